"""``fulgurite checkpoint convert``: one file and parts, and what it says of what it cannot do."""

from __future__ import annotations

from pathlib import Path

import lightning
import pytest
import torch

from fulgurite import cli
from fulgurite.backends.checkpoints.folders import check_folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "one.ckpt"
    version = {"pytorch-lightning_version": lightning.__version__}
    torch.save({**version, "state_dict": {"w": torch.arange(10.0)}}, path)
    return path


def test_a_file_becomes_parts_and_one_file_again(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, back = tmp_path / "parts", tmp_path / "back.ckpt"
    assert cli.main(["checkpoint", "convert", str(file), str(folder), "--parts", "3"]) == 0
    assert capsys.readouterr().out == f"{folder}: a folder with 3 parts\n"
    check_folder(folder)
    assert len(list(folder.glob("*.distcp"))) == 3
    assert cli.main(["checkpoint", "convert", str(folder), str(back)]) == 0
    assert capsys.readouterr().out == f"{back}: one file\n"
    assert torch.equal(torch.load(back)["state_dict"]["w"], torch.arange(10.0))


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(["checkpoint", "convert", *map(str, arguments)]) == 1
    return capsys.readouterr().err


def test_it_says_what_it_cannot_convert(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, folder = tmp_path / "new", tmp_path / "parts"
    assert "There is no checkpoint of that name" in refused(capsys, tmp_path / "none", new)
    assert "is one file: --parts 4 makes 4 parts of it" in refused(capsys, file, new)
    assert "but no checkpoint in parts" in refused(capsys, tmp_path, new)
    text = tmp_path / "notes.txt"
    text.write_text("no checkpoint")
    assert "is no checkpoint: it begins with b'no check" in refused(capsys, text, new, "--parts", 2)
    weights = tmp_path / "weights.pt"
    torch.save({"w": torch.ones(2)}, weights)
    assert "no Lightning checkpoint" in refused(capsys, weights, new, "--parts", 2)
    assert not new.exists()
    cli.main(["checkpoint", "convert", str(file), str(folder), "--parts", "2"])
    assert "becomes one file. Leave out --parts" in refused(capsys, folder, new, "--parts", 2)
    assert "Something of that name is there" in refused(capsys, folder, file)
    assert "Something of that name is there" in refused(capsys, file, folder, "--parts", 2)
    part = folder / "__1_0.distcp"
    part.write_bytes(part.read_bytes()[:-1])
    assert "__1_0.distcp is damaged or cut off" in refused(capsys, folder, new)
    file.write_bytes(file.read_bytes()[:-30])
    assert "is damaged or cut off" in refused(capsys, file, new, "--parts", 2)
    with pytest.raises(SystemExit):
        cli.main(["checkpoint", "convert", str(file), str(new), "--parts", "0"])
    assert "expected a number of parts as 4; got '0'" in capsys.readouterr().err
    assert not new.exists()


def test_it_runs_nothing_that_a_file_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = {"pytorch-lightning_version": lightning.__version__}
    torch.save({**version, "state_dict": {}, "x": Path()}, tmp_path / "one.ckpt")
    told = refused(capsys, tmp_path / "one.ckpt", tmp_path / "new", "--parts", 2)
    assert "UnsafeCheckpoint" in told
    assert "pathlib" in told
