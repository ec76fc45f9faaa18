"""How many threads a program computes with, and setting that around a run.

The number comes from the program's own operations, never from a measurement, for sums round as they
are divided: a run that goes on elsewhere with as many threads gives the same numbers. It is part of
a compiled program's key, and at most ``torch.get_num_threads()`` when the program is loaded.

Threads gain where an operation is long. Measured on two cores of an AMD EPYC that little else used,
a compiled step with AdamW, the best of 7 or 12 interleaved rounds; MFLOP are those of its largest
product:

    64-128-128-10, batch 32        1 MFLOP    157 µs with one thread, 211 with two
    the digits ConvNet, batch 32  38 MFLOP   2171 µs, 2443 (most products have 2 MFLOP)
    3 layers of 256, batch 128    17 MFLOP   1273 µs,  956
    3 layers of 512, batch 128    67 MFLOP   5342 µs, 3352
    GPT of 4 layers, 8 x 64       67 MFLOP  37675 µs, 21372 (most products have 17 MFLOP)

and the first with a busy process on each core: 779 µs and 21761.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.op_schema import is_alias, is_mutable, operation_name
from fulgurite.backends.torch_compiler import options

# through torch's own library: a process may hold several OpenMP pools (scikit-learn brings one),
# and two that take turns cost 12 ms a step (measured)
TORCH_CPU = str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
_PAIR_FLOP = 16e6  # of an operation that two threads share: 0.27 ms of one (measured there)
_SHARE_FLOP = 16e6  # for each of more threads (assumed)
_ELEMENT_FLOP = 8  # what an element takes in operations that are no products (assumed)
_EFFICIENCY = 0.7  # of all threads together, at least (assumed)
_DECOMPOSITIONS = (  # counted as a product of two such matrices: no formula fits all (assumed)
    *("linalg_cholesky", "linalg_eig", "linalg_householder", "linalg_inv", "linalg_ldl"),
    *("linalg_lu", "linalg_matrix_exp", "linalg_qr", "linalg_solve", "linalg_svd", "cholesky"),
)


def threads_for(graph: Graph) -> int:
    """How many threads a graph is computed with: 1, unless most of its work is in long operations.

    An operation can use two threads from ``_PAIR_FLOP`` of work on, and more of them one for each
    ``_SHARE_FLOP``. The graph's number is the largest with which the threads would compute, and not
    wait, for ``_EFFICIENCY`` of the time.
    """
    most = torch.get_num_threads()
    if options.cpp.threads > 0:  # set by the user
        most = min(most, options.cpp.threads)
    if most == 1 or _openmp() is None:
        return most
    flop: Counter[int] = Counter()  # of all operations that can use so many threads
    for work in _works(graph):
        flop[min(most, max(1 + (work >= _PAIR_FLOP), int(work / _SHARE_FLOP)))] += work
    total = flop.total()

    def efficiency(n: int) -> float:
        return total / (n * sum(work / min(n, can) for can, work in flop.items()))

    numbers = range(max(flop, default=1), 1, -1)
    return next((n for n in numbers if efficiency(n) >= _EFFICIENCY), 1)


def _works(graph: Graph) -> Iterator[int]:
    """The work of each operation, in floating-point operations."""
    for node in graph.runs.operations():
        name = operation_name(node.target)
        if name and (is_mutable(node.target) or not is_alias(node.target)):
            touched = (_numel(one.meta.get("val")) for one in (node, *node.all_input_nodes))
            yield _product(name, node) or _ELEMENT_FLOP * max(touched)


def _product(name: str, node: fx.Node) -> int:
    """The work of an operation that is made of products of matrices; 0 where it is none."""

    def value(arg: Any) -> Any:
        return arg.meta.get("val") if isinstance(arg, fx.Node) else arg

    result, args = value(node), list(map(value, node.args))
    match name:
        case "mm" | "bmm":
            return 2 * _numel(result) * int(args[0].shape[-1])
        case "addmm" | "baddbmm":
            return 2 * _numel(result) * int(args[1].shape[-1])
        case "convolution":
            return _convolution(result, args[0], args[1], transposed=args[6])
        case "convolution_backward":
            grad, x, weight = args[:3]
            wanted: int = sum(args[10][:2])  # the gradients of x and of the weight
            return wanted * _convolution(grad, x, weight, transposed=args[7])
    if name.startswith("_scaled_dot_product"):
        backward = name.endswith("backward")
        query, key = args[1:3] if backward else args[:2]
        return (10 if backward else 4) * _numel(query) * int(key.shape[-2])
    if name.removeprefix("_").startswith(_DECOMPOSITIONS):
        matrix = max((arg for arg in args if isinstance(arg, Tensor)), key=_numel)
        return 2 * _numel(matrix) * int(matrix.shape[-1])
    return 0


def _convolution(result: Tensor, x: Tensor, weight: Tensor, transposed: bool) -> int:
    """Of one direction; a weight is [out, in / groups, ...], transposed [in, out / groups, ...]."""
    return 2 * _numel(x if transposed else result) * (_numel(weight) // max(1, weight.shape[0]))


def _numel(value: object) -> int:
    if isinstance(value, (list, tuple)):
        return max(map(_numel, value), default=0)
    return value.numel() if isinstance(value, Tensor) else 0


class _OpenMP:
    """The number of threads that torch's OpenMP gives to the Python thread that asks.

    ``torch.set_num_threads`` would change it for threads that begin meanwhile too. MKL has a number
    of its own once that was called.
    """

    def __init__(self) -> None:
        library = ctypes.PyDLL(TORCH_CPU)  # holds the GIL: 0.24 µs a call, not 0.36 (measured)
        self.set_openmp = library.omp_set_num_threads
        self.set_mkl = getattr(library, "MKL_Set_Num_Threads_Local", lambda number: 0)
        self.set_openmp.restype = None

    def is_torchs(self) -> bool:
        """Whether torch follows; a preloaded OpenMP may have taken its place."""
        # a number that is not torch's already, or nothing would be seen to change
        own = torch.get_num_threads()
        self.set_openmp(own + 1)
        follows = torch.get_num_threads() == own + 1
        self.set_openmp(own)
        return follows


@functools.cache
def _openmp() -> _OpenMP | None:
    """None where its number cannot be set (not Linux): programs then use torch's, as ever."""
    try:
        openmp = _OpenMP()
    except (OSError, AttributeError):
        return None
    return openmp if openmp.is_torchs() else None


def threads_beside_another() -> int:
    """How many threads leave a core to a compiler; 0 where none do, or none can be set.

    A ConvNet's step of two threads on two cores took 14 ms beside one, 2.5 with one thread; without
    a compiler 2.8 (measured).
    """
    return 0 if _openmp() is None else len(os.sched_getaffinity(0)) - 1


def set_threads(threads: int, mkl: int | None = None) -> int:
    """Let this Python thread compute with so many threads, 0.9 µs (measured).

    Args:
        threads: how many.
        mkl: MKL's number, where it is another: what this function returned before.

    Returns:
        MKL's number until now; 0 where it follows the environment and OpenMP.
    """
    openmp = _openmp()
    assert openmp is not None
    openmp.set_openmp(threads)
    return int(openmp.set_mkl(threads if mkl is None else mkl))
