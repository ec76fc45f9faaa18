"""A part of an epoch, by as many processes as there are: which samples they took.

    torchrun --nproc_per_node=N tests/support/several_counts.py FOLDER KIND FROM TO

Goes on from ``FROM.ckpt``, if there is one, ends with step TO, and writes ``TO.ckpt``. Each rank
adds to ``TO.RANK.json`` the samples of each batch, with its epoch.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once

import lightning.pytorch as pl
import torch
from harness import QUIET
from models import Classifier, mlp, rows
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import fulgurite

ROWS = 90


class Numbered(Dataset[Any]):
    """Rows with their numbers."""

    def __init__(self) -> None:
        self.rows = rows(ROWS)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return *self.rows[index], index


class Takes(Classifier):
    """Notes which samples its batches have, and when it validates."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.taken: list[Any] = []
        self.validated: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.taken.append((self.current_epoch, batch[2].tolist()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val", loss, sync_dist=True)

    def on_validation_start(self) -> None:
        self.validated.append(self.trainer.global_step)


def main() -> None:
    """Train."""
    folder, kind, begin, end = Path(sys.argv[1]), *sys.argv[2:5]
    warnings.simplefilter("ignore")
    pl.seed_everything(3, verbose=False)
    count = int(os.environ.get("WORLD_SIZE", "1"))
    options: dict[str, Any] = {"shuffle": kind != "in order"}
    if kind == "generator":
        options["generator"] = torch.Generator().manual_seed(5)
    data = DataLoader(Numbered(), 4, num_workers=2 * (kind == "workers"), **options)
    trainer = fulgurite.Trainer(
        backend=fulgurite.backend("CSX", autogen_policy="disabled"),
        devices=count,
        use_distributed_sampler=kind != "own rows",
        accumulate_grad_batches=2 if kind == "accumulates" else 1,
        **{**QUIET, "max_epochs": 3, "max_steps": int(end)},
    )
    module = Takes()
    path = folder / f"{begin}.ckpt"
    trainer.fit(module, data, DataLoader(Numbered(), 30), ckpt_path=path if path.exists() else None)
    trainer.save_checkpoint(folder / f"{end}.ckpt")
    told = {
        "taken": module.taken,
        "validated": module.validated,
        "logged": sorted(trainer.callback_metrics),
    }
    (folder / f"{end}.{trainer.global_rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
