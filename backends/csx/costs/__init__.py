"""What a program that was built is made of and what it costs, as data for its report.

``program`` imports from here, and gives the data to ``backends/report``, which writes and shows it;
this room imports from ``compile``, ``graph`` and ``diagnostics``.

machine       machines, by what they do a second: this one (timed once in a process), CS-2, CS-3
timing        how long each call of a program takes, predicted
roofline      what bounds a step: compute, memory, or streaming weights
graph_values  what calls make and read of a graph
traffic       bytes that each call moves, and each module; exchange: between processes
memory        what is alive call by call, and whose it is;
              workspace: what torch's kernels take for themselves

stock         what stock Lightning would have taken for a fit
build_record  passes that run and warnings that are shown while a program is built
entry_data    an entry point of a program as plain data: the one place that asks for these
"""
