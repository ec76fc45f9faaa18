"""Checkpoints in parts: what is written is read, damage is seen, one file becomes parts."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from fulgurite.backends.checkpoints.chunks import FlatPart
from fulgurite.backends.checkpoints.conversion import to_file, to_folder
from fulgurite.backends.checkpoints.damage import CheckpointError, check_file
from fulgurite.backends.checkpoints.files import appear, part_folder, remove_folder, sweep
from fulgurite.backends.checkpoints.folder_reader import FolderReader
from fulgurite.backends.checkpoints.folder_writer import Planner, finish, write_folder
from fulgurite.backends.checkpoints.folders import (
    CHECKSUMS,
    METADATA,
    REST,
    check_folder,
    in_parts,
    is_folder,
    labelled,
    without_parts,
)
from fulgurite.backends.checkpoints.plugin import CheckpointFiles

SHAPES = [(7,), (5, 3), (4, 3, 5), (2, 3, 4, 5), (1,), (16, 3, 3, 3), (13, 1), (1, 13), (0, 3), ()]
COUNTS = (1, 2, 3, 4, 7)


def length(numel: int, count: int) -> int:
    return -(-numel // count)


def own(tensor: Tensor, rank: int, count: int) -> Tensor:
    """A process's part, filled up with zeros."""
    n = length(tensor.numel(), count)
    flat = torch.cat([tensor.reshape(-1), tensor.new_zeros(n * count - tensor.numel())])
    return flat[rank * n : (rank + 1) * n]


def part(tensor: Any, rank: int, count: int) -> Any:
    if not isinstance(tensor, Tensor) or tensor.numel() < count:
        return tensor
    return FlatPart(tensor.shape, rank * length(tensor.numel(), count), own(tensor, rank, count))


def checkpoint() -> dict[str, Any]:
    """Lightning's, with weights of many shapes and the state of two optimizers."""
    torch.manual_seed(0)
    weights = {f"net.{i}": torch.randn(shape) for i, shape in enumerate(SHAPES)}
    weights["half"] = torch.randn(6, 5).bfloat16()
    state = {
        name: {"step": torch.tensor(3.0), "exp_avg": torch.randn_like(value)}
        for name, value in weights.items()
    }
    group = {"lr": 0.1, "betas": (0.9, 0.999), "params": list(weights)}
    empty = {"state": {}, "param_groups": [{"lr": 0.1, "params": ["net.0"]}]}
    return {
        "pytorch-lightning_version": lightning.__version__,
        "epoch": 3,
        "state_dict": {**weights, "count": torch.tensor([1, 2, 3]), "extra": {"a": 1}},
        "optimizer_states": [{"state": state, "param_groups": [group]}, empty],
        "rng": torch.get_rng_state(),
    }


def cut(found: dict[str, Any], rank: int, count: int) -> dict[str, Any]:
    """A checkpoint with the parts of one of so many processes."""
    weights = {name: part(value, rank, count) for name, value in found["state_dict"].items()}
    states = [
        {
            **one,
            "state": {
                name: {key: part(value, rank, count) for key, value in state.items()}
                for name, state in one["state"].items()
            },
        }
        for one in found["optimizer_states"]
    ]
    return {**found, "state_dict": weights, "optimizer_states": states}


def written(folder: Path, count: int, found: dict[str, Any] | None = None) -> Path:
    """A folder as so many processes write it."""
    whole = checkpoint() if found is None else found
    folder.mkdir(parents=True)
    planners = [Planner(in_parts(cut(whole, rank, count))) for rank in range(count)]
    plans, metadata = planners[0].create_global_plan([one.create_local_plan() for one in planners])
    results = [one.write(folder, rank, plans[rank]) for rank, one in enumerate(planners)]
    finish(folder, metadata, results, without_parts(whole))
    return folder


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize("count", COUNTS)
def test_what_processes_write_is_read_whole_and_in_parts_of_any_number(
    count: int, tmp_path: Path
) -> None:
    folder, whole = written(tmp_path / "one", count), checkpoint()
    check_folder(folder)
    assert equal(FolderReader(folder).checkpoint(), whole)
    reader = FolderReader(folder)
    for name, value in whole["state_dict"].items():
        for others in COUNTS if isinstance(value, Tensor) and value.numel() else ():
            for rank in range(others):
                values = torch.zeros(length(value.numel(), others), dtype=value.dtype)
                target = FlatPart(value.shape, rank * len(values), values)
                reader.read(("model", name), lambda *_, target=target: target)
                assert torch.equal(values, own(value, rank, others)), (name, others, rank)


@pytest.mark.parametrize("key", ["state_dict", "optimizer_states"])
def test_what_a_smaller_checkpoint_lacks_it_lacks_in_parts(key: str, tmp_path: Path) -> None:
    whole = checkpoint()
    del whole[key]
    write_folder(whole, tmp_path / "one", 0, lambda one: [one])
    assert equal(FolderReader(tmp_path / "one").checkpoint(), whole)
    none = {"epoch": 1, "optimizer_states": []}
    write_folder(none, tmp_path / "none", 0, lambda one: [one])
    assert FolderReader(tmp_path / "none").checkpoint() == none


