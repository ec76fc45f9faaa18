"""A step on parts is the step: run by as many processes as there are, in one, by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import graph_of
from torch import Tensor, fx

from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedState
from fulgurite.backends.csx.diagnostics.user_lines import _BACKWARD, _IN
from fulgurite.backends.csx.graph.collectives import (
    OWN_PART,
    Processes,
    functional,
    is_gather,
    is_scatter,
    is_wait,
    length_of_part,
)
from fulgurite.backends.csx.graph.graph import Graph, Kind, Placement
from fulgurite.backends.csx.graph.passes.gathers import HELD_BYTES, small_bytes
from fulgurite.backends.csx.graph.passes.hold import GUARD, hold_state
from fulgurite.backends.csx.graph.passes.shard_state import sharding

aten: Any = torch.ops.aten
BACKWARD = f'File "net.py", line 1, in training_step{_IN}{_BACKWARD} of net (Net)'


def lowered(
    step: Callable[..., Any], state: list[Tensor], batch: list[Tensor], count: int
) -> tuple[Graph, Graph]:
    """A step that writes its state, as traced, and on parts of it."""

    def writing(*tensors: Tensor) -> list[Tensor]:
        own, rows = tensors[: len(state)], tensors[len(state) :]
        loss, *new = step(list(own), *rows, Processes(group="0", count=count))
        for old, value in zip(own, new, strict=True):
            old.copy_(value)
        return [loss]

    graph = graph_of(writing, *state, *batch)
    inputs = [
        replace(one, placement=Placement.SHARDED)
        if i < len(state)
        else replace(one, kind=Kind.BATCH)
        for i, one in enumerate(graph.inputs)
    ]
    graph = replace(graph, inputs=tuple(inputs))
    return graph, sharding(Processes(group="0", count=count))(graph)


def run(graph: Graph, of_each: list[list[Tensor]]) -> list[Any]:
    """The results of processes that run a graph on these inputs, which are changed."""
    count = len(of_each)
    known: list[dict[fx.Node, Any]] = [{} for _ in of_each]
    given = [iter(tensors) for tensors in of_each]
    for node in graph.module.graph.nodes:
        if node.op == "placeholder":
            for values, own in zip(known, given, strict=True):
                values[node] = next(own)
            continue
        args, kwargs = (
            [fx.map_arg(one, values.__getitem__) for values in known]
            for one in (node.args, node.kwargs)
        )
        if node.op == "output":
            return [own[0] for own in args]
        firsts = [own[0] for own in args]
        if is_wait(node.target):
            found = firsts
        elif is_gather(node.target):
            found = [torch.cat(firsts)] * count
        elif is_scatter(node.target):
            found = list(sum(firsts).chunk(count))
        elif node.target is functional.all_reduce.default:
            found = [sum(firsts)] * count
        elif node.target is OWN_PART:
            found = parts(firsts[0], count) if count > 1 else firsts
        else:
            found = [node.target(*own, **more) for own, more in zip(args, kwargs, strict=True)]
        for values, value in zip(known, found, strict=True):
            values[node] = value
    raise AssertionError("a graph has an end")


def parts(whole: Tensor, count: int) -> list[Tensor]:
    """What each of these processes holds of a tensor."""
    flat = whole.reshape(-1)
    missing = length_of_part(flat.numel(), count) * count - flat.numel()
    return [one.clone() for one in torch.nn.functional.pad(flat, [0, missing]).chunk(count)]


def check(step: Callable[..., Any], shapes: list[Any], count: int = 2) -> Graph:
    """That a step on parts gives what it gives on whole tensors; returns the graph on parts."""
    torch.manual_seed(0)
    state = [torch.randn(shape) for shape in shapes]
    batches = [torch.randn(6, 8) for _ in range(count)]
    whole, on_parts = lowered(step, state, [batches[0]], count)
    each = [[one.clone() for one in state] for _ in range(count)]
    expected = run(whole, [[*own, batch] for own, batch in zip(each, batches, strict=True)])
    cut = [list(own) for own in zip(*(parts(one, count) for one in state), strict=True)]
    got = run(on_parts, [[*own, batch] for own, batch in zip(cut, batches, strict=True)])
    torch.testing.assert_close(got, expected)
    for i, one in enumerate(each[0]):
        for rank, own in enumerate(parts(one, count)):
            torch.testing.assert_close(cut[rank][i], own)
    return on_parts


def gradients(w: list[Tensor], x: Tensor, every: Processes) -> tuple[Any, ...]:
    """The loss of two layers, and their gradients, each begun to be added up at once."""
    h = torch.relu(x @ w[0])
    y = h @ w[1]
    gy = 2 * y / y.numel()
    second = every.begin_sum(h.t() @ gy)
    first = every.begin_sum(x.t() @ ((gy @ w[1].t()) * (h > 0)))
    return (y.square().mean(), *(every.wait(one) / every.count for one in (first, second)))


def sgd(w: list[Tensor], x: Tensor, every: Processes) -> list[Tensor]:
    """A step of plain gradient descent."""
    loss, *grads = gradients(w, x, every)
    return [loss, *(one - 0.1 * grad for one, grad in zip(w, grads, strict=True))]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_step_on_parts_is_the_step_also_where_sizes_do_not_divide(count: int) -> None:
    graph = check(sgd, [(8, 7), (7, 3)], count)
    kinds = [node.target for node in graph.operations()]
    # both are small: one message there, and one back
    assert [is_gather(kind) for kind in kinds].count(True) == 1
    assert [is_scatter(kind) for kind in kinds].count(True) == 1
    sizes = [item.example.shape for item in graph.inputs[:2]]
    assert sizes == [(length_of_part(56, count),), (length_of_part(21, count),)]


def test_a_norm_over_all_parameters_is_a_sum_of_sums() -> None:
    def clipped(w: list[Tensor], x: Tensor, every: Processes) -> list[Tensor]:
        loss, *grads = gradients(w, x, every)
        norm = torch.stack([one.square().sum() for one in grads]).sum().sqrt()
        scale = torch.clamp(0.01 / norm, max=1.0)
        return [loss, *(one - scale * grad for one, grad in zip(w, grads, strict=True))]

    graph = check(clipped, [(8, 7), (7, 3)], 3)
    sums = [one for one in graph.operations() if one.target is functional.all_reduce.default]
    assert [one.meta["val"].numel() for one in sums] == [2]  # of both, in one message


def test_sums_of_several_dtypes_are_each_a_message() -> None:
    def counted(w: list[Tensor], x: Tensor, every: Processes) -> list[Tensor]:
        loss, *grads = gradients(w, x, every)
        sums = [(grad != 0).sum() + grad.abs().sum() for grad in grads]
        return [loss, *(one - grad / n for one, grad, n in zip(w, grads, sums, strict=True))]

    graph = check(counted, [(8, 7), (7, 3)], 3)
    sums = [one for one in graph.operations() if one.target is functional.all_reduce.default]
    kinds = [(one.meta["val"].dtype, one.meta["val"].numel()) for one in sums]
    assert sorted(kinds, key=str) == [(torch.float32, 2), (torch.int64, 2)]


def test_what_follows_from_one_s_own_batch_is_not_written_into_a_part() -> None:
    def renormed(w: list[Tensor], x: Tensor, every: Processes) -> list[Tensor]:
        used = w[0] / x.norm()
        loss, *grads = gradients([used, w[1]], x, every)
        return [loss, *(one - grad for one, grad in zip([used, w[1]], grads, strict=True))]

    with pytest.raises(UnsupportedState, match="follows from this process's own batch") as caught:
        check(renormed, [(8, 7), (7, 3)])
    assert "execution='pipeline'" in str(caught.value)


def test_where_one_process_s_step_goes_wrong_all_keep_their_parts() -> None:
    def step(w: Tensor, v: Tensor, count: Tensor, x: Tensor) -> list[Tensor]:
        loss, *new = sgd([w, v], x.nan_to_num(), Processes(group="0", count=2))
        count.copy_(torch.where((loss + x.sum()).isfinite(), count + 1, -1 - count))
        for old, value in zip((w, v), new, strict=True):
            old.copy_(value)
        return [loss]

    torch.manual_seed(0)
    state, count = [torch.randn(8, 7), torch.randn(7, 3)], torch.zeros((), dtype=torch.int64)
    graph = graph_of(step, *state, count, torch.randn(6, 8))
    w, v, guard, batch = graph.inputs
    sharded = [replace(one, placement=Placement.SHARDED) for one in (w, v)]
    named = replace(guard, name=f"self.{GUARD}"), replace(batch, kind=Kind.BATCH)
    graph = hold_state(replace(graph, inputs=(*sharded, *named)))
    on_parts = sharding(Processes(group="0", count=2))(graph)
    for wrong in (False, True):
        batches = [torch.randn(6, 8), torch.randn(6, 8)]
        batches[1][0, 0] = torch.inf if wrong else 1.0
        cut = [list(own) for own in zip(*(parts(one, 2) for one in state), strict=True)]
        before = [[one.clone() for one in own] for own in cut]
        run(
            on_parts,
            [[*own, count.clone(), one] for own, one in zip(cut, batches, strict=True)],
        )
        kept = [
            torch.equal(a, b)
            for own, was in zip(cut, before, strict=True)
            for a, b in zip(own, was, strict=True)
        ]
        assert kept == [wrong] * 4


def test_what_fills_up_the_last_part_is_no_summand() -> None:
    def shifted(w: list[Tensor], x: Tensor, every: Processes) -> list[Tensor]:
        loss, *new = sgd(w, x, every)
        return [loss + sum(one.cos().sum() for one in w), *new]

    check(shifted, [(8, 7), (7, 3)], 5)


@pytest.mark.parametrize("count", [2, 3])
def test_a_sum_over_what_is_each_process_s_own_is_its_own(count: int) -> None:
    """A gradient for a factor of a weight, before it is added up; and a factor of the batch's."""

    def scaled(w: list[Tensor], x: Tensor, every: Processes) -> list[Tensor]:
        loss, *new = sgd(w, x, every)
        own = x.t() @ (x @ w[0])
        gain = every.wait(every.begin_sum((w[0] * own).sum()))
        own_factor = (w[1] * x.sum()).square().sum()
        return [loss + gain + own_factor, *new]

    check(scaled, [(8, 7), (7, 3)], count)


