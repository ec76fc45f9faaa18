"""What a fit took, as data and as a small table: whether it was compiled, and whether that pays.

The seconds by kind add up to the fit's. What was compiled in the background is none of them: the
fit did not wait for it.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from fulgurite.backends.csx.program.description import Cost
from fulgurite.backends.csx.program.speed import Speed, in_ms
from fulgurite.backends.csx.streaming.residency import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSummary:
    """What a fit took; ``str()`` of it is the table at its end.

    Args:
        batches: how many were trained on.
        steps: the optimizers' steps, all of them counted.
        total_s: seconds from its begin to its end.
        captured_s: of that, until programs were traced.
        compiled_s: until they were compiled, where the fit waited for it.
        loaded_s: until compiled ones were loaded from the cache.
        data_s: until batches, and the loaders' iterators, were there.
        stepped_s: in training steps, without the building of their programs.
        waits_s: of ``stepped_s``, until other processes' parts of sums were there.
        programs: how many were built, of all stages.
        compiled_from: the first batch that compiled code trained on, counted from 1; None: none.
        background_s: seconds of compiling beside the steps.
        not_compiled: why none is or not all are, in words; empty: all programs that train are.
        batch_s: seconds a batch takes: compiled, where ``compiled_from`` says so.
        by_operations_s: seconds a batch takes operation by operation; None: not measured.
        pays_after: from how many batches on a program pays for this module: compiled, it has gained
            the seconds that the fit waited for it by then; not compiled, fits of so many batches
            or more are. None: not known, or never.
        lightning_s: an estimate of what stock Lightning takes for this fit: all batches as those
            that ran operation by operation, and the rest as it was; None: no batch did.
        other_shapes: how many shapes of training batches are not compiled, for there are too many.
        other_shapes_batches: how many batches had one of them.
        peak_memory_bytes: the most that this process has had resident since it began.
        streamed: what it took to keep state within a budget; None: there was none.
    """

    batches: int
    steps: int
    total_s: float
    captured_s: float = 0.0
    compiled_s: float = 0.0
    loaded_s: float = 0.0
    data_s: float = 0.0
    stepped_s: float = 0.0
    waits_s: float = 0.0
    programs: int = 0
    compiled_from: int | None = None
    background_s: float = 0.0
    not_compiled: str = ""
    batch_s: float = 0.0
    by_operations_s: float | None = None
    pays_after: int | None = None
    lightning_s: float | None = None
    other_shapes: int = 0
    other_shapes_batches: int = 0
    peak_memory_bytes: int = 0
    streamed: Traffic | None = None

    @property
    def other_s(self) -> float:
        """Seconds of validation, hooks, logging and checkpoints: the rest."""
        kinds = self.captured_s, self.compiled_s, self.loaded_s, self.data_s, self.stepped_s
        return max(self.total_s - sum(kinds), 0.0)  # of one clock, read at several times

    def as_dict(self) -> dict[str, Any]:
        """All of it as numbers and strings, for a logger's ``log_hyperparams`` or a file."""
        return {**asdict(self), "other_s": self.other_s}

    @property
    def head(self) -> str:
        """The table's first line."""
        steps = f" ({self.steps:,} optimizer steps)" if self.steps != self.batches else ""
        return f"CSX: {_counted(self.batches, 'batch', 'batches')}{steps} in {_in_s(self.total_s)}"

    def brief(self) -> str:
        """The table's first line, and whether it was compiled."""
        return self._table([("compiled", _compiled(self)), ("shapes", _shapes(self))])

    def __str__(self) -> str:
        rows = [
            ("compiled", _compiled(self)),
            ("Lightning", _lightning(self)),
            ("pays", _pays(self)),
            ("time", _times(self)),
            ("shapes", _shapes(self)),
            ("streamed", _streamed(self)),
            ("memory", f"{self.peak_memory_bytes / 2**20:,.0f} MiB resident at most"),
        ]
        return self._table(rows)

    def _table(self, rows: list[tuple[str, str]]) -> str:
        lines = [f"  {name:<11}{line}" for name, text in rows for line, name in _lines(text, name)]
        return "\n".join([self.head, *lines])


