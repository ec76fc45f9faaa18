"""Fused regions: code whose operations are to be one kernel, and another in the backward pass.

``fused_region`` marks the code while it is traced. The mark is part of the text that a node has of
its line (``user_lines``), which all passes carry along.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

_MARK = "\n    in fused region "


@dataclass(frozen=True, slots=True)
class Region:
    """A fused region of a trace: the how manyth, what it is called, and which pass."""

    number: int
    name: str
    backward: bool = False

    def __str__(self) -> str:
        return f"{self.number} {'backward' if self.backward else 'forward'} {self.name}"

    @classmethod
    def parsed(cls, text: str) -> Region | None:
        """The region of such a text; None of any other."""
        found = re.fullmatch(r"(\d+) (forward|backward) (.*)", text)
        return None if found is None else cls(int(found[1]), found[3], found[2] == "backward")

    @property
    def described(self) -> str:
        """``CrossEntropyLoss backward``."""
        return f"{self.name} {'backward' if self.backward else 'forward'}"


class _Trace:
    """The regions of the trace that is under way."""

    def __init__(self) -> None:
        self.entered, self.now = 0, None  # type: int, Region | None


_trace = _Trace()


@contextlib.contextmanager
def fused_region(name: str) -> Iterator[None]:
    """While it lasts, operations that are traced belong to one fused region.

    A region inside another one belongs to that. Where nothing is traced, this does nothing.

    Args:
        name: what it is called in messages and reports: a class of losses.
    """
    before = _trace.now
    if before is None:
        _trace.entered += 1
        _trace.now = Region(_trace.entered, name)
    try:
        yield
    finally:
        _trace.now = before


def begin_counting() -> None:
    """A trace begins: its first region is number 1."""
    _trace.entered = 0


def region_now() -> Region | None:
    """The region whose code runs now."""
    return _trace.now


def backward_of(region: Region) -> Region:
    """The region of the backward pass of a region."""
    return replace(region, backward=True)


def marked(text: str, region: Region | None) -> str:
    """The text of a node with the region that it is in."""
    return text if region is None else f"{text}{_MARK}{region}"


def unmarked(text: str) -> str:
    """The same without."""
    return text.partition(_MARK)[0]


def region_of(node: fx.Node) -> Region | None:
    """The region that a node is in."""
    return _region_in(str(node.meta.get("stack_trace", "")))


@functools.lru_cache(maxsize=4096)  # many nodes share one
def _region_in(text: str) -> Region | None:
    return Region.parsed(text.partition(_MARK)[2])
