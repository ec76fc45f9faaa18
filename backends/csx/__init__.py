"""The static-graph backend: a step is traced once, compiled once, then only fed.

Rooms, from the ground up; a room imports from those that are listed before it, and ``compile`` from
``diagnostics`` and ``graph`` alone:

config        the options of the backend
diagnostics   whose line it was, and which error it is
graph         operations, and passes over them
compile       from a graph to a callable
costs         what was built, as data for its report: who made which kernel, what it costs
state         what persists from one step to the next
hyperparams   the numbers of param groups
contract      what a user's code may do in a step
capture       one traced step
program       choose a program, build it, run it
plugins       what Lightning and plain functions hold on to
"""
