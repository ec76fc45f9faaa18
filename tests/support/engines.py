"""A training that is started in one of many ways; each process writes what came of it.

python tests/support/engines.py FOLDER [csx | waits | late | stock | cpu] [OPTION=VALUE ...]

Options are those of the backend: ``background=False``. "waits" goes on until it is ended, "late"
has fewer batches of a stream on other ranks than the first, "stock" is Lightning's Trainer, "cpu"
ours with device="CPU".
"""

from __future__ import annotations

import ast
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, which reads it once

import lightning.pytorch as pl
import torch
from harness import QUIET
from models import Classifier, loader, mlp
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import fulgurite


class Waits(pl.Callback):
    """Says that the run has begun, and takes its time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        (self.folder / f"began{trainer.global_rank}").touch()
        time.sleep(0.2)


class Stream(IterableDataset[Any]):
    """Rows without a length, fewer of them on other ranks than the first."""

    def __iter__(self) -> Iterator[Any]:
        rows: Any = loader(64).dataset
        yield from (rows[i] for i in range(64 - 32 * int(os.environ.get("LOCAL_RANK", "0"))))


class Late(Classifier):
    """With a validation in which all ranks take part."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val", loss, sync_dist=True, on_step=True)


def trainer_of(what: str, folder: Path, options: dict[str, Any]) -> pl.Trainer:
    """What was asked for; in how many processes is for the environment to say, if it knows."""
    given = {**QUIET, "max_epochs": 2, "default_root_dir": Path.cwd()}
    if what in ("stock", "cpu"):
        each = int(os.environ.get("LOCAL_WORLD_SIZE", "2"))
        nodes = int(os.environ.get("WORLD_SIZE", "2")) // each
        given |= {"strategy": "ddp", "devices": each, "num_nodes": nodes}
        if what == "cpu":
            return fulgurite.Trainer(device="CPU", **given)
        return pl.Trainer(accelerator="cpu", **given)
    if what == "waits":
        given |= {"max_epochs": -1, "callbacks": [Waits(folder)]}
    if what == "late":
        given["devices"] = 2
    given["enable_checkpointing"] = True
    backend = fulgurite.backend("CSX", **{"autogen_policy": "disabled", **options})
    return fulgurite.Trainer(backend=backend, **given)


def main() -> None:
    """Fit, and write weights and what ran the step."""
    folder, what, *rest = Path(sys.argv[1]), sys.argv[2], *sys.argv[3:]
    pairs = (one.split("=", 1) for one in rest)
    options = {name: ast.literal_eval(value) for name, value in pairs}
    warnings.simplefilter("ignore")
    pl.seed_everything(3, verbose=False)
    module = Late(mlp()) if what == "late" else Classifier(mlp())
    trainer = trainer_of(what, folder, options)
    torch.manual_seed(3)
    validation = DataLoader(Stream(), batch_size=16) if what == "late" else None
    trainer.fit(module, loader(160, shuffle=True), validation)
    strategy: Any = trainer.strategy
    steps = strategy.training.executables() if what == "csx" else []
    found = {
        "processes": trainer.world_size,
        "how": [one.loaded.how for one in steps],
        "weights": {name: value.tolist() for name, value in module.state_dict().items()},
    }
    (folder / f"{what}{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
