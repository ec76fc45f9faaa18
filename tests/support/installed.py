"""Python modules that lie where installed packages do."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def installed(
    folder: Path, name: str, source: str, monkeypatch: pytest.MonkeyPatch, listed: bool = True
) -> ModuleType:
    """A module with this source in a folder of packages; ``listed`` in ``sys.modules`` too."""
    path = folder / "site-packages" / f"{name}.py"
    path.parent.mkdir()
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if listed:
        monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module
