"""How long one waits: for the first step, for the first compiled one, for runs of some steps.

    python tests/benchmarks/waiting.py                      cold and warm, every contender, a table
    python tests/benchmarks/waiting.py --models convnet --steps 100 300 --json waiting.json
    python tests/benchmarks/waiting.py --busy               steps beside one busy process per core
    python tests/benchmarks/waiting.py --models gpt-4 gpt-12 gru-40      compiling large models
    python tests/benchmarks/waiting.py --child fulgurite convnet 300     one run in this process

Each run is a process of its own: stock Lightning, the same with its net compiled by torch, and
Fulgurite as people use it (``device="CSX"``). Seconds count from ``fit`` called: ``first`` to the
end of the first training step, ``compiled`` to the end of the first that compiled code did (0: none
was), ``wall`` to the end of ``fit``. Cold runs begin with empty compile caches, warm ones with full
ones; ``again`` begins with what a cold run left, which may have ended before its programs were
compiled. A validation of two batches comes every 80 steps. Large models (``large.py``) take two
steps, and Fulgurite waits for its programs: ``first`` is then the first compiled step, of a program
with the optimizer in it, where torch.compile has the net alone.
With ``--busy`` each core has another busy process, and what counts is the mean step of a warm run
after its first one, or first compiled one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from contenders import QUIET, quiet
from large import LARGE
from models import LOSS, convnet, gpt, mlp
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader

import fulgurite

CONTENDERS = ("lightning", "torch.compile", "fulgurite")
COMPILES = "waits"  # Fulgurite, with background=False
CHECKED = 16  # steps, after which compiled code was compared with its operations, and is trusted
MODELS = {"convnet": convnet, "mlp": mlp, "gpt": gpt, **LARGE}
STEPS = {"convnet": (100, 300, 1000, 3000), "mlp": (300,), "gpt": (30, 100, 300)}
Row = dict[str, Any]


class Clock(pl.Callback):
    """When the first step ended, and the first compiled one."""

    def __init__(self) -> None:
        self.first = self.compiled = self.last = 0.0
        self.steps = 0  # after the first one, or the first compiled one

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        self.last = time.perf_counter()
        if self.compiled or (self.first and not isinstance(trainer, fulgurite.Trainer)):
            self.steps += 1
        if not self.first:
            self.first = time.perf_counter()
        if not self.compiled and isinstance(trainer, fulgurite.Trainer):
            loads = [one.loaded for one in trainer.strategy.training.executables()]
            if all(load.compiled for load in loads):
                self.compiled = time.perf_counter()


def run(contender: str, name: str, steps: int) -> Row:
    """One fit in this process."""
    quiet()
    model, clock = MODELS[name](), Clock()
    batches = model.batches * (steps // len(model.batches) + 1)
    loader = DataLoader(batches, batch_size=None)
    options: dict[str, Any] = {
        **QUIET,
        "callbacks": [clock],
        "max_steps": steps,
        "val_check_interval": min(80, steps),
        "limit_val_batches": 2,
    }
    module: Any = model.module(LOSS)
    began = time.perf_counter()
    if contender in ("fulgurite", COMPILES):
        backend = fulgurite.backend("CSX", background=contender != COMPILES)
        trainer: pl.Trainer = fulgurite.Trainer(backend=backend, **options)
    else:
        trainer = pl.Trainer(accelerator="cpu", **options)
    if contender == "torch.compile":
        # the whole module fails in Lightning's log; net.compile() skips torch's own Sequential
        module.net = torch.compile(module.net)
    trainer.fit(module, loader, DataLoader(model.batches[:2], batch_size=None))
    wall = time.perf_counter() - began
    if contender == "torch.compile" and not counters["stats"]["unique_graphs"]:
        sys.exit("torch compiled nothing: the figures would mean nothing")
    compiled = clock.compiled - began if clock.compiled else 0.0
    step_us = (clock.last - (clock.compiled or clock.first)) / max(1, clock.steps) * 1e6
    return {"first": clock.first - began, "compiled": compiled, "wall": wall, "step_us": step_us}


def child(contender: str, name: str, steps: int, folder: str) -> Row:
    """One fit in a process of its own, with its caches in a folder."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", contender, name, str(steps)],
        env={
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "XDG_CACHE_HOME": f"{folder}/user",
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: Row = json.loads(done.stdout.splitlines()[-1])
    return result


def beside_busy_processes(names: list[str], steps: list[int] | None) -> None:
    """Print the mean step of stock Lightning and of Fulgurite, a busy process on each core."""
    spin = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
    for name in names:
        count = steps[0] if steps else STEPS[name][0]
        for contender in ("lightning", "fulgurite"):
            with tempfile.TemporaryDirectory() as folder:
                if contender == "fulgurite":
                    child(COMPILES, name, CHECKED, folder)
                cores = os.sched_getaffinity(0)
                busy = [subprocess.Popen([sys.executable, "-c", spin]) for _ in cores]
                try:
                    found = child(contender, name, count, folder)
                finally:
                    for process in busy:
                        process.kill()
            print(f"{name:8s} {contender:10s} {found['step_us']:12,.0f} µs a step", flush=True)


def measure(names: list[str], steps: list[int] | None) -> list[Row]:
    """Every contender in turn: cold, where that may end before the compiler again, and warm."""
    rows = []
    for name in names:
        for count in steps or STEPS.get(name, (2,)):
            for contender in CONTENDERS if name in STEPS else ("torch.compile", COMPILES):
                background = contender == "fulgurite"
                with tempfile.TemporaryDirectory() as folder:
                    for start in ("cold", "again", "warm") if background else ("cold", "warm"):
                        if background and start == "warm":
                            child(COMPILES, name, CHECKED, folder)
                        found = child(contender, name, count, folder)
                        rows.append(
                            {"model": name, "steps": count, "who": contender, "start": start}
                            | {key: round(value, 2) for key, value in found.items()}
                        )
                        print(line(rows[-1]), flush=True)
    return rows


def line(row: Row) -> str:
    """A row of the table."""
    return (
        f"{row['model']:8s} {row['steps']:6d} {row['who']:14s} {row['start']:5s}"
        f" {row['first']:8.2f} {row['compiled']:8.2f} {row['wall']:8.2f}"
    )


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=3)
    parser.add_argument("--models", nargs="+", default=list(STEPS), choices=list(MODELS))
    parser.add_argument("--steps", nargs="+", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--busy", action="store_true")
    arguments = parser.parse_args()
    if arguments.child:
        contender, name, steps = arguments.child
        print(json.dumps(run(contender, name, int(steps))))
        return
    if arguments.busy:
        beside_busy_processes(arguments.models, arguments.steps)
        return
    print("model     steps who            start    first compiled     wall")
    rows = measure(arguments.models, arguments.steps)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
