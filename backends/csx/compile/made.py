"""What runs a graph: its kernels in order, who made each, and which operations it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.op_schema import is_view


class Maker(Enum):
    """Who made a kernel."""

    LIBRARY = "library"  # of torch's own, by the table in ``library``
    GENERATED = "generated"  # by the compiler, for this program
    HOST = "host"  # what the library lacks and nobody generated: the host's path


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """One call of a kernel.

    Args:
        kernel: its name: ``aten.mm.default``, ``kernel_4f1c...``.
        maker: who made it.
        operations: what it computes, as positions in ``graph.operations()``. Views are in none.
        region: the loss whose fused region it is: ``loss (CrossEntropyLoss) forward``.
        tuned: how it was chosen among others, in words.
    """

    kernel: str
    maker: Maker
    operations: tuple[int, ...]
    region: str = ""
    tuned: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What runs a graph.

    Args:
        calls: of kernels, in the order in which they run.
        sources: the C++ of the generated kernels, by name.
        program: the Python that calls them; empty where operations run one by one.
        seconds: what making it took, by phase (``generate``, ``compile``), when it was made.
    """

    calls: tuple[KernelCall, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    program: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)


def one_by_one(graph: Graph) -> Made:
    """What runs a graph operation by operation."""
    calls = []
    for i, node in enumerate(graph.operations()):
        if not is_view(node.target):
            calls.append(KernelCall(kernel=str(node.target), maker=Maker.LIBRARY, operations=(i,)))
    return Made(calls=tuple(calls))
