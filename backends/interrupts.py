"""Ctrl-C while something is made that is put back when it fails: once is enough."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupted_once() -> Iterator[None]:
    """Let the first Ctrl-C end the block, and ignore others while it puts things back.

    A second one would leave them half put back. What a Ctrl-C does stays what it was: where the
    process's handler raises nothing, the block goes on, and the next one is given to it too. Only
    Python's main thread receives signals; in others nothing has to be done.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    ends = False

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal ends
        if not ends:
            try:
                before(number, frame)
            except BaseException:
                ends = True
                raise

    signal.signal(signal.SIGINT, receive)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is receive:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Let a Ctrl-C that comes while something is put back take effect when the block is done."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
