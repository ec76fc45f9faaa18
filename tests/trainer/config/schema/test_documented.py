"""The parameter files that pages show pass ``check``, whole ones and parts; the examples too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from parts import described
from pasted import ROOT, blocks, files

from fulgurite.config.document.reading import parse
from fulgurite.config.schema.checking import check
from fulgurite.config.schema.json_schema import schema

BLOCKS = [block.text for block in blocks("parameter_files", "yaml")]
PARTS = [
    block.text
    for page in ("parameter_files", "weight_streaming")
    for block in blocks(page, "yaml")
    if block.file is None
    and "..." not in block.text
    and not block.text.startswith("optimizer: AdamW")
]


@pytest.mark.parametrize("page", ["README", "parameter_files"])
def test_the_file_that_a_page_shows_passes(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files(page).items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "net", raising=False)
    [file] = tmp_path.glob("*.yaml")
    assert not check(file).notes


@pytest.mark.parametrize("text", PARTS)
def test_a_part_of_a_file_that_a_page_shows_passes(text: str, tmp_path: Path) -> None:
    shown: dict[str, Any] = parse(text, "docs").data
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
