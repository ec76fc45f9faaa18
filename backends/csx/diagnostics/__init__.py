"""Whose line it was, and which error it is.

Every room may import from this one; it imports no other room.

user_lines    lines of the user's code: which runs now, which one every node of a graph comes from
mentions      the names in a function's source, and their lines
conditions    what to write for a condition on a tensor: of the line, and of its branch
line_finder   the lines after which something is no longer as it was
regions       fused regions: which operations are to be one kernel
trace_errors  TraceError and its kinds, and StopIteration of the user's code
muted         a trace that repeats another one prints nothing
"""
