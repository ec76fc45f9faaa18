"""What a fit took, as data and as five lines: whether it was compiled, and what it won.

The seconds by kind add up to the fit's. What was compiled in the background is none of them: the
fit did not wait for it.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from textwrap import wrap
from typing import Any

from fulgurite.backends.csx.compile.threads import in_ms
from fulgurite.backends.csx.costs.stock import Stock
from fulgurite.backends.csx.program.description import Cost
from fulgurite.backends.csx.program.speed import STRETCH_STEPS, Speed
from fulgurite.backends.csx.streaming.residency import Traffic

_FEW = 20
"""Batches, of which the first ones' pace says little of how long others take."""
_MUCH, _FEW_S = 0.2, 0.05  # the share of a fit that programs took to be told; seconds of a kind
_ALIKE = 0.95  # times as long, from where on it is told as Lightning's


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
        compiled_batches: how many compiled code trained on.
        background_s: seconds of compiling beside the steps.
        not_compiled: why none is or not all are, in words; empty: all programs that train are.
        batch_s: seconds a batch takes: compiled, where ``compiled_from`` says so; 0 where each
            one also did what others do not.
        by_operations_s: seconds a batch takes operation by operation; None: not measured.
        compiles_from: from about how many batches on fits are compiled, where this one was too
            short, and long enough to tell.
        pays_after: from how many batches on such a fit takes less than stock Lightning's, by
            ``lightning_s``; None: not known, or never.
        lightning_s: an estimate of what stock Lightning would have taken (see ``costs.stock``);
            None: there is none.
        lightning_batch_s: the same of a training batch.
        was_busy: whether other processes took cores away, so that there is no estimate.
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
    compiled_batches: int = 0
    background_s: float = 0.0
    not_compiled: str = ""
    batch_s: float = 0.0
    by_operations_s: float | None = None
    compiles_from: int | None = None
    pays_after: int | None = None
    lightning_s: float | None = None
    lightning_batch_s: float | None = None
    was_busy: bool = False
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
    def is_mixed(self) -> bool:
        """Whether other programs trained after code was compiled for some, and none for them."""
        if self.compiled_from is None:
            return False
        return self.compiled_batches < _ALIKE * (self.batches - self.compiled_from + 1) - 2

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
            ("Lightning", _lightning(self)),
            ("compiled", _compiled(self)),
            ("building", _building(self)),
            ("a batch", _batch(self)),
            ("pays", _pays(self)),
            ("waits", _waits(self)),
            ("shapes", _shapes(self)),
            ("streamed", _streamed(self)),
        ]
        return self._table(rows)

    def _table(self, rows: list[tuple[str, str]]) -> str:
        lines = [f"  {name:<11}{line}" for name, text in rows for line, name in _lines(text, name)]
        return "\n".join([self.head, *lines])


def _lines(text: str, name: str) -> list[tuple[str, str]]:
    """A text in lines of at most 80 columns, the first with the row's name."""
    return [(line, "" if i else name) for i, line in enumerate(wrap(text, 67))]


def _lightning(fit: FitSummary) -> str:
    if fit.lightning_s is None:
        return "no estimate: other processes had the cores" if fit.was_busy else ""
    times, told = fit.lightning_s / fit.total_s, f"about {_in_s(fit.lightning_s)}"
    if times < _ALIKE:
        return f"{told} (an estimate): this took {1 / times:.1f} times as long"
    if times < 1 / _ALIKE:
        return f"{told}, as long as this (an estimate)"
    return f"{told}, {times:.1f} times as long (an estimate)"


def _compiled(fit: FitSummary) -> str:
    if fit.compiled_from is None:
        return f"no: {fit.not_compiled}"
    first = fit.compiled_from
    told = "from the first batch on" if first == 1 else f"from batch {first:,} on"
    if fit.is_mixed:
        told += f", {fit.compiled_batches:,} of {fit.batches:,} batches"
    if fit.not_compiled:
        told += f"; some of its programs not: {fit.not_compiled}"
    return told


def _building(fit: FitSummary) -> str:
    """What the fit waited for its programs, where that is much of it."""
    kinds = {"tracing": fit.captured_s, "compiling": fit.compiled_s, "loading": fit.loaded_s}
    waited_s = sum(kinds.values())
    if waited_s < _MUCH * fit.total_s:
        return ""
    told = (f"{_in_s(took_s)} of {what}" for what, took_s in kinds.items() if took_s > _FEW_S)
    return f"{', '.join(told)}: {waited_s / fit.total_s:.0%} of the fit"


def _batch(fit: FitSummary) -> str:
    if not fit.batch_s:
        return ""
    told, times, stock_s = f"{in_ms(fit.batch_s)} ms", "", fit.lightning_batch_s
    if stock_s is not None:
        times = f"{stock_s / fit.batch_s:.1f}"
    if fit.is_mixed and fit.by_operations_s:
        told += f" compiled, {in_ms(fit.by_operations_s)} others"
        times += "" if stock_s is None else f" and {stock_s / fit.by_operations_s:.1f}"
    if stock_s is None:
        return told
    return f"{told}, Lightning about {in_ms(stock_s)}: {times} times as fast"


def _pays(fit: FitSummary) -> str:
    if fit.lightning_s is None:
        return ""
    if fit.pays_after is None:
        return "never, as it is: docs/what_pays.md has which models gain"
    return f"from {_counted(fit.pays_after, 'batch', 'batches')} on"


def _waits(fit: FitSummary) -> str:
    if not fit.waits_s:
        return ""
    share = fit.waits_s / max(fit.stepped_s, fit.waits_s)
    return f"{_in_s(fit.waits_s)} of the steps, {share:.0%}, for other processes"


