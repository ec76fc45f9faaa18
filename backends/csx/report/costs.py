"""What a program costs, from those who count it: the one place that asks them.

Numbers of kernels are lists beside ``made.calls``; those of modules are by the module's name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import fx

from fulgurite.backends.csx.compile.programs.made import KernelCall, Made, Maker
from fulgurite.backends.csx.diagnostics.user_lines import line_of, module_of, split_backward
from fulgurite.backends.csx.graph.flops import Product
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.report.exchange import messages, sent_bytes
from fulgurite.backends.csx.report.machine import this_machine
from fulgurite.backends.csx.report.memory import Memory, memory
from fulgurite.backends.csx.report.roofline import roofline, work_of
from fulgurite.backends.csx.report.timing import predicted_s
from fulgurite.backends.csx.report.traffic import Traffic, moves, traffic
from fulgurite.backends.csx.report.values import is_backward

Data = dict[str, Any]


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


def costs(
    graph: Graph,
    made: Made | None,
    products: Sequence[Product],
    threads: int,
    batch_size: int,
    processes: int = 1,
) -> Data:
    """FLOPs, bytes, memory and time of one entry point, as plain data.

    Args:
        graph: its operations after all passes.
        made: what runs them; None where nothing was made.
        products: those that were traced.
        threads: of the machine that runs it.
        batch_size: samples a step.
        processes: how many train together.
    """
    found: Data = {"flops": sum(one.flops for one in products), "calls": [], "memory": None}
    found["messages"] = [asdict(one) for one in messages(graph)]
    backward = sum(one.flops for one in products if split_backward(one.module)[1])
    found["backward_share"] = backward / max(1, found["flops"])
    if made is None or not made.calls:
        return {**found, "modules": _modules(graph, None, products, ()), "roofline": []}
    here, held = this_machine(threads), memory(graph, made)
    moved, seconds = traffic(graph, made), predicted_s(graph, made, here)
    nodes = list(graph.operations())
    calls: list[Data] = [
        {
            "read_bytes": one.read_bytes,
            "written_bytes": one.written_bytes,
            "sent_bytes": _sent(call, nodes, processes),
            "seconds": s,
        }
        for call, one, s in zip(made.calls, moved, seconds, strict=True)
    ]
    found["backward_share"] = _backward_share(made, nodes, seconds)
    work = work_of(graph, made, products, held.parameters_bytes, batch_size)
    return {
        **found,
        "calls": calls,
        "memory": _memory(held),
        "modules": _modules(graph, made, products, calls),
        "roofline": [asdict(bound) for bound in roofline(work, here)],
    }


def _sent(call: KernelCall, nodes: Sequence[fx.Node], processes: int) -> int:
    """Bytes that a process sends in a call, and receives as well."""
    if call.maker is not Maker.COLLECTIVE:
        return 0
    return sent_bytes([nodes[i] for i in call.operations], processes)


def _backward_share(made: Made, nodes: Sequence[fx.Node], seconds: Sequence[float]) -> float:
    """The share of a step's predicted time that is of operations of the backward pass."""
    backward_s = 0.0
    for call, taken_s in zip(made.calls, seconds, strict=True):
        inside = [is_backward(nodes[i]) for i in call.operations]
        backward_s += taken_s * sum(inside) / max(1, len(inside))
    return backward_s / max(sum(seconds), 1e-12)


def _memory(held: Memory) -> Data:
    sizes = ("peak", "activations", "parameters", "optimizer", "buffers", "other_state", "batch")
    return {
        **{f"{name}_bytes": getattr(held, f"{name}_bytes") for name in (*sizes, "kept")},
        "timeline": [asdict(point) for point in held.timeline],
        "at_peak": [list(one) for one in held.at_peak],
    }


def _modules(
    graph: Graph, made: Made | None, products: Sequence[Product], calls: Sequence[Data]
) -> list[Data]:
    """A row for each module, in the order in which they compute.

    A kernel's time is its modules' by the bytes that it moves for each.
    """
    names = [place_of(node)[0] for node in graph.operations()]
    rows: dict[str, dict[str, float]] = {name: defaultdict(float) for name in dict.fromkeys(names)}
    for name in names:
        rows[name]["operations"] += 1
    for product in products:
        name, backward = _place(product.module, product.line)
        key = "backward_flops" if backward else "forward_flops"
        rows.setdefault(name, defaultdict(float))[key] += product.flops
    for i, moved in _moved(graph, made).items() if calls and made is not None else ():
        call_bytes = sum(one.read_bytes + one.written_bytes for _, one in moved)
        for node, one in moved:
            row, part = rows[place_of(node)[0]], one.read_bytes + one.written_bytes
            row["read_bytes"] += one.read_bytes
            row["written_bytes"] += one.written_bytes
            share = part / call_bytes if call_bytes else 1 / len(moved)
            row["seconds"] += share * calls[i]["seconds"]
    return [_row(name, row) for name, row in rows.items()]


def _moved(graph: Graph, made: Made) -> dict[int, list[tuple[fx.Node, Traffic]]]:
    """What each call moves, and for which operations."""
    nodes, found = list(graph.operations()), defaultdict[int, list[tuple[fx.Node, Traffic]]](list)
    for i, call in enumerate(made.calls):  # one that moves nothing takes its time, too
        found[i] += [(nodes[j], Traffic()) for j in call.operations[:1]]
    for move in moves(graph, made):
        found[move.call].append((move.operation, move.traffic))
    return found


def _row(name: str, row: Mapping[str, float]) -> Data:
    whole = ("operations", "forward_flops", "backward_flops", "read_bytes", "written_bytes")
    return {
        "module": name,
        **{key: round(row.get(key, 0)) for key in whole},
        "seconds": float(row.get("seconds", 0.0)),
    }
