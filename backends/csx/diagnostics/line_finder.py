"""The lines after which something is no longer as it was."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from fulgurite.backends.csx.diagnostics.user_lines import LIBRARIES, UserLine, top_package


class LineFinder:
    """Finds the lines after which something is no longer as it was, by looking after each.

    Attributes:
        found: the line for each name that ``changes`` gave.
    """

    def __init__(self) -> None:
        self.found: dict[str, UserLine] = {}
        self._at: dict[int, int] = {}  # the line that each frame is in, by the frame's identity

    @contextlib.contextmanager
    def watching(self, changes: Callable[[], Iterable[Any]]) -> Iterator[None]:
        """Look while the block runs; ``changes`` gives what differs now, each with a ``name``."""
        self._changes, before = changes, sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)
            self._at.clear()

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        if top_package(frame) in LIBRARIES or not frame.f_globals.get("__name__"):
            return None
        # what differs by now was done by the line that calls: it would else be blamed on the first
        # line of what is called
        caller = frame.f_back
        while caller is not None and id(caller) not in self._at:
            caller = caller.f_back
        if caller is not None:
            self._look(caller)
        self._at[id(frame)] = frame.f_lineno
        return self._ran

    def _ran(self, frame: FrameType, event: str, arg: Any) -> Any:
        self._look(frame)
        self._at[id(frame)] = frame.f_lineno
        return self._ran

    def _look(self, frame: FrameType) -> None:
        for change in self._changes():
            line = UserLine.at(frame.f_code, self._at[id(frame)])
            self.found.setdefault(change.name, line)
