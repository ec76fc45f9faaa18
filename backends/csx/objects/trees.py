"""What a step did to trees (see ``leaves``): which tensors in them it replaced, which it added.

A tensor whose place got another one is state (``side_effects.sort_state``). A container that the
step replaced is replaced after every step (its tensors are outputs of the program), and what the
step appended to a list is appended after every step. A place that got tensors and held none before
is a *new place*: the step may have found it empty, and may do something else next time, so
``CreatedState`` looks into it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from operator import is_
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fulgurite.backends.csx.contract import holds_traced, is_proxy, may_collect
from fulgurite.backends.csx.diagnostics.trace_errors import StateChanged, UnsupportedState
from fulgurite.backends.csx.diagnostics.user_lines import UserLine
from fulgurite.backends.csx.hyperparams.traced_float import tensor_of_its_own
from fulgurite.backends.csx.objects.leaves import (
    DEEPEST,
    AttributeTree,
    Path,
    Trees,
    held_in,
    put_back,
    same,
)
from fulgurite.backends.csx.state import (
    NewPlace,
    OptimizerEntry,
    PathStep,
    Place,
    SideEffects,
    StateInput,
    StateTensor,
    brief,
)
from fulgurite.backends.patches import MISSING

Items = list[tuple[PathStep, Any]]


class AppendedList:
    """A list or deque to which the program appends after every step what the step appended.

    Where the host has taken the list away since, it begins again, as the step's code would begin
    it: ``self.by.setdefault("y", []).append(y)`` after ``self.by.clear()``.
    """

    def __init__(self, tree: AttributeTree, path: Path) -> None:
        self.place = tree.place(path)
        self._tree, self._path = tree, path
        self._templates = [_emptied(tree[path[: i + 1]]) for i in range(len(path))]

    def __getitem__(self, key: Any) -> AppendedList:
        return self  # a program writes container[key].extend(values), whatever the container is

    def begin(self) -> Place | None:
        """Put an empty list there if there is none.

        Returns the place that was empty: the list's own, or that of a container around it. None
        where the list is there.
        """
        paths = [self._path[:i] for i in range(len(self._path) + 1)]
        empty = next((path for path in paths if path not in self._tree), None)
        if empty is None:
            return None
        AppendedList.extend(self, [])
        return self._tree.place(empty)

    def extend(self, values: list[Any]) -> None:
        """Append values, to a new list where there is none."""
        held = self.place.get(MISSING)
        if held is MISSING:
            for i, template in enumerate(self._templates, start=1):
                if template is not None and self._path[:i] not in self._tree:
                    self._tree[self._path[:i]] = copy(template)
            held = self._tree[self._path]
        held.extend(values)


class RebuiltList(AppendedList):
    """A list or tuple that the step replaces by a longer one: ``self.outs = self.outs + [y]``."""

    def extend(self, values: list[Any]) -> None:
        """Put another one there, with the values at its end; who holds the old one keeps it."""
        before = self.place.get()
        self.place.put(before + type(before)(values))


def _emptied(value: Any) -> Any:
    """A container of the same kind with nothing in it; None for other objects."""
    if not isinstance(value, (list, dict, deque)):
        return None
    made = copy(value)
    made.clear()
    return made


def place_of_list(place: Place) -> Place:
    """The place where a list lies that the program makes longer, whichever way."""
    return place.container.place if isinstance(place.container, AppendedList) else place


class SharedTensorSplit(Exception):
    """The step gives places that share one tensor different ones.

    Eagerly they hold different tensors from then on: so they are split before the first step, and
    the step is traced again.
    """

    def __init__(self, held: list[StateTensor]) -> None:
        super().__init__()
        self._held = held

    def split(self) -> None:
        """Give each place memory of its own; no step has written that of the one tensor."""
        for held in self._held:
            for place in held.places[1:]:
                place.put(held.tensor.detach().clone())


def check_ties(state: Iterable[StateInput]) -> None:
    """Find tensors that are in several places, of which a step rebinds some.

    Raises:
        SharedTensorSplit: there are such. One that was also changed in place is none of them: it
            is refused elsewhere.
    """
    apart = []
    for held in [held for item in state for held in item.tensors]:
        in_tree = any(isinstance(place.container, AttributeTree) for place in held.places)
        if len(held.places) > 1 and in_tree and not isinstance(held.tensor, nn.Parameter):
            now = [place.get() for place in held.places]
            stays = all(value is held.tensor for value in now)
            # what the step has also written in place it wrote for all places: they stay one tensor
            if not stays and not _is_one_place(held, now) and not held.tensor._version:
                apart.append(held)
    if apart:
        raise SharedTensorSplit(apart)


def _is_one_place(held: StateTensor, now: list[Any]) -> bool:
    """Whether all places of a tensor are one: several attributes hold the same list or dict."""
    containers = [
        p.container.get(p.key[:-1]) if isinstance(p.container, AttributeTree) else p.container
        for p in held.places
    ]
    return all(map(is_, now, now[1:])) and all(map(is_, containers, containers[1:]))


def check_gradients(state: Iterable[StateInput]) -> None:
    """Refuse a gradient that would be lost: of a leaf that no module or optimizer holds as well.

    Raises:
        UnsupportedState: the step computed one, and left it.
    """
    for held in [held for item in state for held in item.tensors]:
        in_tree = all(isinstance(place.container, AttributeTree) for place in held.places)
        if in_tree and isinstance(held.tensor.grad, FakeTensor):
            raise UnsupportedState(
                f"{held.places[0].name} requires a gradient, but is no parameter of a module or an"
                " optimizer.",
                remedy="nn.ParameterList, nn.ParameterDict, or an attribute of the module; where"
                " none is wanted .requires_grad_(False)",
            )


class TreeChanges:
    """What a step changed in trees.

    Args:
        trees: as they were.
        effects: receives what is to be done after every step.
        is_constant: whether a traced tensor follows from constants alone; it may be cached.
        line: the user's line that is to blame.
        rebuilt: places of lists that an earlier trace found to be rebuilt longer.
    """

    def __init__(
        self,
        trees: Trees,
        state: Iterable[StateInput],
        effects: SideEffects,
        is_constant: Callable[[Tensor], bool],
        line: Callable[[], UserLine | None],
        rebuilt: set[str],
    ) -> None:
        self._trees, self._effects = trees, effects
        self._is_constant, self._line, self._rebuilt = is_constant, line, rebuilt
        self._held = {
            place: held
            for item in state
            for held in item.tensors
            for place in held.places
            if isinstance(place.container, AttributeTree)
        }
        self._seen: set[int] = set()

    def collect(self) -> set[Place]:
        """Undo them; returns the attributes that were looked at.

        Raises:
            UnsupportedState: the step takes tensors away.
        """
        for tree, before in self._trees.roots:
            now = tree.root.get(MISSING)
            if now is before:
                self._content(now, tree, ())
            elif holds_traced(now):
                self._replaced(tree, (), before, now)
        return {tree.root for tree, _ in self._trees.roots}

    def _content(self, value: Any, tree: AttributeTree, path: Path) -> None:
        """Compare what is in a container or an object that still is where it was."""
        if id(value) not in self._trees.content or id(value) in self._seen:
            return
        self._seen.add(id(value))
        before, now = self._trees.content[id(value)][1], held_in(value) or []
        if not same(now, before):
            added = _added(value, before, now)
            if added and holds_traced(added):
                added = pytree.tree_map(tensor_of_its_own, added)  # a later step finds it as state
                self._appended(value, before, added, tree, path)
            else:
                self._changed(value, before, now, tree, path)
        for step, item in before:
            if not isinstance(item, Tensor):
                self._content(item, tree, (*path, step))

    def _appended(
        self, value: Any, before: Items, added: list[Any], tree: AttributeTree, path: Path
    ) -> None:
        place = tree.place(path)
        self._effects.append_after(Place(AppendedList(tree, path), None, place.name), added)
        put_back(value, before)
        # a full deque stays as long; who reads a list in an attribute itself, ``attributes`` sees
        rotates = isinstance(value, deque) and len(before) == value.maxlen
        rotates = rotates and all(isinstance(item, Tensor) for _, item in before)
        watched = not path and type(value) is list and may_collect([item for _, item in before])
        if not rotates and not watched:
            self._new_place(place, value, added, grows=True)

    def _changed(
        self, value: Any, before: Items, now: Items, tree: AttributeTree, path: Path
    ) -> None:
        was, is_now = dict(before), dict(now)
        for step, item in before:
            leaves = () if step in is_now else pytree.tree_leaves(item)
            if any(isinstance(leaf, Tensor) for leaf in leaves):
                raise UnsupportedState(
                    f"The step takes {tree.place((*path, step)).name} away, where the next step"
                    " would look for it.",
                    line=self._line(),
                    remedy="keep its place filled, and change its value",
                )
        for step, item in now:
            old = was.get(step, MISSING)
            if item is not old and holds_traced(item):
                self._replaced(tree, (*path, step), old, item)

    def _replaced(self, tree: AttributeTree, path: Path, before: Any, now: Any) -> None:
        place, now = tree.place(path), pytree.tree_map(tensor_of_its_own, now)
        if isinstance(now, Tensor) and place in self._held:
            return  # state, which ``sort_state`` deals with
        if isinstance(before, Tensor):
            raise UnsupportedState(
                f"The step replaced {place.name}, which is a parameter or a buffer of a"
                " module too, or one of a great many.",
                line=self._line(),
                remedy="change it in place (tensor.copy_(...)), or give it memory of its own before"
                " fit (.clone())",
            )
        place.put(before)
        # longer in each step, it would be another output in each: only its end is one
        grows = _begins_with(now, before) or place.name in self._rebuilt
        if grows:
            rebuilt = Place(RebuiltList(tree, path), None, place.name)
            self._effects.append_after(rebuilt, list(now[len(before) :]))
        else:
            self._effects.set_after([place], now)
            # tensors in what was there go with it: the next step finds others in their places
            self._effects.rebound += [
                held
                for other, held in self._held.items()
                if other.container is tree and other.key[: len(path)] == path
            ]
        if grows or _structure(before) != _structure(now):
            self._new_place(place, before, now, grows)

    def _new_place(self, place: Place, before: Any, now: Any, grows: bool) -> None:
        leaves = pytree.tree_leaves(now)
        # a table of constants that the step caches is the same on every step: nothing to look into
        traced = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        if any(map(is_proxy, leaves)) or not all(map(self._is_constant, traced)):
            self._effects.new_places.append(NewPlace(place=place, grows=grows))
        elif traced and before in (MISSING, None) and not grows:
            self._effects.tables.append(place)


class ConstantTables:
    """Tables that a step makes of constants where it finds none, and that it leaves there.

    Eagerly the first step alone makes one, and later steps find what the host has done to it since.
    A program makes it again in every step, so that the host may not change it.

    Args:
        places: of the tables.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self._places = tuple(places)

    def __bool__(self) -> bool:
        return bool(self._places)

    def mark(self) -> None:
        """A program has filled the places."""
        for _, tensor in self._tensors():
            vars(tensor)[_MADE] = tensor._version

    def check(self) -> None:
        """Verify that what is there now comes from a program.

        Raises:
            StateChanged: the host put something there, or changed it in place.
        """
        for place, tensor in self._tensors():
            if vars(tensor).get(_MADE) != tensor._version:
                raise StateChanged(
                    f"{place.name} was made in the step, of constants alone, and the host has"
                    " changed it since. The program makes it again in every step.",
                    remedy="make it in __init__() or configure_model(): steps then read what the"
                    " host puts there",
                )

    def _tensors(self) -> Iterator[tuple[Place, Tensor]]:
        for place in self._places:
            for leaf in pytree.tree_leaves(place.get()):
                if isinstance(leaf, Tensor):
                    yield place, leaf


