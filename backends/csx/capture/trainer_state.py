"""What a step's Python read of the trainer's state selects its program.

One validation program serves the sanity check, fit and ``validate``, unless the step asks which of
them it is: ``if self.trainer.sanity_checking``, ``f"{self.trainer.state.stage}/loss"``. Then each
answer has a program of its own; graphs that are equal are compiled once, as ever. Only programs
that asked compare. Checked against Lightning 2.6.6.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerState

from fulgurite.backends.csx.diagnostics.user_lines import top_package
from fulgurite.backends.patches import Patch, caller, patches_of

Answers = dict[tuple[str, str], Any]
"""What the trainer's state said, by where and which attribute."""

_TRAINER, _STATE = "trainer", "trainer.state"
_PROPERTIES = ("sanity_checking", "training", "validating", "testing", "predicting", "evaluating")
_FIELDS = ("stage", "fn")
_FRAMEWORKS = ("lightning", "fulgurite", "torchmetrics")


def noted_answers(answers: Answers) -> Iterator[Patch]:
    """Patches that note what code other than Lightning's reads."""

    def note(where: str, name: str, value: Any) -> Any:
        if top_package(caller(sys._getframe(2))) not in _FRAMEWORKS:
            answers[where, name] = value
        return value

    def of_trainer(name: str) -> property:
        own: property = vars(Trainer)[name]
        get: Any = own.fget
        return property(lambda trainer: note(_TRAINER, name, get(trainer)), own.fset)

    def of_state(name: str) -> property:
        return property(
            lambda state: note(_STATE, name, vars(state)[name]),
            lambda state, value: vars(state).__setitem__(name, value),
        )

    why, checked = "a program holds for the answers that its step got", "lightning 2.6"
    asked = {name: of_trainer(name) for name in _PROPERTIES}
    yield from patches_of(Trainer, asked, why=why, checked=checked)
    asked = {name: of_state(name) for name in _FIELDS}
    yield from patches_of(TrainerState, asked, why=why, checked=checked)


def hold(answers: Answers, trainer: Trainer | None) -> bool:
    """Whether the trainer's state still says the same."""
    assert trainer is not None
    asked = {_TRAINER: trainer, _STATE: trainer.state}
    return all(getattr(asked[at], name) == value for (at, name), value in answers.items())
