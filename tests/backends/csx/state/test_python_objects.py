"""What is in Python objects is found, and is the same again after it was put back."""

from __future__ import annotations

import array
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torchmetrics import Metric

from fulgurite.backends.csx.state.python_objects import (
    Owner,
    Snapshot,
    child_name,
    children,
    content,
    elements,
    owner_of,
    refill,
)
from fulgurite.optim.optimizer import Optimizer


def what(container: Any) -> list[Any]:
    """What a container holds, in its order; a set has none."""
    if isinstance(container, set):
        return sorted(container)
    return list(elements(container).items()) if isinstance(container, dict) else [*container]


@pytest.mark.parametrize(
    ("container", "change"),
    [
        ([1, 2], lambda items: items.__setitem__(0, 3)),
        ([1, 2], lambda items: items.reverse()),
        ([1, 2], lambda items: items.append(3)),
        ([1, 2], lambda items: items.pop()),
        ({1: 2}, lambda items: items.update({1: 3})),
        ({1: 2, 3: 4}, lambda items: items.update({1: items.pop(1)})),
        (OrderedDict({1: 2, 3: 4}), lambda items: items.move_to_end(1)),
        ({1, 2}, lambda items: items.symmetric_difference_update({1, 3})),
    ],
)
@pytest.mark.parametrize("inside", [lambda one: one, lambda one: {"a": [one]}])
def test_a_container_that_was_changed_holds_what_it_held(
    container: Any, change: Callable[[Any], Any], inside: Callable[[Any], Any]
) -> None:
    container = container.copy()
    before = what(container)
    owner = SimpleNamespace(held=inside(container))
    snapshot = Snapshot([owner])
    change(container)
    assert what(container) != before
    snapshot.restore()
    assert what(container) == before


class Plain:
    """An object of the user's, with slots in a base of its class."""

    __slots__ = ("__dict__", "empty", "filled")

    def __init__(self) -> None:
        self.filled, self.other = 1, 2


class OneSlot:
    """Its only slot is given as a string."""

    __slots__ = "value"

    def __init__(self) -> None:
        self.value = 1


@pytest.mark.parametrize(
    ("kind", "owner"),
    [
        (Plain, Owner.USER),
        (np.ndarray, Owner.PACKAGE),
        (pytest.Item, Owner.PACKAGE),
        (OrderedDict, Owner.STANDARD),
        (int, Owner.STANDARD),
        (Optimizer, Owner.FULGURITE),
        (torch.nn.Linear, Owner.FRAMEWORK),
        (pl.Trainer, Owner.FRAMEWORK),
        (Metric, Owner.FRAMEWORK),
    ],
)
def test_a_class_has_one_owner(kind: type, owner: Owner) -> None:
    assert owner_of(kind) is owner
    assert owner.is_library is (owner is not Owner.USER)
    assert owner.is_named_library is (owner not in (Owner.USER, Owner.PACKAGE))


class Counting(dict[str, int]):
    """A dict whose own methods change it when it is asked."""

    def __getitem__(self, key: str) -> int:
        self.asked = True
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: int) -> None:
        raise AssertionError("its own method is not to run")


def generator_state(generator: Any) -> str:
    """The state of any generator, to be compared."""
    return repr(content(generator))


@pytest.mark.parametrize(
    ("made", "change"),
    [
        (lambda: [1, [2]], lambda one: one.reverse()),
        (lambda: deque([1, 2], maxlen=2), lambda one: one.append(3)),
        (lambda: {"a": 1, "b": 2}, lambda one: one.update(a=one.pop("a"))),
        (lambda: defaultdict(list, a=1), lambda one: one["b"]),
        (lambda: Counting(a=1, b=2), lambda one: dict.__setitem__(one, "a", 3)),
        (lambda: {1, 2}, lambda one: one.add(3)),
        (lambda: np.arange(3), lambda one: one.fill(7)),
        (lambda: bytearray(b"ab"), lambda one: one.extend(b"c")),
        (lambda: array.array("i", [1]), lambda one: one.append(2)),
        (lambda: random.Random(0), lambda one: one.random()),
        (lambda: np.random.default_rng(0), lambda one: one.random()),
        (lambda: np.random.RandomState(0), lambda one: one.rand()),
        (Plain, lambda one: vars(one).update(other=3, new=4)),
        (Plain, lambda one: setattr(one, "empty", 3)),
        (OneSlot, lambda one: setattr(one, "value", 3)),
    ],
)
def test_what_changed_is_put_back(made: Callable[[], Any], change: Callable[[Any], Any]) -> None:
    value = made()
    before, text = content(value), generator_state(value)
    change(value)
    assert generator_state(value) != text
    refill(value, before)
    assert generator_state(value) == text


def test_a_dict_is_never_empty_while_it_is_put_back() -> None:
    """Another thread may read it."""
    seen: list[int] = []

    class Told:
        def __del__(self) -> None:
            seen.append(len(held))

    held: dict[str, Any] = {"a": 1, "b": 2}
    before = content(held)
    held |= {"b": Told(), "c": Told()}
    refill(held, before)
    assert held == {"a": 1, "b": 2}
    assert seen == [2, 2]


def test_children_are_items_or_attributes_with_their_names() -> None:
    held = {"a": [1, 2]}
    assert children(held, lambda _: False) == [((True, "a"), [1, 2])]
    assert children(torch.zeros(2), lambda _: True) is None
    assert children(Plain(), lambda _: False) is None
    found = dict(children(Plain(), lambda _: True) or [])
    assert found[False, "filled"] == 1
    assert found[False, "other"] == 2
    assert (False, "empty") in found
    assert child_name(child_name("self", (False, "by")), (True, "x")) == "self.by['x']"
