"""State: what a program works on, what a failed trace leaves, and what may change from outside."""

from __future__ import annotations

import copy
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from harness import QUIET, Run, assert_same_run, both, csx, fit, make_trainer
from lightning.pytorch.callbacks import BaseFinetuning
from models import CLASSES, GAN, Classifier, Measured, convnet, loader, mlp, pictures
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAveragePrecision,
    MulticlassConfusionMatrix,
)

import fulgurite
from fulgurite.backends.csx.diagnostics.trace_errors import StateChanged, UnsupportedState
from fulgurite.backends.csx.graph import rng
from fulgurite.backends.csx.state.storage import dict_of


class Failing(Measured):
    """Does everything a step can do, then fails."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Any] = [1]
        self.recent: deque[Any] = deque([1], maxlen=1)
        self.object = SimpleNamespace(losses=[], last=None)
        self.options = {"lr": 0.01, "momentum": 0.9}
        self.optimizer = torch.optim.SGD
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.history.append(loss)
        self.recent.append(2)
        self.object.losses.append(loss)
        self.object.last = loss
        self.last = loss
        self.seen = self.seen + 1
        random.random()
        np.random.rand()
        torch.rand(1)
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.net[0].eval()
        self.trainer.optimizers[0].param_groups[0]["params"].reverse()
        raise RuntimeError("after everything")


DRAWS = pytest.mark.filterwarnings(
    "ignore:.*random:fulgurite.backends.csx.contract.frozen_reads.FrozenValueWarning"
)


@pytest.mark.fits
@DRAWS
def test_a_failed_trace_leaves_everything_as_it_was() -> None:
    module = Failing()
    before = copy.deepcopy(module.state_dict())
    trainer = fulgurite.Trainer(backend=csx(), max_epochs=1, **QUIET)
    found: dict[str, Any] = {}

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
            found["rng"] = rng.portable(rng.collect())
            found["vars"] = {name: dict(vars(m)) for name, m in module.named_modules()}
            found["progress"] = copy.deepcopy(trainer.fit_loop.epoch_loop.automatic_optimization)
            found["groups"] = [dict(g) for g in trainer.optimizers[0].param_groups]
            found["params"] = [*map(id, found["groups"][0]["params"])]

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
            assert progress == found["progress"].optim_progress
            assert trainer.global_step == 0
            assert not trainer.optimizers[0].state
            [group] = trainer.optimizers[0].param_groups
            assert [dict(group)] == found["groups"]
            assert [*map(id, group["params"])] == found["params"]

    trainer.callbacks.append(Look())
    with pytest.raises(RuntimeError, match="after everything"):
        trainer.fit(module, loader())
    after = module.state_dict()
    assert list(after) == list(before)
    for name, value in before.items():
        assert torch.equal(after[name], value), name
        assert type(after[name]) is torch.Tensor
    assert all(type(p) is nn.Parameter and p.grad is None for p in module.parameters())
    assert module.history == [1]
    assert (*module.recent, vars(module.object)) == (1, {"losses": [], "last": None})
    assert not module.calls
    assert not hasattr(module, "last")
    assert module.net[0].training
    assert module.train_accuracy._update_count == 0
    for name, child in module.named_modules():
        for key, value in found["vars"][name].items():
            if key not in ("_trainer", "_current_fx_name", "_device"):
                assert vars(child)[key] is value, (name, key)
    now = rng.portable(rng.collect())
    assert torch.equal(now["torch"], found["rng"]["torch"])
    assert torch.equal(now["python"][1], found["rng"]["python"][1])
    assert torch.equal(now["numpy"][1], found["rng"]["numpy"][1])


@pytest.mark.fits
@DRAWS
def test_after_a_failed_trace_the_same_module_trains() -> None:
    module = Failing()
    with pytest.raises(RuntimeError, match="after everything"):
        fulgurite.Trainer(backend=csx(), max_epochs=1, **QUIET).fit(module, loader())
    type(module).optimizer_step, kept = Measured.optimizer_step, type(module).optimizer_step
    try:
        fulgurite.Trainer(backend=csx(), max_epochs=1, **QUIET).fit(module, loader())
    finally:
        type(module).optimizer_step = kept
    assert module.seen == 50
    assert len(module.history) == 51


@pytest.mark.fits
def test_tensors_keep_identity_and_memory() -> None:
    module = Classifier(convnet())
    before = [(id(t), t.data_ptr()) for t in [*module.parameters(), *module.buffers()]]
    fulgurite.Trainer(backend=csx(), max_epochs=1, **QUIET).fit(module, pictures())
    assert [(id(t), t.data_ptr()) for t in [*module.parameters(), *module.buffers()]] == before


class Attributes(Classifier):
    """A plain tensor, a rebound buffer, outputs in an attribute and a list."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.scale = torch.tensor(0.5)
        self.register_buffer("mean", torch.zeros(CLASSES))
        self.last: Any = None
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        self.mean = 0.9 * self.mean + 0.1 * logits.detach().mean(0)
        loss = nn.functional.cross_entropy(logits - self.mean, batch[1]) * self.scale.clone()
        self.last = logits.argmax(1)
        self.losses.append(loss.detach())
        self.scale.mul_(0.99)
        return loss


