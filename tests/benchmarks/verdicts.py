"""What was asked of the figures, and what came out."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from table import LOGS, ratio, rows_of

FIT = [f"Fulgurite, {logs}" for logs in LOGS]
LIGHTNING = [f"Lightning, {logs}" for logs in LOGS]
BARE, EAGER = "Fulgurite bare program", "plain eager loop"
COMPILED = "torch.compile, fused AdamW"
VARIANTS = "mlp, precision and schedule"

# section, who, how many times faster than whom, at least
RATIOS = (
    ("mlp", FIT[0], LIGHTNING[0], 5.0),
    ("mlp", FIT[1], LIGHTNING[1], 7.0),
    ("mlp", FIT[2], LIGHTNING[2], 9.0),
    ("mlp", FIT[0], EAGER, 3.0),
    ("mlp", FIT[2], "Keras on JAX fit, steps_per_execution=16", 1.0),
    ("mlp", BARE, "JAX jit, optax", 1 / 0.9),
    ("gpt", FIT[0], EAGER, 1.12),
    ("gpt", FIT[0], COMPILED, 1.0),
    ("mlp, validation", FIT[2], LIGHTNING[2], 3.0),
    (VARIANTS, "Fulgurite, warm-up and cosine", "Fulgurite, float32", 1 / 1.02),
    (VARIANTS, f"{BARE}, warm-up and cosine", f"{BARE}, float32", 1 / 1.02),
    (VARIANTS, f"{BARE}, cb16-mixed", f"{BARE}, bf16-mixed", 1 / 2),
)
ADDED_US = 60.0


def verdicts(figures: dict[str, Any]) -> Iterator[tuple[str, str, str, bool]]:
    """(what, asked, measured, whether it holds) of everything that was measured."""
    sections = {name: rows_of(one) for name, one in figures["sections"].items()}
    for name, who, whom, asked in RATIOS:
        rounds = sections.get(name, {})
        if who in rounds and whom in rounds:
            got = ratio(rounds[whom], rounds[who])
            assert got is not None
            yield f"{name}: {who} / {whom}", f">= {asked:.2f} x", f"{got:.2f} x", got >= asked
    mlp = sections.get("mlp", {})
    if FIT[0] in mlp:
        added = statistics.median(a - b for a, b in zip(mlp[FIT[0]], mlp[BARE], strict=True))
        yield "mlp: fit adds to bare", f"<= {ADDED_US:.0f} µs", f"{added:.0f} µs", added <= ADDED_US
    if "fresh" in figures:
        yield from _fresh(figures["fresh"])


def _fresh(figures: dict[str, Any]) -> Iterator[tuple[str, str, str, bool]]:
    ours, stock = figures["fulgurite"], figures["lightning"]
    cold, start = figures["cold_ratio"], ours["second_start_s"]
    compilers = ours["second_start_compilers"]
    live = ours["live_bytes"] / stock["live_bytes"]
    yield "gpt: cold compile against torch.compile's", "<= 1.00 x", f"{cold:.2f} x", cold <= 1
    yield "gpt: second start", "<= 6 s", f"{start:.1f} s", start <= 6
    yield "gpt: compilers at the second start", "0", f"{compilers}", compilers == 0
    yield "gpt: live bytes against Lightning's", "<= 1.10 x", f"{live:.2f} x", live <= 1.1


def text(figures: dict[str, Any]) -> str:
    """One line each."""
    lines = ["", f"{'asked':72s}{'':>10s} {'measured':>10s}"]
    for what, asked, measured, holds in verdicts(figures):
        lines.append(f"{what:72s}{asked:>10s} {measured:>10s}  {'yes' if holds else 'NO'}")
    return "\n".join(lines)
