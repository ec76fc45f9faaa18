"""The self-check: runs of a compiled graph beside the same graph run operation by operation.

Both start from the same inputs, state and random state. Results, written state and the random state
afterwards must agree, in dtype, shape and memory that they share, too: integers and booleans
exactly, other numbers to ``TOLERANCES``, or to what the graph itself does when its operations round
otherwise (``sensitivity``). NaN equals NaN. If they do not, the graph is run operation by operation
from then on, a ``MiscompiledWarning`` names the line, and a folder keeps what a report needs.

Compared are the first step; that step again, without effect, from inputs that were moved away from
what they are (state is zero at its birth, and code that ignores it right); and a later step, by
which all state has left its birth. Then the code is trusted, but for audits that ask again.

It costs two runs operation by operation, and meanwhile the written state twice more.
"""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fulgurite.backends.csx.compile.checking.differences import (
    Comparison,
    Difference,
    Start,
    Trial,
    is_equal,
)
from fulgurite.backends.csx.compile.checking.sensitivity import moved_away
from fulgurite.backends.csx.compile.fabric import Call
from fulgurite.backends.csx.compile.programs.compiler_log import in_a_line
from fulgurite.backends.csx.diagnostics.trace_errors import PUBLIC
from fulgurite.backends.csx.diagnostics.user_lines import line_of
from fulgurite.backends.csx.graph.graph import Graph, Input
from fulgurite.backends.csx.streaming.residency import residency

_LATEST = 8  # steps, of which the last is compared again whatever state has not changed


class MiscompiledWarning(UserWarning):
    """A compiled program gave other numbers than its operations one by one, and is not used."""


MiscompiledWarning.__module__ = PUBLIC


