"""The files of a report: ``report.json`` and ``report.html``, written anew with each program."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fulgurite.backends.csx.report.costs import Data
from fulgurite.backends.csx.report.data import Built, program_data, report_data
from fulgurite.backends.csx.report.page import page
from fulgurite.backends.csx.report.reading import NAME

PAGE = "report.html"


@dataclass(frozen=True, slots=True)
class _Written:
    """A program of a folder's report, the options, and the run that built it while it lives."""

    data: Data
    options: Mapping[str, Any]
    run: weakref.ref[Any]


_folders: dict[Path, list[_Written]] = {}


def add(folder: Path, run: object, built: Built, options: Mapping[str, Any]) -> None:
    """Add a program to the report in a folder, or begin one.

    A report has all programs that this process built into its folder, but those of a stage that
    another run has built since.

    Args:
        folder: where; it exists.
        run: whose program it is: the Trainer, or the backend where there is none.
        built: the program.
        options: of the backend.
    """
    programs = [
        one
        for one in _folders.get(folder.resolve(), [])
        if one.run() is run or one.data["stage"] != built.stage
    ]
    programs.append(_Written(program_data(built), options, weakref.ref(run)))
    _folders[folder.resolve()] = programs
    _write(folder, programs, options)


def _write(folder: Path, programs: list[_Written], options: Mapping[str, Any]) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    report = report_data([one.data for one in programs], options, now)
    _replace(folder / NAME, json.dumps(report, indent=1, allow_nan=False))
    _replace(folder / PAGE, page(report))


def add_measured(folder: Path, run: object, stage: str, measured: Data) -> None:
    """Add how long the steps of a stage took to the report in a folder, where the run has one.

    Args:
        folder, run: as of ``add``.
        stage: whose steps.
        measured: ``steps``, and of one on average ``step_s`` and ``waits_s``, those it waited for
            other processes.
    """
    report = _folders.get(folder.resolve(), [])
    own = [one for one in report if one.run() is run and one.data["stage"] == stage]
    if own:  # steps of its other programs, for other shapes, are counted with those of the first
        own[0].data["entries"][-1]["measured"] = dict(measured)
        _write(folder, report, own[0].options)


def _replace(file: Path, text: str) -> None:
    """Write a file so that who reads it sees the old one or the new one, whole."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)