def test_the_metadata_have_the_true_shape_and_chunks_that_cover_it(tmp_path: Path) -> None:
    reader = FolderReader(written(tmp_path / "one", 3))
    found = reader.tensors["model", "net.3"]
    assert found.size == (2, 3, 4, 5)
    assert sum(chunk.sizes.numel() for chunk in found.chunks) == 120
    # what all hold is there once
    assert len(reader.tensors["optimizer_0", "state", "net.0", "step"].chunks) == 1


@pytest.mark.long
@pytest.mark.process
def test_stock_tools_make_one_file_of_it(tmp_path: Path) -> None:
    folder, whole = written(tmp_path / "one", 3), checkpoint()
    module = "lightning.pytorch.utilities.consolidate_checkpoint"
    subprocess.run([sys.executable, "-m", module, str(folder)], check=True)
    assert equal(torch.load(tmp_path / "one.consolidated", weights_only=True), whole)
    dcp_to_torch_save(folder, tmp_path / "torch.pt")
    found = torch.load(tmp_path / "torch.pt")
    assert equal(found["model"], whole["state_dict"])
    assert equal(found["optimizer_0"], whole["optimizer_states"][0])


def test_a_folder_of_torchs_own_is_read(tmp_path: Path) -> None:
    whole = checkpoint()
    state = {"model": whole["state_dict"], "optimizer_0": whole["optimizer_states"][0]}
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled, unavailable or unin"):
        torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "one", no_dist=True)
    rest = {"pytorch-lightning_version": lightning.__version__}
    torch.save(rest, tmp_path / "one" / REST)
    with pytest.warns(UserWarning, match="without checksums"):
        found = CheckpointFiles().load_checkpoint(tmp_path / "one")
    assert equal(found["state_dict"], whole["state_dict"])
    assert equal(found["optimizer_states"], whole["optimizer_states"][:1])


