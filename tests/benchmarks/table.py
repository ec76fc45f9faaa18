"""The figures as text: tables for the screen, and those of docs/speed.md.

python tests/benchmarks/table.py [step.json]     prints the page's
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("step.json")

LOGS = ("nothing logged", "one self.log", "loss and accuracy")

# the page's tables: label of a row, and the contender behind each of its columns
MLP = {
    "Lightning `fit`": [f"Lightning, {logs}" for logs in LOGS],
    "plain eager loop": ["plain eager loop", None, None],
    "the same, fused AdamW": ["plain eager loop, fused AdamW", None, None],
    "torch.compile, fused AdamW": ["torch.compile, fused AdamW", None, None],
    "accelerate loop": ["accelerate loop", None, None],
    "JAX `jit`, optax": ["JAX jit, optax", None, None],
    "Keras on JAX `fit`": [None, None, "Keras on JAX fit, steps_per_execution=1"],
    "the same, 16 steps per execution": [None, None, "Keras on JAX fit, steps_per_execution=16"],
    "**Fulgurite `fit`**": [f"Fulgurite, {logs}" for logs in LOGS],
    "Fulgurite's program alone": ["Fulgurite bare program", None, None],
}
COLUMNS = {  # of the second table: heading, section, what is logged
    "MLP, shuffling loader": ("mlp, shuffling loader", LOGS[0]),
    "MLP, validation, logged": ("mlp, validation", LOGS[2]),
    "ConvNet, logged": ("convnet", LOGS[2]),
    "GPT": ("gpt", LOGS[0]),
}
OTHERS = {
    "Lightning": "Lightning, {logs}",
    "plain eager loop": "plain eager loop",
    "torch.compile, fused AdamW": "torch.compile, fused AdamW",
    "**Fulgurite**": "Fulgurite, {logs}",
}


def rows_of(section: dict[str, Any]) -> dict[str, list[float]]:
    """Name -> microseconds a step in each round."""
    return {row["name"]: row["rounds_us"] for row in section["rows"]}


def ratio(reference: list[float] | None, values: list[float]) -> float | None:
    """The median over rounds of how many times longer the reference took."""
    if reference is None:
        return None
    return statistics.median(a / b for a, b in zip(reference, values, strict=True))


def machine(figures: dict[str, Any]) -> str:
    """Where and with what it was measured, in one line."""
    where = figures["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    return (
        f"{where['cpu']}, one of {where['cores']} cores, one thread; {versions};"
        f" commit {where['commit']}"
    )


def section(name: str, figures: dict[str, Any]) -> str:
    """One section as a table: each row against Lightning with the same logging, and plain eager."""
    rounds = rows_of(figures)
    lines = [
        "",
        f"{name + ', µs a step':44s}{'median':>9s}{'fastest':>9s}{'Lightning':>11s}{'eager':>9s}",
    ]
    for row in figures["rows"]:
        values = row["rounds_us"]
        against = (f"Lightning, {row['logs']}", "plain eager loop")
        ratios = [ratio(rounds.get(other), values) for other in against]
        shown = [f"{r:.2f} x" if r is not None else "" for r in ratios]
        lines.append(
            f"{row['name']:44s}{statistics.median(values):9.0f}{min(values):9.0f}"
            f"{shown[0]:>11s}{shown[1]:>9s}"
        )
    for who, what in figures["not_installed"].items():
        lines.append(f"{who:44s}  not installed: {', '.join(what)}")
    lines += [f"{who:44s}  written for the MLP only" for who in figures["not_written"]]
    return "\n".join(lines)


def fresh_starts(figures: dict[str, Any]) -> str:
    """Compile seconds, second start and memory."""
    lines = ["", f"{'gpt, fresh processes':24s}{'Fulgurite':>12s}{'torch.compile':>15s}"]
    for label, key in (
        ("cold first step, s", "cold_s"),
        ("second start, s", "second_start_s"),
        ("compilers, cold", "cold_compilers"),
        ("compilers, second start", "second_start_compilers"),
    ):
        ours, theirs = (figures[kind][key] for kind in ("fulgurite", "torch.compile"))
        lines.append(f"{label:24s}{ours:12.1f}{theirs:15.1f}")
    live = {kind: figures[kind]["live_bytes"] / 1e6 for kind in ("fulgurite", "lightning")}
    lines.append(
        f"live tensors: Fulgurite {live['fulgurite']:.1f} MB, Lightning {live['lightning']:.1f} MB"
    )
    return "\n".join(lines)


def page(figures: dict[str, Any]) -> str:
    """The tables of docs/speed.md and what is said of them, in Markdown."""
    sections = {name: rows_of(one) for name, one in figures["sections"].items()}
    lines = [_row("MLP, µs a step", LOGS), _row("---", ["---"] * len(LOGS))]
    for label, names in MLP.items():
        cells = [_cell(sections["mlp"], n, logs) for n, logs in zip(names, LOGS, strict=True)]
        lines += [_row(label, cells)] * any(cells)
    lines += ["", _row("µs a step", COLUMNS), _row("---", ["---"] * len(COLUMNS))]
    for label, name in OTHERS.items():
        cells = [
            _cell(sections[where], name.format(logs=logs), logs) for where, logs in COLUMNS.values()
        ]
        lines.append(_row(label, cells))
    lines += ["", *_variants(sections["mlp, precision and schedule"])]
    return "\n".join([*lines, *_first_steps(figures["fresh"]), "", *_where(figures)]) + "\n"


def _row(label: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join([label, *cells])} |"


def _cell(rounds: dict[str, list[float]], name: str | None, logs: str) -> str:
    if name is None or name not in rounds:
        return ""
    text = f"{statistics.median(rounds[name]):,.0f}"
    times = ratio(rounds.get(f"Lightning, {logs}"), rounds[name])
    return f"{text} ({times:.1f}x)" if times and name == f"Fulgurite, {logs}" else text


def _variants(rounds: dict[str, list[float]]) -> list[str]:
    """The MLP's program as it is, with a schedule, and in narrower types."""
    us = {
        name.removeprefix("Fulgurite bare program, "): round(statistics.median(values))
        for name, values in rounds.items()
    }
    return [
        f"The MLP's program alone, another run: {us['float32']} µs; with warm-up and cosine in it"
        f" {us['warm-up and cosine']};",
        f'"cb16-mixed" {us["cb16-mixed"]}, "bf16-mixed" {us["bf16-mixed"]}: its products are too'
        " small to gain by 16 bits.",
    ]


