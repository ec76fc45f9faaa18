"""An entry point of a program that was built, as plain data: what ``report.json`` holds of it.

What it costs is asked here of those who count it: FLOPs, bytes, memory, time. Sizes end in their
unit; numbers of kernels stand with their calls, those of modules by the module's name.
``backends/report`` says the whole form (``SHAPE``), writes it and shows it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict

import torch.utils._pytree as pytree
from torch import Tensor, fx

from fulgurite.backends.csx.compile.fabric import Loaded
from fulgurite.backends.csx.compile.programs.kernels import Kernels, Maker
from fulgurite.backends.csx.costs.build_record import BuildRecord, kind_of, kinds
from fulgurite.backends.csx.costs.exchange import gathered, messages, sent_bytes
from fulgurite.backends.csx.costs.graph_values import is_backward
from fulgurite.backends.csx.costs.machine import this_machine
from fulgurite.backends.csx.costs.memory import Memory, memory
from fulgurite.backends.csx.costs.roofline import roofline, work_of
from fulgurite.backends.csx.costs.timing import predicted_s
from fulgurite.backends.csx.costs.traffic import Traffic, moves, traffic
from fulgurite.backends.csx.diagnostics.user_lines import line_of, module_of, split_backward
from fulgurite.backends.csx.graph.collectives import is_collective
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.op_schema import is_view
from fulgurite.backends.csx.graph.passes import INTERPRETER_PASSES
from fulgurite.backends.csx.graph.products import Product
from fulgurite.backends.report.words import Data

VIEW, REMOVED = "view", "removed"
"""In place of an operation's maker: it only looks at memory; the compiler needed no kernel for it.
"""
_INTERPRETER = {one.__name__ for one in INTERPRETER_PASSES}


def entry_data(
    name: str,
    graph: Graph,
    products: Sequence[Product],
    loaded: Loaded | None,
    record: BuildRecord,
    batch_size: int,
    processes: int = 1,
    limit_bytes: int | None = None,
) -> Data:
    """An entry point of a program, as plain data.

    Args:
        name: its name.
        graph: its operations, as they were loaded.
        products: those that were traced.
        loaded: what runs it; None where it was only checked.
        record: the passes that ran while the program was built.
        batch_size: samples a step.
        processes: how many train together.
        limit_bytes: of parameters and optimizer state that are in memory at a time.
    """
    runs = graph if loaded is None or loaded.runs is None else loaded.runs
    kernels = None if loaded is None else loaded.kernels()
    threads = 0 if loaded is None else loaded.threads.most
    compiled = loaded is not None and loaded.compiled
    return {
        "name": name,
        "how": "checked" if loaded is None else loaded.how,
        "compiled": compiled,
        "threads": threads,
        "processes": processes,
        "measured": None,  # when the run has ended
        # of a program from the cache they are an earlier process's
        "seconds": dict(kernels.seconds) if kernels and loaded and loaded.built else {},
        "operations": _operations(runs, kernels),
        "passes": _passes(graph, compiled, record),
        **_costs(runs, kernels, products, threads, batch_size, processes, limit_bytes),
    }


def _operations(graph: Graph, kernels: Kernels | None) -> list[Data]:
    makers: dict[int, str] = {}
    for call in reversed(kernels.calls if kernels else ()):  # what is computed twice: by the first
        makers.update(dict.fromkeys(call.operations, call.maker.value))
    without = REMOVED if kernels is not None and kernels.calls else ""
    if kernels is not None:  # the compiler tells of what makes its operand, too
        collective = (i for i, one in enumerate(graph.operations()) if is_collective(one.target))
        makers.update(dict.fromkeys(collective, Maker.COLLECTIVE.value))
    return [
        _operation(node, VIEW if is_view(node.target) else makers.get(i, without))
        for i, node in enumerate(graph.operations())
    ]


def _operation(node: fx.Node, maker: str) -> Data:
    (module, backward), line = place_of(node), line_of(node)
    results = pytree.tree_leaves(node.meta.get("val"))
    layouts = [(one.dtype, list(one.shape)) for one in results if isinstance(one, Tensor)]
    return {
        "kind": kind_of(node.target),
        "maker": maker,
        "module": module,
        "backward": backward,
        "line": "" if line is None else str(line),
        "source": "" if line is None else line.source,
        "result": ", ".join(f"{dtype}{shape}".removeprefix("torch.") for dtype, shape in layouts),
    }


def _passes(graph: Graph, compiled: bool, record: BuildRecord) -> list[Data]:
    """What each pass changed; those for a compiled program's check are left out."""
    rows = []
    for one in record.of(graph):
        # the program's check made them: the operations one by one, with which it is compared
        if compiled and one.name in _INTERPRETER:
            continue
        before, after = kinds(one.before), kinds(one.after)
        changes = {
            kind: [before[kind], after[kind]]
            for kind in sorted({*before, *after})
            if before[kind] != after[kind]
        }
        sizes = {"before": before.total(), "after": after.total()}
        rows.append({"name": one.name, **sizes, "changes": changes})
    return rows