class SelfCheck:
    """A compiled graph that checks itself when it is called.

    Args:
        graph: the graph.
        compiled: its compiled form.
        reference: its operations one by one.
        settled: called after each comparison: with whether both agreed, and with what was compared,
            in words, or "" while more is left to be.
        folder: where what a report needs may be kept.
        program: the folder of the compiled program; its Python is copied.
        once: whether one step is all that is compared.

    Attributes:
        trusted: whether a call may run the compiled graph alone.
    """

    def __init__(
        self,
        graph: Graph,
        compiled: Call,
        reference: Call,
        settled: Callable[[bool, str], None],
        folder: Path,
        program: Path,
        once: bool = False,
    ) -> None:
        self._graph, self._compiled, self._reference = graph, compiled, reference
        self._settled, self._folder, self._program = settled, folder, program
        self._written = sorted(graph.written())
        self._compared = Comparison(graph)
        self._once, self._calls, self.trusted = once, 0, False
        self._done: list[str] = []
        self._newborn: dict[int, Tensor] = {}  # state as the first step found and left it

    def __call__(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Run once, both ways where that is due, and leave the right results and state."""
        self._calls += 1
        if not self._is_due(inputs):
            return self._compiled(inputs)
        start = Start(inputs, torch.get_rng_state())
        try:
            right, tried = self._compared.run(self._reference, start), self._tried(start)
            difference = self._judged(tried, right, start)
            first = difference is None and self._calls == 1 and not self._once
            if first and isinstance(tried, Trial):
                difference = self._moved_away(start, tried)
        except BaseException:
            torch.set_rng_state(start.random_state)  # and nothing else has changed
            raise
        chosen = right if difference is not None or isinstance(tried, Exception) else tried
        if self._compared.is_shared:  # both ran alone; this is the step
            run = self._reference if chosen is right else self._compiled
            chosen = self._compared.run(run, start, together=True)
        if first and difference is None:
            self._newborn = self._unchanged(start, chosen)
        self._done.append(f"step {self._calls} of a run")
        for i in self._written:
            residency.use(inputs[i], chosen.inputs[i])
            inputs[i].copy_(chosen.inputs[i])
        torch.set_rng_state(chosen.random_state)
        self.trusted = difference is None
        waits = self.trusted and first and bool(self._written)
        self._settled(self.trusted, "" if waits else ", ".join(self._done))
        return [self._own(output, chosen.inputs, inputs) for output in chosen.outputs]

    def _is_due(self, inputs: list[Tensor]) -> bool:
        if self._calls == 1 or self._calls >= _LATEST:
            return True
        for i, value in list(self._newborn.items()):
            if not _is_same(inputs[i], value):
                del self._newborn[i]
        return not self._newborn

    def _unchanged(self, start: Start, after: Trial) -> dict[int, Tensor]:
        """Copies of the numbers in the state that a step left as it found them."""
        pairs = {i: (start.inputs[i], after.inputs[i]) for i in self._written}
        return {
            i: residency.copy_of(was)
            for i, (was, now) in pairs.items()
            if was.is_floating_point() and _is_same(was, now)
        }

    def _judged(self, tried: Trial | Exception, right: Trial, start: Start) -> Difference | None:
        """What is wrong with a compiled run, if anything; a report is written."""
        difference: Difference | None
        if isinstance(tried, Exception):
            difference = Difference(in_a_line(tried), None, "failed, and its operations did not")
        else:
            difference = self._compared.difference(tried, right, start)
        return difference and self._report(difference, tried, right, start)

    def _moved_away(self, start: Start, first: Trial) -> Difference | None:
        """Compare once more, from inputs that were moved; nothing where these cannot be run.

        The ``first`` run's results have to be what they were after that.
        """
        # state is zero at its birth, and code that ignores it is right in the first step
        inputs = [*map(_moved, start.inputs, self._graph.inputs)]
        moved, results = Start(inputs, start.random_state), [*map(torch.clone, first.outputs)]
        try:
            right = self._compared.run(self._reference, moved)
        except (RuntimeError, IndexError, ValueError):
            return None  # an index made of a number, say
        tried = self._tried(moved)
        # a result in memory that the program reuses is right until the next run
        for k, (now, was) in enumerate(zip(first.outputs, results, strict=True)):
            if not is_equal(now, was):
                value = self._compared.values[k]
                what = f"{value.name} is what the next step computes there"
                return self._report(Difference(what, line_of(value.maker)), tried, right, moved)
        difference = self._judged(tried, right, moved)
        if difference is None:
            self._done.append("moved inputs")
        return difference

    def _tried(self, start: Start) -> Trial | Exception:
        """The compiled run; whatever it fails with, the step that is right is there already."""
        try:
            return self._compared.run(self._compiled, start)
        except Exception as error:
            return error

    def _own(self, output: Tensor, copies: list[Tensor], inputs: list[Tensor]) -> Tensor:
        """A result; one that is memory of a written input, of that input and not of its copy."""
        for i in self._written:
            copy, own = copies[i], inputs[i]
            if output.untyped_storage().data_ptr() == copy.untyped_storage().data_ptr():
                offset = output.storage_offset() + own.storage_offset()
                return own.as_strided(output.size(), output.stride(), offset)
        return output

    def _report(
        self, difference: Difference, tried: Trial | Exception, right: Trial, start: Start
    ) -> Difference:
        """Warn of a difference, and return it."""
        try:
            folder = self._write(difference, tried, right, start)
            kept = f"What a report needs is in {folder}."
        except OSError as error:
            kept = f"What a report needs could not be kept ({error})."
        where = f"\n  at {difference.line}" if difference.line is not None else ""
        if where and difference.line is not None and difference.line.source:
            where += f"\n      {difference.line.source}"
        warnings.warn(
            f"The compiled program {difference.how}: {difference.what}.{where}\n  The run goes on"
            f" operation by operation, slower, with the right numbers. {kept}",
            MiscompiledWarning,
            stacklevel=2,
        )
        return difference

    def _write(
        self, difference: Difference, tried: Trial | Exception, right: Trial, start: Start
    ) -> Path:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=self._folder, prefix="miscompiled-"))
        (folder / "graph.txt").write_text(self._graph.text())
        (folder / "versions.txt").write_text(
            f"{difference.what}\n  at {difference.line}\n"
            f"torch {torch.__version__}\npython {sys.version}\n{platform.platform()}\n"
            f"{torch.__config__.show()}\n"
        )
        for source in self._program.glob("*.py"):
            shutil.copy(source, folder)
        given = {"inputs": start.inputs, "random_state": start.random_state}
        torch.save(given, folder / "inputs.pt")
        for name, trial in (("compiled", tried), ("right", right)):
            if isinstance(trial, Exception):
                said = "".join(traceback.format_exception(trial))
                (folder / f"{name}.txt").write_text(said)
                continue
            values = {
                f"{k}: {value.name}": tensor
                for k, (value, tensor) in enumerate(
                    zip(self._compared.values, trial.values, strict=True)
                )
            }
            kept = {"values": values, "random_state": trial.random_state}
            torch.save(kept, folder / f"{name}.pt")
        return folder


def _is_same(a: Tensor, b: Tensor) -> bool:
    residency.use(a, b)
    return torch.equal(a, b)


def _moved(x: Tensor, item: Input) -> Tensor:
    """An input with other numbers; of one in a file another one in a file."""
    residency.use(x)
    moved = x if item.zero else moved_away(x, item.kind)
    if moved is x or not residency.is_in_file(x):
        return moved
    made = residency.like(x)
    residency.use(made)
    made.copy_(moved)
    return made
