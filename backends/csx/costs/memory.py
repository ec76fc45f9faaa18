"""What a program keeps in memory, call by call.

Words: *resident* is what is there between steps: state, and the batch. An *intermediate* lives
within a step. Of these, *activations* were made by operations of forward passes, for backward
passes to read; all others are *temporaries*: gradients, updates, what kernels take for themselves
(``workspace``), and memory that a compiled program holds for the next step.

Counted is what torch allocates for tensors. Of what Python, the C++ compiler's code and the BLAS
library allocate themselves nothing is known here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import fx

from fulgurite.backends.csx.compile.programs.kernels import Kernels
from fulgurite.backends.csx.compile.programs.liveness import Liveness
from fulgurite.backends.csx.compile.programs.steps import Program
from fulgurite.backends.csx.costs.graph_values import Value, Values, is_backward, module_name
from fulgurite.backends.csx.costs.workspace import message_bytes, workspace_bytes
from fulgurite.backends.csx.graph.graph import Graph, Role
from fulgurite.backends.csx.graph.passes.as_traced import changed_early

_COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The intermediates that are alive while a call runs; ``call`` counts in ``kernels.calls``."""

    call: int
    activations_bytes: int
    temporaries_bytes: int

    @property
    def intermediates_bytes(self) -> int:
        """Both."""
        return self.activations_bytes + self.temporaries_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What an entry point keeps in memory.

    Args:
        parameters_bytes: of the model's parameters that it reads or writes.
        optimizer_bytes: of the optimizers' state.
        buffers_bytes: of the modules' buffers.
        other_state_bytes: of metrics' states, gradients between steps, numbers that it is fed.
        batch_bytes: of the batch's tensors that it reads.
        files_bytes: of parameters and optimizer state, in files and not in memory.
        kept_bytes: of intermediates that a compiled program makes once, and never frees.
        timeline: the intermediates, call by call, those that are kept among them.
        at_peak: modules whose activations are alive when most is, with bytes, the largest first;
            outside of modules the name is empty.
    """

    parameters_bytes: int
    optimizer_bytes: int
    buffers_bytes: int
    other_state_bytes: int
    batch_bytes: int
    files_bytes: int
    kept_bytes: int
    timeline: tuple[Point, ...]
    at_peak: tuple[tuple[str, int], ...]

    @property
    def state_bytes(self) -> int:
        """All state."""
        model = self.parameters_bytes + self.buffers_bytes
        return model + self.optimizer_bytes + self.other_state_bytes

    @property
    def resident_bytes(self) -> int:
        """State that is in memory, and the batch."""
        return self.state_bytes - self.files_bytes + self.batch_bytes

    @property
    def activations_bytes(self) -> int:
        """The most that activations take at a time."""
        return max((point.activations_bytes for point in self.timeline), default=0)

    @property
    def peak_bytes(self) -> int:
        """The most that is alive at a time: what is resident, and intermediates."""
        most = max((point.intermediates_bytes for point in self.timeline), default=0)
        return self.resident_bytes + most


def memory(graph: Graph, kernels: Kernels, limit_bytes: int | None = None) -> Memory:
    """What a graph keeps in memory while ``kernels`` run it.

    Args:
        graph, kernels: they.
        limit_bytes: of parameters and optimizer state in memory; None: all are.
    """
    points, lives, kept = (
        _one_by_one(graph, kernels)
        if kernels.steps is None
        else _compiled(graph, kernels, kernels.steps)
    )
    most = max(points, key=lambda p: (p.intermediates_bytes, p.activations_bytes), default=None)
    at_peak = Counter[str]()
    for one in lives:
        if most is not None and one.activation and one.first <= most.call <= one.last:
            at_peak[module_name(one.value.node)] += one.value.bytes
    roles = Counter[Role]()
    for item in graph.inputs:
        # all of its memory is there, though an input may look at a part of it
        roles[item.role] += item.example.untyped_storage().nbytes()
    streamed = roles[Role.PARAMETER] + roles[Role.OPTIMIZER]
    return Memory(
        files_bytes=0 if limit_bytes is None else max(0, streamed - limit_bytes),
        parameters_bytes=roles[Role.PARAMETER],
        optimizer_bytes=roles[Role.OPTIMIZER],
        buffers_bytes=roles[Role.BUFFER],
        other_state_bytes=roles[Role.OTHER],
        batch_bytes=roles[Role.BATCH],
        kept_bytes=kept,
        timeline=tuple(points),
        at_peak=tuple(at_peak.most_common()),
    )


@dataclass(frozen=True, slots=True)
class _Life:
    """A value, the first and the last call during which it is alive, and what it is."""

    value: Value
    first: int
    last: int
    activation: bool


_Found = tuple[list[Point], list[_Life], int]
"""The timeline, the lives, and the bytes of what is never freed."""


def _compiled(graph: Graph, kernels: Kernels, program: Program) -> _Found:
    """The program's steps say what is alive, the graph which of it are activations."""
    values, walk = Values(graph, kernels.calls), Liveness(graph, program)
    lives = list(_lives(values, held=False))
    return _points(values.operations, walk.live_bytes, lives), lives, walk.kept_bytes


