"""What the sites of mutants call while ``tests/tools/mutants.py`` asks which tests reach them.

Notes are lines of JSON in the file that ``MUTANTS_NOTES`` names. Processes that a test starts
write there too: pytest leaves the test's name in the environment.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

_open, _write, _close = os.open, os.write, os.close  # a test may put others in their place
_environ = os.environ
_seen: set[tuple[str, str]] = set()


def reached(site: str) -> None:
    """Note that a site was reached, once for each test."""
    test = _environ.get("PYTEST_CURRENT_TEST", "")
    if (test, site) not in _seen:
        _seen.add((test, site))
        note(reached=site, by=test)


def note(**what: Any) -> None:
    """Write a line."""
    path = _environ.get("MUTANTS_NOTES")
    if path is not None:
        with contextlib.suppress(OSError):  # a test of full disks
            file = _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            _write(file, (json.dumps(what) + "\n").encode())
            _close(file)
