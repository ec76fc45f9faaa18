"""The files of a report: ``report.json`` and ``report.html``, written anew with each program, and
``report.json`` read again.

A report has ``format``, who wrote it when, and ``programs``; a program has its entry points, what
building it took, its passes and warnings. ``SHAPE`` is the whole form. Sizes end in their unit.
"""

from __future__ import annotations

import json
import os
import platform
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from fulgurite.backends.report.page import page
from fulgurite.backends.report.words import Data

NAME, PAGE = "report.json", "report.html"
FORMAT = 3
_BUILD = "build the program again with backend('CSX', artifact_dir=...)"

_OPERATION = {"kind": str, "maker": str, "module": str, "line": str, "source": str, "result": str}
_CALL = {"kernel": str, "maker": str, "operations": [int], "region": str, "tuned": str}
_COST = {"read_bytes": int, "written_bytes": int, "seconds": float}
_MESSAGE = {"kind": str, "size_bytes": int, "begins": float, "needed": float}
_GATHERED = {"name": str, "size_bytes": int, "gathers": int, "held": bool}
_BOUND = {"system": str, "systems": int, "batch_size": int, "bound": str, "compute_s": float}
_ENTRY = {
    "name": str,
    "how": str,
    "flops": int,
    "operations": [{**_OPERATION, "backward": bool}],
    "calls": [{**_CALL, **_COST, "sent_bytes": int}],
    "messages": [_MESSAGE],
    "gathered": [_GATHERED],
    "backward_share": float,
    "processes": int,
    "measured": None,
    "sources": {str: str},
    "calling": str,
    "passes": [{"name": str, "before": int, "after": int, "changes": {str: [int]}}],
    "modules": [{"module": str, "operations": int, "forward_flops": int, **_COST}],
    "memory": None,
    "roofline": [{**_BOUND, "memory_s": float, "weights_s": float}],
}
_PROGRAM = {
    "stage": str,
    "headline": str,
    "fabric": str,
    "reason": str,
    "inputs": [str],
    "state": [str],
    "seconds": {str: float},
    "warnings": [{"category": str, "text": str, "place": str}],
    "entries": [_ENTRY],
}
SHAPE = {
    "format": int,
    "written": str,
    "versions": {str: str},
    "options": {str: None},
    "programs": [_PROGRAM],
}
"""The form of a report, without what may be missing: a list of one form, a dict of str to one."""


@dataclass(frozen=True, slots=True)
class _Written:
    """A program of a folder's report, the options, and the run that built it while it lives."""

    data: Data
    options: Mapping[str, Any]
    run: weakref.ref[Any]


_folders: dict[Path, list[_Written]] = {}


def add(folder: Path, run: object, program: Data, options: Mapping[str, Any]) -> None:
    """Add a program to the report in a folder, or begin one.

    A report has all programs that this process built into its folder, but those of a stage that
    another run has built since.

    Args:
        folder: where; it exists.
        run: whose program it is: the Trainer, whose module is the program's ``model``, or the
            backend where there is none.
        program: as plain data, of the form that ``SHAPE`` has.
        options: of the backend.
    """
    programs = [
        one
        for one in _folders.get(folder.resolve(), [])
        # a run that has ended is None here, and equals no other
        if one.run() is run or one.data["stage"] != program["stage"]
    ]
    module = getattr(run, "lightning_module", None)
    program = {**program, "model": "" if module is None else type(module).__name__}
    programs.append(_Written(program, options, weakref.ref(run)))
    _folders[folder.resolve()] = programs
    _write(folder, programs, options)


def _write(folder: Path, programs: list[_Written], options: Mapping[str, Any]) -> None:
    report = {
        "format": FORMAT,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            **{name: metadata.version(name) for name in ("fulgurite", "torch", "lightning")},
            "python": platform.python_version(),
        },
        "options": dict(options),
        "programs": [one.data for one in programs],
    }
    _replace(folder / NAME, json.dumps(report, indent=1, allow_nan=False))
    _replace(folder / PAGE, page(report))


def add_measured(folder: Path, run: object, stage: str, measured: Data, fit: Data) -> None:
    """Add how long the steps of a stage took to the report in a folder, where the run has one.

    Args:
        folder, run: as of ``add``.
        stage: whose steps.
        measured: ``steps``, and of one on average ``step_s`` and ``waits_s``, those it waited for
            other processes.
        fit: a ``FitSummary``, as ``fit`` of that program.
    """
    report = _folders.get(folder.resolve(), [])
    own = [one for one in report if one.run() is run and one.data["stage"] == stage]
    if own:  # steps of its other programs, for other shapes, are counted with those of the first
        own[0].data["entries"][-1]["measured"] = dict(measured)
        own[0].data["fit"] = dict(fit)
        _write(folder, report, own[0].options)


def _replace(file: Path, text: str) -> None:
    """Write a file so that who reads it sees the old one or the new one, whole."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


class NoReport(ValueError):
    """There is no report to read; the text is one line, and says what to do."""


def read(given: str | Path) -> dict[str, Any]:
    """The report in a folder, or in a file.

    Raises:
        NoReport: there is none, or none that can be read.
    """
    path = Path(given)
    if not path.exists():
        raise NoReport(f"{given}: no such file or folder; give the artifact_dir of a run.")
    file = path / NAME if path.is_dir() else path
    if not file.exists():
        raise NoReport(f"{given}: no {NAME} in this folder; {_BUILD}.")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise NoReport(f"{file}: cannot be read ({error}); {_BUILD}.") from None
    if not isinstance(found, dict) or "format" not in found:
        raise NoReport(f"{file}: is no report of Fulgurite; give the artifact_dir of a run.")
    if found["format"] != FORMAT:
        raise NoReport(
            f"{file}: is of format {found['format']!r}, and this Fulgurite reads format {FORMAT};"
            f" read it with the version that wrote it, or {_BUILD}."
        )
    if wrong := misfit(found, SHAPE, ""):
        raise NoReport(f"{file}: is damaged ({wrong}); {_BUILD}.")
    return found


def misfit(value: Any, shape: Any, at: str) -> str:
    """Where a value is not of a form; empty if it is."""
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{at} is no list"
        found = (misfit(one, shape[0], f"{at}[{i}]") for i, one in enumerate(value))
    elif isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{at or 'it'} is no object"
        shapes = dict.fromkeys(value, shape[str]) if str in shape else shape
        paths = {key: f"{at}.{key}".lstrip(".") for key in shapes}
        if lost := next((path for key, path in paths.items() if key not in value), ""):
            return f"{lost} is missing"
        found = (misfit(value[key], inner, paths[key]) for key, inner in shapes.items())
    else:
        # seconds may be a whole number, 0 say
        fits = shape is None or isinstance(value, (int, float) if shape is float else shape)
        return "" if fits else f"{at} is no {shape.__name__}"
    return next(filter(None, found), "")
