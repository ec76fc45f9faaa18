"""The idioms that work as in stock Lightning, by group, and those that are refused.

base       what an idiom is
those that work:
gradients  functions  functional  optimization  modules  layers  operations
those that do not:
refused    with the error that comes and what to write instead
"""

from __future__ import annotations

from idioms import functional, functions, gradients, layers, modules, operations, optimization
from idioms.base import Idiom, examples_in

IDIOMS: dict[str, list[Idiom]] = {
    "Gradients": list(examples_in(gradients)),
    "Functions with gradients of their own": list(examples_in(functions)),
    "torch.func": list(examples_in(functional)),
    "Manual optimization, frozen and averaged weights": list(examples_in(optimization)),
    "Modules": list(examples_in(modules)),
    "Layers": layers.tables(),
    "Operations and batches": [*operations.tables(), *examples_in(operations)],
}
"""By group, in the order of the docs."""
