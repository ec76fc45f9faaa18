"""The page on parameter files: what it shows passes ``check``; the examples too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from parts import described

from fulgurite.config.document.reading import parse
from fulgurite.config.schema.checking import check
from fulgurite.config.schema.json_schema import schema

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs/parameter_files.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE.partition("## Keys without a meaning")[0], re.DOTALL)
SHOWN = [
    block for block in BLOCKS if "..." not in block and not block.startswith("optimizer: AdamW")
]


@pytest.mark.parametrize("text", SHOWN)
def test_what_the_page_shows_passes(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    shown: dict[str, Any] = parse(text, "docs").data
    if "trainer" in shown:
        check(shown)
        return
    file = described(tmp_path, device="CSX", optimizer="AdamW")
    if shown.keys() & {"logger", "loggers"}:
        file["trainer"]["init"].pop("logger", None)
        file["trainer"]["init"].pop("enable_progress_bar", None)
    file["trainer"]["init"] |= shown
    assert not check(file).notes


def test_every_form_of_a_class_that_the_page_shows_passes(tmp_path: Path) -> None:
    [block] = [block for block in BLOCKS if block.startswith("optimizer: AdamW")]
    for line in block.splitlines():
        check({**described(tmp_path, **parse(line, "docs").data)})


@pytest.mark.parametrize("name", ["digits", "gpt_bytes", "two_phases"])
def test_examples_pass(name: str) -> None:
    assert not check(ROOT / f"examples/{name}.yaml").notes


def test_the_schema_knows_the_keys_beside_arguments() -> None:
    found = schema()["$defs"]
    assert {"params", "learning_rate", "lr", "betas"} <= found["optimizer.AdamW"][
        "properties"
    ].keys()
    assert {"monitor", "factor"} <= found["scheduler.ReduceLROnPlateau"]["properties"].keys()
    assert "required" not in found["logger.CSVLogger"]
    assert "logger.ProgressLogger" in found
