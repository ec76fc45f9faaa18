"""A file that is no whole checkpoint is told by name, in one line, with what to do."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from damage_checkpoints import damaged
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from fulgurite.backends.checkpoints.damage import CheckpointError, check_file, check_lightning
from fulgurite.backends.checkpoints.plugin import CheckpointFiles


def checkpoint() -> dict[str, Any]:
    weights = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)).state_dict()
    return {"state_dict": weights, "pytorch-lightning_version": "2.6.6", "epoch": 3}


def saved(path: Path, plugin: type[TorchCheckpointIO] = CheckpointFiles) -> Path:
    plugin().save_checkpoint(checkpoint(), path)
    return path


@pytest.mark.parametrize("plugin", [CheckpointFiles, TorchCheckpointIO], ids=["ours", "stock"])
def test_flipped_bits_and_cuts_are_seen_or_harmless(
    tmp_path: Path, plugin: type[TorchCheckpointIO]
) -> None:
    found = damaged(saved(tmp_path / "a.ckpt", plugin), flips=200, seed=1)
    assert set(found) == {"seen", "harmless"}
    assert found["seen"] > 100


def test_a_flipped_bit_deep_in_a_large_tensor_is_seen(tmp_path: Path) -> None:
    """It lies beyond what zipfile reads at once."""
    weight, path = torch.rand(1 << 16), tmp_path / "a.ckpt"
    CheckpointFiles().save_checkpoint({**checkpoint(), "state_dict": {"weight": weight}}, path)
    check_file(path)
    content = bytearray(path.read_bytes())
    content[content.index(weight.numpy().tobytes()) + weight.nbytes // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged or cut off, with .*Bad CRC-32"):
        CheckpointFiles().load_checkpoint(path)


def test_stock_lightning_sees_less(tmp_path: Path) -> None:
    """Else the checks of ours are not needed any more."""
    found = damaged(saved(tmp_path / "a.ckpt"), flips=50, seed=1, checked=False)
    assert found["silently other"] > 5


def test_a_flip_by_which_torch_takes_a_tensor_for_a_directory_is_seen(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.ckpt")
    content = bytearray(path.read_bytes())
    entry = content.rindex(b"PK\x01\x02", 0, content.rindex(b"archive/data/0"))
    content[entry + 38] ^= 0x10
    path.write_bytes(content)
    torch.load(path, weights_only=True)  # it loads, with whatever was in memory
    with pytest.raises(CheckpointError, match="directory entry of archive/data/0"):
        check_file(path)


def text(path: Path) -> None:
    path.write_text("trainer:\n  init: {}\n")


def other_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"state_dict": {}}))


def old_format(path: Path) -> None:
    torch.save(checkpoint(), path, _use_new_zipfile_serialization=False)


def cut_off(path: Path) -> None:
    content = saved(path).read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Path.touch, "is empty"),
        (text, "is no checkpoint: it begins with b'trainer:"),
        (pickled, "is no checkpoint: it begins with"),
        (other_zip, "is a zip archive, but none that torch.save wrote: it has no data.pkl"),
        (old_format, "has the format of torch before 1.6, which has no checksums"),
        (cut_off, r"is damaged or cut off, with [\d,]+ bytes \(File is not a zip file\)"),
    ],
)
def test_each_kind_of_file_is_told_by_name(tmp_path: Path, make: Any, what: str) -> None:
    path = tmp_path / "a.ckpt"
    make(path)
    with pytest.raises(CheckpointError, match=f"^{path} {what}") as error:
        CheckpointFiles().load_checkpoint(path)
    assert "\n" not in str(error.value)


def test_the_remedy_for_the_old_format_works(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    old_format(path)
    with pytest.raises(CheckpointError, match=r"write it anew: (.*)\.$") as error:
        check_file(path)
    exec(str(error.value).partition("anew: ")[2].rstrip("."), {"torch": torch})
    check_file(path)


def test_files_without_checksums_load_with_a_warning(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path / "a.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.warns(UserWarning, match="nobody can tell whether it is damaged"):
        CheckpointFiles().load_checkpoint(path)


@pytest.mark.parametrize(
    ("holds", "what"),
    [
        ([1, 2], "it holds a list"),
        ({"0.weight": 1, "0.bias": 2}, r"it holds a dict with the keys '0.weight', '0.bias'"),
    ],
)
def test_a_file_of_torchs_that_is_no_checkpoint_is_told(holds: Any, what: str) -> None:
    with pytest.raises(CheckpointError, match=what):
        check_lightning("a.ckpt", holds)
    check_lightning("a.ckpt", checkpoint())
