"""What was built, as data and as a page.

``program`` imports from here; this room imports from ``compile``, ``graph`` and ``diagnostics``.

measured      how fast this machine is: small operations, timed once in a process
machine       machines, by what they do a second: this one, CS-2, CS-3
timing        how long each call of a program takes, predicted
roofline      what bounds a step: compute, memory, or streaming weights
values        what calls make and read of a graph
traffic       bytes that each call moves, and each module
memory        what is alive call by call, and whose it is; statements: of a compiled program's
              Python; workspace: what torch's kernels take for themselves
"""
