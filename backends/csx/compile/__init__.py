"""From a graph to a callable.

``program`` and ``plugins`` import from here, and ``costs``; this one imports ``diagnostics``,
``graph`` and the options of the backend alone. Rooms, from the ground up:

store        compiled programs on disk
programs     compiled programs as data: parts, steps, kernels
inductor     torch's compiler, and the C++ compiler
checking     whether compiled code computes what the graph says
background   compiling, in this process or beside the training
host         the host fabric: this machine's CPU

fabric       what runs programs: what every fabric does
threads      with how many threads of this machine
fabrics      which there are, and which one a backend asks for
"""
