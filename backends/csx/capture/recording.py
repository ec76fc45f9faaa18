"""What is kept of a trace: its operations, the updates in it, and where its results go.

Graphs are recorded as they were captured, before any pass: each operation by its function and
arguments (other operations by number, inputs by name, Python's numbers by value), the tensors that
it read from outside, and where its results went. ``comparison`` compares a later trace with that.

The updates of torch's and this package's optimizers may be left out of a trace. An update follows
from its gradients, and from numbers and options that are compared on every step; to trace it takes
more than half of a trace (measured: MLP and GPT under AdamW). In the outline of a recording an
update is one operation, which reads the gradients. Checked against torch 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from fulgurite.backends.csx.capture.host_calls import Accumulator, HostCall
from fulgurite.backends.csx.capture.metrics import BatchValue
from fulgurite.backends.csx.contract import (
    Access,
    ConstantSource,
    PassThrough,
    Reads,
    is_proxy,
    source_of,
    unwrap_proxy,
)
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, line_of
from fulgurite.backends.csx.graph.graph import Input, Kind, storage_of
from fulgurite.backends.csx.graph.op_schema import arguments_read, is_mutable, is_random
from fulgurite.backends.csx.graph.passes.rename import original_of
from fulgurite.backends.csx.hyperparams.traced_float import (
    TracedNumber,
    as_number,
    is_traced,
    kind_of,
    tensor_or_value,
)
from fulgurite.backends.csx.state import (
    Owner,
    Place,
    SideEffects,
    around_steps,
    owner_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Where the outputs of a program go, as a tree whose tensor leaves they are."""

    tree: pytree.TreeSpec
    leaves: tuple[Any, ...]  # an ``Output``, or a constant
    passed: tuple[PassThrough, ...]  # what the step only passed on: outputs after the program's own
    attributes: tuple[Place, ...]  # set after every step
    lists: tuple[Place, ...]  # of lists, grown after every step
    calls: tuple[HostCall, ...]

    def template(self) -> Any:
        """The tree with its leaves: {"result", "attributes", "lists", "calls"}."""
        return pytree.tree_unflatten(list(self.leaves), self.tree)

    def kept_by_the_user(self) -> set[int]:
        """The numbers of the program's outputs that go to the user alone, as tensors."""
        template = self.template()
        calls = {leaf.index for leaf in _outputs_in(template.pop("calls"))}
        return {leaf.index for leaf in _outputs_in(template) if leaf.kind is None} - calls

    def filled(self, template: Any) -> tuple[list[tuple[Place, Any]], list[tuple[Place, Any]]]:
        """The places that are set, and those of lists, each with what it is given."""
        return (
            list(zip(self.attributes, template["attributes"], strict=True)),
            list(zip(self.lists, template["lists"], strict=True)),
        )


@dataclass(frozen=True, slots=True)
class Output:
    """A leaf of ``Outputs``: the program's output number ``index``, or what it passed on."""

    index: int
    kind: type[float] | None = None  # Python's, of what eagerly is a number
    is_tensor: bool = False  # such a one that stays a tensor, which a later step finds


def _outputs_in(template: Any) -> Iterator[Output]:
    return (leaf for leaf in pytree.tree_leaves(template) if isinstance(leaf, Output))


def make_outputs(
    result: Any, effects: SideEffects, calls: list[Any], of_inputs: set[int]
) -> tuple[Outputs, list[Tensor]]:
    """The tensors among what a traced step returned, set, appended and logged: its outputs.

    ``of_inputs`` is memory that belongs to inputs; the calls lose their traced values.
    """
    places, values = effects.places_and_values()
    tree = {
        "result": result,
        # a later step may read what is there: as state, which numbers of Python's are not
        "attributes": pytree.tree_map(tensor_or_value, values),
        "lists": pytree.tree_map(tensor_or_value, effects.list_values),
        "calls": [call.value for call in calls],
    }
    leaves, spec = pytree.tree_flatten(_with_plain_keys(tree))
    kept, tensors, passed = _numbered(leaves, of_inputs)
    for call in calls:
        call.value = None
    outputs = Outputs(
        tree=spec,
        leaves=kept,
        passed=passed,
        attributes=tuple(places),
        lists=tuple(effects.lists),
        calls=tuple(calls),
    )
    return outputs, tensors


