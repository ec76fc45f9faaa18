"""A runner of one's own: it writes losses to a CSV file, and says where the time went.

    python examples/custom_runner.py --params examples/runner.yaml --mode train_and_eval

Model, data and parameters are those of runner.py. A runner gets its hooks called; what it does not
override costs nothing. A loss is a tensor: reading it waits for the step, so this one reads losses
once an epoch.
"""

from __future__ import annotations

import csv
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from runner import DigitsModel, eval_data, train_data
from torch import Tensor

from fulgurite.runners import PyTorchBaseRunner, run


class Profile:
    """Seconds in spans of several kinds; the first span of each, which builds, is not counted."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}
        self._since: dict[str, float] = {}

    def start(self, kind: str) -> None:
        self._since[kind] = time.perf_counter()

    def stop(self, kind: str) -> None:
        self._seconds.setdefault(kind, []).append(time.perf_counter() - self._since[kind])

    def __str__(self) -> str:
        lines = []
        for kind, (_, *seconds) in self._seconds.items():
            median_us = 1e6 * statistics.median(seconds or [0.0])
            lines.append(f"{kind:<12} {len(seconds):5} spans, median {median_us:8.0f} us")
        return "\n".join(lines)


class ProfilingRunner(PyTorchBaseRunner):
    """Losses to ``losses.csv`` in the model_dir; at the end, the median time of each kind."""

    def on_train_start(self) -> None:
        super().on_train_start()
        self.profile = Profile()
        self.losses: list[Tensor] = []
        self.path = Path(self.trainer.default_root_dir, "losses.csv")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)

    def on_train_batch_start(self, data: Any) -> Any:
        self.profile.start("train batch")
        return data  # or another batch in its place

    def on_train_batch_end(self, loss: Tensor | None, epoch: int, step: int) -> None:
        self.profile.stop("train batch")
        assert loss is not None
        self.losses.append(loss)

    def on_eval_epoch_start(self) -> None:
        self.profile.start("evaluation")

    def on_eval_epoch_end(self, early_exit: bool) -> None:
        self.profile.stop("evaluation")

    def on_train_epoch_end(self, early_exit: bool) -> None:
        losses = torch.stack(self.losses).tolist()
        self.losses.clear()
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerows((self.trainer.current_epoch, loss) for loss in losses)
        print(f"epoch {self.trainer.current_epoch}: mean loss {sum(losses) / len(losses):.3f}")

    def on_train_end(self, early_exit: bool) -> None:
        print(f"{'stopped early' if early_exit else 'trained'}; losses in {self.path}")
        print(self.profile)


if __name__ == "__main__":
    run(DigitsModel, train_data, eval_data, runner=ProfilingRunner)
