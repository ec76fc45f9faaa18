"""What objects hold is remembered before a trace, and is the same again after one that failed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fulgurite.backends.csx.state.snapshot import Snapshot, elements


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
