"""The time of a step as the report predicts it, beside the measured one.

    python tests/benchmarks/predicted.py [--steps 200] [--calls 0] [--roofline]

For the three models, with one thread, operation by operation and compiled. Measured is the program
alone, the least of 20 rounds in seconds of the processor, which others may use meanwhile; predicted
is the sum over the calls of its kernels, from peaks that are measured on this machine in the same
process. ``--calls`` shows so many of the longest calls, ``--roofline`` what bounds the GPT's step.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once
import contenders as torch_
import models
import torch

import fulgurite
from fulgurite.backends import reset_backend
from fulgurite.backends.csx.costs.machine import Machine, this_machine
from fulgurite.backends.csx.costs.roofline import roofline, work_of
from fulgurite.backends.csx.costs.timing import predicted_s

POLICIES = ("disabled", "default", "medium", "aggressive")
ROUNDS = 20


class Clock:
    """Seconds in programs: a fabric tells it of every run."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def begin(self) -> None:
        self.seconds -= time.thread_time()

    def end(self) -> None:
        self.seconds += time.thread_time()


def compiled(model: models.Model, policy: str) -> tuple[Any, Any]:
    """A model's step, and its program."""
    reset_backend()
    backend = fulgurite.backend("CSX", autogen_policy=policy, audit=False, background=False)
    trainer = fulgurite.Trainer(backend=backend, max_steps=2, **torch_.QUIET)
    trainer.fit(model.module(), torch_.preloaded(model))
    [program] = trainer.strategy.programs
    return trainer.strategy.step_functions["training"], program


def line(model: models.Model, policy: str, steps: int, machine: Machine, calls: int) -> str:
    """A row of the table, and the longest calls below it."""
    step, _ = compiled(model, policy)
    [executable] = step.executables()
    batches = [list(batch) for batch in model.batches]
    executable._fabric.timer = clock = Clock()
    measured_s = min(_round(step, batches, clock, max(2, steps // ROUNDS)) for _ in range(ROUNDS))
    graph, kernels = executable.loaded.runs, executable.loaded.kernels()
    seconds = predicted_s(graph, kernels, machine)
    how = "compiled" if executable.loaded.compiled else "operation by operation"
    found = (
        f"| {model.name}, {how} | {len(kernels.calls)} | {measured_s * 1e6:,.0f} µs |"
        f" {sum(seconds) * 1e6:,.0f} µs | {sum(seconds) / measured_s:.2f} |"
    )
    longest = sorted(zip(seconds, kernels.calls, strict=True), key=lambda one: -one[0])[:calls]
    names = [str(node.target) for node in graph.operations()]
    told = [
        f"    {s * 1e6:9.1f} {call.kernel}: {', '.join({names[i] for i in call.operations})}"
        for s, call in longest
    ]
    return "\n".join([found, *told])


def bounds(model: models.Model, machine: Machine) -> str:
    """The roofline of a model's compiled step as a table."""
    step, program = compiled(model, "default")
    [executable], [entry] = step.executables(), program.entries
    weights = sum(p.numel() * p.element_size() for p in model.module().parameters())
    kernels, batch_size = executable.loaded.kernels(), len(model.batches[0][0])
    work = work_of(executable.graph, kernels, entry.products, weights, batch_size)
    rows = ["| systems | batch | compute | memory | weights | bound |", "| --- " * 6 + "|"]
    for one in roofline(work, machine, batches=(1, 64), systems=(1, 4)):
        times = " | ".join(
            f"{s * 1e6:,.2f} µs" for s in (one.compute_s, one.memory_s, one.weights_s)
        )
        name = f"{one.systems} {one.system}" if one.systems > 1 else one.system
        rows.append(f"| {name} | {one.batch_size} | {times} | {one.bound} |")
    return "\n".join(rows)


def _round(step: Any, batches: list[Any], clock: Clock, steps: int) -> float:
    clock.seconds = 0.0
    for i in range(steps):
        step(batches[i % len(batches)], dict)
    return clock.seconds / steps


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--calls", type=int, default=0)
    parser.add_argument("--roofline", action="store_true")
    parser.add_argument("--policy", choices=POLICIES, nargs="*", default=POLICIES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch_.quiet()
    machine = this_machine(1)
    if options.roofline:
        print(bounds(models.gpt(), machine))
        return
    print("| step | calls | measured | predicted | predicted by measured |")
    print("| --- | --- | --- | --- | --- |")
    for policy in options.policy:
        for model in (models.mlp(), models.convnet(), models.gpt()):
            print(line(model, policy, options.steps, machine, options.calls), flush=True)


if __name__ == "__main__":
    main()
