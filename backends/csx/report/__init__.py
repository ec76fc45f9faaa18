"""What was built, as data and as a page.

``program`` imports from here; this room imports from ``compile``, ``graph`` and ``diagnostics``.

measured      how fast this machine is: small operations, timed once in a process
machine       machines, by what they do a second: this one, CS-2, CS-3
timing        how long each call of a program takes, predicted
roofline      what bounds a step: compute, memory, or streaming weights
scaling       how long a step takes on more systems
values        what calls make and read of a graph
traffic       bytes that each call moves, and each module; exchange: between processes
memory        what is alive call by call, and whose it is;
              workspace: what torch's kernels take for themselves

noting        passes that run and warnings that are shown while a program is built
costs         FLOPs, bytes, memory and time of a program: the one place that asks for them
data          a program as plain data
reading       ``report.json`` read and checked
words         numbers in words
markup        HTML by hand, escaped
style         the page's style sheet
pictures      SVG by hand
sections      sections of the page; others in ``spent`` (costs), ``kernels`` and ``systems``
page          the page
folder        ``report.json`` and ``report.html`` in a folder
table         a report on the terminal
difference    two reports side by side
"""
