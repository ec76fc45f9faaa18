"""What a step works on: trainer, module, optimizers; and how a failed trace is undone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fulgurite.backends.csx import rng
from fulgurite.backends.csx.first_update import Unborn
from fulgurite.backends.csx.state import Snapshot


def _counter() -> Tensor:
    with torch.inference_mode(False):  # it is written in other modes too
        return torch.zeros((), dtype=torch.int64)


@dataclass(slots=True, kw_only=True)
class World:
    """What a step works on. Evaluation stages have no optimizers."""

    trainer: pl.Trainer
    module: pl.LightningModule
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    trains: bool = False  # whether the step computes gradients
    unborn: list[Unborn] = field(default_factory=list)
    freezes: bool = True  # the step's Python runs once: the values that it reads stay

    _steps: Tensor = field(default_factory=_counter)

    def global_step(self) -> Tensor:
        """How many optimizer steps were done, as a program's input: int64, without dimensions.

        Always the same tensor: making one takes 5 µs, filling it 1 (measured).
        """
        return self._steps.fill_(self.trainer.global_step)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter by its name: the module's, then those only an optimizer knows."""
        found = dict(self.module.named_parameters())
        known = {id(p) for p in found.values()}
        for o, optimizer in enumerate(self.optimizers):
            for g, group in enumerate(optimizer.param_groups):
                for i, p in enumerate(group["params"]):
                    if id(p) not in known:
                        known.add(id(p))
                        found[f"optimizers[{o}].param_groups[{g}]['params'][{i}]"] = p
        return found

    def groups(self) -> list[dict[str, Any]]:
        """The param groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def objects(self) -> Iterator[object]:
        """Whatever traced code may change on the host."""
        yield from self.module.modules()
        yield from self.optimizers
        yield from self.schedulers
        yield from self.trainer.callbacks  # type: ignore[attr-defined]
        yield self.trainer
        yield self.trainer._logger_connector
        yield from self.trainer.strategy._lightning_optimizers


@contextlib.contextmanager
def undone_on_failure(world: World) -> Iterator[None]:
    """If the block raises, put module, optimizers, counters and random states back as they were."""
    snapshot, random_states, unborn = Snapshot(world.objects()), rng.collect(), world.unborn
    try:
        yield
    except BaseException:
        snapshot.restore()
        rng.restore(random_states)
        world.unborn = unborn
        raise
