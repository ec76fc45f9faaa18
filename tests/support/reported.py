"""A fit of several processes with a report, by torchrun; one process sleeps before each step.

torchrun --nproc_per_node=2 tests/support/reported.py FOLDER POLICY
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once

import torch
import torch.distributed as dist
from harness import QUIET
from models import Classifier, loader
from torch import nn

import fulgurite

SLEEPS_S, STEPS = 0.05, 5
WIDTH = 600  # so that the gradients fill more than the first bucket


class Sleeps(Classifier):
    """Its second process comes late."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1:
            time.sleep(SLEEPS_S)


def net() -> nn.Module:
    """An MLP of 1.4 MB."""
    torch.manual_seed(0)
    hidden = [nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 4))


def main() -> None:
    """Fit, and write a report."""
    folder = Path(sys.argv[1])
    backend = fulgurite.backend("CSX", autogen_policy=sys.argv[2], artifact_dir=str(folder))
    trainer = fulgurite.Trainer(backend=backend, **QUIET, max_epochs=1)
    trainer.fit(Sleeps(net()), loader(16 * STEPS * int(os.environ["WORLD_SIZE"])))
    waited_s = trainer.strategy.training.speed.waits.seconds  # type: ignore[attr-defined]
    (folder / f"waited_{trainer.global_rank}.txt").write_text(str(waited_s))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
