"""A step that no program is for: Lightning's own code runs it, on the real tensors.

So it is for batches of more shapes than are compiled. Recording such a step takes ten times as long
as running it, which pays where the program runs again; of lengths nobody knows that.

What programs keep to themselves is put where that code looks, and is theirs again afterwards: sums
of gradients in ``p.grad``, numbers that schedules compute in param groups. Scalars of modules that
the step changes stay as its programs have found them, for these have them as constants.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fulgurite.backends.csx.capture.scope import Scope
from fulgurite.backends.csx.contract import Access
from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedState
from fulgurite.backends.csx.hyperparams.scheduled_numbers import show_all
from fulgurite.backends.csx.streaming.residency import residency
from fulgurite.backends.patches import MISSING
from fulgurite.backends.program_scheduler import program_schedulers
from fulgurite.backends.step_context import running


def can_run(scope: Scope) -> bool:
    """Whether Lightning's code finds all that the step needs on this host.

    Not where other processes share in it, where weights are in files, where a loss scale or a type
    is the program's own, where a program's state still waits for its first gradient, and where the
    host sees gradients between steps.
    """
    trainer = scope.trainer
    if trainer is None or trainer.world_size > 1 or residency.is_open:
        return False
    scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
    waits = any(one.waits() for one in scope.deferred)
    others = scaled or waits or scope.keeps_gradients or scope.fp16_type == "cbfloat16"
    return scope.python_runs_once and not others


def run_as_lightning(
    scope: Scope,
    run: Callable[[Any], Any],
    batch: Any,
    gradients: Mapping[str, Tensor],
    changes: Iterable[Access],
    accumulates: bool,
    clears: bool,
) -> Any:
    """Run Lightning's code of an entry point once.

    Args:
        scope: what the step works on.
        run: the code.
        batch: as the user's loader gave it.
        gradients: those that the stage's programs keep, as ``{parameter}.grad``.
        changes: scalars of modules that the step has changed while it was traced.
        accumulates: it only adds to gradients.
        clears: it leaves zeros, as the entry point does that ends an accumulation window.

    Raises:
        UnsupportedState: a parameter has a gradient to be kept, and has none in any program.
    """
    show_all(program_schedulers(scope.schedulers))
    steps = torch.tensor(scope.steps_done())
    context = running(steps_optimizer=True, global_step=steps.clone, norms=[])
    with _in_place(scope, gradients, accumulates, clears), _kept(changes), context:
        return run(batch)


@contextlib.contextmanager
def _in_place(
    scope: Scope, gradients: Mapping[str, Tensor], accumulates: bool, clears: bool
) -> Iterator[None]:
    """Put gradients that programs keep into ``p.grad``, and take them out again."""
    parameters = scope.parameters() if scope.trains else {}
    shown = {name: p.grad for name, p in parameters.items()}
    for name, p in parameters.items():
        kept, flag = gradients.get(f"{name}.grad"), scope.carried.get(name)
        there = kept is not None and bool(kept.any() if flag is None else flag.is_there())
        p.grad = kept if there else None
    try:
        yield
        for name, p in parameters.items():
            kept = gradients.get(f"{name}.grad")
            if name in scope.carried:
                scope.carried[name].put(p.grad is not None and not clears)
            if kept is None:
                if p.grad is not None and accumulates:
                    raise UnsupportedState(
                        f"{name} gets a gradient from this batch, and from none of those that are"
                        " compiled, so that no program would add to it.",
                        remedy="backend('CSX', max_programs=n), n as many as there are shapes",
                    )
            elif clears or p.grad is None:
                kept.zero_()
            elif p.grad is not kept:
                kept.copy_(p.grad)
    finally:
        for name, p in parameters.items():
            p.grad = shown[name]


@contextlib.contextmanager
def _kept(changes: Iterable[Access]) -> Iterator[None]:
    """Put scalars back that programs have as constants."""
    found = [replace(one, before=one.container.get(one.name, MISSING)) for one in changes]
    try:
        yield
    finally:
        for change in found:
            change.undo()
