"""Compiled programs as data: parts, steps, kernels. It knows no device and no compiler.

item_order     the operations of a graph in a row, and what comes again in it
parts          a large graph cut where it comes again
steps          a compiled program: what it allocates, frees and calls, in order
linking        the programs of parts, as one
static_memory  small intermediates of one, allocated once; liveness: what it holds, call by call
uses           at which of its calls one works on which inputs
kernels        what runs a graph: its kernels, who made them, and which operations each computes
progress       how far a compilation is, and what is left, in words
compiler_log   a compiler that failed: a line for the screen, and a file with the rest
"""