def _lines(text: str, name: str) -> list[tuple[str, str]]:
    """A text in lines of at most 80 columns, the first with the row's name."""
    return [(line, "" if i else name) for i, line in enumerate(wrap(text, 67))]


def _compiled(fit: FitSummary) -> str:
    if fit.compiled_from is None:
        return f"no: {fit.not_compiled}"
    first = fit.compiled_from
    told = "from the first batch on" if first == 1 else f"from batch {first:,} on"
    before_s = fit.by_operations_s
    if before_s is None:
        told += f", {in_ms(fit.batch_s)} ms a batch"
    else:
        times = before_s / max(fit.batch_s, 1e-9)
        told += f", {times:.1f} times as fast: {in_ms(fit.batch_s)} ms a batch, {in_ms(before_s)}"
        told += " before"
    return told + (
        f"; batches of another shape not: {fit.not_compiled}" if fit.not_compiled else ""
    )


def _lightning(fit: FitSummary) -> str:
    if fit.lightning_s is None:
        return ""
    which = "all of" if fit.compiled_from is None else "the first of"
    return (
        f"about {_in_s(fit.lightning_s)} without Fulgurite (an estimate: as long as {which} these"
        " batches took operation by operation, and the rest as here)"
    )


def _pays(fit: FitSummary) -> str:
    if fit.pays_after is None:
        return ""
    if fit.compiled_from is None:
        return f"a fit of about {fit.pays_after:,} batches or more is compiled in the background"
    seconds = "tracing, and what it waited for compiling, is made up for"
    return f"from batch {fit.pays_after:,} on: {seconds}"


def _times(fit: FitSummary) -> str:
    kinds = {
        "tracing": fit.captured_s,
        "compiling": fit.compiled_s,
        "loading programs": fit.loaded_s,
        "waiting for data": fit.data_s,
        "steps": fit.stepped_s,
        "validation, hooks, logging and checkpoints": fit.other_s,
    }
    told = [f"{what} {_in_s(one)}" for what, one in kinds.items() if one >= 0.005]
    if fit.waits_s:
        share = fit.waits_s / max(fit.stepped_s, fit.waits_s)
        told.append(f"{share:.0%} of the steps' was waiting for other processes")
    if fit.background_s:
        told.append(f"beside them {_in_s(fit.background_s)} of compiling")
    return ", ".join(told)


def _shapes(fit: FitSummary) -> str:
    if not fit.other_shapes:
        return ""
    return (
        f"{fit.other_shapes:,} more than are compiled: {fit.other_shapes_batches:,} batches ran"
        " operation by operation; padded to few sizes, all are compiled (PadToBuckets)"
    )


def _streamed(fit: FitSummary) -> str:
    """What it took to keep state within a budget of memory."""
    traffic = fit.streamed
    if traffic is None:
        return ""
    within = f"within max_resident_bytes={traffic.limit_bytes:,}"
    if not traffic.files_bytes:
        return f"nothing: all state fits {within}"
    a_batch = traffic.read_bytes / 2**20 / max(fit.batches, 1)
    share = traffic.waited_s / max(fit.stepped_s, traffic.waited_s, 1e-9)
    return (
        f"{a_batch:,.0f} MiB a batch, of {traffic.files_bytes / 2**20:,.0f} MiB in files; {within};"
        f" steps waited {_in_s(traffic.waited_s)} for it: {share:.0%}"
    )