def test_what_optimizers_need_a_whole_tensor_for_is_computed_of_one() -> None:
    def factored(w: list[Tensor], x: Tensor, every: Processes) -> list[Tensor]:
        loss, *grads = gradients(w, x, every)
        rows = [grad / (grad.square().mean(1, keepdim=True).sqrt() + 1e-3) for grad in grads]
        return [loss, *(one - 0.1 * row for one, row in zip(w, rows, strict=True))]

    check(factored, [(8, 7), (7, 3)], 3)


def test_a_parameter_that_is_used_after_it_was_written_is_the_new_one() -> None:
    def twice(w: list[Tensor], x: Tensor, every: Processes) -> list[Tensor]:
        loss, *new = sgd(w, x, every)
        h = torch.relu(x @ new[0])
        return [loss + (h @ new[1]).sum(), *new]

    check(twice, [(8, 7), (7, 3)], 2)


def test_random_numbers_of_a_parameter_are_drawn_whole() -> None:
    def noisy(w: list[Tensor], x: Tensor, every: Processes) -> list[Tensor]:
        loss, *grads = gradients(w, x, every)
        return [
            loss,
            *(
                one - grad * torch.bernoulli(grad.sigmoid())
                for one, grad in zip(w, grads, strict=True)
            ),
        ]

    _, graph = lowered(noisy, [torch.randn(8, 7), torch.randn(7, 3)], [torch.randn(6, 8)], 2)
    drawn = [one for one in graph.operations() if one.target is aten.bernoulli.default]
    assert [one.meta["val"].numel() for one in drawn] == [56, 21]


