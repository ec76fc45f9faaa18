"""What a program costs before it is compiled: its capture, and a step operation by operation.

    python tests/benchmarks/uncompiled.py                          a table of all models
    python tests/benchmarks/uncompiled.py --models mlp zoo.vae --steps 100 --rounds 5
    python tests/benchmarks/uncompiled.py --child fulgurite mlp 100    one run in this process

Seconds of the processor in the main thread, of which there is one. *First* counts from ``fit``
called to the end of the first step: of stock Lightning, of Fulgurite with
``autogen_policy="disabled"``, and of a plain ``make_fx`` of the same step (forward, backward,
AdamW written out), which lists its operations and nothing else. A step is the median of those from
the seventh on. Each run is a process of its own; contenders take turns, and a figure is the least
of the rounds. ``zoo.NAME`` is a model of ``examples/zoo``: no make_fx of those.
"""

from __future__ import annotations

import argparse
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import models
import torch
from contenders import QUIET, preloaded, quiet
from models import LOSS, Model
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fulgurite

sys.path.append(str(Path(__file__).parents[2] / "examples" / "zoo"))
from compare import ZOO  # examples/ is no package

CONTENDERS = ("stock", "fulgurite", "make_fx")


class Encoder(nn.Module):
    """x [B, T, 64] -> logits [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.layers, self.last = nn.TransformerEncoder(layer, 2), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.layers(x).mean(1))
        return logits


class Recurrent(nn.Module):
    """x [B, T, 32] -> logits [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(32, 64, 2, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.lstm(x)[0][:, -1])
        return logits


def random(name: str, net: Callable[[], nn.Module], *shape: int) -> Model:
    """A model of ten classes on random inputs."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randn(32, *shape, generator=generator),
            torch.randint(0, 10, (32,), generator=generator),
        )
        for _ in range(8)
    ]
    return Model(name, net, 10, batches)


MODELS: dict[str, Callable[[], Model]] = {
    "mlp": models.mlp,
    "convnet": models.convnet,
    "encoder": lambda: random("encoder", Encoder, 16, 64),
    "lstm": lambda: random("lstm", Recurrent, 20, 32),
    "gpt": models.gpt,
}


class Clock(pl.Callback):
    """The processor's seconds at the end of each step."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_train_batch_end(self, *args: object) -> None:
        self.at.append(time.thread_time())


def fitted(stock: bool, name: str, steps: int) -> dict[str, float]:
    """Fit in this process: seconds of the first step, and of one after that."""
    torch.manual_seed(0)
    if name.startswith("zoo."):
        module, loaders = of_zoo(name.removeprefix("zoo."))
    else:
        model = MODELS[name]()
        module, loaders = model.module(LOSS), [preloaded(model)]
    clock = Clock()
    options: dict[str, Any] = {**QUIET, "max_steps": steps, "max_epochs": -1, "callbacks": [clock]}
    options["limit_val_batches"] = 0
    if stock:
        trainer = pl.Trainer(accelerator="cpu", **options)
    else:
        backend = fulgurite.backend("CSX", autogen_policy="disabled", audit=False)
        trainer = fulgurite.Trainer(backend=backend, **options)
    began = time.thread_time()
    trainer.fit(module, *loaders)
    later = [b - a for a, b in zip(clock.at[5:], clock.at[6:], strict=False)]
    return {"first": clock.at[0] - began, "step": statistics.median(later or [0.0])}


def of_zoo(name: str) -> tuple[pl.LightningModule, list[Any]]:
    """A module of the zoo, and its loaders."""
    file = importlib.import_module(name)
    return getattr(file, ZOO[name])(), [file.loader()] if hasattr(file, "loader") else []


def traced(name: str) -> dict[str, float]:
    """Seconds of a plain ``make_fx`` of a step, its optimizer's state made before."""
    model = MODELS[name]()
    torch.manual_seed(0)
    net = model.net()
    names, parameters = zip(*net.named_parameters(), strict=True)
    buffers = dict(net.named_buffers())
    state = [torch.zeros_like(p) for _ in range(2) for p in parameters]
    counts = [torch.zeros(()) for _ in parameters]

    def step(
        parameters: list[Tensor],
        buffers: dict[str, Tensor],
        state: list[Tensor],
        counts: list[Tensor],
        batch: models.Batch,
    ) -> Tensor:
        held = [p.detach().requires_grad_() for p in parameters]
        whole = dict(zip(names, held, strict=True)) | buffers
        logits = torch.func.functional_call(net, whole, (batch[0],))
        loss = nn.functional.cross_entropy(logits, batch[1])
        gradients = torch.autograd.grad(loss, held)
        with torch.no_grad():
            for i, (p, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                adamw(p, gradient, state[i], state[i + len(held)], counts[i])
        return loss.detach()

    given = [p.detach() for p in parameters]
    began = time.thread_time()
    make_fx(step, tracing_mode="fake")(given, buffers, state, counts, model.batches[0])
    return {"first": time.thread_time() - began, "step": 0.0}


def adamw(p: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, count: Tensor) -> None:
    """The formula of ``torch.optim.AdamW``, with its state as tensors."""
    count.add_(1)
    p.mul_(1 - 1e-3 * 0.01)
    mean.lerp_(gradient, 0.1)
    square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    size = (1 - 0.9**count) / 1e-3
    denominator = (square.sqrt() / (1 - 0.999**count).sqrt()).add_(1e-8)
    p.addcdiv_(mean, denominator * -size)


def child(contender: str, name: str, steps: int) -> dict[str, float]:
    """One run, in a process of its own."""
    told = subprocess.run(
        [sys.executable, __file__, "--child", contender, name, str(steps)],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ).stdout
    found: dict[str, float] = json.loads(told.splitlines()[-1])
    return found


def row(name: str, steps: int, rounds: int) -> str:
    """A model's line of the table."""
    chosen = CONTENDERS[: 2 if name.startswith("zoo.") else 3]
    runs = [{who: child(who, name, steps) for who in chosen} for _ in range(rounds)]
    first = {who: min(run[who]["first"] for run in runs) for who in chosen}
    step = {who: min(run[who]["step"] for run in runs) * 1e3 for who in chosen}
    plain = first.get("make_fx")
    ratio = "" if plain is None else f"{plain:.2f} s | {first['fulgurite'] / plain:.1f}"
    return (
        f"| {name} | {first['stock']:.2f} s | {first['fulgurite']:.2f} s | {ratio or ' | '} |"
        f" {step['stock']:.2f} ms | {step['fulgurite']:.2f} ms |"
        f" {step['fulgurite'] / step['stock']:.2f} |"
    )


def main() -> None:
    """Print the table."""
    every = [*MODELS, *(f"zoo.{name}" for name in ZOO)]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=every, choices=every)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=3, metavar=("WHO", "MODEL", "STEPS"))
    given = parser.parse_args()
    if given.child:
        quiet()
        torch.set_num_threads(1)
        who, name, steps = given.child
        found = traced(name) if who == "make_fx" else fitted(who == "stock", name, int(steps))
        print(json.dumps(found))
        return
    print(
        "| model | first: stock | Fulgurite | make_fx | ratio | step: stock | Fulgurite | ratio |"
    )
    print("| --- " * 8 + "|")
    for name in given.models:
        print(row(name, given.steps, given.rounds), flush=True)


if __name__ == "__main__":
    main()
