"""Weights in parts over several processes, by torchrun; each rank writes what it found.

torchrun --nproc_per_node=2 tests/support/streaming.py FOLDER NAME ...
"""

from __future__ import annotations

import json
import os
import pickle
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
from models import Classifier, loader
from torch import nn

import fulgurite


class Wide(Classifier):
    """Its weights are all there is; Adam holds twice as much."""

    def __init__(self, optimizer: Any = torch.optim.AdamW) -> None:
        super().__init__(nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 4)))
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=1e-2)


def trained(module: pl.LightningModule, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """A fit of weights in parts; 2 epochs of a few steps."""
    backend = fulgurite.backend("CSX", autogen_policy="disabled", execution="weight_streaming")
    given = {**QUIET, "max_epochs": 2, "callbacks": [*callbacks]} | options
    path = given.pop("ckpt_path", None)
    trainer = fulgurite.Trainer(backend=backend, **given)
    trainer.fit(module, loader(96), ckpt_path=path)
    return trainer


def part_bytes(folder: Path) -> Any:
    """Bytes of weights and optimizer state that this process holds, and those of all."""
    torch.manual_seed(0)
    module = Wide()
    whole = 3 * sum(p.nbytes for p in module.parameters())
    trainer = trained(module)
    [optimizer] = trainer.optimizers
    states = [one for state in optimizer.state.values() for one in state.values() if one.ndim]
    parts = [one.part for one in (*module.parameters(), *states)]
    return [sum(part.untyped_storage().nbytes() for part in parts), whole]


def resumed(folder: Path) -> Any:
    """Losses of two epochs, and of the second after a checkpoint."""
    torch.manual_seed(0)
    whole, later = Recorder(), Recorder()
    trained(Wide(), whole)
    torch.manual_seed(0)
    path = str(folder / "one.ckpt")
    trained(Wide(), max_epochs=1).save_checkpoint(path)
    dist.barrier()
    torch.manual_seed(1)
    trained(Wide(), later, ckpt_path=path)
    return [whole.losses[-len(later.losses) :], later.losses]


class Reads(pl.Callback):
    """A host hook that reads a weight, and tries to change it."""

    found: dict[str, Any]

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        p = module.net[0].weight
        self.found = {
            "type": isinstance(p, nn.Parameter),
            "shape": list(p.shape),
            "sum": float(p.sum()),
            "norm": float(p.detach().norm()),
            "array": float(p.detach().numpy().sum()),
        }
        changes: dict[str, Callable[[], object]] = {
            "mul_": lambda: p.data.mul_(2),
            "item": lambda: p.data[0].fill_(0),
            "pickle": lambda: pickle.dumps(p),
        }
        self.found["row"] = p.data[0].tolist() == p.detach().numpy()[0].tolist()
        for name, change in changes.items():
            try:
                change()
            except Exception as error:
                self.found[name] = f"{type(error).__name__}: {error}"
        with torch.no_grad():
            p.copy_(torch.ones(p.shape))
        self.found["copied"] = float(p.sum())


def read(folder: Path) -> Any:
    """What a host hook finds."""
    torch.manual_seed(0)
    reads = Reads()
    trained(Wide(), reads)
    return reads.found


def fitted_twice(folder: Path) -> Any:
    """A second fit of the same module goes on from its parts; then it is validated."""
    torch.manual_seed(0)
    module, first, second = Wide(), Recorder(), Recorder()
    trained(module, first, max_epochs=1)
    trainer = trained(module, second, max_epochs=1)
    stock = Wide()
    stock.load_state_dict(trainer.strategy.lightning_module_state_dict())
    again = [float(p.sum()) for p in module.parameters()]
    return [first.losses[0], second.losses[0], again, [float(p.sum()) for p in stock.parameters()]]


def optimizers(folder: Path) -> Any:
    """What becomes of optimizers of other kinds."""
    found = {}
    for name in ("SGD", "RMSprop", "NAdam", "Adafactor"):
        torch.manual_seed(0)
        try:
            trained(Wide(getattr(torch.optim, name)), max_epochs=1)
            found[name] = "trains"
        except fulgurite.errors.UnsupportedState as error:
            found[name] = str(error)
    return found


CASES: dict[str, Callable[[Path], Any]] = {
    "part_bytes": part_bytes,
    "resumed": resumed,
    "read": read,
    "fitted_twice": fitted_twice,
    "optimizers": optimizers,
}


def main_of(cases: dict[str, Callable[[Path], Any]]) -> None:
    """Run cases, and write what came of each."""
    folder, *names = sys.argv[1:]
    warnings.simplefilter("ignore")
    found = {name: cases[name](Path(folder)) for name in names}
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main_of(CASES)
