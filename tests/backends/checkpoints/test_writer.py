"""A copy holds the checkpoint of its moment, and is written as it would have been."""

from __future__ import annotations

import io
import threading
import weakref
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from fulgurite.backends.checkpoints.writer import Copy, Writer

VALIDATED = pytest.mark.filterwarnings("ignore:Validating sparse tensor")
"""Since 2.14 torch says so where it loads a sparse tensor with ``weights_only=True``."""


def checkpoint() -> dict[str, Any]:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    module[0].bias = module[1].bias  # tied
    optimizer = torch.optim.Adam(module.parameters(), amsgrad=True)
    module(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    base = torch.arange(12.0).reshape(3, 4)
    return {
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "views": [base[1], base.t(), base],
        "parameter": torch.nn.Parameter(base),
        "in a graph": torch.ones(2, requires_grad=True) * 2,
        "sparse": torch.eye(3).to_sparse(),
        "of other kinds": [torch.zeros(2, dtype=torch.bfloat16), torch.tensor([1 + 2j]).conj()],
        "nothing": [torch.empty(0), torch.empty(2, device="meta")],
        "plain": OrderedDict(a=(1, 2.5, None, "s", b"b"), b={3}),
    }


def written(whole: Any) -> tuple[Any, list[bytes]]:
    """What loads from the file of a checkpoint, and the memory of its tensors."""
    file = io.BytesIO()
    torch.save(whole, file)
    with zipfile.ZipFile(file) as archive:
        memory = [archive.read(name) for name in archive.namelist() if "/data/" in name]
    file.seek(0)
    return torch.load(file, weights_only=True), memory


def same(one: tuple[Any, list[bytes]], other: tuple[Any, list[bytes]]) -> bool:
    return one[1] == other[1] and repr(one[0]) == repr(other[0])


@VALIDATED
def test_a_copy_is_written_like_the_checkpoint() -> None:
    whole = checkpoint()
    ours, theirs = written(Copy(whole).restored()), written(whole)
    assert same(ours, theirs)
    assert ours[0]["state_dict"]._metadata == theirs[0]["state_dict"]._metadata
    assert [one.stride() for one in ours[0]["views"]] == [(1,), (1, 4), (4, 1)]


@VALIDATED
def test_what_changes_after_the_copy_is_not_in_it() -> None:
    whole = checkpoint()
    before, copy = written(whole), Copy(whole)
    with torch.no_grad():
        for value in whole["state_dict"].values():
            value.add_(1)
        whole["views"][2].zero_()
    whole["plain"]["b"].add(4)
    assert same(written(copy.restored()), before)
    assert not same(written(whole), before)


def test_torch_holds_no_sparse_tensor_of_a_copy() -> None:
    restored = Copy(checkpoint()).restored()
    sparse = weakref.ref(restored["sparse"])
    del restored
    assert sparse() is None  # else the next torch.load would look at it, and warn of it


def test_tensors_that_share_memory_still_do() -> None:
    first, turned, base = Copy(checkpoint()).restored()["views"]
    base.fill_(7)
    assert first.tolist() == [7] * 4
    assert turned.unique().tolist() == [7]


def test_whoever_opens_a_file_that_is_being_written_waits_for_it(tmp_path: Path) -> None:
    path, writer, may_write = tmp_path / "best.ckpt", Writer(), threading.Event()
    path.write_text("old")

    def write() -> None:
        may_write.wait(10)
        path.write_text("new")

    writer.submit(write, path, leaves=True)
    threading.Timer(0.2, may_write.set).start()
    assert path.read_text() == "new"
    writer.submit(lambda: path.unlink(), path, leaves=False)
    with pytest.raises(FileNotFoundError):
        path.read_text()
    writer.close()
