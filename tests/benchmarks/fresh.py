"""What only a fresh process shows, on the GPT: compile seconds, the second start, memory.

    python tests/benchmarks/fresh.py fulgurite|torch.compile|lightning STEPS

runs that many steps and prints JSON: ``first_step_s`` (from imports done to the first step done)
and ``live_bytes`` after the last. ``measure`` starts such processes with compile caches in a folder
of their own, on every core (both compilers use several), and counts the compiler processes.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from contenders import check_compiled, cross_entropy, make_trainer, preloaded, quiet
from models import LEARNING_RATE, gpt
from table import ratio
from torch._subclasses import FakeTensor

STEPS = 10
WRAPPER = '#!/bin/sh\necho started >> "{log}"\nexec {compiler} "$@"\n'


def live_bytes() -> int:
    """Bytes of all CPU tensors that Python can reach, gradients included; shared storage once."""
    gc.collect()
    storages: dict[int, int] = {}
    # no isinstance: it would wake lazy proxies
    found = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    real = [t for t in found if not isinstance(t, FakeTensor) and t.device.type == "cpu"]
    real += [t.grad for t in real if t.is_leaf and t.grad is not None]
    for tensor in real:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Probe(pl.Callback):
    """When the first step was done, and the live bytes after the last."""

    def __init__(self, steps: int) -> None:
        self.steps, self.first, self.bytes = steps, 0.0, 0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        self.first = self.first or time.perf_counter()
        if trainer.global_step == self.steps:
            self.bytes = live_bytes()


def run_fit(ours: bool, steps: int) -> dict[str, float]:
    """Our fit, or stock Lightning's."""
    model, probe = gpt(), Probe(steps)
    base = live_bytes()
    began = time.perf_counter()
    trainer = make_trainer(ours, max_steps=steps, callbacks=[probe])
    trainer.fit(model.module(), preloaded(model))
    if ours:
        check_compiled(trainer)
    return {"first_step_s": probe.first - began, "live_bytes": probe.bytes - base}


def run_torch_compile(steps: int) -> dict[str, float]:
    """Forward and backward by torch.compile, and the optimizer's step too."""
    model = gpt()
    base = live_bytes()
    began = time.perf_counter()
    net = model.module().net
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE)
    loss_of = torch.compile(functools.partial(cross_entropy, net))
    step = torch.compile(optimizer.step)
    first = 0.0
    for i in range(steps):
        loss = loss_of(model.batches[i])
        optimizer.zero_grad()
        loss.backward()
        step()
        first = first or time.perf_counter() - began
    return {"first_step_s": first, "live_bytes": live_bytes() - base}


def child(kind: str, folder: Path, steps: int = STEPS) -> dict[str, float]:
    """One process with its caches in ``folder``; what it printed, and ``compilers`` it started."""
    log = folder / "compilers"
    log.write_text("")
    wrapper = folder / "c++"
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    wrapper.write_text(WRAPPER.format(log=log, compiler=compiler))
    wrapper.chmod(0o700)
    unpinned = {"OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"}
    done = subprocess.run(
        [sys.executable, __file__, kind, str(steps)],
        env={
            **{name: value for name, value in os.environ.items() if name not in unpinned},
            "CXX": str(wrapper),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "XDG_CACHE_HOME": str(folder / "user"),
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {**result, "compilers": len(log.read_text().splitlines())}


def measure(rounds: int, cores: set[int]) -> dict[str, Any]:
    """Cold and second starts of the GPT, taking turns, on these cores; memory after some steps."""
    pinned = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # the processes inherit it
    try:
        return _measure(rounds)
    finally:
        os.sched_setaffinity(0, pinned)


def _measure(rounds: int) -> dict[str, Any]:
    kinds = ("fulgurite", "torch.compile")
    cold: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    second: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            with tempfile.TemporaryDirectory() as folder:
                cold[kind].append(child(kind, Path(folder)))
                second[kind].append(child(kind, Path(folder)))
    with tempfile.TemporaryDirectory() as folder:
        stock = child("lightning", Path(folder))

    def median(runs: list[dict[str, float]], what: str) -> float:
        return statistics.median(run[what] for run in runs)

    result: dict[str, Any] = {
        kind: {
            "cold_s": median(cold[kind], "first_step_s"),
            "second_start_s": median(second[kind], "first_step_s"),
            "second_start_compilers": max(run["compilers"] for run in second[kind]),
            "cold_compilers": median(cold[kind], "compilers"),
            "live_bytes": median(cold[kind], "live_bytes"),
        }
        for kind in kinds
    }
    ours, theirs = ([run["first_step_s"] for run in cold[kind]] for kind in kinds)
    result["cold_ratio"] = ratio(ours, theirs)
    result["steps"] = STEPS
    result["lightning"] = {"live_bytes": stock["live_bytes"]}
    return result


def main(kind: str, steps: int) -> None:
    """Run one contender in this process."""
    quiet()
    runs = {
        "fulgurite": functools.partial(run_fit, True),
        "lightning": functools.partial(run_fit, False),
        "torch.compile": run_torch_compile,
    }
    print(json.dumps(runs[kind](steps)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