@pytest.mark.parametrize("name", [METADATA, "__0_0.distcp", "__1_0.distcp", REST, CHECKSUMS])
def test_a_flipped_bit_is_seen_in_each_file(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "one", 2)
    content = (folder / name).read_bytes()
    for place in range(0, len(content), max(1, len(content) // 97)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        (folder / name).write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"damaged|is missing"):
            CheckpointFiles().load_checkpoint(folder)
    (folder / name).write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        check_folder(folder)
    (folder / name).unlink()
    if name == CHECKSUMS:
        with pytest.warns(UserWarning, match="without checksums"):
            return check_folder(folder)
    with pytest.raises(CheckpointError, match=r"missing|has no meta\.pt"):
        check_folder(folder)


class Runs:
    """What a pickle could have called."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_nothing_in_a_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = written(tmp_path / "one", 2)
    found = pickle.loads((folder / METADATA).read_bytes())
    found.planner_data["x"] = Runs()
    (folder / METADATA).write_bytes(pickle.dumps(found))
    (folder / CHECKSUMS).unlink()
    with (
        pytest.warns(UserWarning, match="without checksums"),
        pytest.raises(CheckpointError, match=r"names posix\.mkdir"),
    ):
        CheckpointFiles().load_checkpoint(folder)
    assert not (tmp_path / "ran").exists()


@dataclass
class Got:
    """Is pickled as ``getattr`` of a class, as Python before 3.11.4 pickles an Enum's member."""

    owner: Any
    name: str

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)


def test_members_of_enumerations_are_read_and_no_other_attributes(tmp_path: Path) -> None:
    folder = written(tmp_path / "one", 2)
    found, layout = pickle.loads((folder / METADATA).read_bytes()), _MEM_FORMAT_ENCODING
    found.planner_data["x"] = Got(layout, "TORCH_CONTIGUOUS_FORMAT")
    (folder / METADATA).write_bytes(pickle.dumps(found))
    assert FolderReader(folder).checkpoint()["state_dict"]
    found.planner_data["x"] = Got(type(found), "__init__")
    (folder / METADATA).write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError, match="__init__, which no checkpoint in parts does"):
        FolderReader(folder).checkpoint()


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_are_read_as_each_python_writes_them(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setitem(sys.modules, module, pathlib)
        elsewhere.setattr(pathlib.PosixPath, "__module__", module)
        folder = written(tmp_path / "one", 2)
    assert module.encode() + b"\x94" in (folder / METADATA).read_bytes()
    assert FolderReader(folder).checkpoint()["state_dict"]


def test_a_folder_appears_whole_takes_the_place_of_another_and_goes_whole(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for value in (1.0, 2.0):
        found = {"state_dict": {"w": torch.full((4,), value)}, "epoch": 1}
        write_folder(found, path, 0, lambda one: [one])
        assert FolderReader(path).checkpoint()["state_dict"]["w"][0] == value
        assert [one.name for one in tmp_path.iterdir()] == ["last.ckpt"]
    CheckpointFiles().remove_checkpoint(path)
    assert list(tmp_path.iterdir()) == []


def test_where_names_cannot_be_exchanged_both_stay_under_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fulgurite.backends.checkpoints.files._exchange", lambda *_: False)
    path, before = written(tmp_path / "one", 1), tmp_path / "one.before"
    made = written(tmp_path / "new", 2)
    renamed = os.rename

    def dies(source: Path, target: Path) -> None:
        if source == made:
            raise KeyboardInterrupt
        renamed(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", dies)
        with pytest.raises(KeyboardInterrupt):
            appear(made, path)
    check_folder(before)
    check_folder(made)
    appear(made, path)
    check_folder(path)


def test_what_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one"
    write_folder(checkpoint(), path, 0, lambda one: [one])

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fulgurite.backends.checkpoints.folder_writer._Summed.write", full)
        with pytest.raises(OSError, match="could not be written"):
            write_folder(checkpoint(), path, 0, lambda one: [one])
    check_folder(path)
    assert [one.name for one in tmp_path.iterdir()] == ["one"]


def test_an_error_of_one_process_is_one_of_all(tmp_path: Path) -> None:
    failure = OSError(28, "A checkpoint could not be written", "of-rank-1")
    with pytest.raises(OSError, match="of-rank-1"):
        write_folder(checkpoint(), tmp_path / "one", 0, lambda one: [one, failure])
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_machine_that_is_not_there_is_named(tmp_path: Path) -> None:
    results: list[Any] = []

    def gathered(one: Any) -> list[Any]:
        results.append(one)
        elsewhere = ([], {"__1_0.distcp": {"bytes": 7, "crc32": 7}})
        return [one, elsewhere] if len(results) == 3 else [one]

    with pytest.raises(OSError, match=r"written \(__1_0\.distcp\)\. Checkpoints in parts need a f"):
        write_folder(checkpoint(), tmp_path / "one", 0, gathered)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    with pytest.raises(OSError, match="which is no checkpoint"):
        write_folder(checkpoint(), tmp_path / "mine", 0, lambda one: [one])
    with pytest.raises(CheckpointError, match="but no checkpoint in parts"):
        CheckpointFiles().load_checkpoint(tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").exists()


def test_folders_of_killed_processes_are_swept_and_of_living_ones_left(tmp_path: Path) -> None:
    left = tmp_path / ".fulgurite-1-dead.part"
    (left / "inner").mkdir(parents=True)
    with part_folder(tmp_path) as living:
        assert sweep(tmp_path) == [left]
        assert living.is_dir()
    assert list(tmp_path.iterdir()) == []
    remove_folder(written(tmp_path / "one", 1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_file_becomes_a_folder_and_that_the_same_file(count: int, tmp_path: Path) -> None:
    found = checkpoint()
    found["optimizer_states"] = [labelled(one, int) for one in found["optimizer_states"]]
    found["state_dict"]["strided"] = torch.randn(6, 4).t()
    file, back = tmp_path / "one.ckpt", tmp_path / "back.ckpt"
    torch.save(found, file)
    to_folder(file, tmp_path / "folder", count)
    check_folder(tmp_path / "folder")
    to_file(tmp_path / "folder", back)
    check_file(back)
    for mmap in (False, True):
        assert equal(torch.load(back, weights_only=True, mmap=mmap), found)


_PEAK = """
import resource, sys
from pathlib import Path
from fulgurite.backends.checkpoints.conversion import to_file, to_folder
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
folder, before = Path(sys.argv[1]), peak()
to_folder(folder / "one.ckpt", folder / "parts", 2)
to_file(folder / "parts", folder / "back.ckpt")
print((peak() - before) << 10)
"""


@pytest.mark.long
@pytest.mark.process
def test_converting_takes_the_memory_of_the_largest_tensor(tmp_path: Path) -> None:
    version = {"pytorch-lightning_version": lightning.__version__}
    weights = {f"w{i}": torch.ones(6_000_000) for i in range(20)}  # 24 MB each
    torch.save({**version, "state_dict": weights}, tmp_path / "one.ckpt")
    run = [sys.executable, "-c", _PEAK, str(tmp_path)]
    printed = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert int(printed) < 24e6 + 100e6


def test_checksums_are_those_of_zlib(tmp_path: Path) -> None:
    folder = written(tmp_path / "one", 2)
    sums = json.loads((folder / CHECKSUMS).read_text())
    assert sorted(sums) == [METADATA, "__0_0.distcp", "__1_0.distcp", REST]
    for name, one in sums.items():
        content = (folder / name).read_bytes()
        assert one == {"bytes": len(content), "crc32": zlib.crc32(content)}
    assert is_folder(folder)