def large(count: int = 2, passes: bool = True) -> Graph:
    """Two layers too large to be held, whose second half is a backward pass."""
    width = 512
    state = [torch.randn(width, width), torch.randn(width, width)]
    whole, _ = lowered(sgd, state, [torch.randn(6, width)], count)
    if passes:
        operations = list(whole.operations())
        turn = next(i for i, one in enumerate(operations) if one.target is aten.mul.Tensor)
        for node in operations[turn:]:
            node.meta["stack_trace"] = BACKWARD
    return sharding(Processes(group="0", count=count))(whole)


def alive_bytes(graph: Graph) -> int:
    """The most bytes of tensors that a gather brought which are there at a time."""
    order = {node: i for i, node in enumerate(graph.operations())}

    def last(node: fx.Node) -> int:
        views = (aten.reshape.default, aten.view.default, aten.slice.Tensor)
        return max(
            last(user) if is_wait(user.target) or user.target in views else order[user]
            for user in node.users
            if user in order
        )

    lives = [
        (i, last(node), node.meta["val"].nbytes)
        for node, i in order.items()
        if is_gather(node.target)
    ]
    return max(sum(size for first, end, size in lives if first <= i <= end) for i in order.values())


def test_a_large_tensor_is_gathered_for_each_pass_and_never_three_at_a_time() -> None:
    graph = large()
    kinds = [node.target for node in graph.operations()]
    # of the first layer the backward pass needs nothing
    assert [is_gather(kind) for kind in kinds].count(True) == 3
    assert [is_scatter(kind) for kind in kinds].count(True) == 2
    layer = 512 * 512 * 4
    assert alive_bytes(graph) <= 2 * layer


def test_messages_are_on_their_way_while_products_are_computed() -> None:
    operations = list(large().operations())
    order = {node: i for i, node in enumerate(operations)}
    products = [order[one] for one in operations if one.target is aten.mm.default]
    meanwhile = []
    for node in operations:
        if is_gather(node.target) or is_scatter(node.target):
            [wait] = node.users
            meanwhile.append(any(order[node] < at < order[wait] for at in products))
    # the first gather has nothing before it, the last gradient nothing after it
    assert meanwhile == [False, True, True, True, False]


def test_without_a_backward_pass_a_tensor_is_gathered_once() -> None:
    kinds = [node.target for node in large(passes=False).operations()]
    assert [is_gather(kind) for kind in kinds].count(True) == 2


def test_small_are_those_that_together_are_a_quarter_of_the_largest() -> None:
    big = 16 * HELD_BYTES
    assert small_bytes([]) == 0
    assert small_bytes([HELD_BYTES, 2]) == 2  # a MiB at most, of all
    assert small_bytes([big, big // 8, big // 8]) == big // 8
    assert small_bytes([big, big // 8, big // 8, big // 8]) < big // 8
    assert small_bytes([big, 4, big // 4]) == 4
