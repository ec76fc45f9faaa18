"""Compiling: in the training's process, or beside it in a worker.

compilation   a graph and its compiled code in the cache
queue         what the worker process has to compile; worker_pulse: whether it still works
later         what takes the place of operations, once it is compiled; meanwhile: what runs until
              then, and whether it can become faster; together: in all processes at once
"""
