"""Files appear when they are complete, whatever ends the process that writes them."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fulgurite.backends.checkpoints.damage import check_file
from fulgurite.backends.checkpoints.files import Sink, link, part, sweep, write


def weights(value: float, n: int = 100_000) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((n,), value)}


def forked(work: Callable[[], Any]) -> int:
    """Begin something in a process of its own, which ends with 7 if ``work`` returns; its pid.

    It computes in one thread: OpenMP's others are not forked, and it would wait for them for ever.
    """
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            work()
        finally:
            os._exit(7)
    return child


def in_a_fork(work: Callable[[], Any]) -> int:
    """Run something in a process of its own; what ended it, as ``os.waitpid`` says."""
    return os.waitpid(forked(work), 0)[1]


def value_of(path: Path) -> float:
    check_file(path)
    return float(torch.load(path)["weight"][0])


def dies(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DiesInTheMiddle(Sink):
    """A tensor's bytes are half written, then the process is killed."""

    def write(self, data: Any) -> int:
        if len(data) > 1000:
            super().write(bytes(data)[: len(data) // 2])
            dies()
        return super().write(data)


STAGES = {
    "in the middle of a tensor": ("fulgurite.backends.checkpoints.files.Sink", DiesInTheMiddle, 1),
    "before the flush": ("os.fsync", dies, 1),
    "before the new name": ("os.replace", dies, 1),
    "before the folder's flush": ("fulgurite.backends.checkpoints.files.flush_folder", dies, 2),
}


@pytest.mark.process
@pytest.mark.parametrize("stage", STAGES)
def test_a_kill_at_any_stage_leaves_a_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    path = tmp_path / "last.ckpt"
    write(weights(1), path)
    name, value, left = STAGES[stage]
    with monkeypatch.context() as patch:
        patch.setattr(name, value)
        assert in_a_fork(lambda: write(weights(2), path)) == signal.SIGKILL
    assert value_of(path) == left
    parts = set(tmp_path.iterdir()) - {path}
    assert len(parts) == (left == 1)
    assert set(sweep(tmp_path)) == parts
    assert set(tmp_path.iterdir()) == {path}


@pytest.mark.process
def test_the_part_of_a_living_process_is_not_swept(tmp_path: Path) -> None:
    with part(tmp_path) as file:
        assert sweep(tmp_path) == []
        assert in_a_fork(lambda: os._exit(len(sweep(tmp_path)))) == 0
        assert [str(path) for path in tmp_path.iterdir()] == [file.name]
    assert list(tmp_path.iterdir()) == []


def test_files_of_others_are_not_swept(tmp_path: Path) -> None:
    for name in (".checkpoint_4.ckpt.part", "a.part", ".fulgurite", "a.ckpt"):
        (tmp_path / name).touch()
    assert sweep(tmp_path) == []
    assert sweep(tmp_path / "nowhere") == []


@pytest.mark.process
def test_processes_that_share_a_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    def work() -> None:
        for _ in range(25):
            sweep(tmp_path)
            write(weights(os.getpid()), tmp_path / f"{os.getpid()}.ckpt")
            link(tmp_path / f"{os.getpid()}.ckpt", tmp_path / "last.ckpt")
        os._exit(0)

    children = [forked(work) for _ in range(4)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    whole = {tmp_path / f"{child}.ckpt": child for child in children}
    assert set(tmp_path.iterdir()) == {*whole, tmp_path / "last.ckpt"}
    assert {path: value_of(path) for path in whole} == whole
    assert (tmp_path / "last.ckpt").resolve() in whole


def test_a_full_disk_leaves_the_file_before_and_no_part(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write(weights(1), path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match="earlier checkpoints are as they were") as error:
            write(weights(2), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.errno == errno.EFBIG
    assert error.value.filename == str(path)
    assert value_of(path) == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.long
@pytest.mark.process
def test_a_full_file_system_says_so(tmp_path: Path) -> None:
    script = f"""
import subprocess, sys
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", {str(tmp_path)!r}]).returncode:
    sys.exit(3)
import torch
from fulgurite.backends.checkpoints.files import write
write({{"w": torch.zeros(100_000)}}, {str(tmp_path / "a.ckpt")!r})
try:
    write({{"w": torch.zeros(200_000)}}, {str(tmp_path / "b.ckpt")!r})
except OSError as error:
    print(error)
import os
print(os.listdir({str(tmp_path)!r}))
"""
    command = ["unshare", "--mount", sys.executable, "-c", script]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if run.returncode in (1, 3):
        pytest.skip(f"no file system can be mounted here: {run.stderr[-200:]}")
    assert "(No space left on device); no file is left" in run.stdout
    assert run.stdout.endswith("['a.ckpt']\n")


def test_what_torch_cannot_write_is_an_error_of_torchs(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="local"):
        write({"function": lambda: None}, tmp_path / "a.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_a_link_leads_to_the_old_or_to_the_new(tmp_path: Path) -> None:
    for value in (1, 2):
        write(weights(value), tmp_path / f"{value}.ckpt")
        link(tmp_path / f"{value}.ckpt", tmp_path / "last.ckpt")
        assert value_of(tmp_path / "last.ckpt") == value
    write(weights(3), tmp_path / "last.ckpt")  # replaces the link, not what it leads to
    assert [value_of(tmp_path / f"{name}.ckpt") for name in ("1", "2", "last")] == [1, 2, 3]


def test_a_folder_that_cannot_be_flushed_has_the_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ckpt"
    write({"a": 1}, path)

    def fails(folder: Path) -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr("fulgurite.backends.checkpoints.files.flush_folder", fails)
    with pytest.raises(OSError, match="was written, but its folder could not be flushed") as told:
        write({"a": 2}, path)
    assert told.value.filename == str(path)
    assert torch.load(path) == {"a": 2}


def test_who_replaces_torchs_save_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tests of other projects do, to count checkpoints."""
    monkeypatch.setattr(torch, "save", lambda what, stream: stream.write(b"replaced"))
    write({}, tmp_path / "one.ckpt")
    assert (tmp_path / "one.ckpt").read_bytes() == b"replaced"