def _shapes(fit: FitSummary) -> str:
    if not fit.other_shapes:
        return ""
    return (
        f"{fit.other_shapes:,} more than are compiled: {fit.other_shapes_batches:,} batches ran"
        " without a program; padded to few sizes, all are compiled"
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
    stock: Stock | None = None,
    was_busy: bool = False,
    shapes: tuple[int, int] = (0, 0),
    streamed: Traffic | None = None,
) -> FitSummary:
    """What is known of a fit at its end, put together.

    Args:
        batches, steps, total_s, data_s, was_busy, streamed: as in ``FitSummary``.
        speed: of the training's steps.
        costs: of all programs that were built in it.
        training: those of them that train.
        why_not: of each entry point that trains and is not compiled, why, in words.
        stock: an estimate of stock Lightning.
        shapes: how many are too many to be compiled, and how many batches had one.
    """
    waited_s = sum(cost.waited_s for cost in training)
    plain, compiled, compiled_from = speed.pace(False), speed.pace(True), _first(training)
    before_s = plain.batch_s if plain.steps >= STRETCH_STEPS or not compiled.steps else None
    after_s = before_s if compiled_from is None else compiled.batch_s
    tells = batches >= _FEW and not any(why_not)
    compiles_from = _compiles_from(training, before_s) if tells else None
    fit = FitSummary(
        batches=batches,
        steps=steps,
        total_s=total_s,
        captured_s=sum(cost.captured_s for cost in costs),
        compiled_s=sum(one.compiled_s for one in costs if not one.first_compiled_step),
        loaded_s=sum(cost.loaded_s for cost in costs),
        data_s=data_s,
        stepped_s=max(speed.in_steps_s - waited_s, 0.0),
        waits_s=speed.waits.seconds,
        programs=len(costs),
        compiled_from=compiled_from,
        compiled_batches=speed.compiled_steps,
        background_s=sum(cost.compiled_s for cost in training if cost.first_compiled_step),
        not_compiled=_why_not(training, why_not, compiles_from),
        batch_s=after_s or 0.0,
        by_operations_s=before_s,
        compiles_from=compiles_from,
        lightning_s=stock.total_s if stock else None,
        lightning_batch_s=stock.batch_s if stock else None,
        was_busy=was_busy,
        other_shapes=shapes[0],
        other_shapes_batches=shapes[1],
        peak_memory_bytes=peak_memory_bytes(),
        streamed=streamed,
    )
    return replace(fit, pays_after=_pays_after(fit, stock, speed)) if stock else fit


def _first(training: Sequence[Cost]) -> int | None:
    """The first batch that compiled code trained on, counted from 1."""
    found = [one.first_compiled_step or 1 for one in training if one.compiled_s or one.loaded_s]
    return min(found, default=None)


def _pays_after(fit: FitSummary, stock: Stock, speed: Speed) -> int | None:
    """From how many batches on a fit like this one takes less than stock Lightning's."""
    before_s = after_s = speed.alike_s / max(speed.alike_steps, 1)
    uncompiled = 0
    if fit.compiled_from is not None and not fit.is_mixed:
        before_s, after_s = fit.by_operations_s or fit.batch_s, fit.batch_s
        uncompiled = fit.compiled_from - 1
    lost_s = speed.in_steps_s - speed.alike_s  # by building and comparisons
    gained_s = stock.batch_s - (before_s if uncompiled else after_s)
    if uncompiled and lost_s > uncompiled * gained_s:
        # not before it is compiled
        lost_s, gained_s = lost_s - uncompiled * gained_s, stock.batch_s - after_s
    else:
        uncompiled = 0
    if gained_s <= 0:
        return None
    found = max(1, uncompiled + math.ceil(lost_s / gained_s))
    # what is the same in both, such as a checkpoint, is in neither batch
    wins = stock.total_s > fit.total_s
    return min(found, fit.batches) if wins else max(found, fit.batches + 1)


def _compiles_from(training: Sequence[Cost], before_s: float | None) -> int | None:
    """From how many batches on a fit is long enough to be compiled beside its steps."""
    asked = [one.payback for one in training if one.payback is not None]
    if before_s is None or _first(training) is not None or any(one.pays for one in asked):
        return None
    found = [one.compiling_s / ((1 - one.fixed) * before_s) for one in asked if one.can_gain]
    if not found:
        return None
    digits = 2 - len(str(math.ceil(min(found))))  # what is known of it: two of them
    return int(round(min(found), min(digits, 0))) or 1


def _why_not(training: Sequence[Cost], why_not: Sequence[str], compiles_from: int | None) -> str:
    """Why programs that train are not compiled, in words, and what to do."""
    if not why_not or any(why_not):
        return next((one for one in why_not if one), "")
    if _first(training) is not None:
        return "compiling takes longer than they did"
    asked = [cost.payback for cost in training if cost.payback is not None]
    if any(one.pays for one in asked):
        return "the fit was over before it was done; `fulgurite compile` does it beforehand"
    most = max(asked, key=lambda one: one.fixed)
    if not most.can_gain:
        return f"nothing to gain, for {most.fixed:.0%} of a step is in products of matrices"
    least = "" if compiles_from is None else f"; from about {compiles_from:,} batches on it is"
    return f"too short{least}; `fulgurite compile` does it beforehand"


def peak_memory_bytes() -> int:
    """The most memory that this process has had resident, as the system counts it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # getrusage(2) of both


def _counted(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"


def _in_s(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds:.2f} s"