def summarize(
    *,
    batches: int,
    steps: int,
    total_s: float,
    data_s: float,
    speed: Speed,
    costs: Sequence[Cost],
    training: Sequence[Cost],
    why_not: Sequence[str],
    shapes: tuple[int, int] = (0, 0),
    streamed: Traffic | None = None,
) -> FitSummary:
    """What is known of a fit at its end, put together.

    Args:
        batches, steps, total_s, data_s, streamed: as in ``FitSummary``.
        speed: of the training's steps.
        costs: of all programs that were built in it.
        training: those of them that train.
        why_not: of each entry point that trains and is not compiled, why, in words.
        shapes: how many are too many to be compiled, and how many batches had one.
    """
    waited_s = sum(cost.waited_s for cost in training)
    later = [cost for cost in training if cost.first_compiled_step and cost.compiled_s]
    compiled_from = _first(training)
    before_s, after_s = speed.batch_s
    if compiled_from == 1:  # none ran operation by operation but for the comparisons
        before_s = None
    elif compiled_from is None:
        before_s = after_s or None  # none were like the others
    background_s = sum(cost.compiled_s for cost in later)
    stepped_s = max(speed.in_steps_s - waited_s, 0.0)
    built = {
        "captured_s": sum(cost.captured_s for cost in costs),
        "compiled_s": sum(one.compiled_s for one in costs if not one.first_compiled_step),
        "loaded_s": sum(cost.loaded_s for cost in costs),
    }
    rest_s = max(total_s - stepped_s - sum(built.values()), 0.0)
    return FitSummary(
        batches=batches,
        steps=steps,
        total_s=total_s,
        **built,
        data_s=data_s,
        stepped_s=stepped_s,
        waits_s=speed.waits.seconds,
        programs=len(costs),
        compiled_from=compiled_from,
        background_s=background_s,
        not_compiled=_why_not(training, why_not),
        batch_s=after_s,
        by_operations_s=before_s,
        pays_after=_pays_after(training, before_s, after_s, compiled_from, any(why_not)),
        lightning_s=None if before_s is None else before_s * batches + rest_s,
        other_shapes=shapes[0],
        other_shapes_batches=shapes[1],
        peak_memory_bytes=peak_memory_bytes(),
        streamed=streamed,
    )


def _first(training: Sequence[Cost]) -> int | None:
    """The first batch that compiled code trained on, counted from 1."""
    found = [one.first_compiled_step or 1 for one in training if one.compiled_s or one.loaded_s]
    return min(found, default=None)


def _pays_after(
    training: Sequence[Cost],
    before_s: float | None,
    after_s: float,
    compiled_from: int | None,
    refused: bool,
) -> int | None:
    """Batches by which a program has made up for its seconds, or with which it is compiled."""
    if before_s is None or not training:
        return None
    if compiled_from is not None:
        waited = [one.compiled_s for one in training if not one.first_compiled_step]
        cost_s = sum(one.captured_s for one in training) + sum(waited)
        gained_s = before_s - after_s
        return compiled_from - 1 + math.ceil(cost_s / gained_s) if gained_s > 0 else None
    asked = [one.payback for one in training if one.payback is not None and not refused]
    least = [one.least_s / max((1 - one.fixed) * before_s, 1e-9) for one in asked if one.can_gain]
    return math.ceil(min(least)) if least else None


def _why_not(training: Sequence[Cost], why_not: Sequence[str]) -> str:
    """Why programs that train are not compiled, in words."""
    if not why_not or any(why_not):
        return next((one for one in why_not if one), "")
    if _first(training) is not None:
        return "compiling takes longer than they did"
    asked = [cost.payback for cost in training if cost.payback is not None]
    if any(one.pays for one in asked):
        return (
            "the fit was over before it was done. `fulgurite compile`, of a script or a parameter"
            " file, does it beforehand, for all runs"
        )
    most = max(asked, key=lambda one: one.fixed)
    if not most.can_gain:
        return f"nothing to gain, for {most.fixed:.0%} of a step is in products of matrices"
    least_s = min(one.least_s for one in asked)
    return (
        f"the fit is too short, for compiling takes {_in_s(least_s)} at least. All ran operation by"
        " operation"
    )


def peak_memory_bytes() -> int:
    """The most memory that this process has had resident, as the system counts it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # getrusage(2) of both


def _counted(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"


def _in_s(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds:.2f} s"
