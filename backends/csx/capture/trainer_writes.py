"""What a step sets on the Trainer, while it is traced: that happens once.

``trainer.should_stop = True`` stays set, so a step that always sets it stops the run, as eagerly.
One that would set it on a later batch never does: its condition was False when it was traced.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

from fulgurite.backends.csx.capture.discovery import codes_reached
from fulgurite.backends.csx.contract.frozen_reads import PLAIN, warn, warned_in
from fulgurite.backends.csx.diagnostics.errors import UnsupportedState
from fulgurite.backends.csx.diagnostics.user_lines import UserLine
from fulgurite.backends.patches import MISSING

_STOP = "should_stop"
_REMEDY = (
    "the same in on_train_batch_end, a host hook that runs on every batch; or"
    " Trainer(max_steps=n), max_time=..., EarlyStopping"
)


def check_trainer(trainer: Any, before: dict[str, Any], hooks: Iterable[Any]) -> None:
    """Say what the traced step set on the Trainer, or would set on another batch.

    ``before`` are its attributes before the trace, ``hooks`` the functions that were traced.

    Raises:
        UnsupportedState: the step would stop the run under a condition that is frozen.
    """
    now = vars(trainer)
    changed = {
        name
        for name, value in now.items()
        if isinstance(value, PLAIN) and value is not before.get(name, MISSING)
    }
    codes = codes_reached(hooks)
    for code, name, line in _writes(codes):
        if name == _STOP and not now[_STOP]:
            what = (
                "trainer.should_stop is set under a condition that was False when the step was"
                " traced: the program never sets it"
            )
            callers = [one for one in codes if code.co_name in one.co_names]
            if any(map(warned_in, (code, *callers))):
                raise UnsupportedState(f"{what}.", line=line, remedy=_REMEDY)
            warn("trainer.should_stop", what, line, _REMEDY)
        elif name in changed - {_STOP}:
            text = f"trainer.{name} was changed while the step was traced; that happens once"
            warn(f"trainer.{name}", text, line, "a host hook such as on_train_batch_end")


def _writes(codes: Iterable[CodeType]) -> Iterator[tuple[CodeType, str, UserLine]]:
    """Each ``trainer.name = ...`` in the code of functions."""
    for code in codes:
        before, now = None, code.co_firstlineno
        for instruction in dis.get_instructions(code):
            now = instruction.starts_line or now
            of_trainer = before is not None and before.argval == "trainer"
            if instruction.opname == "STORE_ATTR" and of_trainer:
                yield code, instruction.argval, UserLine(code.co_filename, now, code.co_name)
            before = instruction
