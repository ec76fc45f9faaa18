"""What happens while a program is built: the passes that run, and the warnings that are shown."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.op_schema import operation_name
from fulgurite.backends.csx.graph.passes import observing_passes
from fulgurite.backends.patches import applied, patches_of

_WHY = "warnings of a build are in its report, and shown as ever"


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass that ran: its name, the graph that it was given, and the one that it made."""

    name: str
    before: Graph
    after: Graph


@dataclass(frozen=True, slots=True)
class ShownWarning:
    """A warning that was shown: its class, its text, and the line that it names."""

    category: str
    text: str
    place: str


@dataclass(slots=True)
class BuildRecord:
    """What happened while a program was built: the passes and warnings that its report shows.

    Attributes:
        passes: in the order in which they ran.
        warnings: in the order in which they were shown, each once.
    """

    passes: list[Pass] = field(default_factory=list)
    warnings: list[ShownWarning] = field(default_factory=list)

    def of(self, graph: Graph) -> list[Pass]:
        """The passes that led to a graph, and those that ran on it after that."""
        made = [i for i, one in enumerate(self.passes) if one.after.module is graph.module]
        if not made:
            return []
        led: list[Pass] = []
        wanted = graph
        for one in reversed(self.passes[: made[-1] + 1]):
            if one.after.module is wanted.module:
                led, wanted = [one, *led], one.before
        later = self.passes[made[-1] + 1 :]
        # a pass makes another graph of the same inputs: by those the later ones are told
        return led + [one for one in later if one.before.inputs is graph.inputs]


@contextlib.contextmanager
def recording_build() -> Iterator[BuildRecord]:
    """Record what happens while the block runs."""
    record, show = BuildRecord(), warnings.showwarning

    def showwarning(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        shown = ShownWarning(category.__name__, str(message), f"{filename}:{lineno}")
        if shown not in record.warnings:
            record.warnings.append(shown)
        show(message, category, filename, lineno, *rest)

    patches = patches_of(warnings, {"showwarning": showwarning}, why=_WHY, checked="Python 3.11")
    with (
        applied(patches),
        observing_passes(
            lambda name, before, after: record.passes.append(Pass(name, before, after))
        ),
    ):
        yield record


def kinds(graph: Graph) -> Counter[str]:
    """How many operations a graph has of each kind."""
    return Counter(kind_of(node.target) for node in graph.operations())


def kind_of(target: Any) -> str:
    """What an operation is called: ``addmm``; ``getitem`` for one of several results."""
    return operation_name(target) or getattr(target, "__name__", str(target))
