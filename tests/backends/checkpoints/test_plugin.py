"""Writing beside the training: in order, at most one block at a time, errors in the open."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fulgurite.backends.checkpoints import plugin
from fulgurite.backends.checkpoints.damage import CheckpointError, check_file
from fulgurite.backends.checkpoints.plugin import CheckpointFiles


class Slow:
    """Stands for ``write``: waits for ``go``, and fails for the names in ``fails``."""

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        self.fails: set[str] = set()
        self.write = plugin.write

    def __call__(self, checkpoint: Any, path: Path, **options: Any) -> None:
        self.begun.set()
        assert self.go.wait(20)
        if path.name in self.fails:
            raise OSError(28, "no space", str(path))
        self.write(checkpoint, path, **options)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    slow = Slow()
    monkeypatch.setattr(plugin, "write", slow)
    yield slow
    slow.go.set()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_caller_goes_on_and_the_file_holds_its_moment(tmp_path: Path, slow: Slow) -> None:
    files, weight = CheckpointFiles(), torch.zeros(4)
    with files.beside():
        files.save_checkpoint({"weight": weight}, tmp_path / "a.ckpt")
    weight.add_(1)
    assert names(tmp_path) == []
    assert files.exists(tmp_path / "a.ckpt")
    slow.go.set()
    files.wait()
    assert torch.load(tmp_path / "a.ckpt")["weight"].tolist() == [0] * 4


def test_outside_of_the_block_the_file_is_there_at_once(tmp_path: Path) -> None:
    files = CheckpointFiles()
    files.save_checkpoint({}, tmp_path / "new" / "a.ckpt")
    assert names(tmp_path / "new") == ["a.ckpt"]


def test_removing_and_linking_wait_for_what_was_asked_before(tmp_path: Path, slow: Slow) -> None:
    files = CheckpointFiles()
    (tmp_path / "old.ckpt").touch()
    with files.beside():
        files.save_checkpoint({"n": 1}, tmp_path / "a.ckpt")
        files.link(tmp_path / "a.ckpt", tmp_path / "last.ckpt")
    files.remove_checkpoint(tmp_path / "old.ckpt")
    assert names(tmp_path) == ["old.ckpt"]
    assert files.exists(tmp_path / "last.ckpt")
    assert not files.exists(tmp_path / "old.ckpt")
    slow.go.set()
    assert files.load_checkpoint(tmp_path / "last.ckpt") == {"n": 1}
    assert names(tmp_path) == ["a.ckpt", "last.ckpt"]


def test_after_a_failure_nothing_is_removed_and_the_next_save_says_so(
    tmp_path: Path, slow: Slow
) -> None:
    files = CheckpointFiles()
    (tmp_path / "old.ckpt").touch()
    slow.fails = {"a.ckpt"}
    slow.go.set()
    with files.beside():
        files.save_checkpoint({}, tmp_path / "a.ckpt")
    files.remove_checkpoint(tmp_path / "old.ckpt")
    with pytest.raises(OSError, match=r"a\.ckpt"), files.beside():
        raise AssertionError("not reached")
    assert names(tmp_path) == ["old.ckpt"]
    files.wait()  # once
    files.remove_checkpoint(tmp_path / "old.ckpt")
    assert names(tmp_path) == []


def test_the_next_block_waits_for_the_one_before(tmp_path: Path, slow: Slow) -> None:
    files = CheckpointFiles()
    with files.beside():
        files.save_checkpoint({}, tmp_path / "a.ckpt")
        files.save_checkpoint({}, tmp_path / "a_part.ckpt")
    assert slow.begun.wait(20)
    threading.Timer(0.2, slow.go.set).start()
    with files.beside():
        assert names(tmp_path) == ["a.ckpt", "a_part.ckpt"]


@pytest.mark.parametrize("how", ["save", "load", "teardown"])
def test_who_needs_the_files_waits(tmp_path: Path, slow: Slow, how: str) -> None:
    files, threads = CheckpointFiles(), set(threading.enumerate())
    with files.beside():
        files.save_checkpoint({"n": 1}, tmp_path / "a.ckpt")
    threading.Timer(0.2, slow.go.set).start()
    if how == "save":
        files.save_checkpoint({}, tmp_path / "b.ckpt")
    elif how == "load":
        assert files.load_checkpoint(tmp_path / "a.ckpt") == {"n": 1}
    else:
        files.teardown()
        new = set(threading.enumerate()) - threads
        assert not [one for one in new if "fulgurite" in one.name]
    assert "a.ckpt" in names(tmp_path)


def test_a_file_that_is_not_there_is_told_as_lightning_tells_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        CheckpointFiles().load_checkpoint(tmp_path / "none.ckpt")


def test_weights_only_is_passed_on(tmp_path: Path) -> None:
    files = CheckpointFiles()
    files.save_checkpoint({"path": slice(3)}, tmp_path / "a.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        files.load_checkpoint(tmp_path / "a.ckpt")
    assert files.load_checkpoint(tmp_path / "a.ckpt", weights_only=False) == {"path": slice(3)}


def test_a_copy_has_no_jobs(tmp_path: Path, slow: Slow) -> None:
    files = CheckpointFiles()
    with files.beside():
        files.save_checkpoint({}, tmp_path / "a.ckpt")
    for other in (copy.deepcopy(files), pickle.loads(pickle.dumps(files))):
        assert not other.exists(tmp_path / "a.ckpt")


@pytest.mark.parametrize("through", [CheckpointFiles().load_checkpoint, check_file])
def test_a_pipe_is_an_error_and_no_wait(through: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match="is a pipe or a device, no file"):
        through(tmp_path / "last.ckpt")