def _numbered(
    leaves: list[Any], of_inputs: set[int]
) -> tuple[tuple[Any, ...], list[Tensor], tuple[PassThrough, ...]]:
    """The leaves with an ``Output`` in the place of each traced tensor and of what is passed on.

    Returned with the tensors and the sources of what is passed on, each once: outputs count through
    both. An output over the memory of an input is copied, for the next step writes there.
    """
    tensors: list[Tensor] = []
    known: dict[int, Output] = {}
    kept: list[Any] = []
    passed: dict[PassThrough, list[int]] = {}
    for leaf in leaves:
        if isinstance(leaf, BatchValue):
            leaf.refuse()
        if is_proxy(leaf):
            passed.setdefault(source_of(leaf), []).append(len(kept))
            kept.append(None)
            continue
        value = leaf.tensor if isinstance(leaf, TracedNumber) else leaf
        if isinstance(value, FakeTensor):
            if id(value) not in known:
                known[id(value)] = Output(len(tensors))
                alias = storage_of(value) in of_inputs
                tensors.append(value.detach().clone() if alias else value.detach())
            value = known[id(value)]
        if isinstance(value, Output) and is_traced(leaf):
            value = Output(value.index, kind_of(leaf), not isinstance(leaf, TracedNumber))
        kept.append(value)
    for number, places in enumerate(passed.values(), start=len(tensors)):
        for place in places:
            kept[place] = Output(number)
    return tuple(kept), tensors, tuple(passed)


def _with_plain_keys(tree: Any) -> Any:
    """The tree with values for the stand-ins that are keys of its dicts; hashing has read them."""

    def plain(value: Any) -> Any:
        if not _has_watched_keys(value):
            return value
        return {unwrap_proxy(key): _with_plain_keys(one) for key, one in value.items()}

    return pytree.tree_map(plain, tree, is_leaf=_has_watched_keys)


def _has_watched_keys(value: Any) -> bool:
    return type(value) is dict and any(map(is_proxy, value))


def output_writer(outputs: Outputs) -> Callable[[Sequence[Tensor]], tuple[Any, Any, Any]]:
    """A function that puts a program's outputs where they go; returns (result, calls, values)."""
    template = outputs.template()
    result = _filler(template["result"])
    values = [_filler(value) for value in template["calls"]]
    attributes, lists = (
        [(place.container, place.key, _filler(value)) for place, value in filled]
        for filled in outputs.filled(template)
    )
    calls = outputs.calls

    def build(tensors: Sequence[Tensor]) -> tuple[Any, Any, Any]:
        for owner, key, fill in attributes:
            owner[key] = fill(tensors)
        for owner, key, fill in lists:
            owner[key].extend(fill(tensors))
        return result(tensors), calls, [fill(tensors) for fill in values]

    return build


def result_of(outputs: Outputs) -> Callable[[Sequence[Tensor]], Any]:
    """A function that makes the step's result of a program's outputs, and does nothing else."""
    return _filler(outputs.template()["result"])


def _filler(template: Any) -> Callable[[Sequence[Tensor]], Any]:
    """A function from a program's outputs to a copy of ``template`` with them in it."""
    if isinstance(template, Output):
        index, number = template.index, template.kind
        if number is not None and template.is_tensor:
            return lambda tensors: as_number(tensors[index], number is int)
        if number is not None:
            return lambda tensors: number(tensors[index].item())
        return lambda tensors: tensors[index]
    if type(template) in (list, tuple):
        kind = type(template)
        items = [_filler(item) for item in template]
        return lambda tensors: kind(fill(tensors) for fill in items)
    if type(template) is dict:
        pairs = [(key, _filler(value)) for key, value in template.items()]
        return lambda tensors: {key: fill(tensors) for key, fill in pairs}
    leaves, tree = pytree.tree_flatten(template)
    if tree.is_leaf():
        return lambda tensors: template
    fillers = [_filler(leaf) for leaf in leaves]
    return lambda tensors: pytree.tree_unflatten([fill(tensors) for fill in fillers], tree)


_KNOWN = (Owner.FRAMEWORK, Owner.FULGURITE)
"""Of whose optimizers it is known that an update of no parameters is nothing."""


@dataclass(frozen=True, slots=True)
class Update:
    """One update of the graph.

    Args:
        name: in messages.
        before: the nodes that were there when it began.
        inside: its own.
        gradients: the nodes of its parameters' gradients, None where there is none.
    """

    name: str
    before: frozenset[fx.Node]
    inside: frozenset[fx.Node]
    gradients: tuple[fx.Node | None, ...]


