"""What runs a graph: its kernels in order, who made each, and which operations it computes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import fx

from fulgurite.backends.csx.compile.programs import compiler_log
from fulgurite.backends.csx.compile.programs.steps import Extern, HasKernel, Kernel, Program, typed
from fulgurite.backends.csx.diagnostics.regions import Region
from fulgurite.backends.csx.diagnostics.user_lines import line_of
from fulgurite.backends.csx.graph.collectives import is_collective
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.op_schema import is_view

INDEX = "program.json"  # its steps, and which kernel is in which of its modules
PROGRAM = "program.py"
_FILE = "kernels.json"


class KernelFailed(UserWarning):
    """A generated kernel did not compile, or was wrong, and others do its work."""


class Maker(Enum):
    """Who made a kernel."""

    LIBRARY = "library"  # of torch's own, by the fabric's table
    GENERATED = "generated"  # by the compiler, for this program
    HOST = "host"  # what the library lacks and nobody generated: the host's path
    COLLECTIVE = "collective"  # of torch.distributed, by all processes together


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


class How(StrEnum):
    """How a generated kernel failed."""

    FAILED = "failed"  # in the C++ compiler
    TEMPLATE = "template"  # one that "aggressive" would have tried could not be generated


@dataclass(frozen=True, slots=True)
class UnusedKernel:
    """A generated kernel that is not used.

    Args:
        kernel: its name, where it has one.
        operations: what it was to compute, as of ``KernelCall``.
        printed: what the compiler printed.
        how: it failed.
    """

    kernel: str
    operations: list[int]
    printed: str
    how: How


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What runs a graph.

    Args:
        calls: of kernels, in the order in which they run.
        sources: the C++ of the generated kernels, by name.
        steps: of the compiled program; None where operations run one by one.
        program: the same as Python.
        seconds: what making it took, by phase (``generate``, ``compile``), when it was made.
        unused: generated kernels that are not used.
    """

    calls: tuple[KernelCall, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    steps: Program | None = None
    program: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    unused: tuple[UnusedKernel, ...] = ()


def one_by_one(graph: Graph, has: HasKernel) -> Kernels:
    """What runs a graph operation by operation, where torch ``has`` kernels for some."""
    calls = []
    for i, node in enumerate(graph.operations()):
        if not is_view(node.target):
            name = str(node.target)
            maker = _without_compiler([node], has)
            calls.append(KernelCall(kernel=name, maker=maker, operations=(i,)))
    return Kernels(calls=tuple(calls))


def write(
    folder: Path,
    calls: Iterable[Kernel | Extern],
    sources: Mapping[str, str],
    seconds: Mapping[str, float],
    unused: Sequence[UnusedKernel] = (),
) -> None:
    """Write down what runs a graph.

    Args:
        folder: of the compiled program.
        calls: the steps that compute, with operations as the graph numbers them.
        sources, seconds, unused: as of ``Kernels``.
    """
    rows = [
        {
            "kernel": call.kernel,
            "generated": isinstance(call, Kernel),
            "operations": call.at,
            "region": call.region,
            "template": call.template if isinstance(call, Kernel) else "",
        }
        for call in calls
    ]
    told = {"calls": rows, "sources": dict(sources), "seconds": dict(seconds)}
    text = json.dumps({**told, "unused": [asdict(one) for one in unused]})
    (folder / _FILE).write_text(text)


def read(folder: Path, graph: Graph, has: HasKernel) -> Kernels:
    """What runs a graph that was compiled into a folder, where torch ``has`` kernels for some.

    Where only its fused regions were compiled, all else runs operation by operation.

    An operation that the compiler made a part of another one (a sum of the product before it) is
    the call's of the one that it went into.
    """
    told = json.loads((folder / _FILE).read_text())
    nodes = list(graph.operations())
    inside = [list(row["operations"]) for row in told["calls"]]
    whole = (folder / PROGRAM).exists()
    # where its fused regions alone were compiled, all else runs by itself, and went into nothing
    for i, k in _gone_into(nodes, inside) if whole else ():
        inside[k].append(i)
    calls = []
    for row, operations in zip(told["calls"], inside, strict=True):
        operations = [i for i in operations if not is_view(nodes[i].target)]
        maker = Maker.GENERATED
        # of a library's kernel the table decides, as where nothing is compiled
        if not row["generated"]:
            maker = _without_compiler([nodes[i] for i in operations], has)
        region = Region.parsed(row["region"])
        calls.append(
            KernelCall(
                kernel=row["kernel"],
                maker=maker,
                operations=tuple(sorted(operations)),
                region="" if region is None else region.described,
                tuned=f"chosen, {row['template']}" if row["template"] else "",
            )
        )
    if not whole:
        calls = _with_others(graph, calls, has)
    return Kernels(
        calls=tuple(calls),
        sources=told["sources"],
        steps=typed(json.loads((folder / INDEX).read_text())["program"]) if whole else None,
        program=(folder / PROGRAM).read_text() if whole else "",
        seconds=told["seconds"],
        unused=tuple(map(_unused, told["unused"])),
    )


def warn_of_unused(graph: Graph, folder: Path) -> None:
    """Warn of generated kernels that are not used, once for each program."""
    try:
        told = json.loads((folder / _FILE).read_text())
    except OSError:  # removed by another process since it was loaded
        return
    for one in map(_unused, told["unused"]):
        every = [node for i, node in enumerate(graph.operations()) if i in one.operations]
        nodes = [node for node in every if not is_view(node.target)]
        line = line_of(nodes[0]) if nodes else None
        names = ", ".join(dict.fromkeys(str(node.target) for node in nodes[:4]))
        first = [*(text for text in one.printed.splitlines() if "error" in text), "it failed"][0]
        why, instead = _TOLD[one.how]
        why = why.format(kernel=one.kernel, names=names, first=first.removeprefix("error: "))
        where = f" at {line}" if line else ""
        log = compiler_log.with_log(why, compiler_log.keep(one.printed))
        rank_zero_warn(f"{log}. {instead}{where}.", category=KernelFailed)


def _unused(row: dict[str, Any]) -> UnusedKernel:
    return UnusedKernel(**{**row, "how": How(row["how"])})


_TOLD = {
    How.FAILED: (
        "The C++ compiler failed on the generated kernel {kernel} ({names}): {first}",
        "The library's kernels compute it",
    ),
    How.TEMPLATE: (
        "A kernel that autogen_policy='aggressive' tries could not be generated: {first}",
        "Its part of the program is compiled as by 'default', beginning",
    ),
}
"""What is said of them, and of what computes it instead, before a line of the user's."""


def _with_others(graph: Graph, calls: Sequence[KernelCall], has: HasKernel) -> list[KernelCall]:
    """The calls of fused regions among those of all other operations."""
    inside = {i for call in calls for i in call.operations}
    others = [call for call in one_by_one(graph, has).calls if inside.isdisjoint(call.operations)]
    return sorted([*calls, *others], key=lambda call: call.operations[-1])


def _gone_into(nodes: Sequence[fx.Node], inside: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Operations that compute something and are in no call, each with the call that it counts for.

    The compiler made such an operation a part of the one that reads its result, maybe through
    views: it counts for the call of that one.
    """
    # the other way round: of what two kernels compute, the first one's number stays
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


def _without_compiler(nodes: Sequence[fx.Node], has: HasKernel) -> Maker:
    if any(is_collective(node.target) for node in nodes):
        return Maker.COLLECTIVE
    known = any(has(node.target) for node in nodes)
    return Maker.LIBRARY if known or not nodes else Maker.HOST
