"""A misuse as a program: the text of a module, and what happens when it is trained.

The text is written to a file ``model.py``, so that errors and warnings name lines of it. The line
to blame ends in ``# <-``.
"""

from __future__ import annotations

import importlib.util
import sys
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from harness import QUIET, csx
from torch.utils.data import DataLoader, TensorDataset

import fulgurite
from fulgurite.backends import reset_backend
from fulgurite.backends.csx.contract.frozen_reads import FrozenValueWarning
from fulgurite.backends.csx.contract.rules import RULES

MARK = "# <-"
_MODEL = """\
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn

import fulgurite
{top}

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 4)
{init}

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x)
        loss = F.cross_entropy(out, y)
{step}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
{hooks}
"""


@dataclass(frozen=True, kw_only=True)
class Code:
    """The parts of a program that are its own: statements around the loss, and what they need.

    ``step`` follows the loss in ``training_step``, and returns it unless it has a ``return``;
    ``init`` ends ``__init__``, ``top`` is above the class, ``hooks`` are further methods, ``after``
    runs when training has ended, with ``model`` and ``trainer``.
    """

    step: str = ""
    init: str = ""
    top: str = ""
    hooks: str = ""
    after: str = ""
    batches: str = ""  # a function of the seeded default batches, where these will not do

    def model(self) -> str:
        """The text of the module."""
        step = _clean(self.step)
        if "return" not in step:
            step += "\nreturn loss"
        text = _MODEL.format(
            top=_clean(self.top) + "\n" if self.top else "",
            init=textwrap.indent(_clean(self.init), " " * 8),
            step=textwrap.indent(step.strip("\n"), " " * 8),
            hooks="\n" + textwrap.indent(_clean(self.hooks), " " * 4) if self.hooks else "",
        )
        return text.replace("\n\n\n\n", "\n\n\n").rstrip() + "\n"

    def shown(self) -> str:
        """The parts that are its own, as documents show them."""
        parts = [_clean(self.top)]
        if self.init:
            parts.append("# in __init__\n" + _clean(self.init))
        parts.append(
            ("# in training_step\n" if self.init or self.hooks else "") + _clean(self.step)
        )
        parts += [_clean(self.hooks)]
        if self.batches:
            parts.append("# the batches, of four\n" + self.batches)
        if self.after:
            parts.append("# after fit\n" + _clean(self.after))
        return "\n\n".join(part for part in parts if part.strip())


def _clean(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


OTHER_ROOMS: dict[str, tuple[str, str]] = {
    "replaced_state": ("UnsupportedState", "capture"),
    "new_module": ("UnsupportedState", "capture"),
    "untrained": ("UnsupportedState", "capture"),
    "python_count": ("UnsupportedState", "state"),
    "number_set": ("FrozenNumber", "hyperparams"),
    "number_changed": ("StateChanged", "hyperparams"),
    "no_loss": ("NoLoss", "plugins"),
    "no_gradient": ("GradientNotKept", "state"),
    "batch_changed": ("InputChanged", "objects"),
    "state_changed": ("StateChanged", "state"),
    "module_changed": ("StateChanged", "program"),
    "mode_changed": ("StateChanged", "program"),
    "frozen_read": ("FrozenValueWarning", "contract"),
    "happens_once": ("FrozenValueWarning", "contract"),
}
"""Rules whose texts are where they are noticed, by id: the error or warning, and its room."""

WITHOUT_PROGRAM = {
    "object": "its batch holds an object",
    "frozen_changed": "it takes max_programs=1: each value has a program",
    "no_parameter": "no step is known that breaks it: what modules hold is untrained",
    "not_run": "it takes compile_only",
    "constant_changed": "it takes a traced function and a global: what modules hold is state",
}
"""Rules that no program of the table breaks, and why not."""


@dataclass(frozen=True, kw_only=True)
class Misuse:
    """One row of the table.

    Args:
        name: a slug, unique.
        title: what somebody wrote, in a few words.
        rule: the id of the rule that it breaks.
        bad: the program.
        good: the program put right; None where there is nothing to put right in the step.
        jax: the same step in JAX, statements after ``loss``; empty where JAX has no counterpart.
        same: whether the corrected program's losses equal those of stock Lightning.
    """

    name: str
    title: str
    rule: str
    bad: Code
    good: Code | None
    jax: str = ""
    same: bool = True

    @property
    def error(self) -> str:
        """The name of the exception's class, or of the warning's."""
        row = RULES.get(self.rule)
        return OTHER_ROOMS[self.rule][0] if row is None else row.error.__name__

    @property
    def warns(self) -> bool:
        """Whether it is a warning: the program runs, with a value that stays as it was."""
        return self.error == FrozenValueWarning.__name__


@dataclass
class Outcome:
    """What became of a program."""

    error: BaseException | None
    warnings: list[warnings.WarningMessage]
    losses: list[float]
    file: Path
    marked: int  # the number of the line that ends in the mark; 0 if there is none


def batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of x [16, 8] and y [16], of 4 classes."""
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(count * 16, 8, generator=generator)
    loader = DataLoader(TensorDataset(xs, xs[:, :4].argmax(1)), batch_size=16)
    return [(x, y) for x, y in loader]


def load(code: Code, folder: Path) -> tuple[Any, Path]:
    """Write a program to a file and import it; returns the module and the file."""
    file = folder / "model.py"
    file.write_text(code.model(), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("model", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["model"] = module  # where the user's modules are looked for
    spec.loader.exec_module(module)
    return module, file


def data(code: Code) -> Any:
    """The batches of a program."""
    given: Any = batches()
    if code.batches:
        given = eval(code.batches, {"batches": given})
    return DataLoader(given, batch_size=None)


def run(code: Code, folder: Path, *, static: bool = True, compiled: bool = False) -> Outcome:
    """Train a program on four batches, for an epoch or as long as it goes.

    Args:
        code: the program.
        folder: where its file is written.
        static: on CSX, or else in stock Lightning.
        compiled: with ``training_step`` under ``torch.compile(fullgraph=True)``.
    """
    torch.manual_seed(0)
    module, file = load(code, folder)
    lines = file.read_text(encoding="utf-8").splitlines()
    marked = next((i for i, line in enumerate(lines, 1) if line.endswith(MARK)), 0)
    losses: list[float] = []

    class Recorder(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            if outputs:
                losses.append(float(outputs["loss"]))

    options: dict[str, Any] = {**QUIET, "max_epochs": 1, "callbacks": [Recorder()]}
    if static:
        reset_backend()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", FrozenValueWarning)
        error: BaseException | None = None
        try:
            kind = fulgurite.Trainer if static else pl.Trainer
            where = {"backend": csx()} if static else {"accelerator": "cpu"}
            trainer = kind(**where, **options)
            model = module.Model()
            if compiled:
                step = torch.compile(model.training_step, fullgraph=True, backend="aot_eager")
                model.training_step = step
            torch.manual_seed(7)
            trainer.fit(model, data(code))
            exec(
                compile(_clean(code.after), str(file), "exec"),
                {**vars(module), "model": model, "trainer": trainer},
            )
        except Exception as raised:  # whatever it is, the caller compares it
            error = raised
    return Outcome(error, list(seen), losses, file, marked)
