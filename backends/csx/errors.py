"""What goes wrong with a step that is not static.

Each misuse has its own class under ``TraceError``. A message says what was done, where in the
user's code, and what to do instead.
"""

from __future__ import annotations

from fulgurite.backends.csx.lines import UserLine


class TraceError(RuntimeError):
    """The step cannot be one static program.

    Args:
        what: what was done.
        line: where the user did it; None where no line of theirs is known.
        remedy: what to do instead.
    """

    def __init__(self, what: str, *, line: UserLine | None = None, remedy: str = "") -> None:
        self.what, self.line, self.remedy = what, line, remedy
        lines = [what]
        if line is not None:
            lines += [f"  at {line}"] + ([f"      {line.source}"] if line.source else [])
        if remedy:
            lines.append(f"  Remedy: {remedy}")
        super().__init__("\n".join(lines))


class ConditionalOnTensor(TraceError):
    """Python asked a tensor for its truth: ``if``, ``while``, ``assert``, ``bool()``, ``in``."""


class HostRead(TraceError):
    """Python read a tensor's value: ``.item()``, ``float()``, ``.tolist()``, ``.cpu()``."""


class TensorPrinted(HostRead):
    """A tensor was printed or formatted while traced, where it has no value yet."""


class DynamicShape(TraceError):
    """The shape of a result depends on values: ``nonzero``, ``unique``, ``x[mask]``."""


class InputChanged(TraceError):
    """A batch differs from the traced one in structure, shape, dtype, or in a Python value."""


class StateChanged(TraceError):
    """What the program was built on changed: a parameter, a buffer, requires_grad, train mode."""


class UnsupportedInput(TraceError):
    """A batch holds something that can be neither a program's input nor a constant."""


class UnsupportedState(TraceError):
    """The step keeps state in a way that cannot be the program's."""


class NoLoss(TraceError):
    """``training_step`` returned no loss under automatic optimization."""
