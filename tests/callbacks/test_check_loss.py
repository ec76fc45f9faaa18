"""A loss that is no number ends the run."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Run, assert_same_run, both, fit, make_trainer
from lightning.pytorch import Callback
from models import GAN, Classifier, loader, mlp
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fulgurite.callbacks import CheckLoss, Checkpoint, NonFiniteLoss, SamplesStreamedInfo

pytestmark = pytest.mark.fits

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
    assert "it is now 8." in str(caught.value)


@devices
def test_it_is_found_though_later_losses_are_well(static: bool) -> None:
    with pytest.raises(NonFiniteLoss, match="training batch 3 "):
        run(static, at_2=float("nan"), at_5=float("inf"), log_every_n_steps=10)


@devices
def test_it_comes_at_the_end_of_the_epoch_at_the_latest(static: bool) -> None:
    with pytest.raises(NonFiniteLoss, match=r"training batch 19 .*; it is now 19"):
        run(static, at_18=float("nan"), log_every_n_steps=1000)


@devices
def test_it_comes_before_a_checkpoint_is_written(static: bool, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLoss, match="it is now 6"):
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


@pytest.mark.numbers
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


class Network(Classifier):
    """Its loss is not finite where ``bad`` makes something of the batch (x [4, 8], y, factor)."""

    def __init__(self, bad: Any) -> None:
        norm = torch.nn.BatchNorm1d(8)
        super().__init__(torch.nn.Sequential(norm, torch.nn.Linear(8, 4)))
        self.bad = bad

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, factor = batch
        return torch.nn.functional.cross_entropy(self.bad(self.net, x, factor[0]), y)


class Rooted(torch.nn.Module):
    """NaN where its number is negative."""

    def forward(self, number: Tensor) -> Tensor:
        return torch.sqrt(number)


class WithRoot(Network):
    """Its output is multiplied by the root of the factor, in a module of its own."""

    def __init__(self) -> None:
        super().__init__(lambda net, x, factor: net(x) * self.head[0](factor))
        self.head = torch.nn.ModuleList([Rooted()])


def snapshot(trainer: Any) -> list[Tensor]:
    """Copies of weights, buffers and the optimizer's state."""
    state = trainer.optimizers[0].state_dict()["state"]
    flat = [t for values in state.values() for t in values.values()]
    return [t.detach().clone() for t in (*trainer.lightning_module.state_dict().values(), *flat)]


class Snapshots(Callback):
    """What each batch began with."""

    def __init__(self) -> None:
        self.taken: list[list[Tensor]] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.taken.append(snapshot(trainer))


def failed(make: Any, callbacks: tuple[Any, ...] = (), **options: Any) -> tuple[str, Any]:
    """(Error, module) of a run on CSX whose batch 3 has the factor -1."""
    module = make()
    with pytest.raises(NonFiniteLoss) as caught:
        run_on(module, callbacks or (CheckLoss(),), at_3=-1.0, **options)
    return str(caught.value), module


def run_on(
    module: Any, callbacks: tuple[Any, ...], static: bool = True, count: int = 8, **options: Any
) -> Any:
    """Fit; ``at_3`` and the like are factors of batches."""
    bad = {k: options.pop(k) for k in list(options) if k.startswith("at_")}
    trainer = make_trainer(
        static, max_epochs=1, callbacks=[*callbacks], log_every_n_steps=5, **options
    )
    trainer.fit(module, batches(count, **bad))
    return trainer


def test_operation_module_and_line_are_named_and_all_state_is_as_before_the_step() -> None:
    before = Snapshots()
    module = WithRoot()
    with pytest.raises(NonFiniteLoss) as caught:
        run_on(module, (CheckLoss(), before), at_3=-1.0)
    text = str(caught.value)
    assert "training batch 4 of this run, which is in optimizer step 4; it is now 4." in text
    assert "The first result that is NaN is that of sqrt in head.0 (Rooted)\n    at " in text
    assert "return torch.sqrt(number)" in text
    after = list(module.state_dict().values())
    for now, then in zip(after, before.taken[3], strict=False):
        assert torch.equal(now, then)


def test_a_batch_that_was_not_finite_is_named() -> None:
    class Batch(Network):
        def __init__(self) -> None:
            super().__init__(lambda net, x, factor: net(x * factor))

    module = Batch()
    with pytest.raises(NonFiniteLoss, match=r"batch\[2\] is NaN at \[0\] \(1 of 4 elements\)"):
        run_on(module, (CheckLoss(),), at_3=float("nan"))


def test_an_infinity_that_becomes_nan_is_followed_to_where_it_was_made() -> None:
    def make() -> Network:
        return Network(lambda net, x, factor: net(x) + torch.log(factor + 1) * 0)

    text, _ = failed(make)
    assert "that is NaN is that of mul\n" in text
    assert "of an infinity that is the result of log\n" in text


def test_a_mask_of_infinities_is_no_fault() -> None:
    class Masked(WithRoot):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            mask = torch.full((8, 8), -torch.inf).triu(1)
            x = (mask + self.head[0](batch[2][0]) * 0).softmax(-1)
            return super().training_step((batch[0] @ x, *batch[1:]), batch_idx)

    text, _ = failed(Masked)
    assert "NaN is that of sqrt in head.0 (Rooted)" in text


