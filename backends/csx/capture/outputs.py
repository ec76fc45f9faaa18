"""What a program returns, and where it goes: the step's result, attributes, lists, host calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fulgurite.backends.csx.capture.batch_changes import container_at
from fulgurite.backends.csx.capture.host_calls import HostCall
from fulgurite.backends.csx.capture.metrics import BatchValue
from fulgurite.backends.csx.contract.proxies import PassedOn, is_watched, source_of, unwatched
from fulgurite.backends.csx.graph.graph import storage_of
from fulgurite.backends.csx.hyperparams.traced_float import TracedNumber
from fulgurite.backends.csx.state.places import Place, SideEffects


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Where the outputs of a program go, as a tree whose tensor leaves they are."""

    tree: pytree.TreeSpec
    leaves: tuple[Any, ...]  # an ``Output``, or a constant
    passed: tuple[PassedOn, ...]  # what the step only passed on: outputs after the program's own
    attributes: tuple[Place, ...]  # set after every step
    lists: tuple[Place, ...]  # of lists, grown after every step
    calls: tuple[HostCall, ...]

    def template(self) -> Any:
        """The tree with its leaves: {"result", "attributes", "lists", "calls"}."""
        return pytree.tree_unflatten(list(self.leaves), self.tree)

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


def collected_outputs(
    result: Any, left: SideEffects, calls: list[Any], of_inputs: set[int]
) -> tuple[Outputs, list[Tensor]]:
    """The tensors among what a traced step returned, set, appended and logged: its outputs.

    ``of_inputs`` is memory that belongs to inputs; the calls lose their traced values.
    """
    places, values = left.written()
    tree = {
        "result": result,
        "attributes": values,
        "lists": left.list_values,
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
        lists=tuple(left.lists),
        calls=tuple(calls),
    )
    return outputs, tensors


def _numbered(
    leaves: list[Any], of_inputs: set[int]
) -> tuple[tuple[Any, ...], list[Tensor], tuple[PassedOn, ...]]:
    """The leaves with an ``Output`` for each traced tensor, and these tensors, each once.

    So is what the step only passed on, numbered after the tensors; returned third. An output over
    the memory of an input is copied, for the next step writes there.
    """
    tensors: list[Tensor] = []
    known: dict[int, Output] = {}
    kept: list[Any] = []
    passed: dict[PassedOn, list[int]] = {}
    for leaf in leaves:
        if isinstance(leaf, BatchValue):
            leaf.refuse()
        if is_watched(leaf):
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
        return {unwatched(key): _with_plain_keys(one) for key, one in value.items()}

    return pytree.tree_map(plain, tree, is_leaf=_has_watched_keys)


def _has_watched_keys(value: Any) -> bool:
    return type(value) is dict and any(map(is_watched, value))


def builder(outputs: Outputs) -> Callable[[Sequence[Tensor]], tuple[Any, Any, Any]]:
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


def passed_on(
    sources: Sequence[PassedOn], batch: Any, given: Any, arguments: dict[str, Any]
) -> list[Any]:
    """What this call has for the sources of ``Outputs.passed``.

    Args:
        sources: these.
        batch: of the structure that the program was traced with.
        given: the batch as it came, whose containers the step may change.
        arguments: the others, by name.
    """
    leaves = pytree.tree_leaves(batch)

    def value(source: PassedOn) -> Any:
        if isinstance(source, tuple):
            return container_at(given, source)
        return leaves[source] if isinstance(source, int) else arguments[source]

    return [value(source) for source in sources]


def result_of(outputs: Outputs) -> Callable[[Sequence[Tensor]], Any]:
    """A function that makes the step's result of a program's outputs, and does nothing else."""
    return _filler(outputs.template()["result"])


def _filler(template: Any) -> Callable[[Sequence[Tensor]], Any]:
    """A function from a program's outputs to a copy of ``template`` with them in it."""
    if isinstance(template, Output):
        index = template.index
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