_MADE = "fulgurite_made"  # on a tensor: its version, when a program left it


def order_of(place: Place, owners: dict[int, str], trees: dict[str, int]) -> tuple[int, str]:
    """The key by which outputs are sorted: two traces of one step list them in the same order.

    ``owners`` are paths of modules by the identity of their attributes, ``trees`` places in order.
    """
    if isinstance(place.container, AttributeTree):
        return trees.get(place.name, len(trees)), place.name
    if isinstance(place.container, OptimizerEntry):
        return len(trees), ""  # in the order in which the optimizer makes them
    return -1, f"{owners.get(id(place.container), '')}.{place.key}"


def _added(value: Any, before: Items, now: Items) -> list[Any] | None:
    """What was put at a list's or a deque's end, where nothing else was changed."""
    if not isinstance(value, (list, deque)):
        return None
    old, new = [item for _, item in before], [item for _, item in now]
    # a deque that is full loses one at its begin for each that is appended
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


def _structure(value: Any, levels: int = DEEPEST) -> Any:
    """Where in a value there are tensors, with dtype and shape, and values that were passed on.

    A place whose structure stays is no new place: the next step finds there what this one found.
    """
    if is_proxy(value):
        return "passed on"
    if isinstance(value, Tensor):
        return brief(value)
    items = None if isinstance(value, nn.Module) or not levels else held_in(value)
    if items is None:
        return None
    found = {step: _structure(item, levels - 1) for step, item in items}
    return {step: structure for step, structure in found.items() if structure} or None