def _first_steps(fresh: dict[str, Any]) -> list[str]:
    ours, compiled, stock = (fresh[kind] for kind in ("fulgurite", "torch.compile", "lightning"))
    return [
        f"In a fresh process the GPT's first compiled step takes {ours['cold_s']:.0f} s with empty"
        f" caches (torch.compile with its",
        f"optimizer: {compiled['cold_s']:.0f} s) and {ours['second_start_s']:.1f} s the next time"
        f" ({compiled['second_start_s']:.1f} s). Live tensors after {fresh['steps']} steps:"
        f" {ours['live_bytes'] / 1e6:.1f} MB",
        f"(Lightning: {stock['live_bytes'] / 1e6:.1f} MB; commit {fresh['commit']}).",
    ]


def _where(figures: dict[str, Any]) -> list[str]:
    where = figures["environment"]
    shown = ("torch", "lightning", "accelerate", "jax", "keras")
    versions = [f"{name} {where['versions'][name]}" for name in shown if name in where["versions"]]
    count = len(figures["sections"]["mlp"]["rows"][0]["rounds_us"])
    return [
        f"Medians of {count} rounds, one core and one thread of {where['cores']} ({where['cpu']});",
        f"{', '.join(versions)}; commit {where['commit']}.",
    ]


if __name__ == "__main__":
    print(page(json.loads(Path(*sys.argv[1:] or [PATH]).read_text())), end="")
