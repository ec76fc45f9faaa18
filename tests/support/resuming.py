"""A run that nobody disturbs, and the same run gone on with from a checkpoint, bit for bit.

A ``Scenario`` is a module, loaders and options of a Trainer. ``undisturbed`` runs it and keeps its
checkpoints; ``continued`` goes on from one of them, in the same process but with everything made
anew and other random states; ``differences`` names what is not equal to the bit: the batches, the
losses, the hooks and the rows given to a logger after the checkpoint, and what is left at the end
of weights, optimizers, schedulers, loss scale, metrics and callbacks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from harness import QUIET, csx
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

import fulgurite
from fulgurite.backends import reset_backend

HOOKS = (
    "on_train_epoch_start",
    "on_validation_start",
    "on_validation_end",
    "on_train_epoch_end",
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is trained.

    Args:
        make: the module.
        loaders: the training loader and, if any, the validation loader.
        options: of the Trainer.
        keep: arguments of the ModelCheckpoint, or what makes the checkpoint callback.
        callbacks: others, made anew for each run.
    """

    make: Callable[[], pl.LightningModule]
    loaders: Callable[[], tuple[Any, ...]]
    options: dict[str, Any] = field(default_factory=dict)
    keep: dict[str, Any] | Callable[[Path], pl.Callback] = field(
        default_factory=lambda: {"every_n_train_steps": 1}
    )
    callbacks: Callable[[], list[pl.Callback]] = list


class Rows(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[Any, ...]] = []

    @property
    def name(self) -> str:
        return "rows"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, *sorted(metrics.items())))


class Events(pl.Callback):
    """What happened, in order; a checkpoint knows how much of it came before."""

    def __init__(self, rows: Rows) -> None:
        self.batches: list[Any] = []
        self.losses: list[Any] = []
        self.hooks: list[Any] = []
        self.rows = rows.rows
        self.before = {"batches": 0, "losses": 0, "hooks": 0, "rows": 0}

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches.append(bits(batch))
        self.losses.append(bits(outputs))
        self.hooks.append(("batch", trainer.global_step, trainer.current_epoch, batch_idx))

    def state_dict(self) -> dict[str, Any]:
        return {name: len(getattr(self, name)) for name in self.before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before = state_dict


def _hook(name: str) -> Callable[..., None]:
    def note(self: Events, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.hooks.append((name, trainer.global_step, trainer.current_epoch))

    return note


for _name in HOOKS:
    setattr(Events, _name, _hook(_name))


def bits(value: Any) -> Any:
    """Tensors as their bytes, in any lists, tuples and dicts."""
    if isinstance(value, Tensor):
        value = value.detach().contiguous()
        return (
            str(value.dtype),
            tuple(value.shape),
            value.flatten().view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(one) for one in value]
    return value


@dataclass
class Ended:
    """What a run left."""

    events: Events
    final: dict[str, Any]
    trainer: pl.Trainer


def seed(number: int) -> None:
    """Set all global random states."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def run(
    scenario: Scenario,
    folder: Path,
    *,
    static: bool = True,
    path: Path | None = None,
    start: int = 1,
    policy: str | None = None,
    **options: Any,
) -> Ended:
    """Run a scenario in a folder, from the beginning or from a checkpoint."""
    seed(0)
    module = scenario.make()
    loaders = scenario.loaders()
    rows = Rows()
    events = Events(rows)
    keep = scenario.keep
    if isinstance(keep, dict):
        arguments = {"save_top_k": -1, "filename": "{epoch}-{step}", **keep}
        saver: Any = ModelCheckpoint(folder, enable_version_counter=True, **arguments)
    else:
        saver = keep(folder)
    chosen = {**QUIET, "enable_checkpointing": True, "log_every_n_steps": 1, "max_epochs": 2}
    chosen |= {**scenario.options, **options, "default_root_dir": folder}
    chosen |= {"callbacks": [events, *scenario.callbacks(), saver], "logger": rows}
    if static:
        reset_backend()
        trainer: pl.Trainer = fulgurite.Trainer(backend=csx(policy), **chosen)
    else:
        trainer = pl.Trainer(accelerator="cpu", **chosen)
    seed(start)
    trainer.fit(module, *loaders, ckpt_path=path)
    return Ended(events, final(trainer, module, saver), trainer)


def final(trainer: Any, module: pl.LightningModule, saver: pl.Callback) -> dict[str, Any]:
    """Everything at the end of a run that a later step or a reader could see."""
    others = [one for one in trainer.callbacks if one is not saver and type(one) is not Events]
    return {
        "weights": bits(module.state_dict()),
        "optimizers": bits([one.state_dict() for one in trainer.optimizers]),
        "schedulers": bits([one.scheduler.state_dict() for one in trainer.lr_scheduler_configs]),
        "precision": bits(trainer.precision_plugin.state_dict()),
        "callback_metrics": bits(dict(trainer.callback_metrics)),
        "logged_metrics": bits(dict(trainer.logged_metrics)),
        "callbacks": bits({one.state_key: one.state_dict() for one in others}),
        "plain": bits({k: v for k, v in vars(module).items() if isinstance(v, Tensor)}),
        "counters": (trainer.global_step, trainer.current_epoch),
        "loops": bits(trainer.fit_loop.state_dict()),
        "random": (bits(torch.get_rng_state()), random.random(), np.random.rand()),
    }


def differences(whole: Ended, rest: Ended) -> list[str]:
    """What of a run that went on differs from the undisturbed one, in words."""
    found = []
    for name, before in rest.events.before.items():
        mine, wanted = getattr(rest.events, name), getattr(whole.events, name)[before:]
        trained = name == "rows" and wanted and "val_loss" not in dict(wanted[0][1:])
        if trained and wanted[0][0] == _saved_in(whole, rest):
            wanted = wanted[1:]  # the run that wrote the checkpoint went on to log it
        if mine != wanted:
            found.append(f"{name}: {_first(mine, wanted)}")
    for name, wanted in whole.final.items():
        if rest.final[name] != wanted:
            found.append(f"final {name}: {_where(rest.final[name], wanted)}")
    return found


def _saved_in(whole: Ended, rest: Ended) -> int | None:
    """The step in whose hooks a checkpoint was written, from 0; None of another moment."""
    kind, step, *_ = whole.events.hooks[rest.events.before["hooks"] - 1]
    return step - 1 if kind == "batch" else None


def _first(mine: list[Any], wanted: list[Any]) -> str:
    for i, (one, other) in enumerate(zip(mine, wanted, strict=False)):
        if one != other:
            return f"at {i} after the checkpoint, {_short(one)} instead of {_short(other)}"
    return f"{len(mine)} instead of {len(wanted)}"


def _where(mine: Any, wanted: Any) -> str:
    if isinstance(wanted, dict) and isinstance(mine, dict):
        keys = [key for key in {**mine, **wanted} if mine.get(key, ()) != wanted.get(key, ())]
        return f"of {keys}: {_short([(mine.get(key), wanted.get(key)) for key in keys])}"
    return f"{_short(mine)} instead of {_short(wanted)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 300 else f"{text[:300]} ..."


def checkpoints(folder: Path) -> Iterator[Path]:
    """Those of a folder, in the order in which they were written."""
    yield from sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