def no_gradient(net: Any, x: Tensor, factor: Tensor) -> Tensor:
    """Finite, and its gradient is not where the factor is -1: the slope of a root at 0."""
    y = net(x)
    return y + torch.sqrt((factor + 1).abs() + y * 0)


def test_a_gradient_is_found_in_its_own_step_where_asked_for() -> None:
    text, module = failed(lambda: Network(no_gradient), (CheckLoss(gradients=True),))
    assert text.startswith("A gradient became NaN or infinite in training batch 4 of this run")
    assert " in the backward pass" in text
    assert "torch.sqrt((factor + 1).abs() + y * 0)" in text
    assert all(p.isfinite().all() for p in module.parameters())


def test_otherwise_its_weights_are_named_in_the_next_step() -> None:
    text, _ = failed(lambda: Network(no_gradient))
    assert "in training batch 5 of this run" in text
    assert "It was not finite before the step: self.net." in text
    assert "CheckLoss(gradients=True)" in text


@devices
@pytest.mark.parametrize("bad", [no_gradient, lambda net, x, f: net(x) * torch.sqrt(f)])
def test_steps_may_be_left_out_and_are_counted(static: bool, bad: Any) -> None:
    check, states, module = CheckLoss(max_consecutive_skips=2), Snapshots(), Network(bad)
    with pytest.warns(UserWarning, match="The step was left out") as told:
        trainer = run_on(module, (check, states), static, at_3=-1.0, at_4=-1.0, at_6=-1.0)
    assert len([one for one in told if "left out" in str(one.message)]) == 1
    assert check.skipped == 3
    assert trainer.global_step == 8
    names = [name for name, _ in module.named_parameters()]
    positions = [i for i, name in enumerate(module.state_dict()) if name in names]
    changed = [
        any(not torch.equal(a[i], b[i]) for i in positions)
        for a, b in itertools.pairwise(states.taken)
    ]
    assert changed == [True, True, True, False, False, True, False]


@pytest.mark.numbers
def test_left_out_steps_are_as_on_other_devices() -> None:
    torch.manual_seed(0)
    runs = []
    for static in (True, False):
        torch.manual_seed(0)
        module = Network(lambda net, x, f: net(x) * torch.sqrt(f))
        module.net[0].track_running_stats = False
        check = CheckLoss(max_consecutive_skips=1)
        with pytest.warns(UserWarning, match="left out"):
            trainer = run_on(
                module, (check,), static, count=12, at_5=-1.0, accumulate_grad_batches=2
            )
        assert check.skipped == 1
        runs.append(snapshot(trainer))
    for ours, stock in zip(*runs, strict=True):
        torch.testing.assert_close(ours, stock)


def test_what_left_out_steps_log_is_no_part_of_the_epochs_mean() -> None:
    class Logs(Network):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_step=False, on_epoch=True)
            self.log("factors", batch[2][0], on_step=False, on_epoch=True, reduce_fx="sum")
            return loss

    module = Logs(lambda net, x, f: net(x) * torch.sqrt(f))
    with pytest.warns(UserWarning, match="left out"):
        trainer = run_on(module, (CheckLoss(max_consecutive_skips=1),), at_3=-1.0)
    assert trainer.callback_metrics["loss"].isfinite()
    assert trainer.callback_metrics["factors"] == 7  # of 8 batches


@pytest.mark.core
def test_where_a_step_is_left_out_a_loss_scale_shrinks_all_the_same() -> None:
    check, module = CheckLoss(max_consecutive_skips=1), Network(lambda net, x, f: net(x) * f.sqrt())
    with pytest.warns(UserWarning, match="left out"):
        trainer = run_on(module, (check,), at_3=-1.0, precision="16-mixed")
    assert check.skipped == 1
    assert trainer.precision_plugin.scaler.get_scale() == 2.0**15


def test_more_in_a_row_end_the_run() -> None:
    check = CheckLoss(max_consecutive_skips=2)
    bad = {f"at_{i}": -1.0 for i in (1, 3, 4, 5)}
    told = pytest.warns(UserWarning, match="left out")
    with told, pytest.raises(NonFiniteLoss, match="batch 6 of"):
        run_on(WithRoot(), (check,), **bad)
    assert check.skipped == 3


def test_a_negative_number_of_skips_is_refused() -> None:
    with pytest.raises(ValueError, match="max_consecutive_skips=-1"):
        CheckLoss(max_consecutive_skips=-1)


@pytest.mark.long
@pytest.mark.compiler
def test_compiled_steps_keep_state_and_name_the_operation() -> None:
    before, module = Snapshots(), WithRoot()
    with pytest.raises(NonFiniteLoss, match=r"sqrt in head\.0"):
        run_on(module, (CheckLoss(), before), at_3=-1.0, policy="default")
    for now, then in zip(module.state_dict().values(), before.taken[3], strict=False):
        assert torch.equal(now, then)