def _one_by_one(graph: Graph, kernels: Kernels) -> _Found:
    """A value is freed when it was read last; what ``changed_early`` tells is copied before."""
    values = Values(graph, kernels.calls)
    lives = list(_lives(values, held=True))
    copied = sum(graph.inputs[i].example.nbytes for i in changed_early(graph))
    alive = [copied + size for size in _alive(lives, len(kernels.calls))]
    return _points(values.operations, alive, lives), lives, 0


def _points(
    operations: list[list[fx.Node]], alive: list[int], lives: Iterable[_Life]
) -> list[Point]:
    """The timeline, of what each call computes and the bytes of intermediates that are alive."""
    held = _alive((one for one in lives if one.activation), len(alive))
    sent, points = _sent(operations), []
    for i, (computed, total, activations) in enumerate(zip(operations, alive, held, strict=True)):
        rest = max(0, total - activations) + workspace_bytes(computed) + sent[i]
        points.append(Point(call=i, activations_bytes=activations, temporaries_bytes=rest))
    return points


def _sent(operations: list[list[fx.Node]]) -> list[int]:
    """Bytes that gloo takes for what is on its way between processes, during each call."""
    where = {node: i for i, computed in enumerate(operations) for node in computed}

    def arrival(node: fx.Node, begun: int) -> int:
        """The first call after one that reads what a message brings."""
        reads = (where.get(user, begun) for user in node.users)
        calls = [
            arrival(user, begun) if call == begun else call
            for user, call in zip(node.users, reads, strict=True)
        ]
        return min(calls, default=len(operations))

    found = [0] * len(operations)
    for node, begun in where.items():
        if size := message_bytes(node):
            for call in range(begun, arrival(node, begun)):
                found[call] += size
    return found


def _alive(lives: Iterable[_Life], calls: int) -> list[int]:
    """Bytes during each call."""
    changes = [0] * (calls + 1)
    for one in lives:
        changes[one.first] += one.value.bytes
        changes[one.last + 1] -= one.value.bytes
    return list(accumulate(changes))[:-1]


def _lives(values: Values, held: bool) -> Iterator[_Life]:
    """The life of each value that operations make.

    With ``held`` each operation runs by itself, in order, and views hold what they look at.
    """
    ends, backward, updates = dict[Value, int](), set[Value](), set[Value]()
    for node, at, own in _readers(values, held):
        for operand in node.all_input_nodes:
            for value, _ in values.behind(operand):
                if value.node not in own:
                    ends[value] = max(ends.get(value, 0), at)
                    if node.target is _COPY and operand is not node.args[0]:
                        # a new weight is read by its write: no backward pass waits for it
                        updates.add(value)
                    elif is_backward(node):
                        backward.add(value)
    ends |= dict.fromkeys(values.outputs(), len(values.operations) - 1)
    for node, first in values.maker.items():
        for value, _ in values.behind(node):
            whole = held and len(values.operations[first]) == 1  # its results are all made
            if value.node is node and (whole or value in ends):
                update = value in updates and not module_name(node)  # an optimizer's
                kept = value in backward and not update and not is_backward(node)
                yield _Life(value, first, max(first, ends.get(value, first)), kept)


def _readers(values: Values, held: bool) -> Iterator[tuple[fx.Node, int, set[fx.Node]]]:
    """Each operation that reads values, the call during which it does, and what that call computes.

    With ``held`` operations that are in no call, views, read too: in the call before them.
    """
    for i, operations in enumerate(values.operations):
        own = set(operations)
        for node in operations:
            yield node, i, own
    begun = -1
    for node in values.position if held else ():
        begun = max(begun, values.maker.get(node, begun))
        if node not in values.maker:
            yield node, begun, set()
