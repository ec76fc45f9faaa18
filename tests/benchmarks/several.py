"""What communication costs: a step of several processes, of as many that do not talk, and of one.

    python tests/benchmarks/several.py [--model gpt] [--processes 2 4] [--steps 200] [--rounds 3]
    python tests/benchmarks/several.py --parts [--model gpt] [--processes 2]
    python tests/benchmarks/several.py --sums

Each process has one thread. "Together" is one training of so many systems, "apart" so many
trainings of one system at the same time, "one" a training of one system, alone on the machine. They
take turns; a step is the median over rounds of the slowest process's mean, after a warm-up.

``--parts``: one training of so many systems that hold all weights, that hold them in parts, and the
same by torch's FSDP (``fully_shard`` of each block, a plain loop), each with the most memory that
its processes have had.

``--sums``: how long gloo takes to add up a tensor of two processes, by its size: the median of
many, each after a barrier.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from contenders import QUIET, quiet
from models import LOSS, NOTHING, convnet, gpt, mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.utils.data import DataLoader

import fulgurite

MODELS = {"gpt": gpt, "convnet": convnet, "mlp": mlp}
WARM_UP = 30
SUMS = (16, 2**16, 2**20, 3_440_000)  # bytes; the last are the gradients of the GPT


def torchrun(processes: int) -> list[str]:
    """What starts so many processes of one training, after ``python``."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]


def sums() -> None:
    """Add up tensors of all processes, and print how long that takes."""
    dist.init_process_group("gloo")
    for size_bytes in SUMS:
        tensor, took = torch.zeros(size_bytes // 4), []
        for _ in range(200):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(tensor)
            took.append(time.perf_counter() - began)
        if dist.get_rank() == 0:
            least_s, median_s = min(took), statistics.median(took)
            print(f"{size_bytes:,} bytes: {median_s * 1e6:,.0f} µs, at least {least_s * 1e6:,.0f}")
    dist.destroy_process_group()


class Clock(pl.Callback):
    """When the warm-up was over, and when the last step."""

    began = ended = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.ended = time.perf_counter()
        if trainer.global_step == WARM_UP:
            self.began = self.ended


def run(name: str, steps: int, execution: str) -> None:
    """Train in this process, and print microseconds a step."""
    quiet()
    model, clock = MODELS[name](), Clock()
    batches = model.batches * (steps // len(model.batches) + 2)
    if execution == "fsdp":
        _report(fsdp(model.module(NOTHING), batches, steps))
        return
    trainer = fulgurite.Trainer(
        backend=fulgurite.backend("CSX", background=False, execution=execution),
        **QUIET,
        max_steps=WARM_UP + steps,
        use_distributed_sampler=False,
        callbacks=[clock],
    )
    module: Any = model.module(NOTHING if name == "gpt" else LOSS)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    _report((clock.ended - clock.began) / steps)


def _report(seconds: float) -> None:
    peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
    print(f"us a step: {seconds * 1e6:.1f}\nMB: {int(peak) / 1024:.0f}", flush=True)


def fsdp(module: Any, batches: Sequence[Any], steps: int) -> float:
    """Seconds a step of torch's fully sharded data parallel."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    lists = [one for one in module.modules() if isinstance(one, (nn.Sequential, nn.ModuleList))]
    for layer in (child for one in reversed(lists) for child in one.children()):
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    register_fsdp_forward_method(module, "training_step")
    optimizer, began = module.configure_optimizers(), 0.0
    for i, batch in enumerate(batches[: WARM_UP + steps]):
        if i == WARM_UP:
            began = time.perf_counter()
        optimizer.zero_grad()
        module.training_step(batch).backward()
        optimizer.step()
    ended = time.perf_counter()
    dist.destroy_process_group()
    return (ended - began) / steps


def measured(
    command: Sequence[str],
    name: str,
    steps: int,
    folder: str,
    count: int = 1,
    execution: str = "pipeline",
) -> tuple[float, float]:
    """Microseconds a step of so many processes that run at the same time, the slowest; and MB."""
    child = [__file__, "--child", name, "--steps", str(steps), "--execution", execution]
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "XDG_CACHE_HOME": f"{folder}/user",
    }
    running = [
        subprocess.Popen(
            [sys.executable, *command, *child],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(count)
    ]
    printed = "".join(process.communicate()[0] for process in running)
    found = [re.findall(f"{what}: ([0-9.]+)", printed) for what in ("us a step", "MB")]
    return max(map(float, found[0])), max(map(float, found[1]))


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--child", choices=[*MODELS, "sums"])
    parser.add_argument("--sums", action="store_true")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--execution", default="pipeline", help=argparse.SUPPRESS)
    parser.add_argument("--processes", nargs="+", type=int, default=[2])
    parser.add_argument("--model", nargs="+", default=["gpt"], choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.sums:
        subprocess.run([sys.executable, *torchrun(2), __file__, "--child", "sums"], check=True)
    elif options.child == "sums":
        sums()
    elif options.child:
        run(options.child, options.steps, options.execution)
    else:
        for name in options.model:
            for processes in options.processes:
                doing = compare_parts if options.parts else compare
                doing(name, processes, options.steps, options.rounds)


def compare_parts(name: str, processes: int, steps: int, rounds: int) -> None:
    """Print what so many processes take whose weights are whole, in parts, and under FSDP."""
    ways = "pipeline", "weight_streaming", "fsdp"
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        for way in ways[:2]:
            measured(torchrun(processes), name, 10, folder, execution=way)  # compiles
        for _ in range(rounds):
            for way, times in found.items():
                times.append(measured(torchrun(processes), name, steps, folder, execution=way))
    for way, times in found.items():
        us, mb = (statistics.median(values) for values in zip(*times, strict=True))
        print(
            f"{name}, {processes} processes, {way}: {us:,.0f} µs a step, {mb:,.0f} MB", flush=True
        )


def compare(name: str, processes: int, steps: int, rounds: int) -> None:
    """Print what so many processes take together, apart, and what one takes."""
    found: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        measured(torchrun(processes), name, 10, folder)  # compiles
        measured((), name, 10, folder)
        for _ in range(rounds):
            together, _ = measured(torchrun(processes), name, steps, folder)
            apart, _ = measured((), name, steps, folder, count=processes)
            one, _ = measured((), name, steps, folder)
            found.append((together, apart, one))
    together, apart, one = (statistics.median(times) for times in zip(*found, strict=True))
    samples = processes * one / together
    print(
        f"{name}, {processes} processes: together {together:,.0f} µs a step, apart {apart:,.0f},"
        f" one {one:,.0f}; {together / apart:.2f}x apart, {samples:.2f}x one's samples a second",
        flush=True,
    )


if __name__ == "__main__":
    main()
