"""Machines, by what they do a second: others as published, this one as measured.

Small operations of each kind are timed once in a process. Words: *work* is what a call does beyond
being called. How much of it a second does depends on how much there is, so it is a ``Curve``,
measured at a few sizes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fulgurite.backends.csx.compile.inductor.toolchain import cpu_name
from fulgurite.backends.csx.compile.threads import counted, reset_threads, set_threads

_aten = torch.ops.aten
_ROUNDS, _ROUND_S, _AT_MOST_S = 9, 1e-4, 0.02
_NOTHING_S = 1e-8  # work that is not seen beside the call
_GENERATED_OF_LIBRARY = 0.8  # a generated kernel's call by that of a library's product (measured)
NARROW = 16  # matrices with a side below it are slower


_Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size: straight in logarithms between points, in proportion above the last.

    Args:
        points: sizes and seconds, the smallest first; what is smaller takes as long as the first.
    """

    points: tuple[tuple[float, float], ...]

    def seconds(self, size: float) -> float:
        """How long so much takes."""
        if size <= self.points[0][0]:
            return self.points[0][1]
        for (x0, y0), (x1, y1) in zip(self.points, self.points[1:], strict=False):
            if size <= x1:
                part = math.log(size / x0) / math.log(x1 / x0)
                return math.exp((1 - part) * math.log(y0) + part * math.log(y1))
        return self.points[-1][1] * size / self.points[-1][0]

    @property
    def most_per_s(self) -> float:
        """The highest rate of its three largest points; work is hardly seen in smaller ones."""
        return max(size / seconds for size, seconds in self.points[-3:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured. Curves are of work alone.

    Args:
        products: by FLOPs: ``mm``, ``narrow`` (matrices with a side below ``NARROW``),
            ``convolution`` and ``attention``, the last two with ``_backward`` too.
        memory: by bytes read and written.
        elements_s: an element of what is slower than memory, in float32, by function.
        operation_s: the call of one operation of torch, which allocates its result.
        view_s: the call of one that only looks at memory.
        library_s: the call of a product by a compiled program, into memory that is there.
        generated_s: the call of a generated kernel.
    """

    products: Mapping[str, Curve]
    memory: Curve
    elements_s: Mapping[str, float]
    operation_s: float
    view_s: float
    library_s: float
    generated_s: float


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
    try:
        measured = measure()
    finally:
        if mkl is not None:
            reset_threads(own, mkl)
    size_bytes, seconds = measured.memory.points[-1]
    return Machine(
        name=f"{cpu_name()}, {counted(threads)}",
        flops_per_s=max(curve.most_per_s for curve in measured.products.values()),
        bytes_per_s=size_bytes / seconds,
        number_bytes=4,
        measured=measured,
    )


def measure() -> Measured:
    """Measure with the threads that torch computes with now: 0.2 s, on a machine that is idle."""
    with torch.inference_mode(False), torch.no_grad():
        one = _filled(4, 4)
        operation_s, view_s = _in_turns(_operations(one)), _in_turns(_views(one))
        library_s = _least(lambda: torch.mm(one, one, out=one))
        return Measured(
            products=_products(operation_s, library_s),
            memory=_memory(),
            elements_s=_elements(),
            operation_s=operation_s,
            view_s=view_s,
            library_s=library_s,
            generated_s=_GENERATED_OF_LIBRARY * library_s,
        )


def _operations(one: Tensor) -> list[Callable[[], Any]]:
    """Small operations of many kinds: each one finds the caches as another left them."""
    number, mask = _filled(), one > 1
    return [
        lambda: _aten.add.Tensor(one, one),
        lambda: _aten.mul.Tensor(one, 0.5),
        lambda: _aten.sub.Tensor(one, number),
        lambda: _aten.sqrt.default(one),
        lambda: _aten.copy.default(one, one),
        lambda: _aten.where.self(mask, one, number),
        lambda: _aten.sum.dim_IntList(one, [0], True),
        lambda: _aten.mm.default(one, one),
        lambda: _aten.pow.Tensor_Scalar(one, 2),
        lambda: _aten.div.Tensor(one, number),
        lambda: _aten.le.Scalar(one, 0.0),
        lambda: _aten.copy_.default(one, one),
    ]


def _views(one: Tensor) -> list[Callable[[], Any]]:
    return [
        lambda: _aten.permute.default(one, [1, 0]),
        lambda: _aten.view.default(one, [16]),
        lambda: _aten.select.int(one, 0, 1),
        lambda: _aten.unsqueeze.default(one, 1),
        lambda: _aten.expand.default(one, [2, 4, 4]),
    ]


def _elements() -> dict[str, float]:
    many = _filled(1 << 14)
    mask, number, pictures = many > 1, _filled(), many.view(16, 16, 8, 8)
    runs: dict[str, Callable[[], Any]] = {
        "exp": lambda: torch.exp(many),
        "tanh": lambda: torch.tanh(many),
        "where": lambda: torch.where(mask, number, many),
        "var_mean": lambda: _aten.var_mean.correction(pictures, [0, 2, 3], correction=0),
        "max_pool": lambda: _aten.max_pool2d_with_indices.default(pictures, [2, 2]),
    }
    return {name: _least(run) / len(many) for name, run in runs.items()}


def _memory() -> Curve:
    """Of a sum of two tensors into a third, from the first cache to main memory."""
    one = _filled(1)
    call_s = _least(lambda: torch.add(one, one, out=one))
    numbers = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
    return Curve(tuple(_moving(count, call_s) for count in numbers))


def _products(operation_s: float, library_s: float) -> dict[str, Curve]:
    mm = [_mm(n, n, library_s) for n in (8, 16, 32, 64, 128, 256, 512)]
    narrow = [_mm(n, NARROW // 2, library_s) for n in (8, 32, 128, 512)]
    found = {"mm": Curve(tuple(mm)), "narrow": Curve(tuple(narrow))}
    for name, shapes, measured in (
        ("convolution", ((1, 1, 4), (32, 1, 8), (16, 16, 8), (16, 64, 8)), _convolution),
        ("attention", ((1, 4, 4), (4, 16, 16), (8, 64, 32)), _attention),
    ):
        forward, backward = zip(*(measured(*shape, operation_s) for shape in shapes), strict=True)
        found |= {name: Curve(forward), f"{name}_backward": Curve(backward)}
    return found


def _moving(numbers: int, call_s: float) -> _Point:
    a, b, c = (_filled(numbers) for _ in range(3))
    return _point(12 * numbers, lambda: torch.add(a, b, out=c), call_s)


def _mm(n: int, width: int, call_s: float) -> _Point:
    a, b, c = _filled(n, n), _filled(n, width), _filled(n, width)
    return _point(2 * n * n * width, lambda: torch.mm(a, b, out=c), call_s)


def _convolution(batch: int, channels: int, side: int, call_s: float) -> tuple[_Point, _Point]:
    """Forward, and both gradients: 16 channels out, a window of 3 x 3."""
    x, weight = _filled(batch, channels, side, side), _filled(16, channels, 3, 3)
    y = _filled(batch, 16, side, side)
    flops, how = 2 * y.numel() * channels * 9, ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    run, gradients = _aten.convolution.default, _aten.convolution_backward.default
    both = [True, True, False]
    return (
        _point(flops, lambda: run(x, weight, None, *how), call_s),
        _point(2 * flops, lambda: gradients(y, x, weight, None, *how, both), call_s),
    )


def _attention(batch: int, length: int, width: int, call_s: float) -> tuple[_Point, _Point]:
    """Forward, and the gradients of queries, keys and values: 2 heads, causal."""
    q = _filled(batch, 2, length, width)
    run = _aten._scaled_dot_product_flash_attention_for_cpu.default
    gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    y, logsumexp = run(q, q, q, 0.0, True)
    flops = 8 * batch * length * length * width  # and 2.5 times as many: torch.utils.flop_counter
    return (
        _point(flops, lambda: run(q, q, q, 0.0, True), call_s),
        _point(2.5 * flops, lambda: gradients(y, q, q, q, y, logsumexp, 0.0, True), call_s),
    )


def _filled(*shape: int) -> Tensor:
    return torch.full(shape, 0.5, dtype=torch.float32, device="cpu")


def _point(size: float, run: Callable[[], Any], call_s: float) -> _Point:
    """A size, and how long ``run`` takes beyond ``call_s``."""
    return size, max(_least(run) - call_s, _NOTHING_S)


def _in_turns(runs: list[Callable[[], Any]]) -> float:
    """The seconds of one of them on average, where each runs once a turn."""

    def turn() -> None:
        for run in runs:
            run()

    return _least(turn) / len(runs)


def _least(run: Callable[[], Any]) -> float:
    """The least seconds of several rounds: others use the machine too."""
    run()
    began = perf_counter()
    run()
    times = max(1, int(_ROUND_S / max(perf_counter() - began, 1e-7)))
    found, spent = math.inf, 0.0
    for _ in range(_ROUNDS):
        began = perf_counter()
        for _ in range(times):
            run()
        took = perf_counter() - began
        found, spent = min(found, took / times), spent + took
        if spent > _AT_MOST_S:
            break
    return found
