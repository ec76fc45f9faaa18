"""A file's mistakes: all at once, each with its place and the nearest key."""

from __future__ import annotations

from pathlib import Path

import pytest

from fulgurite.config.document.problems import ParameterFileError
from fulgurite.config.schema.checking import check

FILE = """\
trainer:
  init:
    device: TPU
    modle: {}
    model: {name: torch.nn.Identity}
    optimizer: {AdmW: {lr: 1e-3}}
    loop: {max_stepz: 3}
    max_epochs: many
  fitt: {}
"""


def test_all_mistakes_of_a_file_come_at_once_with_their_places(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(FILE)
    with pytest.raises(ParameterFileError) as caught:
        check(file)
    lines = str(caught.value).splitlines()
    assert [line.removeprefix(str(file)).split(" ")[:2] for line in lines] == [
        [":3:5:", "trainer.init.device:"],
        [":4:5:", "trainer.init.modle:"],
        [":6:17:", "trainer.init.optimizer.AdmW:"],
        [":7:12:", "trainer.init.loop.max_stepz:"],
        [":8:5:", "trainer.init.max_epochs:"],
        [":9:3:", "trainer.fitt:"],
    ]
    assert "Did you mean 'model'?" in lines[1]
    assert "Did you mean 'AdamW'?" in lines[2]
    assert "Did you mean 'max_steps'?" in lines[3]
    assert "Did you mean 'fit'?" in lines[5]
