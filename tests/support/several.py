"""Trainings of several processes beside stock Lightning's DDP on the same ranks, by torchrun.

    torchrun --nproc_per_node=2 tests/support/several.py FOLDER POLICY CASE ...

Each rank fits every case twice, and writes ``rank.json`` into the folder: what each case gave.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from harness import QUIET, Recorder
from lightning.pytorch.strategies import DDPStrategy
from models import GAN, Classifier, Measured, Transformer, convnet, loader, mlp, pictures, tokens
from torch import Tensor, nn

import fulgurite

Case = tuple[Callable[[], pl.LightningModule], Callable[[], tuple[Any, ...]], dict[str, Any]]


class Logged(Classifier):
    """Logs what all processes have, at steps and at the epoch's end."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("both", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("largest", loss, sync_dist=True, reduce_fx="max", on_step=True)
        self.log("own", loss.detach() * 2, rank_zero_only=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)


class Gathers(Classifier):
    """Trains on what all processes computed, with its gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.net(batch[0])
        everyones = self.all_gather(outputs, sync_grads=True)
        assert everyones.shape == (self.trainer.world_size, *outputs.shape)
        loss = nn.functional.cross_entropy(outputs, batch[1]) + everyones.square().mean()
        self.log("sum", self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="sum"))
        return loss


class Unused(Classifier):
    """A parameter that no loss reaches."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.more = nn.Linear(3, 3)


def with_validation() -> tuple[Any, ...]:
    return loader(160), loader(50)  # 50 of 16 rows: uneven, and its last batch is smaller


CASES: dict[str, Case] = {
    "mlp": (lambda: Classifier(mlp()), lambda: (loader(160, shuffle=True),), {}),
    "convnet": (lambda: Classifier(convnet()), lambda: (pictures(160),), {}),
    "transformer": (
        Transformer,
        lambda: (tokens(160),),
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
    "gan": (GAN, lambda: (loader(160),), {}),
    "metrics": (Measured, with_validation, {}),
    "logged": (lambda: Logged(mlp()), with_validation, {"max_epochs": 2}),
    "gathers": (lambda: Gathers(mlp()), lambda: (loader(160),), {}),
    "unused": (Unused, lambda: (loader(160),), {}),
    "bf16-mixed": (
        lambda: Classifier(mlp()),
        lambda: (loader(160),),
        {"precision": "bf16-mixed"},
    ),
}


def fitted(case: Case, policy: str | None, devices: int) -> dict[str, Any]:
    """What a fit gave on this rank, as numbers: on CSX under a policy, or in stock Lightning."""
    make, loaders, options = case
    torch.manual_seed(0)
    module, recorder = make(), Recorder()
    options = {**QUIET, "max_epochs": 1, **options, "callbacks": [recorder]}
    if policy is None:
        strategy = DDPStrategy(find_unused_parameters=True)
        trainer = pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **options)
    else:
        backend = fulgurite.backend("CSX", autogen_policy=policy)
        trainer = fulgurite.Trainer(backend=backend, **options)
    torch.manual_seed(7)
    trainer.fit(module, *loaders())
    assert trainer.world_size == devices
    return {
        "losses": recorder.losses,
        "metrics": recorder.metrics,
        "weights": {name: value.tolist() for name, value in module.state_dict().items()},
        "final": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
    }


def main() -> None:
    """Fit every case, and write what came of it."""
    folder, policy, *names = sys.argv[1:]
    warnings.simplefilter("ignore")
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = {
        name: {
            who: fitted(CASES[name], given, count)
            for who, given in (("stock", None), ("ours", policy))
        }
        for name in names
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
