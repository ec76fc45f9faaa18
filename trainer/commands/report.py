"""``fulgurite report`` and ``fulgurite diff``: what was built, and what a change did to it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from fulgurite.backends.report import console, difference
from fulgurite.backends.report.report_file import NoReport, read


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
