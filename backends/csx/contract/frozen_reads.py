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
from types import CodeType, FrameType
from typing import Any

import lightning.pytorch as pl
from torch.optim.lr_scheduler import LRScheduler

from fulgurite.backends.csx.contract.replay import told, told_again
from fulgurite.backends.csx.contract.watched import EPOCH, INDEX, refused_at, watch
from fulgurite.backends.csx.diagnostics.errors import PUBLIC
from fulgurite.backends.csx.diagnostics.user_lines import (
    UserLine,
    is_library,
    package_of,
    user_line,
)
from fulgurite.backends.patches import Patch, caller, patched, patches_of
from fulgurite.backends.torch_versions import CHECKED

_COUNT = (
    "fulgurite.global_step(), a tensor that counts optimizer steps, with torch.where; or a host"
    " hook (on_train_batch_start, on_train_batch_end), which runs on every batch"
)
_BY_HAND = (
    f"{_COUNT}; to step every n batches, automatic optimization with"
    " Trainer(accumulate_grad_batches=n)"
)
_EVALUATED = (
    "on_{stage}_batch_end(self, outputs, batch, batch_idx), which runs on the host after every"
    " batch and is given what the step returned:\n"
    "      if batch_idx == 0: self.example = outputs  # after: return x[:4]\n"
    "    or on_{stage}_batch_start(self, batch, batch_idx), before it"
)
_METRICS = "a host hook such as on_train_batch_end; or a buffer that on_train_epoch_start sets"
_LOGGER = 'self.log("name", value); or fulgurite.step_closure, which runs on the host every step'
_REMEDIES = {
    "global_step": _COUNT,
    "current_epoch": "a buffer that on_train_epoch_start sets (self.beta.fill_(...))",
    "is_last_batch": "on_train_batch_end, which runs on the host",
    "callback_metrics": _METRICS,
    "logged_metrics": _METRICS,
    "progress_bar_metrics": _METRICS,
    "logger": _LOGGER,
    "loggers": _LOGGER,
    "get_last_lr()": 'optimizer.param_groups[0]["lr"], which is traced',
}
_OF_BOTH = ("global_step", "current_epoch", "logger", "loggers")
_METRIC_DICTS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_PROPERTIES: dict[type, tuple[str, ...]] = {
    pl.LightningModule: _OF_BOTH,
    pl.Trainer: (*_OF_BOTH, "is_last_batch", *_METRIC_DICTS),
}
_SHOWN: set[tuple[str, str, int]] = set()  # name, file and line: each warns once in a run
_ATTRIBUTES = "fulgurite.backends.csx.contract.attributes"  # named: it imports this file
PLAIN = (bool, int, float, complex, str, bytes, type(None))

_thread: int | None = None  # that traces, and wants warnings


class FrozenValueWarning(UserWarning):
    """A Python value that the step read is a constant of the program from then on."""


FrozenValueWarning.__module__ = PUBLIC


def forget_shown() -> None:
    """Let every line warn again: a run begins."""
    _SHOWN.clear()


def warned_in(code: CodeType) -> bool:
    """Whether a line of a function warned in this run."""
    lines = {line for *_, line in code.co_lines() if line is not None}
    return any(file == code.co_filename and line in lines for _, file, line in _SHOWN)


def warn(name: str, text: str, line: UserLine | None, remedy: str) -> None:
    """Warn once of ``name`` on a line; nothing where no trace wants warnings, or has no line."""
    if _thread != threading.get_ident() or line is None or told_again():
        return
    line = line.inside or line
    key = (name, line.file, line.line)
    if key not in _SHOWN:
        message = f"{text}, in {line}. Use {remedy}."
        warnings.warn_explicit(message, FrozenValueWarning, line.file, line.line)
        _SHOWN.add(key)


def warn_frozen(
    name: str, value: Any, remedy: str = "", done: str = "read", line: UserLine | None = None
) -> None:
    """Warn that ``name`` was read: on the line of the user's that runs now, unless one is given."""
    kept = "that happens once"
    if value is not None or done == "read":
        shown = repr(value) if isinstance(value, PLAIN) else f"a {type(value).__name__}"
        kept = f"the program keeps its value, {shown}"
    text = f"{name} was {done} while the step was traced; {kept}"
    warn(name, text, line or user_line(), remedy or _REMEDIES[name])