@pytest.mark.numbers
def test_attributes_that_a_step_reads_and_writes_are_state_or_outputs() -> None:
    ours, stock = both(Attributes, lambda: (loader(),))
    assert_same_run(ours, stock)
    torch.testing.assert_close(ours.module.scale, stock.module.scale)
    assert torch.equal(ours.module.last, stock.module.last)
    assert len(ours.module.losses) == 50
    torch.testing.assert_close(torch.stack(ours.module.losses), torch.stack(stock.module.losses))


@pytest.mark.fits
def test_state_that_changes_its_shape_is_refused() -> None:
    class Grows(Classifier):
        def __init__(self) -> None:
            super().__init__(mlp())
            self.register_buffer("seen", torch.zeros(0))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.seen = torch.cat([self.seen, loss.detach()[None]])
            return loss

    with pytest.raises(
        UnsupportedState, match=r"replaced self\.seen, float32\[0\], by float32\[1\]"
    ):
        fit(Grows, lambda: (loader(),), static=True)


@pytest.mark.numbers
def test_a_literal_that_the_step_changes_in_place_starts_anew_each_time() -> None:
    class Literal(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            scale = torch.tensor(0.5)
            scale += 1
            return super().training_step(batch, batch_idx) * scale

    ours, stock = both(lambda: Literal(mlp()), lambda: (loader(64),))
    assert_same_run(ours, stock)


class Views(Classifier):
    """Two parameters over one storage, as ``.data`` ties them, and a buffer that is a view."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
        self.net[2].weight.data = self.net[0].weight.data
        self.register_buffer("corner", self.net[0].bias.detach()[:4])
        self.register_buffer("counts", torch.zeros(6))
        self.register_buffer("tail", self.counts[3:])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.counts.add_(1)
        self.tail.mul_(0.5)
        loss = super().training_step(batch, batch_idx)
        return loss + self.corner.sum() * self.tail.sum()


@pytest.mark.numbers
def test_tensors_over_one_storage_are_one_state() -> None:
    ours, stock = both(lambda: Views(), lambda: (loader(),), limit_train_batches=10)
    assert_same_run(ours, stock)
    a, b = ours.module.net[0].weight, ours.module.net[2].weight
    assert a.data_ptr() == b.data_ptr()


@pytest.mark.numbers
def test_unused_parameters_get_no_optimizer_state() -> None:
    class Spare(Classifier):
        def __init__(self) -> None:
            super().__init__(mlp())
            self.spare = nn.Linear(3, 3)

    ours, stock = both(Spare, lambda: (loader(),), accumulate_grad_batches=2)
    assert_same_run(ours, stock)
    assert torch.equal(ours.module.spare.weight, stock.module.spare.weight)


@pytest.mark.numbers
def test_gradient_hooks_on_parameters_are_kept() -> None:
    class Hooked(Classifier):
        def __init__(self) -> None:
            super().__init__(mlp())
            self.net[0].weight.register_hook(lambda g: g * 0.1)

    ours, stock = both(Hooked, lambda: (loader(),))
    assert_same_run(ours, stock)


@pytest.mark.numbers
def test_hooks_of_a_parameter_outlast_that_it_is_frozen() -> None:
    """Frozen for an epoch, and thawed: its hooks run where it has a gradient."""

    class Frozen(Classifier):
        def __init__(self) -> None:
            super().__init__(mlp())
            weight: Any = self.net[0].weight
            weight.register_hook(lambda g: g * 0.1)
            weight.register_post_accumulate_grad_hook(self.halve)

        def halve(self, parameter: Any) -> None:
            parameter.grad.mul_(0.5)

        def on_train_epoch_start(self) -> None:
            self.net[0].requires_grad_(self.current_epoch != 1)

    ours, stock = both(Frozen, lambda: (loader(),), max_epochs=3)
    assert_same_run(ours, stock)


class Collected(Classifier):
    """A MetricCollection, a confusion matrix and a MeanMetric, logged from the step."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.scores = MetricCollection(
            {
                "micro": MulticlassAccuracy(CLASSES, average="micro"),
                "macro": MulticlassAccuracy(CLASSES),
            },
            prefix="train_",
        )
        self.confusion = MulticlassConfusionMatrix(CLASSES)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.scores.update(logits, batch[1])
        self.confusion.update(logits.argmax(1), batch[1])
        self.mean(loss.detach())
        self.log_dict(self.scores, on_step=False, on_epoch=True)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        return loss