def place_of(node: fx.Node) -> tuple[str, bool]:
    """What an operation belongs to, and whether to its backward pass.

    It is a module, or the function of the user's where no module computes: ``training_step()`` for
    the loss, ``configure_optimizers()`` for the optimizer. Empty where neither is known.
    """
    return _place(module_of(node), str(line_of(node) or ""))


def _place(module: str, line: str) -> tuple[str, bool]:
    name, backward = split_backward(module)
    function = line.partition(" in ")[2]
    return name or (f"{function}()" if function else ""), backward


def _costs(
    graph: Graph,
    kernels: Kernels | None,
    products: Sequence[Product],
    threads: int,
    batch_size: int,
    processes: int,
    limit_bytes: int | None,
) -> Data:
    """Calls, FLOPs, bytes, memory and time; less is known where nothing was made."""
    flops = sum(one.flops for one in products)
    backward = sum(one.flops for one in products if split_backward(one.module)[1])
    found: Data = {
        "calls": [],
        "sources": {} if kernels is None else dict(kernels.sources),
        "calling": "" if kernels is None else kernels.program,
        "flops": flops,
        "memory": None,
        "messages": [asdict(one) for one in messages(graph)],
        "gathered": [asdict(one) for one in gathered(graph, processes)],
        "backward_share": backward / max(1, flops),
    }
    if kernels is None or not kernels.calls:
        return {**found, "modules": _modules(graph, None, products, ()), "roofline": []}
    here, held = this_machine(threads), memory(graph, kernels, limit_bytes)
    seconds, nodes = predicted_s(graph, kernels, here), list(graph.operations())
    calls: list[Data] = [
        {
            "kernel": call.kernel,
            "maker": call.maker.value,
            "operations": list(call.operations),
            "region": call.region,
            "tuned": call.tuned,
            **asdict(moved),
            "sent_bytes": sent,
            "seconds": taken_s,
        }
        for call, moved, sent, taken_s in zip(
            kernels.calls,
            traffic(graph, kernels),
            sent_bytes(nodes, kernels.calls, processes),
            seconds,
            strict=True,
        )
    ]
    work = work_of(graph, kernels, products, held.parameters_bytes, batch_size)
    return {
        **found,
        "calls": calls,
        "memory": _memory(held),
        "backward_share": _backward_share(kernels, nodes, seconds),
        "modules": _modules(graph, kernels, products, calls),
        "roofline": [asdict(bound) for bound in roofline(work, here)],
    }


def _backward_share(kernels: Kernels, nodes: Sequence[fx.Node], seconds: Sequence[float]) -> float:
    """The share of a step's predicted time that is of operations of the backward pass."""
    backward_s = 0.0
    for call, taken_s in zip(kernels.calls, seconds, strict=True):
        inside = [is_backward(nodes[i]) for i in call.operations]
        backward_s += taken_s * sum(inside) / max(1, len(inside))
    return backward_s / max(sum(seconds), 1e-12)


def _memory(held: Memory) -> Data:
    sizes = ("peak", "activations", "parameters", "optimizer", "buffers", "other_state", "batch")
    return {
        **{f"{name}_bytes": getattr(held, f"{name}_bytes") for name in (*sizes, "files", "kept")},
        "timeline": [asdict(point) for point in held.timeline],
        "at_peak": [list(one) for one in held.at_peak],
    }


def _modules(
    graph: Graph, kernels: Kernels | None, products: Sequence[Product], calls: Sequence[Data]
) -> list[Data]:
    """A row for each module, in the order in which they compute.

    A kernel's time is its modules' by the bytes that it moves for each.
    """
    nodes = list(graph.operations())
    rows = defaultdict[str, defaultdict[str, float]](lambda: defaultdict(float))
    for node in nodes:
        rows[place_of(node)[0]]["operations"] += 1
    for product in products:
        name, backward = _place(product.module, product.line)
        key = "backward_flops" if backward else "forward_flops"
        rows[name][key] += product.flops
    moved = [  # a call that moves nothing takes its time, too
        [(nodes[i], Traffic()) for i in call["operations"][:1]] for call in calls
    ]
    for move in moves(graph, kernels) if kernels is not None else ():
        moved[move.call].append((move.operation, move.traffic))
    for call, parts in zip(calls, moved, strict=True):
        call_bytes = call["read_bytes"] + call["written_bytes"]
        for node, one in parts:
            row, part = rows[place_of(node)[0]], one.read_bytes + one.written_bytes
            row["read_bytes"] += one.read_bytes
            row["written_bytes"] += one.written_bytes
            row["seconds"] += (part / call_bytes if call_bytes else 1 / len(parts)) * call[
                "seconds"
            ]
    whole = ("operations", "forward_flops", "backward_flops", "read_bytes", "written_bytes")
    return [
        {"module": name, **{key: round(row[key]) for key in whole}, "seconds": row["seconds"]}
        for name, row in rows.items()
    ]
