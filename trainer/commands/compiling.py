"""``fulgurite compile``: a script runs with backends that build its programs and train nothing."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from fulgurite.backends.backend import only_compiling


def compile_script(script: str, arguments: Sequence[str]) -> int:
    """Run a script as Python does; returns 0.

    Args:
        script: its file.
        arguments: what follows it on its command line.

    Raises:
        ValueError: it is no script.
        RuntimeError: it trains on another device than CSX.
    """
    file = Path(script)
    if not file.is_file() or file.suffix in (".yaml", ".yml"):
        what = "is a parameter file" if file.is_file() else "is not there"
        raise ValueError(
            f"{script!r} {what}. Give a Python script; for a parameter file:"
            " fulgurite fit FILE --compile_only"
        )
    sys.argv, sys.path[:0] = [script, *arguments], [str(file.parent.resolve())]
    try:
        with only_compiling():
            runpy.run_path(script, run_name="__main__")
    except Exception as error:
        error.add_note(
            "Fits of this script trained nothing, and it went on. What is compiled stays."
        )
        raise
    return 0
