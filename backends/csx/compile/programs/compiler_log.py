"""What a compiler prints: one line of it for the screen, and all of it in a file."""

from __future__ import annotations

import os
import tempfile
import traceback
from pathlib import Path

from fulgurite.backends.torch_compiler import CppCompileError

PREFIX, SUFFIX = "fulgurite-compile-", ".txt"
_MOST = 160  # characters of a line


def in_a_line(error: Exception) -> str:
    """A failure in one line: of the C++ compiler's, the first that it calls an error.

    Of any other: its type, what it says, and the file and line where it was raised.
    """
    inner: Exception = getattr(error, "inner_exception", error)  # of torch's InductorError
    if isinstance(inner, CppCompileError):
        lines = [line.strip() for line in inner.output.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        return _cut(f"the C++ compiler: {[*errors, *lines, 'it printed nothing'][0]}")
    said = [f": {line}" for line in str(inner).strip().splitlines()]
    frames = traceback.extract_tb(inner.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return _cut(f"{type(inner).__name__}{[*said, ''][0]}") + place


def _cut(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."


def with_log(why: str, log: Path | None) -> str:
    """Why something was not compiled, with the file that has more, where there is one."""
    return why if log is None else f"{why}; {log} has more"


def keep(printed: str) -> Path | None:
    """Write what was printed into a file of its own; None if it is nothing, or a disk is full."""
    if not printed:
        return None
    try:
        number, name = tempfile.mkstemp(prefix=PREFIX, suffix=SUFFIX)
        with os.fdopen(number, "w", errors="replace") as file:
            file.write(printed)
    except OSError:
        return None
    return Path(name)
