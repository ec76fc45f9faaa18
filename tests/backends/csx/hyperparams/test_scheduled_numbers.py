"""Schedulers that count in the program: numbers, host's view, checkpoints and errors."""

from __future__ import annotations

import csv
import functools
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import QUIET, assert_close, assert_same_run, both, csx, fit, make_trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    LearningRateMonitor,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from models import GAN, Classifier, loader, mlp
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.utils.data import DataLoader

import fulgurite
from fulgurite import errors
from fulgurite.backends import reset_backend
from fulgurite.backends.csx.plugins.strategy import strategy_of
from fulgurite.backends.program_scheduler import ProgramScheduler

STEPS = 50


class Cosine(ProgramScheduler):
    """Half a cosine from the group's number to zero; or from zero to it."""

    def __init__(self, optimizer: Any, key: str = "lr", up: bool = False, **options: Any) -> None:
        self.sign = -1.0 if up else 1.0
        super().__init__(optimizer, key, **options)

    def value(self, count: Any, group: int) -> Any:
        cos = torch.cos if isinstance(count, Tensor) else math.cos
        return self.initial[group] * (1 + self.sign * cos(math.pi * count / STEPS)) / 2


class Doubling(ProgramScheduler):
    """Has state of its own."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, "lr")
        self.resident["factor"] = torch.ones((), dtype=torch.float64)
        self.show_again()

    def value(self, count: Any, group: int) -> Any:
        factor = self.resident.get("factor", 1.0)
        return self.initial[group] * factor

    def advance(self, count: Any) -> None:
        self.resident["factor"].mul_(1.01)


class Net(Classifier):
    """An MLP under AdamW, with the schedulers that ``make`` gives."""

    def __init__(self, make: Any, optimizer: Any = AdamW, **options: Any) -> None:
        super().__init__(mlp())
        self.make, self.optimizer = make, optimizer
        self.options = {"lr": 1e-2, "weight_decay": 0.1, **options}

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), **self.options)
        made = self.make(optimizer)
        schedulers = made if isinstance(made, list) else [made]
        return [optimizer], [{"scheduler": one, "interval": "step"} for one in schedulers]


class Shown(pl.Callback):
    """The host's param groups before each step, and after the last."""

    def __init__(self, key: str = "lr") -> None:
        self.key, self.values = key, []

    def look(self, trainer: Any) -> None:
        self.values.append(float(trainer.optimizers[0].param_groups[0][self.key]))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.look(trainer)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.look(trainer)


def cosine(count: int) -> float:
    """What ``Cosine`` gives of 1."""
    return (1 + math.cos(math.pi * count / STEPS)) / 2


MAKERS = {
    "lr": Cosine,
    "both": lambda o: [Cosine(o), Cosine(o, "weight_decay")],
    "warm-up from zero": lambda o: [Cosine(o, up=True), Cosine(o, "weight_decay", up=True)],
    "state": Doubling,
}


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}], ids=["", "window"])
def test_a_run_equals_stock_with_the_same_scheduler_on_the_host(make: Any, options: Any) -> None:
    ours, stock = both(lambda: Net(make), lambda: (loader(),), **options)
    assert_same_run(ours, stock)
    mine, theirs = (run.trainer.optimizers[0].param_groups[0] for run in (ours, stock))
    for key in ("lr", "weight_decay"):
        assert mine[key] == pytest.approx(theirs[key], rel=1e-12)
    counts = [
        [c.scheduler.last_epoch for c in r.trainer.lr_scheduler_configs] for r in (ours, stock)
    ]
    assert counts[0] == counts[1] != [0]


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.parametrize("optimizer", [SGD, Adam, torch.optim.RMSprop, torch.optim.NAdam])
def test_every_optimizer_sees_the_numbers(optimizer: Any) -> None:
    ours, stock = both(
        lambda: Net(MAKERS["warm-up from zero"], optimizer), lambda: (loader(),), max_epochs=1
    )
    assert_same_run(ours, stock)


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.compiler
def test_a_compiled_run_equals_stock() -> None:
    ours, stock = both(lambda: Net(MAKERS["both"]), lambda: (loader(),), policy="default")
    assert_same_run(ours, stock)