def warn_of_audit(name: str, text: str, line: UserLine) -> None:
    """Warn of what happens once, though the step's code would do it on every batch."""
    if not any(name.startswith(shown) for shown, *_ in _SHOWN):  # told in the first trace, too
        _SHOWN.add((name, line.file, line.line))
        message = f"{text} while the step was traced again; in the run it happens once, in {line}."
        remedy = " Use a buffer; or a host hook such as on_train_batch_start."
        warnings.warn_explicit(message + remedy, FrozenValueWarning, line.file, line.line)


def is_users(frame: FrameType) -> bool:
    """Whether a frame is the user's, in the thread that traces and wants warnings."""
    return _wants_warnings() and not is_library(_reader(frame))


def is_models(frame: FrameType) -> bool:
    """The same, or whether it is that of a package: a model that was installed."""
    if not _wants_warnings():
        return False
    frame = _reader(frame)
    return package_of(frame) != ""


def _wants_warnings() -> bool:
    return _thread == threading.get_ident()


def _reader(frame: FrameType) -> FrameType:
    frame = caller(frame)
    if frame.f_globals.get("__name__") == _ATTRIBUTES and frame.f_back is not None:
        frame = caller(frame.f_back)  # a module's property, whose reader went through there
    return frame


def frozen_index(batch_idx: int, stage: str = "", by_hand: bool = False) -> Any:
    """``batch_idx`` for a step that is traced: a stand-in that warns when it is read.

    Args:
        batch_idx: of the first batch.
        stage: which hooks to advise where it is not training's.
        by_hand: the step is that of manual optimization.
    """
    seen = told("batch_idx", batch_idx)
    remedy = _EVALUATED.format(stage=stage) if stage else _BY_HAND if by_hand else _COUNT

    def note() -> None:
        warn_frozen("batch_idx", seen, remedy, line=refused_at(INDEX))

    return watch(seen, note, INDEX)


@contextlib.contextmanager
def frozen_hook_arguments(module: pl.LightningModule) -> Iterator[None]:
    """Let ``optimizer_step`` and ``optimizer_zero_grad`` get arguments that warn when read."""

    def watched(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(epoch: int, batch_idx: int, *rest: Any, **named: Any) -> Any:
            now = told("epoch", epoch)

            def note() -> None:
                warn_frozen("current_epoch", now, line=refused_at(EPOCH))

            seen = watch(now, note, EPOCH)
            return hook(seen, frozen_index(batch_idx), *rest, **named)

        return call

    names = ("optimizer_step", "optimizer_zero_grad")
    with patched([(module, name, watched(getattr(module, name))) for name in names]):
        yield


@contextlib.contextmanager
def warn_of_frozen_reads() -> Iterator[None]:
    """Let this thread warn; outside of it, all warnings of this file are silent."""
    global _thread
    before, _thread = _thread, threading.get_ident()
    try:
        yield
    finally:
        _thread = before


def frozen_reads() -> Iterator[Patch]:
    """Patches after which the user's reads of Lightning's counters, metrics and loggers warn."""
    why = "the program keeps the value that the first step read, so the user is warned"
    for owner, names in _PROPERTIES.items():
        properties = {name: _property(vars(owner)[name], name) for name in names}
        yield from patches_of(owner, properties, why=why, checked="lightning 2.6")
    rates = {"get_last_lr": _last_lr(LRScheduler.get_last_lr)}
    yield from patches_of(LRScheduler, rates, why=why, checked=CHECKED)


def _property(original: property, name: str) -> property:
    def read(self: Any) -> Any:
        assert original.fget is not None
        value = original.fget(self)
        if is_models(frame := sys._getframe(1)):
            warn_frozen(name, value)
            if is_users(frame):  # a package's value may not change: an audit would see it
                return told(name, value)
        return value

    return property(read, original.fset)


def _last_lr(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_last_lr(self: LRScheduler) -> Any:
        value = original(self)
        if is_models(sys._getframe(1)):
            warn_frozen("get_last_lr()", value[0] if len(value) == 1 else value, done="called")
            return told("get_last_lr()", value)
        return value

    return get_last_lr
