"""Checkpoints that a fit cannot go on from: the error names the file, and nothing was loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import make_trainer
from models import Classifier, loader, mlp

from fulgurite.backends.checkpoints.damage import CheckpointError
from fulgurite.backends.csx.plugins import checkpoint_checks

pytestmark = pytest.mark.fits

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A checkpoint from the middle of an epoch."""
    path = tmp_path / "whole.ckpt"
    trainer = make_trainer(True, max_steps=2)
    trainer.fit(Classifier(mlp(), torch.optim.Adam), loader())
    trainer.save_checkpoint(path)
    return path


def fit_from(path: Path) -> Classifier:
    """Go on for a step."""
    module = Classifier(mlp(), torch.optim.Adam)
    make_trainer(True, max_steps=3).fit(module, loader(), ckpt_path=path)
    return module


def changed(whole: Path, folder: Path, change: Change) -> Path:
    """The checkpoint, changed, in another file."""
    checkpoint = torch.load(whole, weights_only=True)
    change(checkpoint)
    path = folder / "changed.ckpt"
    torch.save(checkpoint, path)
    return path


@pytest.mark.parametrize(
    ("found", "held"),
    [
        ({"a": 3}, "a dict with the keys 'a'"),
        ("x", "a str"),
        ({"rng": {}, "generators": []}, "a dict with the keys 'rng', 'generators'"),
    ],
)
def test_what_is_not_ours_under_our_key_is_refused(
    found: Any, held: str, whole: Path, tmp_path: Path
) -> None:
    path = changed(whole, tmp_path, lambda checkpoint: checkpoint.update(fulgurite=found))
    module, before = Classifier(mlp(), torch.optim.Adam), mlp().state_dict()
    module.net.load_state_dict(before)
    with pytest.raises(CheckpointError, match=f"changed.ckpt has under 'fulgurite' .* {held}"):
        make_trainer(True, max_steps=3).fit(module, loader(), ckpt_path=path)
    assert all(torch.equal(now, before[name]) for name, now in module.net.state_dict().items())


def test_a_moment_of_the_epoch_that_is_not_ours_is_refused(whole: Path, tmp_path: Path) -> None:
    def change(checkpoint: dict[str, Any]) -> None:
        checkpoint["fulgurite"]["progress"] = {"moment": "x"}

    with pytest.raises(CheckpointError, match="has under 'fulgurite' not what Fulgurite writes"):
        fit_from(changed(whole, tmp_path, change))


def test_a_list_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.ckpt")
    with pytest.raises(CheckpointError, match=r"list\.ckpt is a file of torch's, .* holds a list"):
        fit_from(tmp_path / "list.ckpt")


@pytest.mark.parametrize("shape", [(5, 5), ()])
def test_optimizer_state_of_another_shape_is_refused(
    shape: tuple[int, ...], whole: Path, tmp_path: Path
) -> None:
    def change(checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"][0]["state"][0]["exp_avg"] = torch.zeros(shape)

    with pytest.raises(CheckpointError) as caught:
        fit_from(changed(whole, tmp_path, change))
    expected = f"Adam's 'exp_avg' of net.0.weight has the shape {shape}, and net.0.weight has ("
    assert f"changed.ckpt does not fit: {expected}" in str(caught.value)


def test_a_parameter_without_optimizer_state_is_named(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(checkpoint_checks, "rank_zero_info", told.append)
    fit_from(whole)
    assert told == []

    def change(checkpoint: dict[str, Any]) -> None:
        del checkpoint["optimizer_states"][0]["state"][1]

    fit_from(changed(whole, tmp_path, change))
    assert len(told) == 1
    assert "changed.ckpt has no state of Adam for net.0.bias: it begins anew there." in told[0]
