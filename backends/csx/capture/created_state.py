"""State inside lists, dicts and objects that the step makes from data: is it read, or an output?

``self.last["x"] = x`` leaves a tensor where there was none. If the step would do the same with that
tensor there, it is an output, filled after every step. If not (``self.d.get("x", default)``, ``if
meter.value is None``), it is state that begins with data, which no program can have. Who reads a
dict or an object cannot be seen, so the step is traced a second time, with tensors in those places.
The second trace, which is as all later steps are, is the one that is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from fulgurite.backends.csx.capture.comparison import same_operations
from fulgurite.backends.csx.capture.outputs import Output
from fulgurite.backends.csx.capture.recording import Operand, Recording
from fulgurite.backends.csx.contract.attributes import code_of_zeros
from fulgurite.backends.csx.diagnostics.errors import StateBornInStep
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, line_of
from fulgurite.backends.csx.graph.passes.rename import RENAMES
from fulgurite.backends.csx.state.places import NewPlace
from fulgurite.backends.csx.state.storage import brief
from fulgurite.backends.patches import MISSING


class CreatedState:
    """What the first trace of a step left in ``new_places``, which held no such tensors.

    ``examples`` are its graph's outputs, ``passed`` what it passed on of its batch.
    """

    def __init__(
        self,
        new_places: list[NewPlace],
        recording: Recording,
        examples: list[Tensor],
        passed: list[Any],
    ) -> None:
        self._new_places, self._recording = new_places, recording
        self._examples, self._passed = examples, passed
        outputs = recording.outputs
        filled = chain(*outputs.filled(outputs.template()))
        self._values = {place.name or place: value for place, value in filled}
        self._content = [list(one.before) if one.grows else [] for one in new_places]

    @contextlib.contextmanager
    def there(self) -> Iterator[None]:
        """While the block runs, the places hold tensors, as after the first step."""
        try:
            self._put()
            yield
        finally:
            self._take()

    def _put(self) -> None:
        for new in self._new_places:
            value = self._value(new)
            before = new.place.get()
            if new.grows and not isinstance(before, tuple):
                before.extend(value)
            else:
                new.place.put(before + type(before)(value) if new.grows else value)

    def _take(self) -> None:
        for new, content in zip(self._new_places, self._content, strict=True):
            new.place.put(new.before)
            if new.grows and not isinstance(new.before, tuple):
                new.before.clear()
                new.before.extend(content)

    def _value(self, new: NewPlace) -> Any:
        """What the first trace left there, with tensors of zeros."""
        return pytree.tree_map(self._filled, self._values[new.place.name])

    def _filled(self, leaf: Any) -> Any:
        if not isinstance(leaf, Output):
            return leaf
        computed = len(self._examples)
        if leaf.index >= computed:
            return self._passed[leaf.index - computed]
        example = self._examples[leaf.index]
        return torch.zeros(example.shape, dtype=example.dtype)

    def check(self, now: Recording, graph: fx.Graph, names: list[str]) -> None:
        """Compare with the second trace: its recording, its graph, and the graph's inputs' names.

        Raises:
            StateBornInStep: it is another program.
        """
        first, second = self._recording, now
        if same_operations(first, second) and _results(first) == _results(second):
            return
        read = dict(self._readers(graph, names))
        new = next((one for one in self._new_places if one.place.name in read), self._new_places[0])
        leaves = pytree.tree_leaves(self._values[new.place.name])
        made = next((leaf for leaf in leaves if isinstance(leaf, Output)), None)
        line = read.get(new.place.name)
        if line is None and made is not None:
            line = self._made_at(made)
        raise self._error(new, line)

    def _readers(self, graph: fx.Graph, names: list[str]) -> Iterator[tuple[str, UserLine | None]]:
        """The places that the second trace read, and its first line that did."""
        for node, name in zip(graph.find_nodes(op="placeholder"), names, strict=True):
            owners = [one.place for one in self._new_places if name.startswith(one.place.name)]
            users = list(_users(node)) if owners else []
            for place in owners if users else ():
                yield place.name, next((line for line in map(line_of, users) if line), None)

    def _made_at(self, output: Output) -> UserLine | None:
        operand = _resolved(self._recording, output)
        if isinstance(operand, Operand) and operand.kind == "operation":
            line: UserLine | None = self._recording.operations[operand.which].line
            return line
        return None

    def _error(self, new: NewPlace, line: UserLine | None) -> StateBornInStep:
        value, name = self._value(new), new.place.name
        leaves = ", ".join(map(_shown, pytree.tree_leaves(value)))
        if new.grows or (isinstance(new.before, (list, tuple)) and type(value) is list):
            return StateBornInStep(
                f"The step adds {leaves} to {name}, and reads what is in it: it would be"
                " another program after every step.",
                line=line,
                remedy=f"read {name} in a host hook such as on_train_epoch_end; or keep the"
                f" last n from the start: collections.deque([{code_of_zeros(value[0])}] * n,"
                " maxlen=n)",
            )
        found = "missing" if new.before is MISSING else _shown(new.before)
        return StateBornInStep(
            f"{name} was {found} before the step, and the step left {leaves} there, which the"
            " next step would read: state that begins with data. A program has all of its state"
            " before its first step.",
            line=line,
            remedy=_tensors_from_the_start(name, new.before, value),
        )


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """The operations that read a tensor, under whichever name."""
    for user in node.users:
        if user.target in RENAMES:
            yield from _users(user)
        elif user.op != "output":
            yield user


def _tensors_from_the_start(name: str, before: Any, value: Any) -> str:
    if type(before) in (int, float) and isinstance(value, Tensor) and not value.ndim:
        return f"{name} = torch.tensor({before!r}) in __init__"
    made = f"{name} = {code_of_zeros(value)} in __init__"
    if isinstance(value, Tensor) and (before is None or before is MISSING):
        known = 'self.register_buffer("known", torch.zeros(()))'
        return (
            f"{made}; where it begins with a value, beside it {known}, and in the step:\n"
            f"      before = torch.where(self.known == 0, value, {name})\n"
            f"      self.known.fill_(1)"
        )
    return made


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, Tensor) else brief(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"


def _results(recording: Recording) -> dict[Any, Any]:
    """What becomes of the results; a list that is made anew from nothing has grown."""
    outputs = recording.outputs
    template = outputs.template()
    found: dict[Any, Any] = {"result": template["result"], "calls": template["calls"]}
    for place, value in chain(*outputs.filled(template)):
        for name, one in _spread(place.name or place, value):
            found[name] = list(one) if isinstance(one, tuple) else one
    return {
        key: [_resolved(recording, leaf) for leaf in pytree.tree_leaves(value)]
        for key, value in found.items()
    }


def _spread(name: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    """What a place is given: of a new dict each value, for a list in it is one that has grown."""
    if type(value) is not dict or not isinstance(name, str):
        yield name, value
        return
    for key, item in value.items():
        yield from _spread(f"{name}[{key!r}]", item)


def _resolved(recording: Recording, leaf: Any) -> Any:
    """What an output is: the operation or the input that it copies, or a constant."""
    if not isinstance(leaf, Output):
        return repr(leaf) if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)
    computed = recording.operations[-1].arguments[0]
    if leaf.index >= len(computed):
        return recording.outputs.passed[leaf.index - len(computed)]
    operand = computed[leaf.index]
    while operand.kind == "operation" and operand.which >= recording.own:
        arguments = recording.operations[operand.which].arguments[0]
        if not arguments or not isinstance(arguments[0], Operand):
            break
        operand = arguments[0]
    return operand
