"""Python values that a step reads while it is traced: the program keeps them as they were then.

Reading one works, and warns once per line of the user's. Not everything can be seen:
docs/steps.md lists what is frozen without a warning.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl

from fulgurite.backends.csx.lines import is_library, user_line
from fulgurite.backends.csx.patches import patched
from fulgurite.backends.csx.watched import watch

_COUNT = (
    "a buffer that the step counts up (self.step.add_(1)) with torch.where, or a host hook such as"
    " on_train_batch_start"
)
_REMEDIES = {
    "batch_idx": _COUNT,
    "global_step": _COUNT,
    "current_epoch": "a buffer that on_train_epoch_start sets (self.beta.fill_(...))",
    "is_last_batch": "on_train_batch_end, which runs on the host",
}
_SEEN = (
    (pl.LightningModule, "global_step"),
    (pl.LightningModule, "current_epoch"),
    (pl.Trainer, "global_step"),
    (pl.Trainer, "current_epoch"),
    (pl.Trainer, "is_last_batch"),
)
_warning = False  # while warn_of_frozen_reads is entered
_REGISTRY: Any = {}  # what Python's "default" filter knows to have shown


class FrozenValueWarning(UserWarning):
    """A Python value that the step read is a constant of the program from then on."""


def warn_frozen(name: str, value: Any) -> None:
    """Warn that ``name`` was read on the line of the user's that runs now."""
    line = user_line()
    if line is not None:
        warnings.warn_explicit(
            f"{name} was read while the step was traced; the program keeps its value, {value!r}, in"
            f" {line}. Use {_REMEDIES[name]}.",
            FrozenValueWarning,
            line.file,
            line.line,
            registry=_REGISTRY,
        )


def frozen_index(batch_idx: int) -> Any:
    """``batch_idx`` for a step that is traced: a stand-in that warns when it is read."""
    return watch(batch_idx, lambda: warn_frozen("batch_idx", batch_idx)) if _warning else batch_idx


@contextlib.contextmanager
def warn_of_frozen_reads() -> Iterator[None]:
    """Warn when user code reads Lightning's counters, or ``frozen_index``'s."""

    def watched(original: property, name: str) -> property:
        def read(self: Any) -> Any:
            assert original.fget is not None
            value = original.fget(self)
            if not is_library(sys._getframe(1)):
                warn_frozen(name, value)
            return value

        return property(read, original.fset)

    changes = [(owner, name, watched(vars(owner)[name], name)) for owner, name in _SEEN]
    with patched([*changes, (sys.modules[__name__], "_warning", True)]):
        yield
