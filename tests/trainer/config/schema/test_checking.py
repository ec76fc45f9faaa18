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


@pytest.mark.parametrize(
    "text",
    [
        "trainer:\n  init: {max_stepz: 3, seed: '${FULGURITE_SEEDS}'}\n"
        "  fit: {train_dataloader: {no_such.data: {batch_size: '${FULGURITE_BAD}'}}}\n",
        "runconfig: {max_stepz: 3, seed: '${FULGURITE_SEEDS}'}\n"
        "train_input: {data_processor: no_such.data, batch_size: '${FULGURITE_BAD}'}\n",
    ],
    ids=["new form", "old form"],
)
def test_variables_without_a_value_come_with_the_other_mistakes(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULGURITE_SEED", "1")
    monkeypatch.setenv("FULGURITE_BAD", "[1")
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ParameterFileError) as caught:
        check(file)
    told = str(caught.value)
    assert "got '${" not in told  # what a key says of the name that stands for its value
    assert "no FULGURITE_SEEDS. Did you mean 'FULGURITE_SEED'?" in told
    assert "the variable's value is not YAML" in told
    assert "max_stepz: no such key" in told
    assert "no_such.data cannot be imported" in told
    key = "trainer.init.seed" if text.startswith("trainer") else "runconfig.seed"
    with pytest.raises(ParameterFileError) as caught:
        check(file, {key: 1})
    assert "FULGURITE_SEEDS" not in str(caught.value)