class Updates:
    """The updates of one trace.

    Args:
        optimizers: whose; those of other classes than torch's and ours are traced like any code.
        left_out: whether they are not to be run.

    Attributes:
        found: those of the trace, in order.
    """

    def __init__(self, optimizers: Iterable[Optimizer], left_out: bool) -> None:
        self._optimizers = [one for one in optimizers if owner_of(type(one)) in _KNOWN]
        self.left_out = left_out
        self._begun: dict[int, tuple[frozenset[fx.Node], tuple[fx.Node | None, ...]]] = {}
        self._groups: dict[int, Any] = {}  # of optimizers that are not to find any
        self.found: list[Update] = []

    @contextlib.contextmanager
    def noting(self, graph: fx.Graph, node_of: Callable[[Any], fx.Node | None]) -> Iterator[None]:
        """Note the updates in a graph while the block runs; ``node_of`` gives a tensor's node."""

        def begin(optimizer: Optimizer) -> None:
            groups = optimizer.param_groups
            gradients = [p.grad for group in groups for p in group["params"]]
            nodes = tuple([None if one is None else node_of(one) for one in gradients])
            self._begun[id(optimizer)] = frozenset(graph.nodes), nodes
            if self.left_out:
                # without parameters its step updates nothing, and hooks around it run as ever
                self._groups[id(optimizer)], optimizer.param_groups = groups, []

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if closure is None:
                begin(optimizer)
                return None

            def evaluated() -> Any:
                value = closure()
                begin(optimizer)
                return value

            return args[:1], {**kwargs, "closure": evaluated}

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            there, gradients = self._begun.pop(id(optimizer))
            self._restore(optimizer)
            if not self._optimizers:
                return
            inside = frozenset(graph.nodes) - there
            name = f"the update by {type(optimizer).__name__}"
            self.found.append(Update(name, there, inside, gradients))

        with contextlib.ExitStack() as stack:
            for one in self._optimizers:
                stack.enter_context(around_steps(one, before, after))
                stack.callback(self._restore, one)
            yield

    def trace_whole(self) -> None:
        """Leave none out: something else follows from what they do."""
        self._optimizers = []

    def _restore(self, optimizer: Optimizer) -> None:
        groups = self._groups.pop(id(optimizer), None)
        if groups is not None:
            optimizer.param_groups = groups


CONSTANT, OUTPUTS = "a constant", "the outputs"


class Operand(NamedTuple):
    """What an operation reads: an input by kind and name, or the result of an operation."""

    kind: Any
    which: Any


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: ``target`` is its function, or CONSTANT or OUTPUTS."""

    target: Any
    arguments: Any
    line: UserLine | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What is kept of a trace, to compare a later one with it.

    Args:
        operations: in order; the last one is OUTPUTS.
        own_count: how many of them the step's code made; the rest brings results to their places.
        constants: sources of the tensors that were read from outside.
        outputs: where results go.
        states: each optimizer's state, and what was in it.
        filled: attributes that the program fills, and what was in them before, or MISSING.
        left_elsewhere: other places where the step left tensors, each with what was in it before
            and what the step left.
        changes: scalars of modules that the step's code changed.
        lists: lists of Python values that it changed, and what was in them.
        reads: the frozen values that it read.
        places: of the state, by name.
        was_none: parameters whose gradient was None.
        outline: the same with each optimizer's update as one operation, if that is possible.
        is_outline: whether it is one.
    """

    operations: list[Operation]
    own_count: int
    constants: list[ConstantSource | Accumulator]
    outputs: Outputs
    states: Sequence[tuple[dict[Any, Any], dict[Any, Any]]]
    filled: list[tuple[Place, Any]]
    left_elsewhere: list[tuple[Place, Any, Any]]
    changes: tuple[Access, ...]
    lists: list[tuple[list[Any], list[Any]]]
    reads: Reads
    places: frozenset[str]
    was_none: frozenset[str]
    outline: Recording | None = None
    is_outline: bool = False


