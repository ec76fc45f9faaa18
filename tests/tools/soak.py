"""Train a small classifier for very many steps, and see that neither memory nor time grows.

    taskset -c 0 python tests/tools/soak.py --steps 200000

Prints the resident memory (MiB) of the first tenth after warm-up and of the last, and the time of a
step in each (medians of blocks): µs, and in steps of a plain loop over the same model, done before
each block, for machines that others use too become slower and faster. Exits with 1 where memory
grew by 1 %, or steps became 3 % slower beside the plain ones.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fulgurite

BLOCK, PLAIN = 500, 100  # steps


class Classifier(pl.LightningModule):
    """The MLP of the step benchmark."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Meter(pl.Callback):
    """Memory and time of each block of steps."""

    def __init__(self) -> None:
        self.memory: list[float] = []
        self.times: list[float] = []
        self.plain: list[float] = []  # of the loop before the same block
        self._loop = plain_loop()
        self._began = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Note a block that ends."""
        if trainer.global_step % BLOCK == 0:
            now = time.perf_counter()
            if self._began:
                self.times.append((now - self._began) / BLOCK * 1e6)
            gc.collect()
            self.memory.append(resident())
            self.plain.append(self._loop())
            self._began = time.perf_counter()


def plain_loop() -> Callable[[], float]:
    """Steps of a plain loop, which stays the same; returns µs a step."""
    net = Classifier().net
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    x, y = torch.randn(64, 64), torch.randint(0, 10, (64,))

    def run() -> float:
        began = time.perf_counter()
        for _ in range(PLAIN):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        return (time.perf_counter() - began) / PLAIN * 1e6

    return run


def resident() -> float:
    """Resident memory of this process, in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> int:
    """Train; 1 where something grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(32_000, 64)
    loader = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), 64, shuffle=True)
    meter = Meter()
    trainer = fulgurite.Trainer(
        backend=fulgurite.backend("CSX", background=False),
        max_steps=steps,
        max_epochs=-1,
        callbacks=[meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader)
    tenth = max(len(meter.times) // 10, 1)
    memory = statistics.median(meter.memory[tenth : 2 * tenth]), meter.memory[-1]
    beside = [a / b for a, b in zip(meter.times, meter.plain, strict=False)]
    times, ratios = (
        [statistics.median(part) for part in (values[:tenth], values[-tenth:])]
        for values in (meter.times, beside)
    )
    grown, slower = memory[1] / memory[0] - 1, ratios[1] / ratios[0] - 1
    print(
        f"{steps} steps: memory {memory[0]:.1f} -> {memory[1]:.1f} MiB ({grown:+.2%}), step"
        f" {times[0]:.1f} -> {times[1]:.1f} µs, {ratios[0]:.3f} -> {ratios[1]:.3f} plain ones"
        f" ({slower:+.2%})"
    )
    return int(grown >= 0.01 or slower >= 0.03)


if __name__ == "__main__":
    sys.exit(main())