class OneMetric(Classifier):
    """It counts the pictures of all validation loaders in one metric."""

    def __init__(self, forward: bool) -> None:
        super().__init__(mlp())
        self.by_forward = forward
        self.metric = MulticlassAccuracy(CLASSES)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        count = self.metric if self.by_forward else self.metric.update
        count(self.net(batch[0]), batch[1])
        self.log("accuracy", self.metric)

    test_step = validation_step


@pytest.mark.numbers
@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.parametrize("forward", [True, False])
def test_several_loaders_share_a_metric(forward: bool, sanity: int) -> None:
    seen = []
    for static in (True, False):
        torch.manual_seed(1)
        module, loaders = OneMetric(forward), [loader(32), loader(48)]
        trainer = make_trainer(static, max_epochs=2, num_sanity_val_steps=sanity)
        trainer.fit(module, loader(32), loaders)
        results = trainer.validate(module, loaders), trainer.test(module, loaders)
        seen.append((results, module.metric._update_count))
    assert seen[0] == seen[1]


@pytest.mark.fits
def test_a_program_of_fit_is_the_same_when_validate_traces_it_again() -> None:
    class Curve(Classifier):
        def __init__(self) -> None:
            super().__init__(mlp())
            self.metric = MulticlassAveragePrecision(CLASSES, thresholds=5)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.metric.update(self.net(batch[0]).softmax(1), batch[1])

        def on_validation_epoch_end(self) -> None:
            self.metric.reset()

    trainer = make_trainer(True, backend={"retrace_every_iteration": True}, max_epochs=1)
    module = Curve()
    trainer.fit(module, loader(32), loader(32))
    trainer.validate(module, loader(32))  # in inference mode, which fit is not


@pytest.mark.long
@pytest.mark.numbers
def test_metrics_accumulate_and_reset_as_in_stock() -> None:
    ours, stock = both(Collected, lambda: (loader(),), max_epochs=3)
    assert_same_run(ours, stock)
    assert torch.equal(ours.module.confusion.compute(), stock.module.confusion.compute())
    assert ours.module.confusion._update_count == stock.module.confusion._update_count == 150


@pytest.mark.numbers
def test_gradients_that_accumulate_over_steps_by_hand_are_state() -> None:
    class Piling(pl.LightningModule):
        """Never clears its gradients."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = mlp()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            self.optimizers().step()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    ours, stock = both(Piling, lambda: (loader(),), limit_train_batches=10)
    assert_same_run(ours, stock)


@pytest.mark.numbers
def test_host_code_may_put_other_tensors_of_the_same_layout_into_place() -> None:
    class Swap(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            module.mean = torch.full((CLASSES,), 0.25)
            module.net[0].weight.data = module.net[0].weight.data * 0.5

    ours, stock = both(Attributes, lambda: (loader(),), callbacks=(Swap(),), max_epochs=2)
    assert_same_run(ours, stock)


def change_layout(module: Any) -> None:
    module.net[0].weight.data = module.net[0].weight.data.t().contiguous().t()


def remove_buffer(module: Any) -> None:
    module.mean = None


def replace_module(module: Any) -> None:
    module.net[0] = nn.Linear(8, 16)


def freeze(module: Any) -> None:
    module.net[0].requires_grad_(False)


def evaluate(module: Any) -> None:
    module.net[2].eval()


CHANGES = [
    (change_layout, r"self\.net\.0\.weight was float32\[16, 8\] with strides \(8, 1\)"),
    (remove_buffer, r"self\.mean held a tensor when the program was built, and now is gone"),
    (replace_module, r"modules of the model changed after the training program was built"),
    (freeze, r"requires_grad of net\.0\.weight changed \(2 parameters"),
    (evaluate, r"Dropout is in eval mode now"),
]


@pytest.mark.fits
@pytest.mark.parametrize(("change", "message"), CHANGES, ids=lambda v: getattr(v, "__name__", ""))
def test_a_model_that_changes_under_its_program_is_an_error(change: Any, message: str) -> None:
    class Change(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                change(module)

    with pytest.raises(StateChanged, match=message):
        fit(
            *(Attributes, lambda: (loader(),)),
            **{"static": True, "callbacks": (Change(),), "max_epochs": 2},
            backend={"max_programs": 1},
        )


@pytest.mark.numbers
def test_freezing_works() -> None:
    class Freeze(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            module.net[0].requires_grad_(trainer.current_epoch != 1)

    options: dict[str, Any] = {"callbacks": (Freeze(),), "max_epochs": 3}
    ours, stock = both(lambda: Classifier(mlp()), lambda: (loader(),), **options)
    assert_same_run(ours, stock)


@pytest.mark.long
@pytest.mark.numbers
def test_modules_in_another_mode_get_a_program() -> None:
    class Modes(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            module.net[1].train(trainer.current_epoch != 1)
            module.net[1].track_running_stats = trainer.current_epoch != 2

    def make() -> Classifier:
        torch.manual_seed(1)
        return Classifier(
            nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, CLASSES))
        )

    options: dict[str, Any] = {"callbacks": (Modes(),), "max_epochs": 4}
    ours, stock = both(make, lambda: (loader(),), **options)
    assert_same_run(ours, stock)
    reasons = [program.reason for program in ours.trainer.strategy.programs]
    assert reasons == [
        "",
        "number 2, since BatchNorm1d is in eval mode now",
        "number 3, since BatchNorm1d is in train mode now",
    ]


class Unfreeze(BaseFinetuning):
    """Trains the head alone in the first epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0], train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=1e-3)


