"""Commands about programs: those of a script are built, and what was built is shown.

``fulgurite compile`` runs a script with backends that build programs and train nothing; of a
parameter file it is ``fulgurite fit``, in ``cli``. ``fulgurite report`` and ``fulgurite diff`` say
what was built, and what a change did to it.
"""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fulgurite.backends.backend import has_built, only_compiling
from fulgurite.backends.report import console, difference
from fulgurite.backends.report.report_file import NoReport, read


class _WouldSave(SystemExit):
    """Ends a script, which does not take it for an error."""


def compile_script(script: str, arguments: Sequence[str]) -> int:
    """Run a script as Python does, and say that it trained nothing; returns the exit status.

    It ends where ``torch.save`` or ``Trainer.save_checkpoint`` would save after a run that trained
    nothing: what is there already may have been trained.

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
    save, trained_nothing = torch.save, f"Fits of {script} trained nothing"

    def save_unless_built(*given: Any, **options: Any) -> None:
        if has_built():
            raise _WouldSave
        save(*given, **options)

    try:
        with only_compiling(), mock.patch.object(torch, "save", save_unless_built):
            runpy.run_path(script, run_name="__main__")
    except _WouldSave as end:
        at = [one for one in traceback.extract_tb(end.__traceback__) if one.filename == script]
        print(f"{trained_nothing}; it ends at line {at[-1].lineno}, which saves: {at[-1].line}")
        return 0
    except Exception as error:
        if has_built():
            error.add_note(f"{trained_nothing}, and it went on after them.")
        error.add_note("What is compiled stays.")
        raise
    print(f"{trained_nothing}; what it did after them was with untrained weights.")
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
