"""Who called the torch function that runs now: the step's own code, an optimizer, or a metric.

What is a misuse in the user's code may be harmless in a library's, which knows what it does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType

from fulgurite.backends.csx.diagnostics.user_lines import is_library, top_package


def _caller() -> FrameType | None:
    """The frame that called the torch function which runs now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and top_package(frame) == "fulgurite":
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame


def called_by_library() -> bool:
    """Whether library code made the torch call that runs now; also if the caller is unknown."""
    caller = _caller()
    return caller is None or is_library(caller)


def called_by_torch_optim() -> bool:
    """Whether one of torch's optimizers called: it reads numbers that a program can compute."""
    caller = _caller()
    return caller is not None and caller.f_globals.get("__name__", "").startswith("torch.optim.")


def may_use_double() -> bool:
    """Whether the code that called may use float64: optimizers and metrics, for a few scalars."""
    frame = _caller()
    while frame is not None and top_package(frame) in ("torch", "contextlib", "functools"):
        if frame.f_globals["__name__"].startswith(("torch.optim", "torch.amp")):
            return True
        frame = frame.f_back
    return frame is None or top_package(frame) in ("fulgurite", "torchmetrics", "lightning")


def line_of_torchmetrics() -> str | None:
    """File and line of torchmetrics' code, if that is what called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and top_package(frame) in ("torch", "fulgurite"):
        frame = frame.f_back
    if frame is None or top_package(frame) != "torchmetrics":
        return None
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def torch_frames() -> Iterator[FrameType]:
    """The frames of torch's that the user's line led to, the outermost first."""
    frames: list[FrameType] = []
    frame = _caller()
    while frame is not None and top_package(frame) == "torch":
        if frame.f_globals["__name__"] not in ("torch._tensor", "torch.overrides"):
            frames.append(frame)
        frame = frame.f_back
    return reversed(frames)
