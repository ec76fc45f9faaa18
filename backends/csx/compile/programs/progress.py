"""How far a compilation is: told where it compiles, read by whoever shows it.

The code of each part of a program is generated, then the C++ compiler makes machine code of all of
it. What is left is estimated from what has been.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

CODE = "code"
"""What is done first: the text of kernels is generated."""

CPP_SHARE = 0.7
"""Seconds of the C++ compiler for each of generating code: 0.4 to 1.0 (measured, 400 programs)."""

Tell = Callable[[str, int, int], None]
"""Takes what is done now, how many of it are ready, and of how many."""

_listener: ContextVar[Tell | None] = ContextVar("_listener", default=None)


def tell(doing: str, done: int, of: int) -> None:
    """Tell whoever listens in this thread: ``done`` of ``of`` are ready."""
    listener = _listener.get()
    if listener is not None:
        listener(doing, done, of)


@contextlib.contextmanager
def listening(listener: Tell) -> Iterator[None]:
    """Let ``listener`` be told while the block compiles."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Course:
    """One compilation from its begin to now; as text: what is done, seconds so far and to go."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._code_s = 0.0  # that generating all code takes, as far as known
        self._doing, self._done, self._of = CODE, 0, 1

    def note(self, doing: str, done: int, of: int) -> None:
        """Note what was told."""
        self._doing, self._done, self._of = doing, done, of
        spent_s = time.monotonic() - self._began
        if doing == CODE and done:
            self._code_s = spent_s * of / done
        elif doing != CODE and not done:
            self._code_s = spent_s

    @property
    def what(self) -> str:
        """What is done now, and which part of it."""
        part = f" {min(self._done + 1, self._of)} of {self._of}" if self._of > 1 else ""
        return f"{self._doing}{part}"

    def __str__(self) -> str:
        spent_s = time.monotonic() - self._began
        left_s = self._code_s * (1 + CPP_SHARE) - spent_s
        to_go = f", about {left_s:.0f} s to go" if left_s >= 1 else ""
        return f"{self.what}, {spent_s:.0f} s{to_go}"
