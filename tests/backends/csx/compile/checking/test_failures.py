"""A label or an index out of range: the error names the user's line, the values and the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from harness import make_trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fulgurite.backends.csx.compile.host import host_fabric

pytestmark = pytest.mark.fits

Loss = Callable[["Net", Tensor, Tensor], Tensor]
LOSSES: dict[str, tuple[Loss, int]] = {
    "embedding": (lambda net, h, ids: net.table(ids).sum() + h.sum(), 10),
    "cross_entropy": (lambda net, h, ids: F.cross_entropy(h, ids), 3),
    "gather": (lambda net, h, ids: h.gather(1, ids[:, None]).sum(), 3),
    "index_select": (lambda net, h, ids: net.table.weight.index_select(0, ids).sum() + h.sum(), 10),
    "index": (lambda net, h, ids: net.table.weight[ids].sum() + h.sum(), 10),
    "one more": (lambda net, h, ids: net.table(ids + 1 - 1).sum() + h.sum(), 10),
}


class Net(pl.LightningModule):
    """Counts its steps, and looks its batch's ids up in one of several ways."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.net, self.table, self.loss = nn.Linear(8, 3), nn.Embedding(10, 3), loss
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return self.loss(self, self.net(batch["x"]), batch["ids"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Kept(pl.Callback):
    """The state after each step."""

    state: dict[str, Tensor] | None = None

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.state = {name: value.clone() for name, value in module.state_dict().items()}


class Rows(TensorDataset):
    def __getitem__(self, i: Any) -> Any:
        return dict(zip(("x", "ids"), super().__getitem__(i), strict=True))


def fit(loss: Loss, wrong: dict[int, int], policy: str, **options: Any) -> None:
    """Train on four batches of 16; ``wrong`` holds ids of some rows."""
    ids = torch.arange(64) % 3
    for row, value in wrong.items():
        ids[row] = value
    trainer = make_trainer(True, policy, max_epochs=1, **options)
    trainer.fit(Net(loss), DataLoader(Rows(torch.randn(64, 8), ids), batch_size=16))


@pytest.mark.parametrize("wrong", [7, -2], ids=["too large", "negative"])
@pytest.mark.parametrize(("loss", "size"), LOSSES.values(), ids=LOSSES.keys())
def test_an_index_out_of_range_names_the_line_and_the_batch_and_changes_nothing(
    loss: Loss, size: int, wrong: int
) -> None:
    wrong = wrong + size if wrong > 0 else wrong - size
    with pytest.raises(IndexError) as caught:
        fit(loss, {40: wrong}, "disabled")
    text = str(caught.value)
    assert f" got {wrong}, where {size} rows or classes take " in text
    assert "test_failures.py:" in text
    assert f"batch['ids'], which holds {min(0, wrong)} to {max(2, wrong)}." in text
    assert "The step changed nothing" in text


def test_a_label_that_is_ignored_is_not_the_one_that_is_told() -> None:
    loss, size = LOSSES["cross_entropy"]
    with pytest.raises(IndexError, match=f" got {size + 7}, where {size} rows or classes take "):
        fit(loss, {33: -100, 40: size + 7}, "disabled")


def test_a_step_that_changed_nothing_left_the_state_of_the_one_before() -> None:
    net, kept = Net(LOSSES["cross_entropy"][0]), Kept()
    trainer = make_trainer(True, max_epochs=1, callbacks=[kept])
    ids = torch.arange(64) % 3
    ids[40] = 3
    data = DataLoader(Rows(torch.randn(64, 8), ids), batch_size=16)
    with pytest.raises(IndexError, match="The step changed nothing"):
        trainer.fit(net, data)
    assert kept.state is not None
    assert trainer.global_step == 2
    for name, value in net.state_dict().items():
        assert torch.equal(value, kept.state[name]), name


@pytest.mark.parametrize("torn", [True, False])
def test_a_state_that_a_step_left_half_written_is_in_no_checkpoint(
    torn: bool, tmp_path: Path
) -> None:
    """A run that begins anew may save again."""
    trainer = make_trainer(True, max_epochs=1)
    data = DataLoader(Rows(torch.randn(64, 8), torch.arange(64) % 3), batch_size=16)
    trainer.fit(Net(LOSSES["cross_entropy"][0]), data)
    trainer.strategy.fabric.torn = torn
    path = tmp_path / "a.ckpt"
    if torn:
        with pytest.raises(
            RuntimeError, match=r"a\.ckpt was not written: .* has no checkpoint from"
        ):
            trainer.save_checkpoint(path)
        assert not path.exists()
        trainer.fit_loop.max_epochs = 2
        trainer.fit(trainer.lightning_module, data)
    trainer.save_checkpoint(path)
    assert path.exists()


def test_a_step_that_was_interrupted_in_its_updates_is_in_no_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Operation by operation a Ctrl-C comes between any two operations."""
    one_by_one = host_fabric.reference_of

    def interrupted(graph: Any) -> Any:
        runs = iter(range(100))

        def call(inputs: list[Tensor]) -> Any:
            outputs = one_by_one(graph)(inputs)
            if next(runs) == 2:
                raise KeyboardInterrupt
            return outputs

        return call

    monkeypatch.setattr(host_fabric, "reference_of", interrupted)
    broken = OnExceptionCheckpoint(str(tmp_path))
    broken.teardown = lambda *args, **options: None  # type: ignore[method-assign]
    more = {"callbacks": [broken], "enable_checkpointing": True}
    with pytest.warns(UserWarning) as warned, pytest.raises(SystemExit):  # noqa: PT030
        fit(LOSSES["cross_entropy"][0], {}, "disabled", **more)
    assert any("was not written: a step failed or" in str(one.message) for one in warned)
    assert not list(tmp_path.iterdir())


def test_another_error_stays_and_has_a_note_with_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(host_fabric, "reference_of", lambda graph: fails)
    with pytest.raises(RuntimeError, match="not enough memory") as caught:
        fit(LOSSES["embedding"][0], {}, "disabled")
    assert caught.value.__notes__ == ["Operation by operation the same step does not fail."]


@pytest.mark.compiler
def test_a_bad_label_in_a_compiled_program_names_the_users_line(tmp_path: Path) -> None:
    """And callbacks that save on an exception save nothing of a step that was half done."""
    saver = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1, filename="{step}")
    broken = OnExceptionCheckpoint(str(tmp_path))
    broken.teardown = lambda *args, **options: None  # type: ignore[method-assign]
    more = {"callbacks": [broken, saver], "enable_checkpointing": True}
    with pytest.warns(UserWarning) as warned, pytest.raises(IndexError) as caught:  # noqa: PT030
        fit(LOSSES["cross_entropy"][0], {40: 3}, "default", **more)
    [told] = [str(one.message) for one in warned if "was not written" in str(one.message)]
    assert told.startswith(f"{tmp_path}/on_exception.ckpt was not written: a step failed")
    assert told.endswith(f"Go on from {tmp_path}/kept/step=2.ckpt.")
    assert not (tmp_path / "on_exception.ckpt").exists()
    text = str(caught.value)
    assert " got 3, where 3 rows or classes take 0 to 2." in text
    assert "test_failures.py:" in text
    assert "batch['ids'], which holds 0 to 3." in text
    assert "go on from a checkpoint" in text
