"""Several processes that train together, each on a part of the data (data parallelism).

This room goes over ``plugins``: one process needs nothing of it. It may import from every room.
The operations of a graph in which all take part are ``graph/collectives``, and what they tell each
other with a step is ``graph/votes``. Only ``parallel`` is imported from outside, and ``network`` by
``fulgurite doctor``.

parallel        Lightning's strategy "csx", of several processes
launchers       starts them: from a script, or from a notebook
rendezvous      they meet, and who has not come is named; network: where gloo listens
heartbeats      whether the others live
agreement       whether all of them have the same model, options, data and step
consensus       what they decide together at each step
reduction       gradients become the mean of all, buffers those of the first process
building        a module that no process holds whole
saved_parts     checkpoints of processes that hold parts
sync_batchnorm  batches that are normalized together
"""
