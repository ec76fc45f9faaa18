"""Reading ``report.json``, and saying what is wrong where that cannot be done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fulgurite.backends.csx.report.data import FORMAT

NAME = "report.json"
_BUILD = "build the program again with backend('CSX', artifact_dir=...)"

_OPERATION = {"kind": str, "maker": str, "module": str, "line": str, "source": str, "result": str}
_CALL = {"kernel": str, "maker": str, "operations": [int], "region": str, "tuned": str}
_COST = {"read_bytes": int, "written_bytes": int, "seconds": float}
_MESSAGE = {"kind": str, "size_bytes": int, "begins": float}
_BOUND = {"system": str, "systems": int, "batch_size": int, "bound": str, "compute_s": float}
_ENTRY = {
    "name": str,
    "how": str,
    "flops": int,
    "operations": [{**_OPERATION, "backward": bool}],
    "calls": [{**_CALL, **_COST, "sent_bytes": int}],
    "messages": [_MESSAGE],
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
    if shape is None:
        return ""
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{at} is no list"
        return next(
            filter(None, (misfit(v, shape[0], f"{at}[{i}]") for i, v in enumerate(value))), ""
        )
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{at or 'it'} is no object"
        pairs = dict.fromkeys(value, shape[str]) if str in shape else shape
        lost = next((key for key in pairs if key not in value), None)
        if lost is not None:
            return f"{at}.{lost} is missing".lstrip(".")
        found = (
            misfit(value[key], inner, f"{at}.{key}".lstrip(".")) for key, inner in pairs.items()
        )
        return next(filter(None, found), "")
    fits = isinstance(value, (int, float) if shape is float else shape)
    return "" if fits else f"{at} is no {shape.__name__}"
