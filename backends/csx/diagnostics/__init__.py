"""Whose line it was, and which error it is.

Every room may import from this one; it imports no other room.

cells         which cell of a notebook a line belongs to
user_lines    lines of the user's code: which runs now, which one every node of a graph comes from
line_finder   the lines after which something is no longer as it was
regions       fused regions: which operations are to be one kernel
errors        TraceError and its kinds
muted         a trace that repeats another one prints nothing
stop_iteration   StopIteration of the user's code, which loops would take for the end of the data
"""
