"""Which hooks run on the host, between steps; and do they read ``.grad``?

If so, programs write all gradients back; if not, they skip that. The hooks of module and callbacks
are searched for ``.grad``, with the code of the user's that they name, and the functions that wait
for ``fit`` to return.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl

from fulgurite.backends.csx.capture.discovery import attributes_read
from fulgurite.backends.csx.diagnostics.user_lines import is_from_library, is_library

_READERS = {"grad", "grad_norm", "clip_grad_norm_", "clip_grad_value_", "get_total_norm"}
_BEFORE_OR_AFTER = {
    *("on_fit_start", "on_train_start", "on_sanity_check_start", "on_sanity_check_end"),
    *("on_train_end", "on_fit_end", "teardown", "on_exception"),
}
"""Hooks that run before the first step of a run or after its last one."""
TRACED_HOOKS = {
    *("on_before_zero_grad", "on_before_backward", "on_after_backward"),
    "on_before_optimizer_step",
}
"""Hooks of modules and callbacks that run inside the step, and so are traced."""


def reads_gradients(trainer: Any, module: pl.LightningModule) -> bool:
    """Whether the code of a host hook, or of whoever called ``fit``, names ``.grad``."""
    if not _READERS.isdisjoint(_names_of_callers()):
        return True
    return not _READERS.isdisjoint(attributes_read(hook for _, hook in _hooks(trainer, module)))


def hooks_between_steps(trainer: Any, module: pl.LightningModule) -> frozenset[str]:
    """Names of the hooks that the user wrote and that run on the host between two steps."""
    written = {name for name, hook in _hooks(trainer, module) if not is_from_library(hook)}
    return frozenset(written - _BEFORE_OR_AFTER)


def overrides(owner: Any, name: str, base: type) -> bool:
    """Whether calling a hook runs other code than ``base``'s, which does nothing.

    The object is asked and not its class: ``LambdaCallback`` has its hooks as attributes.
    Lightning's ``is_overridden`` compares code objects, which callable objects lack.
    """
    method = getattr(owner, name, None)
    return getattr(method, "__func__", method) is not getattr(base, name, None)


def _hooks(trainer: Any, module: pl.LightningModule) -> Iterator[tuple[str, Any]]:
    """The host hooks of the module and of all callbacks."""
    yield from _host_hooks(module, pl.LightningModule)
    for callback in trainer.callbacks:
        yield from _host_hooks(callback, pl.Callback)


def _host_hooks(owner: Any, base: type) -> Iterator[tuple[str, Any]]:
    """The hooks that run on the host and that somebody overrides, by name."""
    names = {name for name in dir(base) if name.startswith("on_")} - TRACED_HOOKS - {"on_gpu"}
    for name in sorted(names | {"lr_scheduler_step", "teardown"}):
        if overrides(owner, name, base):
            yield name, getattr(owner, name)


def _names_of_callers() -> Iterator[str]:
    frame = sys._getframe(1)
    while frame is not None:
        if not is_library(frame):
            yield from frame.f_code.co_names
        frame = frame.f_back  # type: ignore[assignment]
