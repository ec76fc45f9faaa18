"""A trace that repeats another one prints nothing; other threads print on."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Iterator
from typing import Any

from fulgurite.backends.patches import patched


@contextlib.contextmanager
def muted(*names: str) -> Iterator[None]:
    """Drop what this thread writes to streams of ``sys`` ("stdout", "stderr")."""
    with patched([(sys, name, _Mute(getattr(sys, name))) for name in names]):
        yield


class _Mute(io.TextIOBase):
    """A stream that drops what this thread writes."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        """Write what other threads do."""
        if threading.get_ident() != self._thread:
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush."""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
