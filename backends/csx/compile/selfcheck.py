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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.backends.csx.compile.compiler_log import in_a_line
from fulgurite.backends.csx.compile.fabric import Call
from fulgurite.backends.csx.compile.sensitivity import Noisy, moved_away
from fulgurite.backends.csx.diagnostics.errors import PUBLIC
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, line_of
from fulgurite.backends.csx.graph.graph import Graph, like
from fulgurite.backends.csx.graph.op_schema import is_random, operation_name, written_nodes
from fulgurite.backends.csx.state.storage import brief

TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Allowed error of an element, relative to |element| + 0.1 * the largest one of its tensor."""
_FACTOR = 8  # times what the graph itself moved by
_DRAWS, _PATIENCE = 32, 16  # runs with other rounding; how many in a row that explain nothing more
_LATEST = 8  # steps, of which the last is compared again whatever state has not changed


class MiscompiledWarning(UserWarning):
    """A compiled program gave other numbers than its operations one by one, and is not used."""


MiscompiledWarning.__module__ = PUBLIC


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that a graph returns or writes: what to call it, and the operation that made it."""

    name: str
    maker: fx.Node
    position: int  # of the maker in the graph


@dataclass(frozen=True, slots=True)
class Start:
    """What every run begins with."""

    inputs: list[Tensor]
    random_state: Tensor


