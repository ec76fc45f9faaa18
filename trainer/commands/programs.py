"""Commands about programs: those of a script are built, and what was built is shown.

``fulgurite compile`` runs a script with backends that build programs and train nothing; of a
parameter file it is ``fulgurite fit``, in ``cli``. ``fulgurite report`` and ``fulgurite diff`` say
what was built, and what a change did to it.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fulgurite.backends.backend import only_compiling
from fulgurite.backends.report import console, difference
from fulgurite.backends.report.report_file import NoReport, read


def compile_script(script: str, arguments: Sequence[str]) -> int:
    """Run a script as Python does, and say that it trained nothing; returns the exit status.

    Args:
        script: its file.
        arguments: what follows it on its command line.

    Raises:
        RuntimeError: it trains on another device than CSX.
    """
    file = Path(script)
    if not file.is_file():
        print(f"{script}: no such file; give a Python script or a parameter file.", file=sys.stderr)
        return 1
    sys.argv, sys.path[:0] = [script, *arguments], [str(file.parent.resolve())]
    try:
        with only_compiling():
            runpy.run_path(script, run_name="__main__")
    except Exception as error:
        error.add_note(
            "Fits of this script trained nothing, and it went on. What is compiled stays."
        )
        raise
    print(f"Fits of {script} trained nothing; what it did after them was with untrained weights.")
    return 0


def report(folder: str) -> int:
    """Print a report as a table; returns the exit status.

    Args:
        folder: the ``artifact_dir`` of a run, or its ``report.json``.
    """
    return _printed(lambda: console.lines(read(folder)))


def diff(before: str, after: str) -> int:
    """Print what differs between two reports; returns the exit status, 0 where they differ too."""
    return _printed(lambda: difference.lines(read(before), read(after)))


def _printed(lines: Callable[[], Iterable[str]]) -> int:
    try:
        text = "\n".join(lines())
    except NoReport as error:
        print(error, file=sys.stderr)
        return 1
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, "replace").decode(encoding))
    return 0
