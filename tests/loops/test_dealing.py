"""An epoch that goes on in another number of processes takes each sample once."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import QUIET
from launched import SUPPORT, torchrun
from models import Classifier, loader, mlp

import fulgurite
from fulgurite.backends.checkpoints.damage import CheckpointError

ROWS, LAST = 90, 60


def trained(folder: Path, kind: str, *parts: tuple[int, int]) -> list[dict[str, Any]]:
    """Train in parts, each (processes, last step); what each rank of each part told, in order."""
    begin, told = "none", []
    for count, end in parts:
        torchrun(count, SUPPORT / "several_counts.py", str(folder), kind, begin, str(end))
        files = [folder / f"{end}.{rank}.json" for rank in range(count)]
        told += [json.loads(file.read_text()) for file in files]
        begin = str(end)
    return told


@pytest.mark.several
@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["shuffled", "in order", "generator", "workers", "accumulates", "at ends"]
)
def test_each_epoch_takes_each_sample_once(kind: str, tmp_path: Path) -> None:
    parts = [(1, 16), (2, 18), (1, 20), (2, LAST)]
    if kind == "at ends":
        parts = [(2, 12), (1, 35), (3, LAST)]
    told = trained(tmp_path, kind, *parts)
    taken: dict[int, list[int]] = defaultdict(list)
    for one in told:
        for epoch, samples in one["taken"]:
            taken[epoch] += samples
    assert len(taken) == 3
    assert all(sorted(samples) == [*range(ROWS)] for samples in taken.values())
    assert told[-1]["validated"] == told[-2]["validated"]
    assert set(told[-1]["logged"]) == {"loss", "loss_step", "loss_epoch", "val"}
    ends = {step for one in told for step in one["validated"] if step}
    assert len(ends) == 3  # at the end of each epoch, also of those in parts


@pytest.mark.several
@pytest.mark.long
def test_a_run_that_was_dealt_out_anew_goes_on_exactly_after_that(tmp_path: Path) -> None:
    trained(tmp_path, "shuffled", (2, 5), (1, 30))
    whole = torch.load(tmp_path / "30.ckpt", weights_only=True)
    trained(tmp_path, "shuffled", (2, 5), (1, 9), (1, 30))
    stopped = torch.load(tmp_path / "30.ckpt", weights_only=True)
    assert all(
        torch.equal(w, stopped["state_dict"][name]) for name, w in whole["state_dict"].items()
    )
    assert stopped["fulgurite"]["order"]["taken"] == whole["fulgurite"]["order"]["taken"]


@pytest.mark.several
@pytest.mark.long
def test_of_rows_that_each_process_has_alone_it_is_not_known_what_is_left(tmp_path: Path) -> None:
    trained(tmp_path, "own rows", (2, 5))
    ours = torch.load(tmp_path / "5.ckpt", weights_only=True)["fulgurite"]
    assert not any("order" in one for one in ours["ranks"])


def checkpoint_of(folder: Path, count: int, **options: Any) -> Path:
    """One of the middle of an epoch; as that of some processes, of which each was at the same."""
    path = folder / "two.ckpt"
    ends: dict[str, Any] = {**QUIET, "max_epochs": 1, "max_steps": 2, **options}
    trainer = fulgurite.Trainer(device="CSX", **ends)
    trainer.fit(Classifier(mlp()), loader())
    trainer.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    if "order" in checkpoint["fulgurite"]:
        checkpoint["fulgurite"]["order"]["taken"] *= count
    checkpoint["fulgurite"]["ranks"] = [dict(checkpoint["fulgurite"])] * count
    torch.save(checkpoint, path)
    return path


def go_on(path: Path, **options: Any) -> fulgurite.Trainer:
    trainer = fulgurite.Trainer(device="CSX", **{**QUIET, "max_epochs": 1, **options})
    trainer.fit(Classifier(mlp()), loader(), ckpt_path=path)
    return trainer


@pytest.mark.long
@pytest.mark.fits
def test_what_other_processes_left_of_an_epoch_has_fewer_batches(tmp_path: Path) -> None:
    alone = go_on(checkpoint_of(tmp_path, 1))
    assert alone.global_step == len(loader())
    assert go_on(checkpoint_of(tmp_path, 2)).global_step == len(loader()) - 2


@pytest.mark.fits
def test_of_some_loaders_it_is_not_known_what_is_left(tmp_path: Path) -> None:
    limited = checkpoint_of(tmp_path, 2, limit_train_batches=3)
    message = "was written by 2 processes in the middle of an epoch, and 1 would go on"
    with pytest.raises(CheckpointError, match=message):
        go_on(limited)
    with pytest.raises(CheckpointError, match="ends within an epoch that other processes"):
        go_on(checkpoint_of(tmp_path, 2), limit_train_batches=3)


@pytest.mark.fits
@pytest.mark.parametrize("found", [3, {}, {"taken": "x"}])
def test_an_order_that_is_none_is_refused(found: Any, tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path, 1)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["fulgurite"]["order"] = found
    torch.save(checkpoint, path)
    with pytest.raises(CheckpointError, match="has under 'fulgurite' not what Fulgurite writes"):
        go_on(path)