@pytest.mark.numbers
def test_lightning_s_finetuning_works() -> None:
    class Trainable(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=1e-2)

    def run(**options: Any) -> Run:
        callbacks = (Unfreeze(),)
        return fit(
            lambda: Trainable(mlp()),
            lambda: (loader(160),),
            callbacks=callbacks,
            max_epochs=3,
            **options,
        )

    assert_same_run(run(static=True), run(static=False))
    with pytest.raises(StateChanged, match="another program"):
        run(static=True, backend={"max_programs": 1})


@pytest.mark.fits
@pytest.mark.filterwarnings("ignore:global_step was read")
def test_a_group_that_the_step_sets_from_python_is_an_error() -> None:
    class WarmUp(Classifier):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.1 * int(self.global_step + 1)
            super().optimizer_step(*args, **kwargs)

    match = r"set param_groups\['lr'\], which the host sets"
    with pytest.raises(UnsupportedState, match=match) as error:
        fit(lambda: WarmUp(mlp()), lambda: (loader(),), static=True)
    assert error.value.line is not None
    assert error.value.line.function == "optimizer_step"
    assert "on_train_batch_start" in str(error.value)


@pytest.mark.fits
def test_a_guard_on_a_number_that_no_longer_holds_is_an_error() -> None:
    class Momentum(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, idx: int) -> None:
            if idx == 3:
                trainer.optimizers[0].param_groups[0]["momentum"] = 0.0

    with pytest.raises(StateChanged, match=r"\['momentum'\] != 0 was True when traced"):
        fit(
            lambda: Classifier(mlp(), torch.optim.SGD, momentum=0.9),
            lambda: (loader(),),
            static=True,
            callbacks=(Momentum(),),
            backend={"max_programs": 1},
        )


@pytest.mark.fits
def test_the_gan_s_toggled_flags_are_restored() -> None:
    run = fit(GAN, lambda: (loader(),), static=True, limit_train_batches=2)
    assert all(p.requires_grad for p in run.module.parameters())


class Copies(Classifier):
    """Tensors that take another's value, which then changes, in the order of the attributes."""

    def __init__(self) -> None:
        super().__init__(mlp())
        for name, shape in (("a", (4, 4)), ("b", (4, 4)), ("c", (4, 4)), ("flat", (16,))):
            self.register_buffer(name, torch.arange(16.0).reshape(shape).sin())
        self.before = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a = self.a.clone()
        self.a.copy_(self.b)
        self.b.copy_(a)
        self.flat.copy_(self.c.flatten())
        self.c.copy_(self.c.t() * 2)
        self.before.load_state_dict(self.net.state_dict())
        return super().training_step(batch, batch_idx)


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.process
def test_what_a_tensor_took_of_another_stays_when_that_one_changes_compiled() -> None:
    assert_same_run(*both(Copies, lambda: (loader(48),), policy="default"))


class Refuses:
    """Without attributes; asked for one it raises, as pydantic's mocks do, no AttributeError."""

    __slots__ = ()

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


def test_what_an_object_holds_is_found_without_its_own_code() -> None:
    assert dict_of(Refuses()) is None
    assert dict_of(SimpleNamespace(x=1)) == {"x": 1}
    assert dict_of(Refuses)["__slots__"] == ()
    assert dict_of(3) is None


@pytest.mark.fits
def test_a_hook_that_names_an_object_which_refuses_attributes_is_no_error() -> None:
    class Names(pl.Callback):
        held = Refuses()

        def on_train_batch_end(self, *_: Any) -> None:
            assert self.held is not None

    run = fit(
        lambda: Classifier(mlp()),
        lambda: (loader(64),),
        static=True,
        policy="disabled",
        callbacks=(Names(),),
    )
    assert len(run.losses) == 4
