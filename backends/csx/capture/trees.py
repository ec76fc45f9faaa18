"""What a step did to trees (see ``leaves``): which leaves it replaced, which it added.

A leaf that another tensor took the place of is left to ``side_effects.sort_state``. A container
that was replaced is made anew after every step, one that grew gets what was added. Where that
gives a place tensors that it did not hold before, the step may have found it empty and may depend
on that: a *new place*, which ``created_state`` looks into.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from copy import copy
from operator import is_
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fulgurite.backends.csx.capture.leaves import (
    ABSENT,
    DEEPEST,
    Inside,
    Path,
    Step,
    Trees,
    children,
    refill,
    same,
)
from fulgurite.backends.csx.contract.lists import may_collect
from fulgurite.backends.csx.contract.watched import holds_traced, is_watched
from fulgurite.backends.csx.diagnostics.errors import UnsupportedState
from fulgurite.backends.csx.diagnostics.user_lines import UserLine
from fulgurite.backends.csx.state.places import NewPlace, Place, SideEffects
from fulgurite.backends.csx.state.storage import StateInput, StateTensor, brief

Items = list[tuple[Step, Any]]


class Grown:
    """A list or deque that the step adds to; it is made where the host has none, or none any more.

    ``self.by.setdefault("y", []).append(y)`` begins one, and does so again after ``clear()``.
    """

    def __init__(self, inside: Inside, path: Path) -> None:
        self.name = inside.place(path)
        self._inside, self._path = inside, path
        self._made = [_emptied(inside[path[: i + 1]]) for i in range(len(path))]

    def __getitem__(self, key: Any) -> Grown:
        return self

    def extend(self, values: list[Any]) -> None:
        """Put these at its end."""
        held = self._inside.get(self._path, ABSENT)
        if held is ABSENT:
            for i, made in enumerate(self._made, start=1):
                if made is not None and self._path[:i] not in self._inside:
                    self._inside[self._path[:i]] = copy(made)
            held = self._inside[self._path]
        held.extend(values)

    @property
    def place(self) -> Place:
        """Where it is."""
        return self._inside, self._path


class Regrown(Grown):
    """A list or tuple that the step makes anew and longer."""

    def extend(self, values: list[Any]) -> None:
        """Put another one there, with these at its end."""
        before = self._inside[self._path]
        self._inside[self._path] = before + type(before)(values)


def _emptied(value: Any) -> Any:
    """A container of the same kind with nothing in it; None for other objects."""
    if not isinstance(value, (list, dict, deque)):
        return None
    made = copy(value)
    made.clear()
    return made


def where_put(place: Place) -> Place:
    """The place of a list, also of one that is made anew."""
    container, _ = place
    return container.place if isinstance(container, Grown) else place


class Untied(Exception):
    """A trace found that places which hold one tensor get several: it starts again with several."""

    def __init__(self, held: list[StateTensor]) -> None:
        super().__init__()
        self._held = held

    def untie(self) -> None:
        """Give each place memory of its own; no step has written that of the one tensor."""
        for held in self._held:
            for slot in held.slots[1:]:
                slot.container[slot.key] = held.tensor.detach().clone()


def check_ties(state: Iterable[StateInput]) -> None:
    """Find tensors that are in several places, of which a step rebinds some.

    Raises:
        Untied: there are such; what was changed in place too is left to others to refuse.
    """
    apart = []
    for held in [held for item in state for held in item.tensors]:
        inside = any(isinstance(slot.container, Inside) for slot in held.slots)
        if len(held.slots) > 1 and inside and not isinstance(held.tensor, nn.Parameter):
            now = [slot.container.get(slot.key) for slot in held.slots]
            stays = all(value is held.tensor for value in now)
            if not stays and not _is_one_place(held, now) and not held.tensor._version:
                apart.append(held)
    if apart:
        raise Untied(apart)


def _is_one_place(held: StateTensor, now: list[Any]) -> bool:
    """Whether all places of a tensor are one, in a container that several hold."""
    containers = [
        slot.container.get(slot.key[:-1]) if isinstance(slot.container, Inside) else slot.container
        for slot in held.slots
    ]
    return all(map(is_, now, now[1:])) and all(map(is_, containers, containers[1:]))


def check_gradients(state: Iterable[StateInput]) -> None:
    """Refuse a gradient that would be lost: of a leaf that no module or optimizer holds as well.

    Raises:
        UnsupportedState: the step computed one, and left it.
    """
    for held in [held for item in state for held in item.tensors]:
        inside = all(isinstance(slot.container, Inside) for slot in held.slots)
        if inside and isinstance(held.tensor.grad, FakeTensor):
            raise UnsupportedState(
                f"{held.slots[0].name} requires a gradient, but is no parameter of a module or an"
                " optimizer.",
                remedy="nn.ParameterList, nn.ParameterDict, or an attribute of the module; where"
                " none is wanted .requires_grad_(False)",
            )


def collect_trees(
    trees: Trees,
    state: Iterable[StateInput],
    left: SideEffects,
    is_constant: Callable[[Tensor], bool],
    line: Callable[[], UserLine | None],
    regrown: set[str],
) -> set[tuple[int, Any]]:
    """Find what a step changed in trees, and undo it; returns the attributes that were looked at.

    Args:
        trees: as they were.
        state: the state.
        left: receives what is to be done after every step.
        is_constant: whether a traced tensor follows from constants alone; it may be cached.
        line: the user's line that is to blame.
        regrown: places that an earlier trace found to grow.

    Raises:
        UnsupportedState: the step takes tensors away.
    """
    comparison = _Comparison(trees, state, left, is_constant, line, regrown)
    for inside, before in trees.roots:
        comparison.tree(before, inside.owner.get(inside.key, ABSENT), inside)
    return {(id(inside.owner), inside.key) for inside, _ in trees.roots}


class _Comparison:
    def __init__(
        self,
        trees: Trees,
        state: Iterable[StateInput],
        left: SideEffects,
        is_constant: Callable[[Tensor], bool],
        line: Callable[[], UserLine | None],
        regrown: set[str],
    ) -> None:
        self._trees, self._left = trees, left
        self._is_constant, self._line, self._regrown = is_constant, line, regrown
        self._held: dict[tuple[int, Any], StateTensor] = {
            (id(slot.container), slot.key): held
            for item in state
            for held in item.tensors
            for slot in held.slots
            if isinstance(slot.container, Inside)
        }
        self._seen: set[int] = set()

    def tree(self, before: Any, now: Any, inside: Inside) -> None:
        """Compare an attribute."""
        if now is before:
            self._content(now, inside, ())
        elif holds_traced(now):
            self._replaced(inside, (), before, now)

    def _content(self, value: Any, inside: Inside, path: Path) -> None:
        """Compare what is in a container or an object that still is where it was."""
        if id(value) not in self._trees.content or id(value) in self._seen:
            return
        self._seen.add(id(value))
        before, now = self._trees.content[id(value)][1], children(value) or []
        if not same(now, before):
            added = _added(value, before, now)
            if added and holds_traced(added):
                self._grown(value, before, added, inside, path)
            else:
                self._changed(value, before, now, inside, path)
        for step, item in before:
            if not isinstance(item, Tensor):
                self._content(item, inside, (*path, step))

    def _grown(
        self, value: Any, before: Items, added: list[Any], inside: Inside, path: Path
    ) -> None:
        self._left.lists.append((Grown(inside, path), None))
        self._left.list_values.append(added)
        refill(value, before)
        rotates = isinstance(value, deque) and len(before) == value.maxlen
        watched = not path and type(value) is list and may_collect([item for _, item in before])
        if not rotates and not watched:
            self._new_place(inside, path, value, added, grows=True)

    def _changed(self, value: Any, before: Items, now: Items, inside: Inside, path: Path) -> None:
        was, is_now = dict(before), dict(now)
        for step, item in before:
            if step not in is_now and _has_tensors(item):
                raise UnsupportedState(
                    f"The step takes {inside.place((*path, step))} away, where the next step would"
                    " look for it.",
                    line=self._line(),
                    remedy="keep its place filled, and change its value",
                )
        for step, item in now:
            old = was.get(step, ABSENT)
            if item is not old and holds_traced(item):
                self._replaced(inside, (*path, step), old, item)

    def _replaced(self, inside: Inside, path: Path, before: Any, now: Any) -> None:
        if isinstance(now, Tensor) and (id(inside), path) in self._held:
            return
        if isinstance(before, Tensor):
            raise UnsupportedState(
                f"The step replaced {inside.place(path)}, which is a parameter or a buffer of a"
                " module too, or one of a great many.",
                line=self._line(),
                remedy="change it in place (tensor.copy_(...)), or give it memory of its own before"
                " fit (.clone())",
            )
        _put_back(inside, path, before)
        grows = _begins_with(now, before) or inside.place(path) in self._regrown
        if grows:
            self._left.lists.append((Regrown(inside, path), None))
            self._left.list_values.append(list(now[len(before) :]))
        else:
            self._left.set_after([(inside, path)], now)
            self._left.rebound += [
                held
                for (container, key), held in self._held.items()
                if container == id(inside) and key[: len(path)] == path
            ]
        if grows or _structure(before) != _structure(now):
            self._new_place(inside, path, before, now, grows)

    def _new_place(self, inside: Inside, path: Path, before: Any, now: Any, grows: bool) -> None:
        leaves = pytree.tree_leaves(now)
        traced = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        if any(map(is_watched, leaves)) or not all(map(self._is_constant, traced)):
            name, place = inside.place(path), (inside, path)
            self._left.new_places.append(
                NewPlace(name=name, place=place, before=before, grows=grows)
            )


def order_of(place: Place, owners: dict[int, str], trees: dict[str, int]) -> tuple[int, str]:
    """By which outputs are sorted, so that two traces of a step have them in one order.

    Args:
        place: in a tree or a module.
        owners: paths of modules by the identity of their attributes.
        trees: the places in trees, in order.
    """
    container, key = place
    if isinstance(container, Inside):
        name = container.place(key)
        return trees.get(name, len(trees)), name
    return -1, f"{owners.get(id(container), '')}.{key}"


def _added(value: Any, before: Items, now: Items) -> list[Any] | None:
    """What was put at a list's or a deque's end, where nothing else was changed."""
    if not isinstance(value, (list, deque)):
        return None
    old, new = [item for _, item in before], [item for _, item in now]
    full = isinstance(value, deque) and value.maxlen == len(new)
    for gone in range(len(old) + 1 if full else 1):
        kept = old[gone:]
        if len(new) >= len(kept) and all(map(is_, new, kept)):
            return new[len(kept) :]
    return None


def _begins_with(now: Any, before: Any) -> bool:
    """Whether a list or tuple is another one with something at its end."""
    return (
        type(now) is type(before)
        and type(now) in (list, tuple)
        and 0 < len(before) < len(now)
        and all(map(is_, now, before))
    )


def _put_back(inside: Inside, path: Path, before: Any) -> None:
    if before is not ABSENT:
        inside[path] = before
    else:
        inside.pop(path)


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def _structure(value: Any, levels: int = DEEPEST) -> Any:
    """Where in a value tensors are, and of which shapes; and what was only passed on."""
    if is_watched(value):
        return "passed on"
    if isinstance(value, Tensor):
        return brief(value)
    items = None if isinstance(value, nn.Module) or not levels else children(value)
    if items is None:
        return None
    found = {step: _structure(item, levels - 1) for step, item in items}
    return {step: structure for step, structure in found.items() if structure} or None
