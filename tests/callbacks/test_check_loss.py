"""A loss that is no number ends the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Run, assert_same_run, both, fit, make_trainer
from models import GAN, Classifier, loader, mlp
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fulgurite.callbacks import CheckLoss, Checkpoint, NonFiniteLoss, SamplesStreamedInfo

devices = pytest.mark.parametrize("static", [True, False], ids=["CSX", "stock"])


class Scaled(Classifier):
    """Its loss is multiplied by a number of the batch, and no gradient comes of a bad one."""

    def __init__(self) -> None:
        super().__init__(mlp())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        return loss + (batch[2].sum() - batch[2].sum().nan_to_num(0, 0, 0)).detach()


def batches(count: int, **bad: float) -> DataLoader[Any]:
    """Batches of 4 rows; ``bad`` says which (``at_7``) have which factor."""
    factors = torch.ones(count * 4)
    for name, value in bad.items():
        factors[4 * int(name.removeprefix("at_"))] = value
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count * 4, 8, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1), factors), batch_size=4)


def run(static: bool, count: int = 20, check: Any = None, **options: Any) -> Run:
    bad = {k: options.pop(k) for k in list(options) if k.startswith("at_")}
    callbacks = (check or CheckLoss(), *options.pop("more", ()))
    return fit(
        Scaled, lambda: (batches(count, **bad),), static=static, callbacks=callbacks, **options
    )


@devices
@pytest.mark.parametrize(
    ("value", "word"), [(float("nan"), "NaN"), (float("inf"), "infinite"), (-float("inf"), "inf")]
)
def test_a_bad_loss_is_an_error_that_names_the_batch(static: bool, value: float, word: str) -> None:
    with pytest.raises(NonFiniteLoss, match=f"{word}.* training batch 8 .* step 8;") as caught:
        run(static, at_7=value, log_every_n_steps=10)
    assert caught.value.batch == 7
    assert f"it is now {10 if static else 8}." in str(caught.value)


@devices
def test_it_is_found_though_later_losses_are_well(static: bool) -> None:
    with pytest.raises(NonFiniteLoss, match="training batch 3 "):
        run(static, at_2=float("nan"), at_5=float("inf"), log_every_n_steps=10)


@devices
def test_it_comes_at_the_end_of_the_epoch_at_the_latest(static: bool) -> None:
    with pytest.raises(
        NonFiniteLoss, match=rf"training batch 19 .*; it is now {20 if static else 19}"
    ):
        run(static, at_18=float("nan"), log_every_n_steps=1000)


@devices
def test_it_comes_before_a_checkpoint_is_written(static: bool, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLoss, match=f"it is now {8 if static else 6}"):
        run(
            static,
            at_5=float("nan"),
            log_every_n_steps=1000,
            more=(Checkpoint(steps=4),),
            enable_checkpointing=True,
            default_root_dir=tmp_path,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_4.ckpt"]


@devices
def test_with_accumulation_batch_and_step_are_both_named(static: bool) -> None:
    with pytest.raises(NonFiniteLoss, match=r"training batch 6 .* optimizer step 3;"):
        run(static, at_5=float("nan"), accumulate_grad_batches=2, log_every_n_steps=5)


@devices
def test_a_smaller_last_window_of_an_epoch_is_a_step_too(static: bool) -> None:
    class Scheduled(Scaled):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step((*batch[:2], batch[2] + self.bad), batch_idx)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.bad += torch.nan

    def make() -> Scaled:
        module = Scheduled()
        module.register_buffer("bad", torch.zeros(()))
        return module

    with pytest.raises(NonFiniteLoss, match=r"training batch 6 .* optimizer step 4;"):
        fit(
            make,
            lambda: (batches(5),),
            static=static,
            callbacks=(CheckLoss(),),
            max_epochs=2,
            accumulate_grad_batches=2,
        )


@devices
def test_under_manual_optimization_the_backward_is_named(static: bool) -> None:
    class Bad(GAN):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step((batch[0] / batch[2].sum(),), batch_idx)

    with pytest.raises(NonFiniteLoss, match="at backward number 6 of this run"):
        fit(
            Bad,
            lambda: (batches(8, at_2=-3.0),),
            static=static,
            callbacks=(CheckLoss(),),
            log_every_n_steps=4,
        )


def test_numbers_and_the_state_of_the_module_stay_as_they_are() -> None:
    ours, stock = both(lambda: Classifier(mlp()), lambda: (loader(160),), callbacks=(CheckLoss(),))
    assert_same_run(ours, stock)
    assert "_losses_until_bad" not in vars(ours.module)
    plain = fit(lambda: Classifier(mlp()), lambda: (loader(160),), static=True)
    assert ours.losses == plain.losses


def test_a_second_fit_counts_from_one(tmp_path: Path) -> None:
    check = CheckLoss()
    run(True, check=check)
    with pytest.raises(NonFiniteLoss, match="training batch 2 "):
        run(True, check=check, at_1=float("nan"))


def test_samples_since_the_last_checkpoint_are_told(tmp_path: Path) -> None:
    samples = SamplesStreamedInfo()
    with pytest.raises(NonFiniteLoss):
        run(
            True,
            at_9=float("nan"),
            log_every_n_steps=10,
            more=(samples, Checkpoint(steps=4)),
            enable_checkpointing=True,
            default_root_dir=tmp_path,
        )
    assert samples.samples_streamed_till_curr_step == 40
    assert samples.samples_since_checkpoint == 8


def test_samples_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    static = True
    samples = SamplesStreamedInfo()
    options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    fit(
        Scaled,
        lambda: (batches(20),),
        static=static,
        callbacks=(samples, Checkpoint(steps=8)),
        **options,
    )
    assert samples.samples_streamed_till_curr_step == 80
    resumed = SamplesStreamedInfo()

    trainer = make_trainer(static, callbacks=[resumed, Checkpoint()], max_epochs=1, **options)
    trainer.fit(Scaled(), batches(20), ckpt_path=tmp_path / "checkpoint_16.ckpt")
    assert resumed.samples_streamed_till_curr_step == 80
