"""Write the tables of docs/scaling.md, which come from ``backends/report/scaling.py``.

python tests/tools/document_scaling.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fulgurite.backends.csx.costs.machine import CS3, H200
from fulgurite.backends.csx.graph.collectives import BUCKET_BYTES, FIRST_BUCKET_BYTES
from fulgurite.backends.report.scaling import (
    ETHERNET,
    H200_NODES,
    PARTS,
    SCATTER,
    SWARM,
    SYSTEMS,
    Link,
    Message,
    Network,
    Step,
    most,
    scaled,
    table,
)
from fulgurite.backends.report.words import in_time

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"

# Measured on two cores. Latency: the benchmarks' MLP takes 1,771 µs longer in two processes, in
# which its one message of 104 kB goes two steps of a ring. Bandwidth: a sum of 3.44 MB takes
# 3,620 µs longer than one of 16 bytes (tests/benchmarks/several.py --sums, the mean of two runs).
LOOPBACK = Network(
    name="loopback, gloo",
    links=(Link(bytes_per_s=3.44e6 / 3.620e-3, latency_s=831e-6),),
    cores=2,
)
# From their reports: backward_share and messages.
GPT = Step(
    compute_s=0.0,
    backward_share=0.55,
    messages=(
        Message(size_bytes=1_181_184, begins=0.35),
        Message(size_bytes=2_264_084, begins=1.0),
    ),
)
CONVNET = Step(
    compute_s=0.0,
    backward_share=0.65,
    messages=(Message(size_bytes=153_760, begins=1.0),),
)
MEASURED_S: dict[str, tuple[Step, float, dict[int, float]]] = {
    "GPT": (GPT, 39.67e-3, {2: 49.93e-3, 4: 110.7e-3}),
    "ConvNet": (CONVNET, 1.720e-3, {2: 5.003e-3, 4: 13.40e-3}),
}
"""The models of tests/benchmarks/several.py: seconds a step of one alone, the mean of both runs,
and of so many processes: two in three rounds of 200 steps, four in two of 80 (GPT) and 300."""

# GPT-3 XL: Brown et al., "Language Models are Few-Shot Learners", 2020, Table 2.1; 6 FLOPs a weight
# and token (its Table D.1). Assumed: 40 % of the peak, as large trainings reach 30 to 52 %
# (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC21); a third
# of a step forward, two thirds backward; gradients of 32 bits that arrive evenly.
WEIGHTS, UTILIZATION = 1.3158e9, 0.4
TOKENS = {"H200": 8 * 2048, "CS-3": 128 * 2048}  # of each system; assumed, for steps equally long


def xl(machine: str, flops_per_s: float) -> Step:
    """A step of GPT-3 XL."""
    left, sizes = 4 * WEIGHTS - FIRST_BUCKET_BYTES, [FIRST_BUCKET_BYTES]
    while left > 0:
        sizes.append(int(min(left, BUCKET_BYTES)))
        left -= BUCKET_BYTES
    there, messages = 0, []
    for size_bytes in sizes:
        there += size_bytes
        messages.append(Message(size_bytes=size_bytes, begins=min(1.0, there / (4 * WEIGHTS))))
    compute_s = 6 * WEIGHTS * TOKENS[machine] / (flops_per_s * UTILIZATION)
    return Step(compute_s=compute_s, backward_share=2 / 3, messages=tuple(messages))


# GPT-3 13B: the same table, 40 layers. Trained in "bf16-mixed": weights are gathered in 16 bits,
# gradients added up in 32. Each process holds weights, gradients and AdamW's two averages in 32.
LARGE_WEIGHTS, LAYERS, HELD_BYTES = 12.85e9, 40, 16


def in_parts() -> Step:
    """A step of GPT-3 13B on H200, its layers gathered for each pass and reduced one by one."""
    weights, n = LARGE_WEIGHTS / LAYERS, LAYERS
    messages = [
        # on its way while the layer before it computes
        Message(kind=PARTS, size_bytes=int(2 * weights), begins=max(-1.0, at - 1 / n), needed=at)
        for at in (i / n - 1 for i in range(2 * n))
    ]
    messages += [
        Message(kind=SCATTER, size_bytes=int(4 * weights), begins=at, needed=min(1.0, at + 1 / n))
        for at in (i / n for i in range(1, n + 1))
    ]
    compute_s = 6 * LARGE_WEIGHTS * TOKENS["H200"] / (H200.flops_per_s * UTILIZATION)
    ordered = sorted(messages, key=lambda one: one.begins)
    return Step(compute_s=compute_s, backward_share=2 / 3, messages=tuple(ordered))


def at(step: Step, compute_s: float) -> Step:
    """A step that takes so long alone."""
    shares = {"backward_share": step.backward_share, "messages": step.messages}
    return Step(compute_s=compute_s, **shares)  # type: ignore[arg-type]


def alone_s(name: str) -> float:
    """The measured step of one system."""
    return MEASURED_S[name][1]


def steps() -> list[tuple[str, Step, Network]]:
    """What the page shows, each on its network."""
    return [
        ("GPT, 0.86 million weights", at(GPT, alone_s("GPT")), ETHERNET),
        ("ConvNet with BatchNorm", at(CONVNET, alone_s("ConvNet")), ETHERNET),
        ("GPT-3 XL", xl("H200", H200.flops_per_s), H200_NODES),
        ("GPT-3 XL", xl("CS-3", CS3.flops_per_s), SWARM),
    ]


def links() -> str:
    """The networks."""
    rows = [
        (
            network.name,
            "all" if link.systems is None else f"{link.systems} systems",
            f"{link.bytes_per_s / 1e9:,.4g} GB/s",
            in_time(link.latency_s),
            f"switches of {link.fan_in}" if link.fan_in else "rings" + ", trees" * link.trees,
        )
        for network in (ETHERNET, H200_NODES, SWARM, LOOPBACK)
        for link in network.links
    ]
    return _table(("network", "joins", "each way", "latency", "sums by"), rows)


def systems() -> str:
    """Each step on 1 to 2,048 systems."""
    parts = []
    for name, step, network in steps():
        rows = [
            (
                f"{row.systems:,}",
                in_time(row.step_s),
                f"{row.efficiency:.1%}",
                _decimal(row.sent_bytes),
                row.bound,
            )
            for row in table(step, network)
        ]
        headers = ("systems", "step", "efficiency", "sent by each", "bound by")
        parts.append(f"{name} on {network.name}:\n\n{_table(headers, rows)}")
    return "\n\n".join(parts)


def limits() -> str:
    """Where each stops scaling."""
    rows = []
    for name, step, network in steps():
        weak = most(table(step, network), 0.9)
        strong = most(table(step, network, shares_batch=True), 0.5)
        end = SYSTEMS[-1]
        rows.append(
            (
                f"{name} on {network.name}",
                *(
                    f"all {end:,}" if one.systems == end else f"{one.systems:,}"
                    for one in (weak, strong)
                ),
                scaled(step, network, min(end, 2 * weak.systems)).bound,
            )
        )
    headers = ("", "90 % of each, a batch each", "50 % of each, one batch", "bound by beyond")
    return _table(headers, rows)


def parts() -> str:
    """A step on parts, and what each system holds."""
    rows = [
        (
            f"{row.systems:,}",
            f"{_decimal(HELD_BYTES * LARGE_WEIGHTS / row.systems)}",
            in_time(row.step_s),
            f"{row.efficiency:.1%}",
            _decimal(row.sent_bytes),
            row.bound,
        )
        for row in table(in_parts(), H200_NODES)
    ]
    headers = ("systems", "held by each", "step", "efficiency", "sent by each", "bound by")
    return _table(headers, rows)


def measured() -> str:
    """The model beside what was measured on one machine of two cores."""
    rows = []
    for name, (step, one_s, together) in MEASURED_S.items():
        for count, took_s in {1: one_s, **together}.items():
            model_s = scaled(at(step, one_s), LOOPBACK, count).step_s
            error = f"{model_s / took_s - 1:+.0%}" if count > 1 else "given"
            rows.append((name, str(count), in_time(took_s), in_time(model_s), error))
    return _table(("", "processes", "measured", "model", "error"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "links": links,
    "systems": systems,
    "limits": limits,
    "parts": parts,
    "measured": measured,
}


def page(text: str) -> str:
    """The page with its tables made anew."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}: tests/tools/document_scaling.py -->", f"<!-- {name} end -->"
        between = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        assert len(between.findall(text)) == 1, name
        text = between.sub(lambda _, b=begin, m=make, e=end: f"{b}\n\n{m()}\n\n{e}", text)  # type: ignore[misc]
    return text


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _decimal(size_bytes: float) -> str:
    """Network's bytes are counted in powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000 or unit == "GB":
            break
        size_bytes /= 1000
    return f"{size_bytes:,.3g} {unit}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
