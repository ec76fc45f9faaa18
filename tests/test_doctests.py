"""The examples in docstrings of the product print what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"trainer": "fulgurite"} | {
    room: f"fulgurite.{room}" for room in ("loops", "callbacks", "backends")
}


def modules() -> list[str]:
    """The modules of the product with examples, by their import paths."""
    return [
        ".".join([package, *path.relative_to(ROOT / room).with_suffix("").parts])
        for room, package in PACKAGES.items()
        for path in sorted((ROOT / room).rglob("*.py"))
        if ">>> " in path.read_text(encoding="utf-8")
    ]


@pytest.mark.parametrize("name", modules())
def test_the_examples_of_a_module_print_what_they_say(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name.removesuffix(".__init__"))
    found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert found.attempted > 0
    assert found.failed == 0