@pytest.mark.fits
@pytest.mark.long
def test_the_program_reads_no_number_from_the_host() -> None:
    run = fit(lambda: Net(Cosine), lambda: (loader(),), static=True, limit_train_batches=2)
    [program] = strategy_of(run.trainer).programs
    assert not any("'lr'" in name for name in program.numbers)
    assert "Cosine.count: int64[], replicated, updated" in str(program)


@pytest.mark.fits
@pytest.mark.long
def test_the_host_sees_the_number_of_the_next_step() -> None:
    shown = Shown()
    run = fit(lambda: Net(Cosine), lambda: (loader(),), static=True, callbacks=(shown,))
    assert shown.values == pytest.approx([1e-2 * cosine(i) for i in range(STEPS + 1)], rel=1e-12)
    assert run.trainer.lr_scheduler_configs[0].scheduler.get_last_lr() == [shown.values[-1]]


@pytest.mark.fits
@pytest.mark.long
def test_without_hooks_the_host_sees_it_at_the_end_and_after_an_interrupt() -> None:
    class Interrupted(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            if self.trainer.global_step == 7:
                raise RuntimeError("stop here")

    torch.manual_seed(0)
    trainer = make_trainer(True, max_epochs=1)
    module = Net(Cosine)
    trainer.fit(module, loader())
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)
    trainer = make_trainer(True, max_epochs=1)
    with pytest.raises(RuntimeError, match="stop here"):
        trainer.fit(Interrupted(Cosine), loader())
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 * cosine(7))


@pytest.mark.fits
@pytest.mark.long
def test_step_closures_see_it_too() -> None:
    seen: list[float] = []

    class Looks(Net):
        def training_step(self, batch: Any) -> Tensor:
            look(self)
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    @fulgurite.step_closure
    def look(module: Any) -> None:
        seen.append(module.trainer.optimizers[0].param_groups[0]["lr"])

    fit(lambda: Looks(Cosine), lambda: (loader(),), static=True, limit_train_batches=5)
    assert seen == pytest.approx([1e-2 * cosine(i + 1) for i in range(5)], rel=1e-12)


@pytest.mark.long
@pytest.mark.numbers
def test_learning_rate_monitor_logs_it(tmp_path: Path) -> None:
    logged = []
    for static in (True, False):
        logger = CSVLogger(tmp_path / str(static))
        fit(
            lambda: Net(Cosine),
            lambda: (loader(),),
            static=static,
            callbacks=(LearningRateMonitor(),),
            logger=logger,
            log_every_n_steps=1,
        )
        [file] = Path(logger.log_dir).glob("*.csv")
        with file.open() as lines:
            rows = list(csv.DictReader(lines))
        logged.append([float(row["lr-AdamW"]) for row in rows if row.get("lr-AdamW")])
    assert len(logged[0]) == STEPS
    assert logged[0] == pytest.approx(logged[1], rel=1e-12)


