"""What goes wrong with a step that is not static.

Each misuse has its own class under ``TraceError``. A message says what was done, where in the
user's code, and what to do instead.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection
from typing import Self

from fulgurite.backends.csx.diagnostics.user_lines import (
    UserLine,
    is_library,
    raised_at,
    user_frames,
)

PUBLIC = "fulgurite.errors"
"""Where users import these from, and what tracebacks call them."""


class TraceError(RuntimeError):
    """The step cannot be one static program.

    Args:
        what: what was done.
        line: where the user did it; None where no line of theirs is known.
        remedy: what to do instead.
        named: names that the user's code on the host has where it did it, if no line is known.
    """

    def __init_subclass__(cls) -> None:
        cls.__module__ = PUBLIC

    def __init__(
        self,
        what: str,
        *,
        line: UserLine | None = None,
        remedy: str = "",
        named: Collection[str] = (),
    ) -> None:
        self.what, self.line, self.remedy, self.named = what, line, remedy, named
        lines = [what]
        inner = None if line is None else line.inside
        for word, one in ("at", inner), ("from" if inner else "at", line):
            if one is not None:
                lines += [f"  {word} {one}"] + ([f"      {one.source}"] if one.source else [])
        if remedy:
            lines.append(f"  Remedy: {remedy}")
        super().__init__("\n".join(lines))

    def replaced(self, *, line: UserLine | None, what: str = "", remedy: str = "") -> Self:
        """The same error with another line, text or remedy; its notes stay."""
        error = type(self)(what or self.what, line=line, remedy=remedy or self.remedy)
        for note in getattr(self, "__notes__", ()):
            error.add_note(note)
        return error


TraceError.__module__ = PUBLIC


class UsersFramesAlone:
    """In a ``with``: the error of a step that is not static comes with the user's frames alone.

    The 60 frames of Lightning and torch in between say nothing about the model.

    Args:
        others: errors of other types that come so too.
    """

    def __init__(self, *others: type[Exception]) -> None:
        self._kinds: tuple[type[Exception], ...] = (TraceError, *others)

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Shorten the traceback; what is raised again takes it from here."""
        if not isinstance(error, self._kinds):
            return
        error.__traceback__ = user_frames(error.__traceback__)
        error.__suppress_context__ = True
        more = f"More: fulgurite explain {type(error).__name__}"
        if isinstance(error, TraceError) and more not in getattr(error, "__notes__", ()):
            error.add_note(more)


class ConditionalOnTensor(TraceError):
    """Python asked a tensor for its truth: ``if``, ``while``, ``assert``, ``bool()``, ``in``."""


class HostRead(TraceError):
    """Python read a tensor's value: ``.item()``, ``float()``, ``.tolist()``, ``.cpu()``."""


class TensorPrinted(HostRead):
    """A tensor was printed or formatted while traced, where it has no value yet."""


class ScalarArgument(TraceError):
    """A computed tensor went where torch takes only Python's numbers: ``alpha=``, ``value=``."""


class DynamicShape(TraceError):
    """The shape of a result depends on values: ``nonzero``, ``unique``, ``x[mask]``."""


class UnsupportedDevice(TraceError):
    """The step asked for a device that the backend does not have: ``.to("cuda")``."""


class UnsupportedDtype(TraceError):
    """The step used a dtype that the run does not have: float64, a second 16-bit type."""


class RandomStateSet(TraceError):
    """The step set a random state, or drew from a generator of its own."""


class InputChanged(TraceError):
    """A batch differs from the traced one in structure, shape, dtype, or in a Python value."""


class UnsupportedInput(TraceError):
    """A batch holds something that can be neither a program's input nor a constant."""


class StateChanged(TraceError):
    """What the program was built on changed: a parameter, a buffer, requires_grad, train mode."""


class FrozenValueChanged(StateChanged):
    """The host changed a Python value that the step read when it was traced."""


class UnsupportedState(TraceError):
    """The step keeps state in a way that cannot be the program's."""


class StateBornInStep(UnsupportedState):
    """State that the step makes from data on its first run: ``if self.ema is None: ...``."""


class ForeignState(UnsupportedState):
    """The step changes a tensor that no module holds: a global, a closure's."""


class FrozenNumber(UnsupportedState):
    """The step set a number of a param group, which the host sets between steps."""


class LeakedTensor(TraceError):
    """A tensor of the trace was used after it: kept in a global, a closure, a dict, an object."""

    used_at: UserLine | None = None  # where the user used it
    is_constant = False  # whether the tensor followed from constants alone


class GradientNotKept(TraceError):
    """The host used a gradient that the program computed and did not keep."""

    is_constant = False  # whether it followed from constants alone


class GraphChanged(TraceError):
    """The step, traced again, is another program: another operation or constant."""


class GraphsDiffer(TraceError):
    """Processes that train together have traced another step each."""


class BatchesDiffer(TraceError):
    """Processes that train together have another number of batches each."""


class NoMeeting(TraceError):
    """Processes that shall train together have not all come together."""


class OtherRankEnded(TraceError):
    """Another of the processes that train together has ended, so this one cannot go on."""


class NoLoss(TraceError):
    """There is no loss to train by: none with a gradient, or none that was scaled."""


class UnfusedLoss(TraceError):
    """A loss with ``use_autogen=True`` that cannot be one generated kernel."""


_DATA = ("lightning.pytorch.loops.fetchers", "fulgurite.loops.fetching", "torch.utils.data")
"""Who asks for batches: a StopIteration that passed one of these is the end of the data."""


def refuse_stop_iteration(error: StopIteration) -> None:
    """Raise a RuntimeError that names the line, if it was the user's code that raised this one."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [str(frame.f_globals.get("__name__", "")) for frame in frames]
    line = raised_at(error)
    by_library = line is None or is_library(frames[-1])
    if line is None or by_library or any(name.startswith(_DATA) for name in modules):
        return
    raise RuntimeError(
        f"{line.function} raised StopIteration, which would end the epoch without a word.\n"
        f"  at {line}\n      {line.source}\n"
        "  Remedy: let next(it) never run out: make the iterator anew where it is exhausted, or use"
        " itertools.cycle. What a step reads anew on every batch belongs in the batch."
    ) from error
