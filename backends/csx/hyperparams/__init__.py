"""Hyperparameters: numbers of optimizers' param groups (``lr``, ``betas``) as inputs of a program.

Any name without an underscore may be imported, by the rooms from ``contract`` up; this room imports
from ``state``, ``graph`` and ``diagnostics``.

slots             which numbers are inputs, where they are, and what they were
schedules         those that schedulers compute inside the program
traced_float      such a number while it is traced
torch_functions   torch's functions on them; python_math: Python's
rounding          where eager kernels round narrow floats
updates           updates of torch's optimizers, one operation each
torch_optim       torch's own optimizers in the form that traces
"""