@pytest.mark.fits
@pytest.mark.long
def test_the_interval_of_lightning_does_not_matter() -> None:
    class Plain(Net):
        def configure_optimizers(self) -> Any:
            optimizer = AdamW(self.parameters(), **self.options)
            return [optimizer], [Cosine(optimizer)]

    stepped = fit(lambda: Net(Cosine), lambda: (loader(),), static=True)
    plain = fit(lambda: Plain(Cosine), lambda: (loader(),), static=True)
    assert_same_run(plain, stepped)
    reset_backend()
    torch.manual_seed(0)
    module = Plain(Cosine)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = fulgurite.Trainer(device="CPU", max_epochs=1, enable_model_summary=False, **quiet)
    torch.manual_seed(7)
    trainer.fit(module, loader())
    assert_close(module.state_dict(), plain.module.state_dict(), 1e-5)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == STEPS


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("make", [Cosine, Doubling])
def test_a_checkpoint_resumes_on_either_side(tmp_path: Path, writes: bool, make: Any) -> None:
    """The other half of the run is stock Lightning's."""
    whole = fit(lambda: Net(make), lambda: (loader(),), static=False)
    first = fit(lambda: Net(make), lambda: (loader(),), static=writes, limit_train_batches=20)
    first.trainer.save_checkpoint(tmp_path / "20.ckpt")
    kept = torch.load(tmp_path / "20.ckpt", weights_only=False)
    assert kept["lr_schedulers"][0]["last_epoch"] == 20
    torch.manual_seed(0)
    module, trainer = Net(make), make_trainer(not writes, max_epochs=2)
    shown = Shown()
    trainer.callbacks.append(shown)
    rest = DataLoader(list(loader())[20:], batch_size=None)
    trainer.fit(module, rest, ckpt_path=tmp_path / "20.ckpt", weights_only=False)
    assert trainer.global_step == STEPS
    assert_close(module.state_dict(), whole.module.state_dict(), 1e-5)
    if make is Cosine:
        assert shown.values[0] == pytest.approx(1e-2 * cosine(20))


class ScheduledGAN(GAN):
    """Steps its schedulers in a manual step: the first once, the second twice."""

    def configure_optimizers(self) -> Any:
        optimizers, _ = super().configure_optimizers()
        return optimizers, [Cosine(optimizers[0]), Doubling(optimizers[1])]

    def lr_schedulers(self) -> Any:
        return self

    def step(self) -> None:
        first, second = super().lr_schedulers()
        first.step()
        second.step()
        second.step()


@pytest.mark.long
@pytest.mark.numbers
def test_a_manual_step_steps_them_itself() -> None:
    ours, stock = both(ScheduledGAN, lambda: (loader(),))
    assert_same_run(ours, stock)
    counts = [c.scheduler.last_epoch for c in ours.trainer.lr_scheduler_configs]
    assert counts == [STEPS, 2 * STEPS]
    for mine, theirs in zip(ours.trainer.optimizers, stock.trainer.optimizers, strict=True):
        assert mine.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"])


@pytest.mark.long
@pytest.mark.numbers
def test_one_beside_a_scheduler_of_torchs() -> None:
    """In one optimizer: torch's sets the learning rate, ours the weight decay."""

    def make(optimizer: Any) -> list[Any]:
        exponential = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return [exponential, Cosine(optimizer, "weight_decay")]

    ours, stock = both(lambda: Net(make), lambda: (loader(),))
    assert_same_run(ours, stock)
    assert ours.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 * 0.97**STEPS)


@pytest.mark.long
@pytest.mark.numbers
def test_groups_are_chosen_by_tags() -> None:
    class Tagged(Net):
        def configure_optimizers(self) -> Any:
            weights = [p for p in self.parameters() if p.ndim > 1]
            others = [p for p in self.parameters() if p.ndim == 1]
            groups = [{"params": weights}, {"params": others, "tags": {"bias"}, "lr": 1e-3}]
            optimizer = AdamW(groups, **self.options)
            schedulers = [
                Cosine(optimizer, param_group_tags=[None]),
                Cosine(optimizer, up=True, param_group_tags="bias"),
            ]
            return [optimizer], [{"scheduler": one, "interval": "step"} for one in schedulers]

    ours, stock = both(lambda: Tagged(Cosine), lambda: (loader(),), limit_train_batches=10)
    assert_same_run(ours, stock)
    first, second = ours.trainer.optimizers[0].param_groups
    assert first["lr"] == pytest.approx(1e-2 * cosine(10))
    assert second["lr"] == pytest.approx(1e-3 * (1 - cosine(10)))


@pytest.mark.numbers
def test_a_tensor_learning_rate_is_filled() -> None:

    def make() -> Net:
        return Net(Cosine, lr=torch.tensor(1e-2), foreach=False)

    ours, stock = both(make, lambda: (loader(),), limit_train_batches=20)
    assert_same_run(ours, stock)
    group = ours.trainer.optimizers[0].param_groups[0]
    assert float(group["lr"]) == pytest.approx(1e-2 * cosine(20))


