"""The time of a step as the report predicts it, beside the measured one.

    python tests/benchmarks/predicted.py [--steps 200] [--calls 0]

For the three models, with one thread, operation by operation and compiled. Measured is the program
alone, the least of 20 rounds in seconds of the processor, which others may use meanwhile; predicted
is the sum over the calls of its kernels, from peaks that are measured on this machine in the same
process. ``--calls`` shows so many of the longest calls.
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
from fulgurite.backends.csx.report.machine import Machine, this_machine
from fulgurite.backends.csx.report.timing import predicted_s

POLICIES = ("disabled", "default")
ROUNDS = 20


class Clock:
    """Seconds in programs: a fabric tells it of every run."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def begin(self) -> None:
        self.seconds -= time.thread_time()

    def end(self) -> None:
        self.seconds += time.thread_time()


def line(model: models.Model, policy: str, steps: int, machine: Machine, calls: int) -> str:
    """A row of the table, and the longest calls below it."""
    reset_backend()
    backend = fulgurite.backend("CSX", autogen_policy=policy, audit=False, background=False)
    trainer = fulgurite.Trainer(backend=backend, max_steps=2, **torch_.QUIET)
    trainer.fit(model.module(), torch_.preloaded(model))
    step = trainer.strategy.step_functions["training"]
    [executable] = step.executables()
    batches = [list(batch) for batch in model.batches]
    clock = Clock()
    executable._fabric.timer = clock
    measured_s = min(_round(step, batches, clock, max(2, steps // ROUNDS)) for _ in range(ROUNDS))
    graph, made = executable.loaded.graph, executable.loaded.made()
    seconds = predicted_s(graph, made, machine)
    found = (
        f"| {model.name}, {executable.loaded.how.partition(' (')[0]} | {len(made.calls)} |"
        f" {measured_s * 1e6:,.0f} µs | {sum(seconds) * 1e6:,.0f} µs |"
        f" {sum(seconds) / measured_s:.2f} |"
    )
    longest = sorted(zip(seconds, made.calls, strict=True), key=lambda one: -one[0])[:calls]
    names = [str(node.target) for node in graph.operations()]
    told = [
        f"    {s * 1e6:9.1f} {call.kernel}: {', '.join({names[i] for i in call.operations})}"
        for s, call in longest
    ]
    return "\n".join([found, *told])


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
    parser.add_argument("--policy", choices=POLICIES, nargs="*", default=POLICIES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch_.quiet()
    machine = this_machine(1)
    print("| step | calls | measured | predicted | predicted by measured |")
    print("| --- | --- | --- | --- | --- |")
    for policy in options.policy:
        for model in (models.mlp(), models.convnet(), models.gpt()):
            print(line(model, policy, options.steps, machine, options.calls), flush=True)


if __name__ == "__main__":
    main()
