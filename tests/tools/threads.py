"""Fit in several threads, beside threads that read weights and use torch, math, time and random.

    python tests/tools/threads.py --fits 2 --minutes 10

Each fit must end with the weights that it has alone, each read must give finite real values, and
what the other thread computes must be right. Prints how much was done, and exits with 1 if anything
was wrong.
"""

from __future__ import annotations

import argparse
import io
import logging
import math
import random
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader, TensorDataset

import fulgurite

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class Classifier(pl.LightningModule):
    """A small module whose step uses a function that traces patch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 2))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y) * math.sqrt(4.0)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Work:
    """What the threads do until the time is over, and what they found wrong."""

    def __init__(self, minutes: float) -> None:
        self.until, self.done, self.wrong = 0.0, Counter[str](), Counter[str]()
        self._modules: list[Classifier] = []
        self._data = self._make_data()
        self._alone = self._fit()
        self.until = time.monotonic() + 60 * minutes

    def _make_data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(64, 8, generator=generator)
        return TensorDataset(x, (x.sum(1) > 0).long())

    def _fit(self) -> list[Tensor]:
        module = Classifier()
        self._modules = [*self._modules[-3:], module]
        backend = fulgurite.backend("CSX", background=False)  # the same bits in every fit
        trainer = fulgurite.Trainer(backend=backend, max_epochs=2, **QUIET)
        trainer.fit(module, DataLoader(self._data, 8))
        return [tensor.clone() for tensor in module.state_dict().values()]

    def fit(self) -> None:
        """A fit gives what it gives alone."""
        found = self._fit()
        self.expect("weights", all(map(torch.equal, found, self._alone)))

    def read(self) -> None:
        """Weights are real and finite, however they are read."""
        for module in self._modules:
            state = module.state_dict()
            self.expect("no fake", not any(isinstance(one, FakeTensor) for one in state.values()))
            self.expect("finite state", all(one.isfinite().all() for one in state.values()))
            self.expect("norm", all(math.isfinite(p.norm().item()) for p in module.parameters()))
            torch.save(state, io.BytesIO())
            with fulgurite.trace_lock, torch.no_grad():
                out = module.net[0](torch.ones(2, 8))
            self.expect("output", bool(out.isfinite().all()))
        time.sleep(0.001)

    def use(self) -> None:
        """What a trace replaces is as ever here."""
        began = time.time()
        self.expect("time", 0 <= time.time() - began < 60)
        self.expect("math", type(math.sqrt(16.0)) is float and math.sqrt(16.0) == 4.0)
        self.expect("random", 0 <= random.random() < 1 and 0 <= random.randint(0, 9) <= 9)
        self.expect("draws", len({torch.rand(4).sum().item() for _ in range(8)}) > 1)
        weight = torch.ones(4, requires_grad=True)
        (weight * weight).sum().backward()
        assert weight.grad is not None
        self.expect("gradient", weight.grad.tolist() == [2.0] * 4)
        layer = nn.Linear(4, 1)
        before, optimizer = layer.weight.detach().clone(), torch.optim.SGD(layer.parameters(), 0.1)
        layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        self.expect("update", torch.allclose(before - 0.1, layer.weight))

    def expect(self, what: str, holds: bool) -> None:
        """Note what was looked at."""
        self.done[what] += 1
        if not holds:
            self.wrong[what] += 1

    def thread(self, work: Callable[[], None]) -> threading.Thread:
        """A thread that works until the time is over."""

        def run() -> None:
            while time.monotonic() < self.until:
                try:
                    work()
                except Exception:
                    self.wrong[traceback.format_exc()] += 1

        return threading.Thread(target=run)


def main() -> int:
    """Run the threads; 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fits", type=int, default=2, help="threads that fit")
    parser.add_argument("--minutes", type=float, default=10)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "fulgurite"):
        logging.getLogger(name).setLevel(logging.ERROR)
    functions = math.sqrt, random.random, time.time, nn.Module.__call__, nn.Module.__setattr__
    work = Work(arguments.minutes)
    threads = [work.thread(work.fit) for _ in range(arguments.fits)]
    threads += [work.thread(work.read), work.thread(work.use)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    now = math.sqrt, random.random, time.time, nn.Module.__call__, nn.Module.__setattr__
    work.expect("put back", now == functions)
    print(f"{arguments.fits} fits at a time, {arguments.minutes:g} minutes: {dict(work.done)}")
    for what, count in work.wrong.items():
        print(f"WRONG, {count} times: {what}")
    return int(bool(work.wrong))


if __name__ == "__main__":
    sys.exit(main())