def test_a_hand_written_loop_steps_it_in_its_function() -> None:
    losses = []
    for static in (True, False):
        reset_backend()
        torch.manual_seed(0)
        net = mlp()
        optimizer = AdamW(net.parameters(), lr=1e-2)
        scheduler = Cosine(optimizer)

        def step(x: Tensor, y: Tensor, net: Any, optimizer: Any, scheduler: Any) -> Tensor:
            loss = nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            return loss.detach()

        run = step
        if static:
            fulgurite.compile(net, csx())
            run = fulgurite.trace(step)
        found = []
        for i, (x, y) in enumerate(loader()):
            found.append(float(run(x, y, net, optimizer, scheduler)))
            assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * cosine(i + 1))
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


class Reacts(Net):
    """Decides in Python by the number."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if optimizer.param_groups[0]["lr"] < 5e-3:
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)


ONE = {"max_programs": 1}


@pytest.mark.fits
@pytest.mark.long
def test_a_comparison_of_the_number_is_a_guard() -> None:
    with pytest.raises(errors.StateChanged, match=r"param_groups\[0\]\['lr'\] of Cosine < 0.005"):
        fit(lambda: Reacts(Cosine), lambda: (loader(),), static=True, backend=ONE)
    run = fit(lambda: Reacts(Cosine), lambda: (loader(),), static=True)
    assert len(strategy_of(run.trainer).programs) == 2


class Momentum(ProgramScheduler):
    """0.9 for three steps, zero for three, and 0.9 again."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, "momentum")

    def value(self, count: Any, group: int) -> Any:
        if not isinstance(count, Tensor):
            return 0.0 if 3 <= count < 6 else 0.9
        return torch.where((count >= 3) & (count < 6), 0.0, torch.full_like(count, 0.9))


@pytest.mark.fits
def test_a_momentum_that_comes_to_zero_is_another_program() -> None:
    """Without it SGD leaves its average alone."""
    with pytest.raises(errors.StateChanged, match=r"\['momentum'\] of Momentum != 0 was True"):
        fit(
            lambda: Net(Momentum, SGD, momentum=0.9),
            lambda: (loader(64),),
            static=True,
            backend=ONE,
        )


@pytest.mark.long
@pytest.mark.numbers
def test_a_momentum_of_zero_is_no_momentum() -> None:
    ours, stock = both(
        lambda: Net(Momentum, SGD, momentum=0.9),
        lambda: (loader(),),
        limit_train_batches=10,
    )
    assert_same_run(ours, stock)
    assert len(strategy_of(ours.trainer).programs) == 2  # 0.9 comes again, and finds its own


class SkipsZero(SGD):
    """Another's optimizer, which does something else at zero."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad * (group["lr"] or 0.1))
        return loss


@pytest.mark.fits
@pytest.mark.long
def test_what_other_optimizers_do_at_zero_is_not_guessed() -> None:
    warm_up = functools.partial(Net, MAKERS["warm-up from zero"], SkipsZero)
    with pytest.raises(errors.StateChanged, match=r"bool\(param_groups\[0\]\['lr'\]"):
        fit(warm_up, lambda: (loader(),), static=True, backend=ONE)


class RealPart(SkipsZero):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad * group["lr"].real + p.grad * group["lr"].conjugate())
        return loss


@pytest.mark.long
@pytest.mark.numbers
def test_attributes_of_the_number_are_traced_too() -> None:
    ours, stock = both(lambda: Net(Cosine, RealPart), lambda: (loader(),), limit_train_batches=9)
    assert_same_run(ours, stock)


class LooksAfter(Net):
    """Compares the number when it already is the next step's."""

    def __init__(self, make: Any) -> None:
        super().__init__(make)
        self.automatic_optimization = False

    def training_step(self, batch: Any) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
        scheduler.step()
        if optimizer.param_groups[0]["lr"] < 5e-3:
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        optimizer.step()


