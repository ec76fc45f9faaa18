"""The static-graph backend: a step is traced once, compiled once, then only fed.

Rooms, from the ground up; a room imports from those that are listed before it, and ``compile`` from
``diagnostics``, ``graph`` and ``streaming`` alone:

config        the options of the backend
diagnostics   whose line it was, and which error it is
graph         operations, and passes over them
streaming     state that is in files, and how much of it is in memory
compile       from a graph to a callable
costs         what was built, as data for its report: who made which kernel, what it costs
state         what persists from one step to the next
hyperparams   the numbers of param groups
contract      what a user's code may do in a step
objects       the Python objects around a step, and what it did to them
capture       one traced step
program       choose a program, build it, run it
plugins       what Lightning and plain functions hold on to
distributed   several processes that train together

This file is the face of all that: loops and callbacks import it alone (``tests/test_rooms.py``).
Names are imported when they are first used, for each import of a room comes through here:

StaticGraph     the strategy of every run on CSX, which does what loops and callbacks ask for
strategy_of     that of a Trainer
STEP            the entry point of a program that ends in an optimizer step
ACCUMULATE      the one that only adds to the gradients
BuiltOnly       raised in place of a step's result, where a run only builds
InputChanged    the error of a batch that fits no program
NoLoss          the error of a step without a loss
returns_value   whether a function's source returns something
refuse_stop_iteration  an error of StopIteration that left the user's code
overrides       whether a hook is somebody's own
step_clears     whether a step clears gradients itself
GUARD           the attribute that says that a step went wrong, and keeps the state as it was
Order, ORDER    the order of an epoch's samples in a checkpoint, and its key
rng             the random states of a process and its loaders
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulgurite.backends.csx.capture import overrides as overrides
    from fulgurite.backends.csx.capture import step_clears as step_clears
    from fulgurite.backends.csx.diagnostics.mentions import returns_value as returns_value
    from fulgurite.backends.csx.diagnostics.trace_errors import InputChanged as InputChanged
    from fulgurite.backends.csx.diagnostics.trace_errors import NoLoss as NoLoss
    from fulgurite.backends.csx.diagnostics.trace_errors import (
        refuse_stop_iteration as refuse_stop_iteration,
    )
    from fulgurite.backends.csx.graph import rng as rng
    from fulgurite.backends.csx.graph.passes.hold import GUARD as GUARD
    from fulgurite.backends.csx.plugins.checkpoint_position import ORDER as ORDER
    from fulgurite.backends.csx.plugins.checkpoint_position import Order as Order
    from fulgurite.backends.csx.plugins.strategy import StaticGraph as StaticGraph
    from fulgurite.backends.csx.plugins.strategy import strategy_of as strategy_of
    from fulgurite.backends.csx.program.description import ACCUMULATE as ACCUMULATE
    from fulgurite.backends.csx.program.description import STEP as STEP
    from fulgurite.backends.csx.program.offline import BuiltOnly as BuiltOnly

_HOMES = {
    "ACCUMULATE": "program.description",
    "BuiltOnly": "program.offline",
    "GUARD": "graph.passes.hold",
    "InputChanged": "diagnostics.trace_errors",
    "NoLoss": "diagnostics.trace_errors",
    "ORDER": "plugins.checkpoint_position",
    "Order": "plugins.checkpoint_position",
    "STEP": "program.description",
    "StaticGraph": "plugins.strategy",
    "overrides": "capture",
    "refuse_stop_iteration": "diagnostics.trace_errors",
    "returns_value": "diagnostics.mentions",
    "step_clears": "capture",
    "strategy_of": "plugins.strategy",
}


def __getattr__(name: str) -> Any:
    if name == "rng":
        return importlib.import_module(f"{__name__}.graph.rng")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
