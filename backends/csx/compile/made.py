"""What runs a graph: its kernels in order, who made each, and which operations it computes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from torch import fx

from fulgurite.backends.csx.compile import library
from fulgurite.backends.csx.compile.scheduling import PartCall
from fulgurite.backends.csx.compile.translation_unit import Kernel
from fulgurite.backends.csx.diagnostics.regions import Region
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.op_schema import is_view

_FILE = "made.json"


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
        operations: what it computes, as positions in ``graph.operations()``. Views are in none;
            what two kernels compute is in both.
        region: the loss whose fused region it is: ``CrossEntropyLoss forward``.
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
            name = str(node.target)
            calls.append(KernelCall(kernel=name, maker=_without_compiler([node]), operations=(i,)))
    return Made(calls=tuple(calls))


def write(
    folder: Path,
    calls: Iterable[tuple[PartCall, Kernel | None, tuple[int, ...]]],
    seconds: Mapping[str, float],
) -> None:
    """Write down what runs a graph.

    Args:
        folder: of the compiled program.
        calls: each with its kernel, where that was generated, and the operations of its part.
        seconds: as of ``Made``.
    """
    sources: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    for call, kernel, operations in calls:
        if kernel is not None:
            sources[kernel.name] = kernel.source
        numbers = [operations[i] for i in call.at if operations[i] >= 0]
        name = call.kernel if kernel is None else kernel.name
        row = {"kernel": name, "generated": call.generated, "operations": sorted(set(numbers))}
        rows.append({**row, "region": call.region, "template": call.template})
    text = json.dumps({"calls": rows, "sources": sources, "seconds": dict(seconds)})
    (folder / _FILE).write_text(text)


def read(folder: Path, graph: Graph, program: str) -> Made:
    """What runs a graph that was compiled into a folder.

    An operation that the compiler made a part of another one (a sum of the product before it) is
    the call's of the one that it went into.
    """
    told = json.loads((folder / _FILE).read_text())
    nodes = list(graph.operations())
    inside = [list(row["operations"]) for row in told["calls"]]
    for i, k in _gone_into(nodes, inside):
        inside[k].append(i)
    calls = []
    for row, operations in zip(told["calls"], inside, strict=True):
        operations = [i for i in operations if not is_view(nodes[i].target)]
        maker = Maker.GENERATED
        if not row["generated"]:
            maker = _without_compiler([nodes[i] for i in operations])
        region = Region.parsed(row["region"])
        calls.append(
            KernelCall(
                kernel=row["kernel"],
                maker=maker,
                operations=tuple(sorted(operations)),
                region="" if region is None else region.described,
                tuned=row["template"],
            )
        )
    sources, seconds = told["sources"], told["seconds"]
    return Made(calls=tuple(calls), sources=sources, program=program, seconds=seconds)


def _gone_into(nodes: Sequence[fx.Node], inside: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Operations that compute and are in no call, each with the call that reads what it gives."""
    call_of = {nodes[i]: k for k, operations in reversed([*enumerate(inside)]) for i in operations}
    found = []
    for i, node in reversed([*enumerate(nodes)]):
        if node in call_of:
            continue
        readers = [call_of[user] for user in node.users if user in call_of]
        if readers:
            call_of[node] = readers[0]  # through views too
            if not is_view(node.target):
                found.append((i, readers[0]))
    return found


def _without_compiler(nodes: Sequence[fx.Node]) -> Maker:
    known = any(library.has(node.target) for node in nodes)
    return Maker.LIBRARY if known or not nodes else Maker.HOST