@pytest.mark.fits
@pytest.mark.long
def test_comparing_the_number_after_its_step_is_refused() -> None:
    """The host would answer with the number before."""
    with pytest.raises(errors.FrozenNumber, match=r"looked at .* after scheduler\.step\(\)"):
        fit(lambda: LooksAfter(Cosine), lambda: (loader(),), static=True)


def test_a_function_that_only_evaluates_may_read_the_number() -> None:
    found = []
    for static in (True, False):
        reset_backend()
        torch.manual_seed(0)
        net = mlp()
        optimizer = SGD(net.parameters(), lr=1e-2)
        scheduler = Cosine(optimizer)

        def train(x: Tensor, net: Any, optimizer: Any, scheduler: Any) -> Tensor:
            loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            return loss.detach()

        def rate(x: Tensor, net: Any, scheduler: Any) -> Tensor:
            return net(x).mean() * scheduler.get_last_lr()[0]

        functions: Any = train, rate
        if static:
            fulgurite.compile(net, csx())
            functions = fulgurite.trace(train), fulgurite.trace(rate)
        for x, _ in list(loader())[:4]:
            found.append(float(functions[0](x, net, optimizer, scheduler)))
            with torch.no_grad():
                found.append(float(functions[1](x, net, scheduler)))
            assert type(optimizer.param_groups[0]["lr"]) is float
    assert found[:8] == pytest.approx(found[8:], rel=1e-5)


def test_groups_that_share_a_tensor_get_one_each() -> None:
    """Torch gives all groups the tensor of the defaults."""
    weights = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)]
    weights[1]["tags"] = "other"  # type: ignore[assignment]
    optimizer = AdamW(weights, lr=torch.tensor(1e-2))
    scheduler = Cosine(optimizer, param_group_tags="other")
    scheduler.step()
    numbers = [float(group["lr"]) for group in optimizer.param_groups]
    assert numbers == pytest.approx([1e-2, 1e-2 * cosine(1)])


class AddsGroup(Net):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        group = {"params": [nn.Parameter(torch.ones(1))]}
        self.trainer.optimizers[0].add_param_group(group)
        super().optimizer_step(*args, **kwargs)


@pytest.mark.fits
def test_a_param_group_added_in_the_step_is_refused() -> None:
    with pytest.raises(errors.UnsupportedState, match="changed how many param groups AdamW has"):
        fit(lambda: AddsGroup(Cosine), lambda: (loader(),), static=True)


class Meddles(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 1.0


@pytest.mark.fits
@pytest.mark.long
def test_setting_the_number_on_the_host_is_an_error() -> None:
    message = r"param_groups\[0\]\['lr'\] was set to 1.0 on the host, but Cosine computes it"
    with pytest.raises(errors.StateChanged, match=message):
        fit(lambda: Meddles(Cosine), lambda: (loader(),), static=True)


@pytest.mark.fits
def test_two_schedulers_of_one_number_are_refused() -> None:
    for other in (Cosine, lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)):
        with pytest.raises(ValueError, match=r"both set param_groups\[0\]\['lr'\] of AdamW"):
            fit(
                lambda other=other: Net(lambda o: [other(o), Cosine(o)]),
                lambda: (loader(),),
                static=True,
            )  # type: ignore[misc]


class WarmsUp(Classifier):
    """A warm-up per step beside a plateau per epoch, as many projects have them."""

    def configure_optimizers(self) -> Any:
        optimizer = Adam(self.parameters(), lr=1e-2)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=7)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.3, patience=0, threshold=10.0
        )
        epochs = {"scheduler": plateau, "monitor": "loss_epoch", "interval": "epoch"}
        return [optimizer], [{"scheduler": warm, "interval": "step"}, epochs]


