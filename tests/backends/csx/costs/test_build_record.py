"""What is noted while a program is built: passes by the graph they led to, warnings shown."""

from __future__ import annotations

import warnings

import torch
from graphs import graph_of

from fulgurite.backends.csx.costs.build_record import kinds, recording_build
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.passes import lower


def copied(graph: Graph) -> Graph:
    """A pass."""
    return graph.with_operations(graph.copied())


def same(graph: Graph) -> Graph:
    """A pass that has nothing to do."""
    return graph


def later(graph: Graph) -> Graph:
    """A pass of a compiler."""
    return graph.with_operations(graph.copied())


def test_passes_are_of_the_graph_that_they_led_to_and_of_what_came_of_it() -> None:
    first = graph_of(lambda x: x + 1, torch.ones(2))
    second = graph_of(lambda x: x * 2, torch.ones(2))
    with recording_build() as noted:
        one = lower(first, (copied, same, copied))
        other = lower(second, (copied, same))
        lower(one, (later, same))
        lower(other, (later,))
        lower(one, (copied,))  # a second thing that is made of it
    names = [p.name for p in noted.of(one)]
    assert names == ["copied", "same", "copied", "later", "same", "copied"]
    assert [p.name for p in noted.of(other)] == ["copied", "same", "later"]
    assert noted.of(one)[0].before is first
    assert noted.of(second) == []


def test_kinds_are_counted_by_name() -> None:
    graph = graph_of(lambda x: (x + 1) * 2 + torch.relu(x), torch.ones(2, 2))
    assert kinds(graph) == {"add": 2, "mul": 1, "relu": 1}


def test_a_warning_is_noted_once_and_shown_as_ever() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with recording_build() as noted:
            for _ in range(2):
                warnings.warn("look", UserWarning, stacklevel=1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.warn("unseen", UserWarning, stacklevel=1)
        warnings.warn("afterwards", UserWarning, stacklevel=1)
    assert [str(one.message) for one in shown] == ["look", "look", "afterwards"]
    [one] = noted.warnings
    assert (one.category, one.text) == ("UserWarning", "look")
    assert one.place.startswith(f"{__file__}:")
