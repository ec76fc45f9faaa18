"""What this machine took before: a few numbers by name, kept from one process to the next.

They make estimates better and decide nothing else, so whatever is wrong with their file, there are
none.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from fulgurite.backends.csx.compile.store.cache_folder import users_folder

_NAMES, _VALUES = 500, 9  # kept: the names that were noted last, and the latest values of each


def measured_before(name: str) -> list[float]:
    """The values that were noted under a name, the latest last."""
    values = _read().get(name)
    if not isinstance(values, list):
        return []
    return [one for one in values if isinstance(one, float) and math.isfinite(one) and one > 0]


def note_measured(name: str, value: float) -> None:
    """Note a value for later processes, where the user's cache folder takes it."""
    kept, values = _read(), [*measured_before(name), value]
    kept.pop(name, None)
    kept[name] = values[-_VALUES:]
    text = json.dumps(dict(list(kept.items())[-_NAMES:]))
    with contextlib.suppress(OSError, RuntimeError):
        path = _path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, written = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
        try:
            with os.fdopen(number, "w") as file:
                file.write(text)
            os.replace(written, path)  # readers see the file before or after
        except OSError:
            Path(written).unlink(missing_ok=True)


def _read() -> dict[str, Any]:
    try:
        kept = json.loads(_path().read_text())
    except (OSError, RuntimeError, ValueError):  # RuntimeError: the user has no home
        return {}
    return kept if isinstance(kept, dict) else {}


def _path() -> Path:
    return users_folder() / "measured.json"