def record_operations(
    module: fx.GraphModule, inputs: Sequence[Input], last: fx.Node, updates: Sequence[Update] = ()
) -> tuple[list[Operation], int, list[Tensor]]:
    """What a captured graph computes, each of ``updates`` as one operation.

    Returns the operations, how many of them the step's own code made (up to the node ``last``), and
    the tensors that were read from outside, each once.
    """
    operands: dict[fx.Node, Operand] = {}
    constants: dict[int, Tensor] = {}
    operations: list[Operation] = []
    own = None
    names, live = iter(inputs), _live(module.graph, updates)
    inside, coming = _inside(updates), list(updates)
    for node in module.graph.nodes:
        while coming and node not in coming[0].before:
            operations.append(_update(coming.pop(0), operands))
        if node.op == "placeholder":
            item = next(names)
            operands[node] = Operand(item.kind, item.name)
        elif node in inside:
            written = node.args[0] if is_mutable(node.target) else None
            if isinstance(written, fx.Node) and written in operands:
                operands[node] = operands[written]  # which is what later operations read
        elif node in live and (original := original_of(node)) is not None:
            operands[node] = operands[original]
        elif node in live:
            operands[node] = Operand("operation", len(operations))
            operations.append(_operation(module, node, operands, constants))
        if node is last:
            operations += [_update(update, operands) for update in coming]
            coming, own = [], len(operations)
    return operations, len(operations) if own is None else own, list(constants.values())


def can_leave_out(graph: fx.Graph, updates: Sequence[Update]) -> bool:
    """Whether the rest of a graph reads nothing of updates but what they wrote in place."""
    live, inside = _live(graph, updates), _inside(updates)
    read = live.union(*(node.all_input_nodes for node in live))
    return all(_is_written(node, inside) for node in read & inside)


def _inside(updates: Sequence[Update]) -> frozenset[fx.Node]:
    return frozenset().union(*(update.inside for update in updates))


def _is_written(node: fx.Node, inside: frozenset[fx.Node]) -> bool:
    """Whether a node of an update is what it wrote into something that was there before."""
    while node in inside:
        if not is_mutable(node.target) or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]
    return True


def _update(update: Update, operands: dict[fx.Node, Operand]) -> Operation:
    gradients = [None if one is None else operands[one] for one in update.gradients]
    return Operation(update.name, ((*gradients,), ()), None)


def _live(graph: fx.Graph, updates: Sequence[Update]) -> set[fx.Node]:
    """The nodes that a result or a state depends on, and those that move the random state.

    Not those of updates, but the gradients that they read, and what they write into for others.
    """
    live: set[fx.Node] = {one for update in updates for one in update.gradients if one is not None}
    inside, read = _inside(updates), set[fx.Node]()
    for node in reversed(graph.nodes):
        if node in inside:
            into = node.args[0] if is_mutable(node.target) else None
            if isinstance(into, fx.Node) and (node in read or not live.isdisjoint(node.users)):
                (read if into in inside else live).add(into)
            continue
        acts = is_mutable(node.target) or is_random(node.target)
        if node.op == "output" or acts or not live.isdisjoint(node.users):
            live.add(node)
    return live


def _operation(
    module: fx.GraphModule,
    node: fx.Node,
    operands: dict[fx.Node, Operand],
    constants: dict[int, Tensor],
) -> Operation:
    if node.op == "output":
        return Operation(OUTPUTS, _key(node.args, operands), None)
    if node.op != "get_attr":
        arguments = _key((arguments_read(node), node.kwargs), operands)
        return Operation(node.target, arguments, _line_of_user(node, operands) or line_of(node))
    value = getattr(module, str(node.target))
    line = next((line_of(user) for user in node.users), None)
    if not isinstance(value, Tensor):
        return Operation("a graph", getattr(value, "code", value), line)
    constants.setdefault(id(value), value)
    return Operation(CONSTANT, list(constants).index(id(value)), line)


def _line_of_user(node: fx.Node, operands: dict[fx.Node, Operand]) -> UserLine | None:
    """The line that uses a number of a param group: it is taken before the step's code runs."""
    takes_number = any(operands[arg].kind is Kind.NUMBERS for arg in node.all_input_nodes)
    user = next(iter(node.users), None)
    return line_of(user) if takes_number and user is not None else None


def _key(value: Any, operands: dict[fx.Node, Operand]) -> Any:
    """Arguments in a form whose ``==`` tells types apart, and finds NaN equal to NaN."""
    if isinstance(value, fx.Node):
        return operands[value]
    if isinstance(value, (list, tuple)):
        return tuple([_key(item, operands) for item in value])
    if isinstance(value, dict):
        return tuple([(key, _key(item, operands)) for key, item in value.items()])
    if isinstance(value, slice):
        return Number(slice, repr(value))
    if isinstance(value, (bool, int, float, complex)):
        return Number(type(value), repr(value))
    return value


class Number(NamedTuple):
    """A number of Python's among the arguments of an operation."""

    kind: type
    text: str
