"""Python values that a step reads while it is traced: the program keeps them as they were then.

Reading one works, and warns once per line of the user's. Here are Lightning's counters, dicts and
loggers; impure.py has clocks and random numbers, attributes.py what modules hold. Not everything
can be seen: docs/steps.md lists what is frozen without a warning.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from torch.optim.lr_scheduler import LRScheduler

from fulgurite.backends.csx.errors import PUBLIC
from fulgurite.backends.csx.lines import UserLine, is_library, user_line
from fulgurite.backends.csx.patches import patched
from fulgurite.backends.csx.watched import watch

_COUNT = (
    "fulgurite.global_step(), a tensor that counts optimizer steps, with torch.where; or a host"
    " hook (on_train_batch_start, on_validation_batch_start), which runs on every batch"
)
_METRICS = "a host hook such as on_train_batch_end; or a buffer that on_train_epoch_start sets"
_LOGGER = 'self.log("name", value); or fulgurite.step_closure, which runs on the host every step'
_REMEDIES = {
    "batch_idx": _COUNT,
    "global_step": _COUNT,
    "current_epoch": "a buffer that on_train_epoch_start sets (self.beta.fill_(...))",
    "is_last_batch": "on_train_batch_end, which runs on the host",
    "sanity_checking": "Trainer(num_sanity_val_steps=0); or on_validation_epoch_end, on the host",
    "callback_metrics": _METRICS,
    "logged_metrics": _METRICS,
    "progress_bar_metrics": _METRICS,
    "logger": _LOGGER,
    "loggers": _LOGGER,
    "get_last_lr()": 'optimizer.param_groups[0]["lr"], which is traced',
}
_PROPERTIES = (
    *((pl.LightningModule, name) for name in ("global_step", "current_epoch")),
    *((pl.LightningModule, name) for name in ("logger", "loggers")),
    *((pl.Trainer, name) for name in ("global_step", "current_epoch")),
    *((pl.Trainer, name) for name in ("is_last_batch", "sanity_checking", "logger", "loggers")),
    *((pl.Trainer, f"{kind}_metrics") for kind in ("callback", "logged", "progress_bar")),
)
_SHOWN: set[tuple[str, str, int]] = set()  # name, file and line: each warns once in a run
_ATTRIBUTES = "fulgurite.backends.csx.attributes"  # named: it imports this file
_PLAIN = (bool, int, float, complex, str, bytes, type(None))

_thread: int | None = None  # that traces, and wants warnings


class FrozenValueWarning(UserWarning):
    """A Python value that the step read is a constant of the program from then on."""


FrozenValueWarning.__module__ = PUBLIC


def forget_shown() -> None:
    """Let every line warn again: a run begins."""
    _SHOWN.clear()


def warn(name: str, text: str, line: UserLine | None, remedy: str) -> None:
    """Warn once of ``name`` on a line; nothing where no trace wants warnings, or has no line."""
    if _thread != threading.get_ident() or line is None:
        return
    key = (name, line.file, line.line)
    if key not in _SHOWN:
        message = f"{text}, in {line}. Use {remedy}."
        warnings.warn_explicit(message, FrozenValueWarning, line.file, line.line)
        _SHOWN.add(key)


def warn_frozen(name: str, value: Any, remedy: str = "", done: str = "read") -> None:
    """Warn that ``name`` was read on the line of the user's that runs now."""
    kept = "that happens once"
    if value is not None or done == "read":
        shown = repr(value) if isinstance(value, _PLAIN) else f"a {type(value).__name__}"
        kept = f"the program keeps its value, {shown}"
    text = f"{name} was {done} while the step was traced; {kept}"
    warn(name, text, user_line(), remedy or _REMEDIES[name])


def is_users(frame: FrameType) -> bool:
    """Whether a frame is the user's, in the thread that traces and wants warnings."""
    if _thread != threading.get_ident():
        return False
    if frame.f_globals.get("__name__") == _ATTRIBUTES and frame.f_back is not None:
        frame = frame.f_back  # a module's property, whose reader went through there
    return not is_library(frame)


def frozen_index(batch_idx: int) -> Any:
    """``batch_idx`` for a step that is traced: a stand-in that warns when it is read."""
    return watch(batch_idx, lambda: warn_frozen("batch_idx", batch_idx))


@contextlib.contextmanager
def frozen_hook_arguments(module: pl.LightningModule) -> Iterator[None]:
    """Let ``optimizer_step`` and ``optimizer_zero_grad`` get arguments that warn when read."""

    def watched(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(epoch: int, batch_idx: int, *rest: Any, **named: Any) -> Any:
            seen = watch(epoch, lambda: warn_frozen("current_epoch", epoch))
            return hook(seen, frozen_index(batch_idx), *rest, **named)

        return call

    names = ("optimizer_step", "optimizer_zero_grad")
    with patched([(module, name, watched(getattr(module, name))) for name in names]):
        yield


@contextlib.contextmanager
def warn_of_frozen_reads() -> Iterator[None]:
    """Warn when user code reads Lightning's counters, metrics and loggers.

    All warnings of this file are silent outside of it.
    """
    global _thread
    before, _thread = _thread, threading.get_ident()
    changes: list[Any] = [(o, name, _property(vars(o)[name], name)) for o, name in _PROPERTIES]
    changes.append((LRScheduler, "get_last_lr", _last_lr(LRScheduler.get_last_lr)))
    try:
        with patched(changes):
            yield
    finally:
        _thread = before


def _property(original: property, name: str) -> property:
    def read(self: Any) -> Any:
        assert original.fget is not None
        value = original.fget(self)
        told = name == "sanity_checking" and self.training  # then it is False for ever
        if not told and is_users(sys._getframe(1)):
            warn_frozen(name, value)
        return value

    return property(read, original.fset)


def _last_lr(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_last_lr(self: LRScheduler) -> Any:
        value = original(self)
        if is_users(sys._getframe(1)):
            warn_frozen("get_last_lr()", value[0] if len(value) == 1 else value, done="called")
        return value

    return get_last_lr
