"""Bytes that calls read and write, counted by hand on tiny graphs. All numbers are float32."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from graphs import graph_of
from harness import fit
from models import Classifier, convnet, loader, pictures
from torch import Tensor, nn

from fulgurite.backends.csx.compile.host.library import has
from fulgurite.backends.csx.compile.programs.kernels import KernelCall, Kernels, Maker, one_by_one
from fulgurite.backends.csx.compile.programs.liveness import Liveness
from fulgurite.backends.csx.compile.programs.steps import Kernel, Step
from fulgurite.backends.csx.costs.graph_values import module_name
from fulgurite.backends.csx.costs.traffic import Traffic, moves, traffic
from fulgurite.backends.csx.graph.graph import Graph

GENERATED, LIBRARY = Maker.GENERATED, Maker.LIBRARY


def calls(*operations: Iterable[int], makers: tuple[Maker, ...] = ()) -> Kernels:
    """Calls of these operations, generated unless said otherwise."""
    makers = makers or (GENERATED,) * len(operations)
    both = zip(operations, makers, strict=True)
    return Kernels(
        calls=tuple(KernelCall(kernel="k", maker=m, operations=tuple(o)) for o, m in both)
    )


def moved(graph: Graph, kernels: Kernels | None = None) -> list[tuple[int, int]]:
    """Read and written elements of each call, at four bytes."""
    found = traffic(graph, kernels or one_by_one(graph, has))
    return [(one.read_bytes // 4, one.written_bytes // 4) for one in found]


def by_module(graph: Graph, kernels: Kernels) -> dict[str, Traffic]:
    """What the operations of each module move, forward and backward; "" is outside of modules."""
    total: dict[str, Traffic] = {}
    for move in moves(graph, kernels):
        name = module_name(move.operation)
        total[name] = total.get(name, Traffic()) + move.traffic
    return total


def of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Graph:
    return graph_of(function, *(torch.zeros(shape) for shape in shapes))


def test_each_operation_reads_its_operands_once_and_writes_its_result() -> None:
    product = of(lambda a, b: (a @ b).relu(), (2, 3), (3, 5))
    assert moved(product) == [(6 + 15, 10), (10, 10)]
    assert moved(of(lambda a: a * a, (2, 3))) == [(6, 6)]


def test_dtypes_count() -> None:
    graph = graph_of(lambda a: a.to(torch.bfloat16).to(torch.int64), torch.zeros(3))
    wanted = [(12, 6), (6, 24)]
    found = traffic(graph, one_by_one(graph, has))
    assert found == tuple(Traffic(read_bytes=r, written_bytes=w) for r, w in wanted)


def test_what_a_call_makes_for_itself_is_not_counted() -> None:
    graph = of(lambda a: (a.exp() + a).sum(), (2, 3))
    assert moved(graph) == [(6, 6), (12, 6), (6, 1)]
    assert moved(graph, calls([0, 1, 2])) == [(6, 1)]
    assert moved(graph, calls([0], [1, 2])) == [(6, 6), (12, 1)]


def _twice(a: Tensor) -> tuple[Tensor, Tensor]:
    b = a.exp()
    return b.relu(), b + 1


def test_what_two_calls_compute_neither_reads_from_the_other() -> None:
    graph = of(_twice, (2, 3))
    assert moved(graph, calls([0, 1], [0, 2])) == [(6, 6), (6, 6)]


def test_of_a_view_what_it_looks_at_is_read() -> None:
    assert moved(of(lambda a: a[1].relu(), (4, 3))) == [(3, 3)]
    assert moved(of(lambda a: a[0] + a[2], (4, 3))) == [(6, 3)]
    assert moved(of(lambda a: a[:, 1:].relu(), (4, 3))) == [(8, 8)]
    assert moved(of(lambda a: a[0].expand(5, 3).exp(), (4, 3))) == [(3, 15)]


def test_two_views_of_the_same_elements_are_read_once() -> None:
    assert moved(of(lambda a: a @ a.T, (2, 3))) == [(6, 4)]
    assert moved(of(lambda a: a[0] + a[0].view(3), (4, 3))) == [(3, 3)]
    overlapping = of(lambda a: a[:3] + a[1:], (4, 3))
    assert moved(overlapping) == [(12, 9)]  # never more than there is


def test_of_several_results_those_that_are_read_are_written() -> None:
    graph = of(lambda a: a.max(dim=1)[0], (4, 3))
    assert moved(graph) == [(12, 4)]
    halves = of(lambda a: a.relu().split(2)[1].exp(), (4, 3))
    assert moved(halves) == [(12, 12), (6, 6)]


def test_a_final_write_is_of_the_call_that_has_it_or_makes_the_value() -> None:
    graph = of(lambda state, x: state.copy_(state + x), (2, 3), (2, 3))
    add, copy = range(2)
    [first, second, *rest] = moved(graph)
    assert (first, second) == ((12, 6), (6, 6))
    assert rest == []
    assert moved(graph, calls([add, copy])) == [(12, 6)]
    assert moved(graph, calls([add])) == [(12, 6)]


def test_a_part_of_a_state_that_is_written_counts_alone() -> None:
    graph = of(lambda state, x: (state[0].copy_(x), x.exp())[1], (4, 3), (3,))
    assert moved(graph) == [(3, 3), (3, 3)]


def test_a_constant_that_is_in_no_call_is_read_by_nobody() -> None:
    graph = of(lambda a: a + torch.full((2, 3), 2.0).exp(), (2, 3))
    assert moved(graph, calls([2])) == [(6, 6)]
    assert moved(graph) == [(0, 6), (6, 6), (12, 6)]


def test_what_picks_rows_reads_as_many_as_it_gives() -> None:
    table, rows = torch.zeros(100, 3), torch.zeros(2, dtype=torch.int64)
    graph = graph_of(lambda t, i: nn.functional.embedding(i, t), table, rows)
    assert moved(graph) == [(6 + 4, 6)]  # a number of a row has eight bytes
    graph = graph_of(lambda t, i: nn.functional.embedding(i, t), table[:1], rows)
    assert moved(graph) == [(3 + 4, 6)]


def test_a_library_call_computes_its_last_operation_alone() -> None:
    graph = of(lambda a, b: (a.exp() @ b).relu(), (2, 3), (3, 5))
    told = calls([0], [0, 1], [1, 2], makers=(GENERATED, LIBRARY, GENERATED))
    assert moved(graph, told) == [(6, 6), (6 + 15, 10), (10, 10)]
    alone = calls([0, 1], makers=(LIBRARY,))  # the product does what nobody else does
    assert moved(graph, alone)[0][0] == 6 + 15


def graph_of_training() -> Graph:
    """Of Linear(8, 4) under SGD, batch 16; its loss is computed in ``training_step``."""
    ours = fit(
        lambda: Classifier(nn.Sequential(nn.Linear(8, 4)), torch.optim.SGD),
        lambda: (loader(32),),
        static=True,
    )
    [program] = ours.trainer.strategy.step_functions["training"].programs  # type: ignore[attr-defined]
    [entry] = program.entries
    graph: Graph = entry.graph
    return graph


@pytest.mark.fits
def test_a_modules_backward_pass_counts_for_it() -> None:
    graph = graph_of_training()
    kernels = one_by_one(graph, has)
    found = by_module(graph, kernels)
    assert set(found) == {"net.0 (Linear)", ""}
    x, weight, bias, y = 16 * 8, 4 * 8, 4, 16 * 4
    # forward: addmm; backward: mm of the weight, sum of the bias
    read, written = (bias + x + weight) + (y + x) + y, y + weight + bias
    assert found["net.0 (Linear)"] == Traffic(read_bytes=4 * read, written_bytes=4 * written)
    total = Traffic()
    for one in traffic(graph, kernels):
        total += one
    assert found["net.0 (Linear)"] + found[""] == total


@pytest.mark.fits
def test_a_call_of_several_modules_is_shared_among_them() -> None:
    graph = graph_of_training()
    nodes = list(graph.operations())
    positions = [one.operations[0] for one in one_by_one(graph, has).calls]
    [addmm] = [i for i in positions if str(nodes[i].target) == "aten.addmm.default"]
    kernels = calls([i for i in positions if i <= addmm], [i for i in positions if i > addmm])
    found = by_module(graph, kernels)
    both = traffic(graph, kernels)
    assert found["net.0 (Linear)"] + found[""] == both[0] + both[1]
    assert both[0].written_bytes >= 4 * 16 * 4
    assert found["net.0 (Linear)"].written_bytes == 4 * 16 * 4  # its gradients go to nobody else


@pytest.mark.long
@pytest.mark.fits
@pytest.mark.compiler
def test_generated_kernels_move_what_they_are_given() -> None:
    """But for scalars: of a vector of numbers they read some."""
    ours = fit(
        lambda: Classifier(convnet()), lambda: (pictures(16),), static=True, policy="default"
    )
    [executable] = ours.trainer.strategy.step_functions["training"].executables()  # type: ignore[attr-defined]
    graph, kernels = executable.graph, executable.loaded.kernels()
    given = _Arguments(graph, kernels).traffic
    found = [
        one
        for one, call in zip(traffic(graph, kernels), kernels.calls, strict=True)
        if call.maker is GENERATED
    ]
    assert len(given) == len(found) > 5
    for mine, arguments in zip(found, given, strict=True):
        assert mine.read_bytes <= arguments.read_bytes
        assert mine.written_bytes <= arguments.written_bytes
        assert mine.read_bytes > arguments.read_bytes - 100
    written = sum(one.written_bytes for one in given)
    # a kernel of several loops keeps some results between them
    assert 0.5 * written < sum(one.written_bytes for one in found)


class _Arguments(Liveness):
    """The bytes of the arguments of each generated kernel, read or written as C++ declares them."""

    def __init__(self, graph: Graph, kernels: Kernels) -> None:
        self.traffic: list[Traffic] = []
        self._sources = kernels.sources
        assert kernels.steps is not None
        super().__init__(graph, kernels.steps)

    def _take(self, step: Step, computed: Any) -> None:
        super()._take(step, computed)
        if not isinstance(step, Kernel):
            return
        [declared] = re.findall(r'extern "C"[^(]*\(([^)]*)\)', self._sources[step.kernel])
        total = Traffic()
        for argument, parameter in zip(step.args, declared.split(","), strict=True):
            try:
                size = self._operand(argument).nbytes
            except KeyError:  # a constant, which is not here
                size = 0
            reads = "const" in parameter or "in_out" in parameter
            writes = "const" not in parameter
            total += Traffic(read_bytes=size * reads, written_bytes=size * writes)
        self.traffic.append(total)
