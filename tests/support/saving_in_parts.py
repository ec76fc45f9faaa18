"""Checkpoints in parts: runs that write them, and runs of other processes that go on from them.

torchrun --nproc_per_node=2 tests/support/saving_in_parts.py FOLDER NAME ...
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from harness import QUIET, Recorder
from lightning.pytorch.callbacks import ModelCheckpoint
from models import loader
from streaming import Wide, main_of
from torch.utils.data import DataLoader, DistributedSampler

import fulgurite
from fulgurite.callbacks import Checkpoint, KeepNCheckpoints, SaveCheckpointState

ROWS, GLOBAL_BATCH = 96, 16
KINDS: dict[str, dict[str, Any]] = {
    "epoch": {"max_epochs": 2},
    "middle": {"max_epochs": 1},
    "window": {"max_epochs": 1, "accumulate_grad_batches": 2},
}
"""Moments at which a run saves, and its options: at an epoch's end, in it, within a window."""


class Saves(pl.Callback):
    """Saves once."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind = path, kind

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        batches = {"middle": 2, "window": 3}
        if trainer.fit_loop.total_batch_idx + 1 == batches.get(self.kind):
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self.kind == "epoch" and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def fit(execution: str, *callbacks: pl.Callback, **options: Any) -> list[float]:
    """The losses of batches that are those of one process, dealt out."""
    torch.manual_seed(0)
    data = loader(ROWS, GLOBAL_BATCH // count())
    if options["max_epochs"] > 1:  # the order of the second epoch is that of the first
        place = count(), int(os.environ.get("RANK", "0"))
        sampler = DistributedSampler[Any](data.dataset, *place, shuffle=False)
        data = DataLoader(data.dataset, GLOBAL_BATCH // count(), sampler=sampler)
    recorder = Recorder()
    backend = fulgurite.backend("CSX", autogen_policy="disabled", execution=execution)
    path = options.pop("ckpt_path", None)
    given = {**QUIET, "callbacks": [recorder, *callbacks]} | options
    fulgurite.Trainer(backend=backend, **given).fit(Wide(), data, ckpt_path=path)
    return recorder.losses


def save(folder: Path) -> Any:
    """Losses of runs that save at each of the moments."""
    execution = "weight_streaming" if count() > 1 else "pipeline"
    return {
        kind: fit(execution, Saves(folder / f"{kind}.ckpt", kind), **options)
        for kind, options in KINDS.items()
    }


def goes_on(execution: str) -> Callable[[Path], Any]:
    """The losses after each of the moments."""

    def case(folder: Path) -> Any:
        return {
            kind: fit(execution, ckpt_path=str(folder / f"{kind}.ckpt"), **options)
            for kind, options in KINDS.items()
        }

    return case


def callbacks(folder: Path) -> Any:
    """What lies in the folders of callbacks that save, and where runs go on from."""
    best = ModelCheckpoint(
        folder / "best", monitor="step", mode="max", save_top_k=2, save_last=True,
        every_n_train_steps=2, filename="{step}",
    )  # fmt: skip
    weights = ModelCheckpoint(folder / "weights", save_weights_only=True, filename="w")
    own = [Checkpoint(steps=3), KeepNCheckpoints(2), SaveCheckpointState(2)]
    options = {"default_root_dir": str(folder / "own"), "enable_checkpointing": True}
    fit("weight_streaming", best, weights, *own, max_epochs=2, **options)
    dist.barrier()
    found = {path.name: sorted(one.name for one in path.iterdir()) for path in folder.iterdir()}
    path = str(folder / "best" / "step=10.ckpt")
    begins = fit("weight_streaming", ckpt_path=path, max_epochs=2)
    last = fit("weight_streaming", best, ckpt_path="last", max_epochs=3, **options)
    newest = fit("weight_streaming", Checkpoint(), ckpt_path="last", max_epochs=3, **options)
    return {"found": found, "last": len(last), "newest": len(newest), "begins": len(begins)}


CASES: dict[str, Callable[[Path], Any]] = {
    "save": save,
    "streamed": goes_on("weight_streaming"),
    "pipeline": goes_on("pipeline"),
    "callbacks": callbacks,
}


if __name__ == "__main__":
    main_of(CASES)
