"""State that is in files, and how much of it is in memory (weight streaming in one process).

A program knows at which of its calls it works on which of its inputs. So what is needed next is
read before it is used, by a thread, and what is needed last makes room for it. ``compile`` says
where the calls are, ``state`` puts tensors into files; this room imports from ``graph`` alone.

mapped      tensors whose memory is a file, and what the system is told of that memory
residency   which of them are in memory: within a budget, read ahead of their use
positions   where the operations of a graph work on which inputs
"""
