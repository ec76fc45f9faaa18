"""A training of two processes that Lightning's launcher starts, in which something happens.

python tests/support/several_ends.py WHAT RANK FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once

import lightning.pytorch as pl
import torch
from harness import QUIET
from models import Classifier, loader, mlp
from torch import Tensor

import fulgurite

SLEEPS_S = 25


class Net(Classifier):
    """With dropout, and with a step of another kind on one rank if that is asked for."""

    def __init__(self, differs_on: int | None = None) -> None:
        super().__init__(mlp(dropout=0.2))
        self.differs_on = differs_on

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if self.global_rank == self.differs_on else loss


class Happens(pl.Callback):
    """Lets it happen after the fourth batch, on one rank."""

    def __init__(self, what: str, rank: int) -> None:
        self.what, self.rank = what, rank

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step != 4 or trainer.global_rank != self.rank:
            return
        if self.what == "raises":
            raise ValueError("a hook of the user's")
        if self.what == "sleeps":
            time.sleep(SLEEPS_S)
        if self.what in ("killed", "stopped"):
            os.kill(os.getpid(), signal.SIGKILL if self.what == "killed" else signal.SIGSTOP)


def fitted(folder: Path, differs_on: int | None = None, **options: Any) -> tuple[Any, Any]:
    """(trainer, module) of a fit of two processes."""
    backend = fulgurite.backend("CSX", autogen_policy="disabled", cluster_config={"num_csx": 2})
    given = {**QUIET, "max_epochs": 2, "default_root_dir": folder, **options}
    trainer = fulgurite.Trainer(backend=backend, **given)
    pl.seed_everything(3, verbose=False)
    module = Net(differs_on)
    trainer.fit(module, loader(160, shuffle=True), ckpt_path=given.pop("ckpt_path", None))
    return trainer, module


def resumed(folder: Path) -> None:
    """A run that was ended in the middle of an epoch goes on as if it had not been."""
    pl.seed_everything(3, verbose=False)
    whole = fitted(folder)[1].state_dict()
    backend = fulgurite.backend("CSX", autogen_policy="disabled")
    options: dict[str, Any] = {**QUIET, "max_epochs": 2, "default_root_dir": folder}
    ends = fulgurite.Trainer(backend=backend, devices=2, **{**options, "max_steps": 7})
    pl.seed_everything(3, verbose=False)
    ends.fit(Net(), loader(160, shuffle=True))
    ends.save_checkpoint(folder / "seven.ckpt")
    goes_on = fulgurite.Trainer(backend=backend, devices=2, **options)
    torch.manual_seed(99)  # the sampler's own seed stays
    module = Net()
    goes_on.fit(module, loader(160, shuffle=True), ckpt_path=folder / "seven.ckpt")
    rank = goes_on.global_rank
    assert all(torch.equal(value, whole[name]) for name, value in module.state_dict().items())
    (folder / f"same{rank}").touch()


def main() -> None:
    """Let it happen."""
    what, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    warnings.simplefilter("ignore")
    if what == "resumed":
        resumed(folder)
        return
    differs_on = rank if what == "differs" else None
    trainer, _ = fitted(folder, differs_on, callbacks=[Happens(what, rank)])
    (folder / f"done{trainer.global_rank}").touch()


if __name__ == "__main__":
    main()
