"""Machines, by what they do a second: this one as measured, others as published."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from fulgurite.backends.csx.compile.background.threads import set_threads
from fulgurite.backends.csx.compile.host.idle_threads import idle_threads
from fulgurite.backends.csx.compile.inductor.toolchain import cpu_name
from fulgurite.backends.csx.report.measured import Measured, measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a system does at most.

    Args:
        name: in reports.
        flops_per_s: of products, dense.
        bytes_per_s: of the memory that activations lie in.
        weights_bytes_per_s: of the link over which weights come and gradients go; None where they
            lie in the machine's memory.
        number_bytes: of a floating-point number, as it computes.
        measured: how fast it is with less than the most; None of others than this machine.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    weights_bytes_per_s: float | None = None
    number_bytes: int = 2
    measured: Measured | None = None


# Products of 16 bits, dense: half of the 1,979 TFLOP/s that count products with zeros, which are
# skipped; memory: NVIDIA's data sheet of the H200 (SXM).
H200 = Machine(name="H200", flops_per_s=1979e12 / 2, bytes_per_s=4.8e12)
# 850,000 cores, 20 PB/s: AnandTech, "Cerebras Unveils Wafer Scale Engine Two", April 2021. A core
# multiplies and adds 4 numbers of 16 bits a cycle: The Next Platform, "Cerebras Goes Hyperscale
# With Third Gen Waferscale Supercomputers", March 2024; 1.1 GHz: Sean Lie, "Cerebras Architecture
# Deep Dive", Hot Chips 34 and IEEE Micro 43(3), 2023. 1.2 Tb/s to and from a system: Argonne's
# tutorial at SC24.
CS2 = Machine(
    name="CS-2",
    flops_per_s=850_000 * 4 * 2 * 1.1e9,
    bytes_per_s=20e15,
    weights_bytes_per_s=1.2e12 / 8,
)
# 900,000 cores, 21 PB/s: Cerebras' announcement of the WSE-3, March 2024; 8 numbers a cycle: The
# Next Platform as above; 1.2 Tb/s: Argonne's tutorial. The clock is not published; the WSE-2's is
# assumed, as the bytes a second and core are within 1 %. The published 125 PFLOP/s, 7.9 times this,
# count products with zeros, which are skipped.
CS3 = Machine(
    name="CS-3",
    flops_per_s=900_000 * 8 * 2 * 1.1e9,
    bytes_per_s=21e15,
    weights_bytes_per_s=1.2e12 / 8,
)


def this_machine(threads: int) -> Machine:
    """The processor that this runs on, with so many threads, measured once in a process.

    ``bytes_per_s`` is that of main memory. Measuring takes 0.2 s where little else runs.
    """
    return _this_machine(min(threads, torch.get_num_threads()))


@functools.cache
def _this_machine(threads: int) -> Machine:
    own = torch.get_num_threads()
    mkl = set_threads(threads) if threads != own else None
    was_asleep = idle_threads.asleep
    if threads > 1:
        idle_threads.sleep()  # on busy cores it takes 3 s without
    try:
        measured = measure()
    finally:
        if not was_asleep:
            idle_threads.spin()
        if mkl is not None:
            set_threads(own, mkl)
    size_bytes, seconds = measured.memory.points[-1]
    return Machine(
        name=f"{cpu_name()}, {threads} thread{'s' * (threads > 1)}",
        flops_per_s=max(curve.most_per_s for curve in measured.products.values()),
        bytes_per_s=size_bytes / seconds,
        number_bytes=4,
        measured=measured,
    )
