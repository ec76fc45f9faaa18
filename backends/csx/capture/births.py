"""State that the first step makes: what it left in places that held no tensors.

``self.last["x"] = x`` leaves a tensor where there was none. If the step would do the same with that
tensor there, it is an output, filled after every step. If not (``if self.mean is None``,
``self.d.get("x", default)``), it is state that is born with data: the first step is a program of
its own, which runs where the places are empty (``EmptyPlaces``). Who reads a dict or an object
cannot be seen, so the step is traced a second time, with tensors in those places. The second trace,
which is as all later steps are, is kept.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from fulgurite.backends.csx.capture.comparison import PLAIN, same_operations, same_results
from fulgurite.backends.csx.capture.recording import Output, Recording
from fulgurite.backends.csx.capture.scope import Scope
from fulgurite.backends.csx.capture.trace import Result, Trace, results
from fulgurite.backends.csx.contract import code_of_zeros, holds_tensors, misuse
from fulgurite.backends.csx.diagnostics.trace_errors import TraceError
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, line_of
from fulgurite.backends.csx.graph.graph import Input
from fulgurite.backends.csx.graph.op_schema import memory_of, written_nodes
from fulgurite.backends.csx.graph.passes.rename import RENAMES
from fulgurite.backends.csx.hyperparams.traced_float import as_number
from fulgurite.backends.csx.objects import pass_through_values
from fulgurite.backends.csx.state import NewPlace, Place, brief
from fulgurite.backends.patches import MISSING

if TYPE_CHECKING:
    from fulgurite.backends.csx.capture.captured_step import CapturedStep, FinishedTrace


_FIRST_STEPS = 3
"""How many steps there may be that make state, each more of it; one that goes on is not static."""


@dataclass(frozen=True, slots=True)
class FirstStep:
    """A step that makes state which later ones find; it is due where there is none."""

    captured: CapturedStep
    is_due: EmptyPlaces


def with_all_state(
    finished: FinishedTrace,
    again: Callable[[], FinishedTrace],
    born: list[Birth],
    stack: contextlib.ExitStack,
) -> tuple[FinishedTrace, list[FirstStep]]:
    """A trace that makes no state which a later step would read, and the steps that make it.

    Args:
        finished: the first trace.
        again: traces again, with what is in ``born``.
        born: receives what the traces made.
        stack: takes that away in the end.

    Raises:
        StateBornInStep: each step makes more.
        UnsupportedState: what one made is changed under another name, too.
    """
    firsts: list[FirstStep] = []
    unread: list[Callable[[], FirstStep]] = []
    recorded = finished.make_recording
    while birth := birth_in(finished.trace, finished.module.graph, recorded):
        first = finished.make_captured_step()
        stack.callback(birth.take)
        born.append(birth)
        # all later steps find tensors there, so the program is built of the trace that does
        finished = again()
        recorded = functools.cache(finished.make_recording)  # the next round may ask for it too
        graph, inputs = finished.module.graph, finished.trace.inputs.items
        unread.append(functools.partial(birth.first_step, first, graph, inputs))
        if birth.is_read(recorded()):
            firsts, unread = firsts + [one() for one in unread], []
            if len(firsts) > _FIRST_STEPS or any(one.goes_on() for one in born):
                finished.refuse_other_effects()
                raise birth.error(graph, inputs)
        # who asks how much there is of what grows, may ask for more than a step has left
        elif len(born) == _FIRST_STEPS or not any(
            one.grows for one in finished.trace.result.collected.new_places
        ):
            break
    return finished, firsts


def with_first_steps(
    scope: Scope, captured: CapturedStep, firsts: list[FirstStep], born: list[Birth]
) -> CapturedStep:
    """A step together with those that make state for it, which ``scope`` gets to know."""
    if not firsts:
        return captured
    scope.born += [one.is_due for one in firsts]
    filled = {(id(place.container), place.key) for one in born for place in one.places()}

    def not_asking(step: CapturedStep) -> CapturedStep:
        """It does not compare what is in these places: tensors come there, and flags change."""
        read = step.assumptions
        scalars = (one for one in read.scalars if (id(one.container), one.name) not in filled)
        return replace(step, assumptions=replace(read, scalars=tuple(scalars)))

    changes = (change for one in firsts for change in one.captured.changes)
    births = (replace(one, captured=not_asking(one.captured)) for one in firsts)
    step = not_asking(captured)
    return replace(step, births=tuple(births), changes=(*changes, *captured.changes))


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
    return Birth(new_places, recording, results(trace, graph), passed, settings)


class Birth:
    """What one trace of a step left in places that held no such tensors.

    Args:
        new_places: those that its code may have read.
        recording: of that trace.
        results: its graph's.
        passed: what it passed on of its batch.
        settings: what it set in modules that is no tensor: flags (bools), which may say that these
            are filled, and what was not there. Each with what was there, and what is now.

    Attributes:
        is_first_step: whether the trace is a step of its own.
    """

    def __init__(
        self,
        new_places: list[NewPlace],
        recording: Recording,
        results: list[Result],
        passed: list[Any],
        settings: list[tuple[Place, Any, Any]],
    ) -> None:
        self._recording, self._settings, self._new_places = recording, settings, new_places
        self._flags = [one for one in settings if type(one[2]) is bool and not new_places]
        self._results, self._passed = results, passed
        outputs = recording.outputs
        attributes, lists = outputs.filled(outputs.template())
        extended = {place.name: value for place, value in lists}
        new = {one.place for one in new_places if not one.grows}
        self._set = [
            (place, place.get(MISSING), value)
            for place, value in attributes
            if place in new or not holds_tensors(place.get())
        ]
        self._grown = [
            (one.place, one.place.get(), extended[one.place.name])
            for one in new_places
            if one.grows
        ]
        self._content = [list(found) for _, found, _ in self._grown]
        self._before = [(place, _outline(found)) for place, found, _ in self._all()]
        self._put: list[Any] = []
        self.is_first_step = False

    def _all(self) -> list[tuple[Place, Any, Any]]:
        return [*self._set, *self._grown]

    def places(self) -> Iterator[Place]:
        """The places, and those of flags."""
        yield from (place for place, *_ in (*self._all(), *self._flags))

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

    def note(self) -> None:
        """Note what the places hold when a trace begins."""
        self._put = [_outline(place.get()) for place, _, _ in self._set]

    def goes_on(self) -> bool:
        """Whether the trace that found all that changed what is no tensor: the next would, too."""
        turns = (place.get() is not left for place, _, left in self._settings if type(left) is bool)
        return any(turns) or any(
            _outline(place.get()) != put
            for (place, _, _), put in zip(self._set, self._put, strict=True)
        )

    def take(self) -> None:
        """Let the places hold what they held, and flags too, where the step is yet to set them."""
        for place, found, _ in self._flags if self.is_first_step else ():
            place.put(found)
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
        made = torch.zeros(example.shape, dtype=example.dtype)
        return made if leaf.kind is None else as_number(made, leaf.kind is int)

    def is_read(self, now: Recording) -> bool:
        """Whether a later trace, which found tensors there, is another program."""
        first = self._recording
        if any(one.is_optimizers for one in self._new_places):
            return True  # it changes them in place, if nothing else
        return not (same_operations(first, now) and same_results(first, now))

    def first_step(
        self, captured: CapturedStep, graph: fx.Graph, inputs: Sequence[Input]
    ) -> FirstStep:
        """The trace as a step of its own; ``graph`` is of the trace that found all that.

        Raises:
            UnsupportedState: it changes in place what is there, which is somebody else's too.
        """
        self.is_first_step = True
        known = _named(graph, inputs)
        read = [name for node, name in known.items() if any(_users(node))]
        # what is only written says nothing of whether the host has emptied the others
        empty = [one for one in self._before if any(_is_in(name, one[0].name) for name in read)]
        changed = (memory_of(one) for node in graph.nodes for one in written_nodes(node))
        written = {known[node] for node in changed if node in known}
        holders: dict[Any, list[str]] = {}
        lines: dict[str, UserLine | None] = {}
        for place, _, value in self._all():
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Output) and leaf.index < len(self._results):
                    result = self._results[leaf.index]
                    memory = result.memory
                    lines.setdefault(place.name, result.line)
                    holders.setdefault(memory, [memory] if isinstance(memory, str) else [])
                    holders[memory].append(place.name)
        for first, *others in holders.values():
            if others and any(_is_in(one, first, *others) for one in written):
                found = {"attribute": others[0], "other": first}
                raise misuse("born_shared", lines[others[0]], **found)
        return FirstStep(
            captured, EmptyPlaces(empty or self._before, self._flags, self._new_places)
        )

    def error(self, graph: fx.Graph, inputs: Sequence[Input]) -> TraceError:
        """The error, where the trace of this graph, too, fills places that it may read."""
        if not self._all():  # flags alone
            remedy = (
                "a number that counts: self.n += 1, and if self.n % 2; or a buffer, and torch.where"
            )
            found = {"added": "another value", "attribute": self._flags[0][0].name}
            return misuse("born", None, remedy=remedy, **found)
        place, _, value = self._all()[0]
        name, leaves = place.name, pytree.tree_leaves(self._with_zeros(value))
        named = _named(graph, inputs).items()
        users = (user for node, one in named if _is_in(one, name) for user in _users(node))
        line = next(filter(None, map(line_of, users)), None)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        zeros = code_of_zeros(next(iter(tensors), None))
        told = {"added": ", ".join(map(brief, leaves)), "zeros": zeros}
        remedy = "a tensor that counts: torch.zeros(()), and .add_(1) in the step"
        remedy = "" if len(tensors) == len(leaves) else remedy
        return misuse("born", line, remedy=remedy, attribute=name, **told)


class EmptyPlaces:
    """Places, and an outline of what was there before a step put tensors into them.

    ``flags`` are what alone says that they are filled: each with what it was, and is since.
    ``new_places`` are all that the step fills; ``is_in_part`` says that it has filled some alone.
    """

    def __init__(
        self,
        before: list[tuple[Place, Any]],
        flags: list[tuple[Place, Any, Any]],
        new_places: list[NewPlace],
    ) -> None:
        self._before, self.flags = before, flags
        self.is_optimizers = any(one.is_optimizers for one in new_places)
        self.is_in_part = False
        made = [one for one in new_places if one.is_optimizers and one.is_state]
        self.made = [(id(one.key), one.place.name) for one in made]
        self._by_update = [(one, one.counts) for one in new_places if one.counts]
        self._always = any(one.counts is None for one in new_places)

    def __call__(self) -> bool:
        """Whether that is there now."""
        if self.flags:
            return all(flag.get(MISSING) is before for flag, before, _ in self.flags)
        return all(_outline(place.get(MISSING)) == before for place, before in self._before)

    def holds(self, names: Collection[str]) -> bool:
        """Whether a state of one of these names is in one of the places."""
        return any(_is_in(name, place.name) for place, _ in self._before for name in names)

    def is_told_by(self, flags: Collection[tuple[int, Any]]) -> bool:
        """Whether one of these says that they are filled, by its container's identity and key."""
        return any((id(flag.container), flag.key) in flags for flag, _, _ in self.flags)

    def fill(self) -> None:
        """A step has filled them; where its update did not count, they are empty again."""
        updated = [(new, counts, bool(counts.get())) for new, counts in self._by_update]
        some = self._always or any(is_update for _, _, is_update in updated)
        self.is_in_part = some and not all(is_update for _, _, is_update in updated)
        for new, counts, is_update in updated:
            if not is_update:
                new.place.put(new.before)
            counts.put(MISSING)
        for flag, _, since in self.flags:
            flag.put(since)


def _named(graph: fx.Graph, inputs: Sequence[Input]) -> dict[fx.Node, str]:
    """The names of a graph's inputs."""
    pairs = zip(graph.find_nodes(op="placeholder"), inputs, strict=True)
    return {node: item.name for node, item in pairs}


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