@dataclass(frozen=True, slots=True)
class Trial:
    """One run from copies of the written inputs."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    values: list[Tensor]
    random_state: Tensor
    shared: list[tuple[int, ...]]  # for each output: which inputs and outputs are its memory, too


@dataclass(frozen=True, slots=True)
class Difference:
    """What the compiled graph got wrong first, and where; what kind of wrong that is; in words."""

    what: str
    line: UserLine | None
    how: str = "gave other numbers than its operations one by one"


class SelfCheck:
    """A compiled graph that checks itself when it is called.

    Args:
        graph: the graph.
        compiled: its compiled form.
        reference: its operations one by one.
        settled: called with whether both agreed, and, once nothing is left to be compared, with
            what was, in words; until then with "".
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
        self._values = list(_values(graph, self._written))
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
            right, tried = self._run(self._reference, start), self._tried(start)
            difference = self._judged(tried, right, start)
            first = difference is None and self._calls == 1 and not self._once
            if first and isinstance(tried, Trial):
                difference = self._moved_away(start, tried)
        except BaseException:
            torch.set_rng_state(start.random_state)  # and nothing else has changed
            raise
        chosen = right if difference is not None or isinstance(tried, Exception) else tried
        if first and difference is None:
            self._newborn = self._unchanged(start, chosen)
        self._done.append(f"step {self._calls} of a run")
        for i in self._written:
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
            if not torch.equal(inputs[i], value):
                del self._newborn[i]
        return not self._newborn

    def _unchanged(self, start: Start, after: Trial) -> dict[int, Tensor]:
        """Copies of the numbers in the state that a step left as it found them."""
        pairs = {i: (start.inputs[i], after.inputs[i]) for i in self._written}
        return {
            i: was.clone()
            for i, (was, now) in pairs.items()
            if was.is_floating_point() and torch.equal(was, now)
        }

    def _judged(self, tried: Trial | Exception, right: Trial, start: Start) -> Difference | None:
        """What is wrong with a compiled run, if anything; a report is written."""
        difference: Difference | None
        if isinstance(tried, Exception):
            difference = Difference(in_a_line(tried), None, "failed, and its operations did not")
        else:
            difference = self._difference(tried, right, start)
        return difference and self._report(difference, tried, right, start)

    def _moved_away(self, start: Start, first: Trial) -> Difference | None:
        """Compare once more, from inputs that were moved; nothing where these cannot be run.

        The ``first`` run's results have to be what they were after that.
        """
        kinds = [item.kind for item in self._graph.inputs]
        inputs = [*map(moved_away, start.inputs, kinds)]
        moved, results = Start(inputs, start.random_state), [*map(torch.clone, first.outputs)]
        try:
            right = self._run(self._reference, moved)
        except (RuntimeError, IndexError, ValueError):
            return None  # an index made of a number, say
        tried = self._tried(moved)
        for value, now, was in zip(self._values, first.outputs, results, strict=False):
            if not _is_equal(now, was):
                what = f"{value.name} is what the next step computes there"
                return self._report(Difference(what, line_of(value.maker)), tried, right, moved)
        difference = self._judged(tried, right, moved)
        if difference is None:
            self._done.append("moved inputs")
        return difference

    def _tried(self, start: Start) -> Trial | Exception:
        """The compiled run; whatever it fails with, the step that is right is there already."""
        try:
            return self._run(self._compiled, start)
        except Exception as error:
            return error

    def _run(self, call: Call, start: Start) -> Trial:
        copies = list(start.inputs)
        for i in self._written:
            copies[i] = like(copies[i]).copy_(copies[i])
        torch.set_rng_state(start.random_state)
        outputs = list(call(list(copies)))
        values = [*outputs, *(copies[i] for i in self._written)]
        return Trial(copies, outputs, values, torch.get_rng_state(), _shared(outputs, copies))

    def _own(self, output: Tensor, copies: list[Tensor], inputs: list[Tensor]) -> Tensor:
        """A result; one that is memory of a written input, of that input and not of its copy."""
        for i in self._written:
            copy, own = copies[i], inputs[i]
            if output.untyped_storage().data_ptr() == copy.untyped_storage().data_ptr():
                offset = output.storage_offset() + own.storage_offset()
                return own.as_strided(output.size(), output.stride(), offset)
        return output

    # -- comparing ---------------------------------------------------------------------------

    def _difference(self, tried: Trial, right: Trial, start: Start) -> Difference | None:
        for k, (a, b) in enumerate(zip(tried.values, right.values, strict=True)):
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                value = self._values[k]
                return Difference(
                    f"{value.name} is {brief(a)}, not {brief(b)}", line_of(value.maker)
                )
        for k, (ours, theirs) in enumerate(zip(tried.shared, right.shared, strict=True)):
            if not set(ours) <= set(theirs):
                value = self._values[k]
                return Difference(f"{value.name} is memory of another value", line_of(value.maker))
        apart = {
            k: slack
            for k, (a, b) in enumerate(zip(tried.values, right.values, strict=True))
            if (slack := _Slack(a, b)).left
        }
        apart = self._unexplained(apart, start)
        if apart:
            first = min(apart, key=lambda k: self._values[k].position)
            value = self._values[first]
            others = f", and {len(apart) - 1} others" if len(apart) > 1 else ""
            what = f"{value.name} is {apart[first].words()}{others}"
            return Difference(what, line_of(value.maker))
        if not torch.equal(tried.random_state, right.random_state):
            draws = [node for node in self._graph.operations() if is_random(node.target)]
            line = line_of(draws[0]) if draws else None
            return Difference("another number of random numbers was drawn", line)
        return None

    def _unexplained(self, apart: dict[int, _Slack], start: Start) -> dict[int, _Slack]:
        """Those of the values apart that the graph's own rounding does not explain."""
        waited = 0
        for seed in range(_DRAWS):
            if not apart or waited == _PATIENCE:
                break
            count = sum(slack.left for slack in apart.values())
            noisy = Noisy(self._graph.module, seed, scale=2 ** (seed // 8))
            moved = self._run(lambda given, noisy=noisy: noisy.run(*given), start)  # type: ignore[misc]
            for k, slack in apart.items():
                slack.widen(moved.values[k])
            apart = {k: slack for k, slack in apart.items() if slack.left}
            waited = 0 if sum(slack.left for slack in apart.values()) < count else waited + 1
        return apart

    # -- telling -----------------------------------------------------------------------------

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
        torch.save(
            {"inputs": start.inputs, "random_state": start.random_state}, folder / "inputs.pt"
        )
        for name, trial in (("compiled", tried), ("right", right)):
            if isinstance(trial, Exception):
                said = "".join(traceback.format_exception(trial))
                (folder / f"{name}.txt").write_text(said)
                continue
            values = {
                f"{k}: {value.name}": tensor
                for k, (value, tensor) in enumerate(zip(self._values, trial.values, strict=True))
            }
            kept = {"values": values, "random_state": trial.random_state}
            torch.save(kept, folder / f"{name}.pt")
        return folder


class _Slack:
    """Elements of a value that are apart, and how far rounding moves each."""

    def __init__(self, tried: Tensor, right: Tensor) -> None:
        self._tried, self._right = tried, right
        self._apart: Tensor | None = None
        self._moved: Tensor | None = None
        if not (tried.dtype == right.dtype and torch.equal(tried, right)):
            self._a, self._b = _numbers(tried), _numbers(right)
            self._allowed = _allowed(right.dtype, self._b)
            self._compare()

    @property
    def left(self) -> int:
        """How many elements are apart."""
        return 0 if self._apart is None else int(self._apart.sum())

    def widen(self, moved: Tensor) -> None:
        """Take in what another rounding made of the value."""
        moves = (_numbers(moved) - self._b).abs()
        moves = moves.nan_to_num(nan=torch.inf)  # finite here and not there
        moves = moves.masked_fill(~self._b.isfinite() & (_numbers(moved) == self._b), 0.0)
        moves = moves.masked_fill(self._b.isnan() & _numbers(moved).isnan(), 0.0)
        self._moved = moves if self._moved is None else torch.maximum(self._moved, moves)
        self._compare()

    def words(self) -> str:
        """The first element apart: ``nan instead of 0.42 at [3, 1] (7 of 64 elements)``."""
        assert self._apart is not None
        place = self._apart.nonzero()[0].tolist()
        got, wanted = (t[tuple(place)].item() for t in (self._a, self._b))
        at = f" at {place}" if place else ""
        count = f" ({self.left} of {self._apart.numel()} elements)" if place else ""
        return f"{got:.7g} instead of {wanted:.7g}{at}{count}"

    def _compare(self) -> None:
        allowed = self._allowed
        if self._moved is not None:
            allowed = allowed + _FACTOR * self._moved
        same = (self._a == self._b) | (self._a.isnan() & self._b.isnan())
        error = (self._a - self._b).abs().nan_to_num(nan=torch.inf)
        self._apart = ~same & ((error > allowed) | (error.isinf() & ~allowed.isinf()))


def _numbers(x: Tensor) -> Tensor:
    return torch.view_as_real(x).double() if x.is_complex() else x.double()


def _shared(outputs: list[Tensor], inputs: list[Tensor]) -> list[tuple[int, ...]]:
    """For each output the positions of inputs, and of outputs before it, that are its memory."""
    pointers = [t.untyped_storage().data_ptr() if t.numel() else 0 for t in (*inputs, *outputs)]
    first = len(inputs)
    return [
        tuple(i for i, one in enumerate(pointers[:k]) if one == pointers[k] != 0)
        for k in range(first, len(pointers))
    ]


def _is_equal(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are: NaN equals NaN."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _allowed(dtype: torch.dtype, right: Tensor) -> Tensor:
    """How far each element may be apart: nothing for integers and booleans."""
    tolerance = TOLERANCES.get(dtype, 1e-4 if dtype.is_complex else 0.0)
    size = right.abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return tolerance * (size + 0.1 * size.max())


def _values(graph: Graph, written: list[int]) -> Iterator[Value]:
    """What a graph returns and writes, in the order of ``Trial.values``."""
    positions = {node: i for i, node in enumerate(graph.module.graph.nodes)}
    returned: Any = graph.module.graph.output_node().args[0]
    for node in returned:
        maker = _origin(node)
        yield Value("what the step returns", maker, positions[maker])
    placeholders = graph.placeholders()
    for i in written:
        state = placeholders[i]
        last = [user for user in state.users if state in written_nodes(user)][-1]
        copied = last.args[1] if last.target is torch.ops.aten.copy_.default else last
        assert isinstance(copied, fx.Node)
        maker = _origin(copied)
        yield Value(graph.inputs[i].name, maker, positions[maker])


def _origin(node: fx.Node) -> fx.Node:
    """The operation that computed a value: Lightning copies a loss, and divides it by a number."""
    while operation_name(node.target) in ("clone", "detach", "alias", "_to_copy", "div"):
        if len(node.all_input_nodes) != 1:
            break
        [node] = node.all_input_nodes
    return node
