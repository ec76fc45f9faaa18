"""What a fit took, as a small table: steps, seconds by kind, programs, memory, and what it gained.

The kinds of seconds add up to the fit's. What was compiled in the background is none of them: the
fit did not wait for it.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from fulgurite.backends.csx.program.description import Cost
from fulgurite.backends.csx.streaming.residency import Traffic

Row = tuple[str, str, str]
"""What it is, a number, its unit and a remark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What is known of a fit at its end.

    Args:
        steps: the optimizer's.
        total_s: from its begin to its end.
        data_s: until batches, and the loaders' iterators, were there.
        in_steps_s: in training steps, with the building of their programs.
        waits_s: of that, for other processes.
        costs: of all programs that were built in it.
        training: those of them that train.
        batches: how many were trained on.
        compiling: how many programs were still being compiled.
        streamed: what it took to keep state within a budget; None where there was none.
        uncompiled: how many shapes of training batches are not compiled since there are more
            than may be, and how many batches had one of them.
    """

    steps: int
    total_s: float
    data_s: float
    in_steps_s: float
    costs: Sequence[Cost]
    training: Sequence[Cost]
    batches: int
    waits_s: float = 0.0
    compiling: int = 0
    streamed: Traffic | None = None
    uncompiled: tuple[int, int] = (0, 0)

    @property
    def stepped_s(self) -> float:
        """In training steps alone."""
        return self.in_steps_s - sum(cost.waited_s for cost in self.training)


def table(fit: Fit) -> str:
    """The table, one row a line, at most 80 columns wide."""
    rows = [*_seconds(fit), *_programs(fit)]
    left, right = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = [f"  {what:<{left}}  {number:>{right}} {rest}".rstrip() for what, number, rest in rows]
    head = f"CSX: {fit.steps:,} step{'s' * (fit.steps != 1)} in {_told(fit.total_s, fit)} s"
    return "\n".join([head, *lines])


def _seconds(fit: Fit) -> list[Row]:
    waited_s = sum(cost.waited_s for cost in fit.costs)
    per_s = fit.steps / max(fit.total_s - waited_s, 1e-9)
    rate = f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"
    kinds = {
        "captured": sum(cost.captured_s for cost in fit.costs),
        "compiled": sum(cost.compiled_s for cost in fit.costs if not cost.first_compiled_step),
        "loaded": sum(cost.loaded_s for cost in fit.costs),
        "waited for data": fit.data_s,
        "stepped": fit.stepped_s,
    }
    other_s = max(fit.total_s - sum(kinds.values()), 0.0)  # of one clock, read at several times
    rows = [(what, _told(one, fit), "s") for what, one in kinds.items() if one]
    if fit.waits_s:
        share = f"{fit.waits_s / max(fit.stepped_s, fit.waits_s):.0%}"
        rows.append(
            ("waiting", _told(fit.waits_s, fit), f"s of these, for other processes: {share}")
        )
    return [
        ("steps/s", rate, "without the seconds that building programs took"),
        *rows,
        ("other", _told(other_s, fit), "s: validation, hooks, logging, checkpoints"),
    ]


def _programs(fit: Fit) -> list[Row]:
    compiled = sum(cost.compiled_s > 0 for cost in fit.costs)
    cached = sum(cost.loaded_s > 0 and not cost.compiled_s for cost in fit.costs)
    parts = {
        "compiled": compiled,
        "from the cache": cached,
        "operation by operation": len(fit.costs) - compiled - cached,
    }
    told = ", ".join(f"{count} {what}" for what, count in parts.items() if count)
    mib = f"{peak_memory_bytes() / 2**20:,.0f}"
    rows = [
        ("programs", str(len(fit.costs)), f"({told})" if told else ""),
        ("peak memory", mib, "MiB: of the process since it began, resident"),
    ]
    rows += _streamed(fit) + _other_shapes(fit)
    if fit.compiling:
        rows.append(("not compiled", str(fit.compiling), _why_not(fit)))
    return rows + _gained(fit)


def _streamed(fit: Fit) -> list[Row]:
    """What it took to keep state within a budget of memory."""
    traffic = fit.streamed
    if traffic is None:
        return []
    within = f"within max_resident_bytes={traffic.limit_bytes:,}"
    if not traffic.files_bytes:
        return [("streamed", "0", f"MiB: all state fits {within}")]
    a_batch = f"{traffic.read_bytes / 2**20 / max(fit.batches, 1):,.0f}"
    files = f"{traffic.files_bytes / 2**20:,.0f}"
    share = f"{traffic.waited_s / max(fit.stepped_s, traffic.waited_s, 1e-9):.0%}"
    return [
        ("streamed", a_batch, f"MiB a batch, of {files} MiB in files; {within}"),
        ("waited for state", _told(traffic.waited_s, fit), f"s of stepping: {share}"),
    ]


def _other_shapes(fit: Fit) -> list[Row]:
    """Of batches whose shapes are too many to be compiled."""
    shapes, batches = fit.uncompiled
    if not shapes:
        return []
    told = f"{batches:,} of {fit.batches:,} batches operation by operation"
    return [("other shapes", f"{shapes:,}", f"than those compiled: {told}")]


def _why_not(fit: Fit) -> str:
    asked = [cost.payback for cost in fit.training if cost.payback is not None]
    if any(one.pays for one in asked):
        return "by then: compile_only=True does it for all runs"
    most = max(asked, key=lambda one: one.fixed)
    if not most.can_gain:
        return f"nothing to gain: {most.fixed:.0%} of a step is in products of matrices"
    least_s = min(one.least_s for one in asked)
    return f"in so short a run, for it takes {least_s:,.1f} s at least"


def _gained(fit: Fit) -> list[Row]:
    meanwhile = [cost for cost in fit.training if cost.first_compiled_step and cost.compiled_s]
    if not meanwhile:
        return []
    cost = meanwhile[0]
    gain = cost.gain if len(fit.training) == 1 else None  # else nobody knows which steps were whose
    told = f"s of compiling; from batch {cost.first_compiled_step:,} on"
    if gain is None:
        return [("in background", _told(cost.compiled_s, fit), f"{told} compiled")]
    rows = [
        ("in background", _told(cost.compiled_s, fit), f"{told} {gain.times:.1f} times as fast")
    ]
    if (gained_s := gain.before_s - gain.after_s) > 0:
        paid = math.ceil((cost.captured_s + cost.compiled_s) / gained_s)
        did = fit.batches - cost.first_compiled_step + 1
        rows.append(("pays after", f"{paid:,}", f"compiled steps; this fit ran {did:,}"))
    return rows


def peak_memory_bytes() -> int:
    """The most memory that this process has had resident, as the system counts it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # getrusage(2) of both


def _told(seconds: float, fit: Fit) -> str:
    """All with the same digits, so that they line up."""
    return f"{seconds:,.1f}" if fit.total_s >= 10 else f"{seconds:.2f}"
