"""A place on the host: what it holds, when two are the same, and what is set after a step."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fulgurite.backends.csx.graph.graph import storage_of
from fulgurite.backends.csx.state.storage import Place, SideEffects, StateTensor
from fulgurite.backends.patches import MISSING


def test_a_place_is_filled_and_emptied() -> None:
    held: dict[str, Any] = {}
    place = Place(held, "a")
    assert place.get(MISSING) is MISSING
    place.put(None)
    assert held == {"a": None}
    place.put(MISSING)
    place.put(MISSING)  # it is empty already
    assert held == {}


def test_places_are_the_same_by_the_object_that_holds_them_not_by_what_is_in_it() -> None:
    a: dict[Any, Any] = {}
    b: dict[Any, Any] = {}
    p, q = torch.zeros(2), torch.zeros(2)  # of which == makes no truth value
    assert Place(a, p, "one name") == Place(a, p, "another")
    assert Place(a, p) != Place(b, p)
    assert Place(a, p) != Place(a, q)
    assert len({Place(a, p), Place(a, p), Place(b, p), Place(a, q)}) == 3


def test_a_tensor_is_replaced_wherever_it_is_tied() -> None:
    held = {"a": torch.zeros(2), "b": torch.zeros(2)}
    other = torch.ones(2)
    StateTensor(held["a"], [Place(held, "a"), Place(held, "b")]).put(other)
    assert held["a"] is other
    assert held["b"] is other


def test_what_two_places_are_given_apart_does_not_share_memory_afterwards() -> None:
    held: dict[str, Any] = {}
    left = SideEffects()
    with FakeTensorMode():
        value = torch.zeros(2)
        left.set_after([Place(held, "a"), Place(held, "b")], value)
        left.set_after([Place(held, "c")], value)
        places, (a, b, c) = left.places_and_values()
    assert [place.key for place in places] == ["a", "b", "c"]
    assert a is b is value
    assert storage_of(c) != storage_of(a)
