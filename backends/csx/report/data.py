"""A program that was built, as plain data: what ``report.json`` holds and the page shows.

A report has ``format``, who wrote it when, and ``programs``; a program has its entry points, what
building it took, its passes and warnings. ``SHAPE`` is the whole form. Sizes end in their unit.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, fx

from fulgurite.backends.csx.compile.fabric import Loaded
from fulgurite.backends.csx.compile.programs.made import KernelCall, Made, Maker
from fulgurite.backends.csx.diagnostics.user_lines import line_of
from fulgurite.backends.csx.graph.collectives import is_collective
from fulgurite.backends.csx.graph.flops import Product
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.op_schema import is_view
from fulgurite.backends.csx.graph.passes import INTERPRETER_PASSES
from fulgurite.backends.csx.report.costs import Data, costs, place_of
from fulgurite.backends.csx.report.noting import Noted, kind_of, kinds

FORMAT = 2
VIEW, REMOVED = "view", "removed"
"""In place of an operation's maker: it only looks at memory; the compiler needed no kernel for it.
"""
_INTERPRETER = {one.__name__ for one in INTERPRETER_PASSES}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEntry:
    """An entry point: its name, its graph, the products that were traced, and what runs it.

    ``loaded`` is None where it was only checked.
    """

    name: str
    graph: Graph
    products: tuple[Product, ...]
    loaded: Loaded | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A program, as the one who built it knows it.

    Args:
        stage: ``training``.
        headline: the line that announced it.
        fabric: what runs it, in words.
        reason: why it is not the stage's first.
        inputs: leaves of the batch, ``batch[0]: float32[32, 64]``.
        state: tensors that stay, ``self.net.0.weight: float32[128, 64], replicated, updated``.
        batch_size: samples a step.
        processes: how many train together.
        seconds: what building took, by phase.
        entries: its entry points.
        noted: passes and warnings.
    """

    stage: str
    headline: str
    fabric: str
    reason: str
    inputs: Sequence[str]
    state: Sequence[str]
    batch_size: int
    processes: int = 1
    seconds: Mapping[str, float]
    entries: Sequence[BuiltEntry]
    noted: Noted


def program_data(built: Built) -> Data:
    """A program as plain data."""
    return {
        "stage": built.stage,
        "headline": built.headline,
        "fabric": built.fabric,
        "reason": built.reason,
        "inputs": list(built.inputs),
        "state": list(built.state),
        "seconds": dict(built.seconds),
        "warnings": [asdict(one) for one in built.noted.warnings],
        "entries": [_entry(one, built) for one in built.entries],
    }


def _entry(entry: BuiltEntry, built: Built) -> Data:
    loaded = entry.loaded
    graph = entry.graph if loaded is None or loaded.runs is None else loaded.runs
    made = None if loaded is None else loaded.made()
    threads = 1 if loaded is None else loaded.threads
    cost = costs(graph, made, entry.products, threads, built.batch_size, built.processes)
    calls = [
        {**_call(call), **numbers}
        for call, numbers in zip(made.calls if made else (), cost.pop("calls"), strict=True)
    ]
    return {
        "name": entry.name,
        "how": "checked" if loaded is None else loaded.how,
        "compiled": loaded is not None and loaded.compiled,
        "threads": 0 if loaded is None else loaded.threads,
        "processes": built.processes,
        "measured": None,  # when the run has ended
        # of a program from the cache they are an earlier process's
        "seconds": dict(made.seconds) if made and loaded and loaded.built else {},
        "operations": _operations(graph, made),
        "passes": _passes(entry, built.noted),
        "calls": calls,
        "sources": {} if made is None else dict(made.sources),
        "calling": "" if made is None else made.program,
        **cost,
    }


def _call(call: KernelCall) -> Data:
    return {
        "kernel": call.kernel,
        "maker": call.maker.value,
        "operations": list(call.operations),
        "region": call.region,
        "tuned": call.tuned,
    }


def _operations(graph: Graph, made: Made | None) -> list[Data]:
    makers: dict[int, str] = {}
    for call in reversed(made.calls if made else ()):  # what is computed twice: by the first
        makers.update(dict.fromkeys(call.operations, call.maker.value))
    without = REMOVED if made is not None and made.calls else ""
    if made is not None:  # the compiler tells of what makes its operand, too
        collective = (i for i, one in enumerate(graph.operations()) if is_collective(one.target))
        makers.update(dict.fromkeys(collective, Maker.COLLECTIVE.value))
    return [
        _operation(node, VIEW if is_view(node.target) else makers.get(i, without))
        for i, node in enumerate(graph.operations())
    ]


def _operation(node: fx.Node, maker: str) -> Data:
    (module, backward), line = place_of(node), line_of(node)
    return {
        "kind": kind_of(node.target),
        "maker": maker,
        "module": module,
        "backward": backward,
        "line": "" if line is None else str(line),
        "source": "" if line is None else line.source,
        "result": ", ".join(_layouts(node.meta.get("val"))),
    }


def _layouts(value: Any) -> list[str]:
    return [
        f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}"
        for one in pytree.tree_leaves(value)
        if isinstance(one, Tensor)
    ]


def _passes(entry: BuiltEntry, noted: Noted) -> list[Data]:
    """What each pass changed; those for a compiled program's check are left out."""
    compiled = entry.loaded is not None and entry.loaded.compiled
    rows = []
    for one in noted.of(entry.graph):
        if compiled and one.name in _INTERPRETER:
            continue
        before, after = kinds(one.before), kinds(one.after)
        changes = {
            kind: [before[kind], after[kind]]
            for kind in sorted({*before, *after})
            if before[kind] != after[kind]
        }
        row = {"name": one.name, "before": before.total(), "after": after.total()}
        rows.append({**row, "changes": changes})
    return rows


def report_data(programs: Sequence[Data], options: Mapping[str, Any], written: str) -> Data:
    """A whole report.

    Args:
        programs: those built so far.
        options: of the backend, where they are not the default.
        written: when, in ISO 8601.
    """
    return {
        "format": FORMAT,
        "written": written,
        "versions": {
            **{name: metadata.version(name) for name in ("fulgurite", "torch", "lightning")},
            "python": platform.python_version(),
        },
        "options": dict(options),
        "programs": list(programs),
    }
