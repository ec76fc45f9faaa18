"""Parameter files from elsewhere pass ``check`` as far as their trainer part goes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from foreign import FRAGMENTS, foreign_file

from fulgurite.config.schema.checking import check


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_a_file_from_elsewhere_passes(fragment: str, tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text(yaml.safe_dump(foreign_file(fragment)))
    check(file, imports=False)
