"""Hyperparameters: numbers of optimizers' param groups (``lr``, ``betas``) as inputs of a program.

Any name without an underscore may be imported, by the rooms from ``contract`` up; this room imports
from ``state``, ``graph`` and ``diagnostics``.

slots              which numbers are inputs, where they are, and what they were
scheduled_numbers  those that schedulers compute inside the program
counts             numbers that optimizers and modules keep outside of param groups
traced_float       such a number while it is traced
run_numbers        counters of the run, traced: steps, epochs, the number of the batch
number_functions   functions of torch and Python's math on them, rounded as by eager kernels
torch_optim        torch's own optimizers in the form that traces, each update one operation
"""