@pytest.mark.numbers
@pytest.mark.parametrize("device", ["CSX", "CPU"])
def test_two_of_torchs_schedulers_set_one_number_in_their_order(device: str) -> None:
    shown = Shown(), Shown()
    options: dict[str, Any] = {"max_epochs": 4, **QUIET}
    if device == "CSX":
        ours = make_trainer(True, max_epochs=4, callbacks=[shown[0]])
    else:
        ours = fulgurite.Trainer(device=device, callbacks=[shown[0]], **options)
    modules = []
    for trainer in (ours, pl.Trainer(accelerator="cpu", callbacks=[shown[1]], **options)):
        torch.manual_seed(1)
        modules.append(WarmsUp(mlp()))
        trainer.fit(modules[-1], loader(64))
    assert shown[0].values == pytest.approx(shown[1].values, rel=1e-12)
    assert len(set(shown[0].values)) > 5
    assert_close(*(dict(module.state_dict()) for module in modules), 1e-5)


@pytest.mark.fits
def test_stepping_it_otherwise_is_refused() -> None:
    class Overrides(Net):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()

    class Seldom(Net):
        def configure_optimizers(self) -> Any:
            optimizer = AdamW(self.parameters())
            return [optimizer], [{"scheduler": Cosine(optimizer), "frequency": 2}]

    for kind, message in ((Overrides, "overrides lr_scheduler_step"), (Seldom, "frequency=2")):
        with pytest.raises(MisconfigurationException, match=message):
            fit(lambda kind=kind: kind(Cosine), lambda: (loader(),), static=True)  # type: ignore[misc]


def test_wrong_tags_and_keys_are_refused() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ValueError, match=r"found no param group in SGD.* the tags \[None\]"):
        Cosine(optimizer, param_group_tags="bias")
    with pytest.raises(ValueError, match=r"found param_groups\[0\] without a number 'beta'"):
        Cosine(optimizer, "beta")
    with pytest.raises(ValueError, match=r"found param_groups\[0\] without a number 'betas'"):
        Cosine(AdamW([nn.Parameter(torch.ones(2))]), "betas")
    with pytest.raises(ValueError, match="got epoch=3"):
        Cosine(optimizer).step(3)


class Broken(Net):
    def training_step(self, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        return loss * float(loss)


@pytest.mark.fits
def test_a_failed_trace_leaves_it_as_it_was() -> None:
    made: list[Cosine] = []

    def make(optimizer: Any) -> Cosine:
        made.append(Cosine(optimizer))
        return made[-1]

    with pytest.raises(errors.HostRead):
        fit(lambda: Broken(make), lambda: (loader(),), static=True)
    [scheduler] = made
    assert scheduler.last_epoch == 0
    assert scheduler.optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.fits
@pytest.mark.long
def test_retracing_takes_the_count_from_the_program() -> None:
    backend = {"retrace_every_iteration": True}
    once = fit(lambda: Net(Cosine), lambda: (loader(),), static=True, limit_train_batches=5)
    again = fit(
        lambda: Net(Cosine),
        lambda: (loader(),),
        static=True,
        limit_train_batches=5,
        backend=backend,
    )
    assert_same_run(again, once)


class Tuned(Net):
    """Has a learning rate to be found."""

    def __init__(self, make: Any) -> None:
        super().__init__(make)
        self.lr = 1e-3

    def configure_optimizers(self) -> Any:
        self.options["lr"] = self.lr
        return super().configure_optimizers()


@pytest.mark.numbers
@pytest.mark.parametrize("make", [Cosine, lambda o: []])
def test_the_tuner_finds_a_learning_rate_as_stock_does(make: Any) -> None:
    found = []
    for static in (True, False):
        torch.manual_seed(0)
        module, trainer = Tuned(make), make_trainer(static, max_epochs=1)
        finder = Tuner(trainer).lr_find(module, loader(), num_training=20)
        found.append((finder.results, module.lr))
        trainer.fit(module, loader())
        assert trainer.global_step == STEPS
    assert found[0][0]["lr"] == found[1][0]["lr"]
    assert found[0][0]["loss"] == pytest.approx(found[1][0]["loss"], rel=1e-4)
    assert found[0][1] == found[1][1]
