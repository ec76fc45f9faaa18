"""Compiled programs as data: parts, steps, kernels. It knows no device and no compiler.

line           the operations of a graph in a line, and what comes again in it
parts          a large graph cut where it comes again
steps          a compiled program: what it allocates, frees and calls, in order
linking        the programs of parts, as one
static_memory  small intermediates of one, allocated once; alive: what it holds, call by call
made           what runs a graph: its kernels, who made them, and which operations each computes
compiler_log   a compiler that failed: a line for the screen, and a file with the rest
"""
