"""State that the first step makes: what it left in places that held no tensors.

``self.last["x"] = x`` leaves a tensor where there was none. If the step would do the same with that
tensor there, it is an output, filled after every step. If not (``if self.mean is None``,
``self.d.get("x", default)``), it is state that is born with data: the first step is a program of
its own, which runs where the places are empty (``EmptyPlaces``). Who reads a dict or an object
cannot be seen, so the step is traced a second time, with tensors in those places. The second trace,
which is as all later steps are, is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from fulgurite.backends.csx.capture.comparison import PLAIN, same_operations, same_results
from fulgurite.backends.csx.capture.recording import Output, Recording, pass_through_values
from fulgurite.backends.csx.capture.trace import Result, Trace
from fulgurite.backends.csx.contract import code_of_zeros, misuse
from fulgurite.backends.csx.diagnostics.trace_errors import TraceError
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, line_of
from fulgurite.backends.csx.graph.op_schema import memory_of, written_nodes
from fulgurite.backends.csx.graph.passes.rename import RENAMES
from fulgurite.backends.csx.state import NewPlace, Place, brief
from fulgurite.backends.patches import MISSING


def birth_in(
    trace: Trace, graph: fx.Graph, make_recording: Callable[[], Recording]
) -> Birth | None:
    """What a trace left in places that held no tensors, if its code may have looked into them.

    ``graph`` is its graph; a recording of it is made where there is such a place.
    """
    new_places, batch = trace.result.collected.new_places, trace.step.batch
    settings = trace.observers.attributes.settings()
    if not new_places and not any(type(now) is bool for _, _, now in settings):
        return None
    recording = make_recording()
    passed = pass_through_values(recording.outputs.passed, batch, batch, lambda name: 0)
    birth = Birth(new_places, recording, trace.results(graph), passed, settings)
    return birth if new_places or birth else None


class Birth:
    """What one trace of a step left in places that held no such tensors.

    Args:
        new_places: those that its code may have read.
        recording: of that trace.
        results: its graph's.
        passed: what it passed on of its batch.
        settings: what it set in modules that is no tensor: flags (bools), which may say that these
            are filled, and what was not there. Each with what was there, and what is now.
    """

    def __init__(
        self,
        new_places: list[NewPlace],
        recording: Recording,
        results: list[Result],
        passed: list[Any],
        settings: list[tuple[Place, Any, Any]],
    ) -> None:
        self._recording, self._settings = recording, settings
        self._flags = [one for one in settings if type(one[2]) is bool and not new_places]
        self._results, self._passed = results, passed
        outputs = recording.outputs
        attributes, lists = outputs.filled(outputs.template())
        extended = {place.name: value for place, value in lists}
        new = {one.place for one in new_places if not one.grows}
        self._set = [
            (place, place.get(MISSING), value)
            for place, value in attributes
            if place in new or not _holds_tensors(place.get())
        ]
        self._grown = [
            (one.place, one.place.get(), extended[one.place.name])
            for one in new_places
            if one.grows
        ]
        self._content = [list(found) for _, found, _ in self._grown]
        self._before = [(place, _outline(found)) for place, found, _ in self._all()]
        self._put: list[Any] = []

    def _all(self) -> list[tuple[Place, Any, Any]]:
        return [*self._set, *self._grown]

    def __bool__(self) -> bool:
        return bool(self._before)

    def put(self) -> None:
        """Let the places hold tensors, as after that step, and what else it set be set."""
        for place, _, left in self._settings:
            place.put(left)
        for place, _, value in self._set:
            place.put(self._with_zeros(value))
        for place, _, value in self._grown:
            now, more = place.get(), self._with_zeros(value)
            if isinstance(now, tuple):
                place.put(now + type(now)(more))
            else:
                now.extend(more)
        self._put = [_outline(place.get()) for place, _, _ in self._set]

    def goes_on(self) -> bool:
        """Whether the trace that found all that changed what is no tensor: the next would, too."""
        turns = (place.get() is not left for place, _, left in self._settings if type(left) is bool)
        return any(turns) or any(
            _outline(place.get()) != put
            for (place, _, _), put in zip(self._set, self._put, strict=True)
        )

    def take(self) -> None:
        """Let the places hold what they held."""
        for place, found, _ in self._all():
            place.put(found)
        for (_, found, _), content in zip(self._grown, self._content, strict=True):
            if not isinstance(found, tuple):
                found.clear()  # a deque has no slices
                found.extend(content)

    def _with_zeros(self, value: Any) -> Any:
        return pytree.tree_map(self._filled, value)

    def _filled(self, leaf: Any) -> Any:
        if not isinstance(leaf, Output):
            return leaf
        computed = len(self._results)
        if leaf.index >= computed:
            return self._passed[leaf.index - computed]
        example = self._results[leaf.index].example
        # no value is needed: the step is only traced with them there
        return torch.zeros(example.shape, dtype=example.dtype)

    def is_read(self, now: Recording) -> bool:
        """Whether a later trace, which found tensors there, is another program."""
        first = self._recording
        return not (same_operations(first, now) and same_results(first, now))

    def settle(self, graph: fx.Graph, names: list[str]) -> EmptyPlaces:
        """The places that the trace reads that found all that; its graph and its inputs' names.

        Raises:
            UnsupportedState: it changes in place what is there, which is somebody else's too.
        """
        inputs = dict(zip(graph.find_nodes(op="placeholder"), names, strict=True))
        read = [name for node, name in inputs.items() if any(_users(node))]
        # what is only written says nothing of whether the host has emptied the others
        empty = [one for one in self._before if any(_is_in(name, one[0].name) for name in read)]
        changed = (memory_of(one) for node in graph.nodes for one in written_nodes(node))
        written = {inputs[node] for node in changed if node in inputs}
        holders: dict[Any, list[str]] = {}
        lines: dict[str, UserLine | None] = {}
        for place, _, value in self._all():
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Output) and leaf.index < len(self._results):
                    _, memory, line = self._results[leaf.index]
                    lines.setdefault(place.name, line)
                    holders.setdefault(memory, [memory] if isinstance(memory, str) else [])
                    holders[memory].append(place.name)
        for first, *others in holders.values():
            if others and any(_is_in(one, first, *others) for one in written):
                found = {"attribute": others[0], "other": first}
                raise misuse("born_shared", lines[others[0]], **found)
        return EmptyPlaces(empty or self._before, self._flags)

    def error(self, graph: fx.Graph, names: list[str]) -> TraceError:
        """The error, where the trace of this graph, too, fills places that it may read."""
        place, _, value = self._all()[0]
        name, leaves = place.name, pytree.tree_leaves(self._with_zeros(value))
        inputs = zip(graph.find_nodes(op="placeholder"), names, strict=True)
        users = (user for node, one in inputs if _is_in(one, name) for user in _users(node))
        line = next(filter(None, map(line_of, users)), None)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        found = {"added": ", ".join(map(brief, leaves)), "zeros": code_of_zeros(tensors[0])}
        remedy = "a tensor that counts: torch.zeros(()), and .add_(1) in the step"
        remedy = "" if len(tensors) == len(leaves) else remedy
        return misuse("born", line, remedy=remedy, attribute=name, **found)


class EmptyPlaces:
    """Places, and an outline of what was there before a step put tensors into them.

    ``flags`` are what alone says that they are filled: each with what it was, and is since.
    """

    def __init__(
        self, before: list[tuple[Place, Any]], flags: list[tuple[Place, Any, Any]]
    ) -> None:
        self._before, self.flags = before, flags

    def __call__(self) -> bool:
        """Whether that is there now."""
        if self.flags and all(flag.get() == before for flag, before, _ in self.flags):
            return True
        return all(_outline(place.get(MISSING)) == before for place, before in self._before)

    def fill(self) -> None:
        """A step has filled them."""
        for flag, _, since in self.flags:
            flag.put(since)


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def _outline(value: Any) -> Any:
    """What is in a place, but for the values of tensors and how they are laid out."""
    leaves, tree = pytree.tree_flatten(value)
    return tree, [repr(leaf) if isinstance(leaf, PLAIN) else brief(leaf) for leaf in leaves]


def _is_in(name: str, *places: str) -> bool:
    """Whether a state is in one of the places, by its name."""
    return any(name == one or name.startswith((f"{one}.", f"{one}[")) for one in places)


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """The operations that read a tensor, under whichever name."""
    for user in node.users:
        if user.target in RENAMES:
            yield from _users(user)
        elif user.op != "output":
            yield user
