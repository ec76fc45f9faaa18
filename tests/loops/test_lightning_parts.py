"""Lightning's parts, a row each: on CSX they do what stock does, or an error says why not.

A row is a training: Trainer arguments, a module and loaders. From outside the two runs may not be
told apart: the host hooks in order with their counters, losses, logged names and values, the
weights, the optimizer's state, and what the part itself found out.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_close, make_trainer, numbers
from lightning.pytorch import callbacks as parts
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from models import CLASSES, loader, rows
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

HOST_HOOKS = (
    *("setup", "on_fit_start", "on_sanity_check_start", "on_sanity_check_end", "on_train_start"),
    *("on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start"),
    *("on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"),
    *("on_train_end", "on_fit_end", "on_exception", "teardown"),
)


class Diary(pl.Callback):
    """Writes down each host hook with the trainer's counters, and the losses."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.losses: list[float] = []
        self.metrics: list[dict[str, float]] = []

    def note(self, hook: str, trainer: Any, *args: Any) -> None:
        index = args[-1] if isinstance(args[-1], int) else ""
        loop = trainer.fit_loop
        self.entries.append(
            f"{hook}({index}) epoch={trainer.current_epoch} step={trainer.global_step}"
            f" seen={loop.total_batch_idx}/{loop.batch_idx} last={trainer.is_last_batch}"
            f" stop={trainer.should_stop} rate={rates(trainer)}"
        )
        if hook == "on_train_batch_end":
            self.losses.append(float(args[1]["loss"]) if args[1] else float("nan"))
        if hook.endswith("_end"):
            self.metrics.append(numbers(trainer.callback_metrics))


def rates(trainer: Any) -> list[str]:
    """The learning rates, as text."""
    groups = (group for optimizer in trainer.optimizers for group in optimizer.param_groups)
    return [f"{float(group['lr']):.6g}" for group in groups]


def noting(hook: str) -> Callable[..., None]:
    return lambda self, trainer, *args, **stage: self.note(hook, trainer, *args)


for hook in HOST_HOOKS:
    setattr(Diary, hook, noting(hook))


class Tiny(pl.LightningModule):
    """A backbone and a head; logs losses of both stages, and has a rate and a batch size."""

    def __init__(self, *norms: nn.Module, momentum: float = 0.9) -> None:
        super().__init__()
        self.lr, self.batch_size, self.momentum = 0.05, 8, momentum
        self.backbone = nn.Sequential(nn.Linear(8, 16), *norms, nn.ReLU())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


def normed() -> Tiny:
    return Tiny(nn.BatchNorm1d(16))


@dataclass(kw_only=True)
class Part:
    """A row: what is trained, and what else is compared (``found``) or said instead (``refused``).

    ``options`` gets a folder and returns Trainer arguments; ``fit`` trains.
    """

    options: Callable[[Path], dict[str, Any]] = lambda folder: {}
    module: Callable[[], Any] = Tiny
    data: Callable[[], tuple[Any, ...]] = lambda: (loader(64, 8), loader(32, 8, seed=5))
    fit: Callable[[Any, Any, Any], Any] = lambda trainer, module, data: trainer.fit(module, *data)
    found: Callable[[Any, Any], Any] = lambda trainer, module: None
    refused: str = ""
    steps: int | None = None  # how many there are, where a row is about that
    raises: type[BaseException] | None = None  # by stock too
    backend: dict[str, Any] = field(default_factory=dict)


@dataclass
class Ran:
    """What a run left behind."""

    diary: Diary
    found: Any
    state: dict[str, Any]
    optimizers: list[Any]
    step: int


def run(part: Part, folder: Path, *, static: bool, policy: str | None = None) -> Ran:
    """Train a row."""
    torch.manual_seed(0)
    module, diary = part.module(), Diary()
    options = {"max_epochs": 3, "default_root_dir": folder, **part.options(folder)}
    options["callbacks"] = [*options.get("callbacks", ()), diary]
    trainer = make_trainer(static, policy, part.backend, **options)
    torch.manual_seed(7)
    result = None
    if part.raises is None:
        result = part.fit(trainer, module, part.data())
    else:
        with pytest.raises(part.raises):
            part.fit(trainer, module, part.data())
    states = [optimizer.state_dict() for optimizer in trainer.optimizers]
    found = result if isinstance(result, (int, float, list)) else part.found(trainer, module)
    return Ran(diary, found, module.state_dict(), states, trainer.global_step)


def callback_of(trainer: Any, kind: type[Any]) -> Any:
    return next(one for one in trainer.callbacks if isinstance(one, kind))


def with_callbacks(*makers: Callable[[], Any], **options: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"callbacks": [make() for make in makers], **options}


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(rows(64))


class Pairs(Tiny):
    """Batches of two loaders; None where one has ended."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = [self.loss(one) for one in batch.values() if one is not None]
        self.log("pairs", float(len(losses)))
        return torch.stack(losses).sum()


def combined(mode: str) -> Callable[[], tuple[Any, ...]]:
    return lambda: (CombinedLoader({"a": loader(64, 8), "b": loader(40, 8, seed=3)}, mode),)


class InSequence(Tiny):
    """Batches of one loader after another, each with where it comes from."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch[0] if len(batch) == 3 else batch)


class Transfers(Tiny):
    """All three hooks of a batch's transfer."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers: list[str] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.transfers.append(f"before {dataloader_idx}")
        return [batch[0] * 2, batch[1]]

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.transfers.append(f"to {device} {dataloader_idx}")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.transfers.append(f"after {dataloader_idx}")
        return [batch[0] + 1, batch[1]]


class Skips(Tiny):
    """Ends the second epoch early."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 1 and batch_idx == 3 else None


class SkipsAll(Tiny):
    """Never trains."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


class Nothing(Tiny):
    """No loss on any batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", 1.0)


class Iterates(Tiny):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class Reloads(Tiny):
    """Another loader every so many epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def train_dataloader(self) -> Any:
        self.made.append(self.trainer.current_epoch)
        return loader(8 * (4 + self.trainer.current_epoch), 8, seed=len(self.made))

    def val_dataloader(self) -> Any:
        return loader(16, 8, seed=5)


class Sized(Tiny):
    """Loaders of the batch size that a tuner sets."""

    def train_dataloader(self) -> Any:
        return loader(64, self.batch_size)

    def val_dataloader(self) -> Any:
        return loader(32, self.batch_size)


class LoadsState(pl.Callback):
    """Loads an optimizer's earlier state again between two steps; or puts it there by hand."""

    def __init__(self, hook: str, way: str) -> None:
        self.way, self.kept = way, None
        setattr(self, hook, self.act)

    def act(self, trainer: Any, module: Any, *args: Any) -> None:
        [optimizer] = trainer.optimizers
        if trainer.global_step == 2 and self.kept is None:
            self.kept = torch.load(saved(optimizer))
        elif trainer.global_step == 5:
            if self.way == "load":
                optimizer.load_state_dict(self.kept)
            elif self.way == "replace":
                for p in module.parameters():
                    optimizer.state[p] = {"momentum_buffer": torch.full_like(p, 0.01)}
            elif self.way == "tensor":
                for p in module.parameters():
                    optimizer.state[p]["momentum_buffer"] = torch.full_like(p, 0.01)
            elif self.way == "assign":
                optimizer.state = type(optimizer.state)(
                    dict,
                    {p: {"momentum_buffer": torch.full_like(p, 0.01)} for p in module.parameters()},
                )


def saved(optimizer: Any) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return file


class Unfreezes(parts.BaseFinetuning):
    """The backbone from the second epoch on."""

    def __init__(self, train_bn: bool = True) -> None:
        super().__init__()
        self.train_bn = train_bn

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.backbone, train_bn=self.train_bn)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(
                module.backbone, optimizer, lr=0.01, train_bn=self.train_bn
            )


class Head(Tiny):
    """Its optimizer has what is trained at the beginning."""

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=self.momentum)


class Spikes(Tiny):
    """Its loss is great on the fifth batch: such is the data."""


def spiking() -> tuple[Any, ...]:
    data = rows(64)
    data.tensors[0][32:40] *= 100
    return (DataLoader(data, batch_size=8),)


def spike(folder: Path) -> Any:
    return SpikeDetection(warmup=2, atol=1.0, exclude_batches_path=folder / "skip.json")


def finder(**options: Any) -> Callable[[], Any]:
    return lambda: parts.LearningRateFinder(num_training_steps=12, **options)


def finder_found(trainer: Any, module: Any) -> Any:
    found = callback_of(trainer, parts.LearningRateFinder).optimal_lr
    return [found.results["lr"], found.results["loss"], [module.lr], [found.suggestion()]]


def average(trainer: Any, module: Any) -> Any:
    one = callback_of(trainer, parts.WeightAveraging)._average_model
    return {name: value.clone().float() for name, value in one.state_dict().items()}


def best(trainer: Any, module: Any) -> Any:
    one = trainer.checkpoint_callback
    return [Path(one.best_model_path).name, sorted(p.name for p in Path(one.dirpath).iterdir())]


def exact(**options: Any) -> Part:
    return Part(options=lambda folder: options)


def scale(**options: Any) -> Any:
    def run(trainer: Any, module: Any, data: Any) -> Any:
        size = Tuner(trainer).scale_batch_size(module, max_trials=3, init_val=4, **options)
        trainer.fit(module)
        return [size, module.batch_size]

    return run


class Stops(pl.Callback):
    """Asks the trainer to stop after so many batches."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batches:
            trainer.should_stop = True


def shuffled() -> tuple[Any, ...]:
    return (loader(64, 8, shuffle=True), loader(32, 8, seed=5))


class Scheduled(Tiny):
    """Dropout, Adam and a scheduler of torch's."""

    def __init__(self, make: Any = torch.optim.Adam, **options: Any) -> None:
        super().__init__(nn.Dropout(0.2))
        self.make, self.options = make, options

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters(), lr=self.lr, **self.options)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class FindsLater(parts.LearningRateFinder):
    def on_fit_start(self, *args: Any) -> None:
        """Not yet."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, module)


class Clears(pl.Callback):
    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 3:
            trainer.optimizers[0].state.clear()


GONE = r"self\.backbone\.0\.weight held a tensor .* now is gone(.|\n)*which ModelPruning calls"
dampened = lambda: Scheduled(torch.optim.SGD, momentum=0.9, dampening=0.5)  # noqa: E731
EMA = parts.EMAWeightAveraging
TABLE: dict[str, Part] = {
    # the learning rate finder
    "finder": Part(options=with_callbacks(finder()), found=finder_found),
    "finder_linear": Part(options=with_callbacks(finder(mode="linear", max_lr=0.1))),
    "find_shuffled": Part(
        module=Scheduled, data=shuffled, options=with_callbacks(finder()), found=finder_found
    ),
    "find_dampened": Part(module=dampened, data=shuffled, options=with_callbacks(finder())),
    "find_later": Part(
        module=Scheduled,
        data=shuffled,
        options=with_callbacks(lambda: FindsLater(num_training_steps=12)),
    ),
    "cleared": Part(module=Scheduled, options=with_callbacks(Clears, val_check_interval=3)),
    "cleared_dampened": Part(module=dampened, options=with_callbacks(Clears, val_check_interval=3)),
    "state_accumulated": Part(
        options=with_callbacks(
            lambda: LoadsState("on_train_batch_end", "load"), accumulate_grad_batches=3
        )
    ),
    # batch sizes
    "scale_power": Part(module=Sized, data=tuple, fit=scale(mode="power")),
    "scale_binsearch": Part(module=Sized, data=tuple, fit=scale(mode="binsearch")),
    "batch_size_finder": Part(
        module=Sized,
        data=tuple,
        options=with_callbacks(lambda: parts.BatchSizeFinder(max_trials=3, init_val=4)),
        found=lambda t, m: m.batch_size,
    ),
    # optimizer state between steps
    **{
        f"state_{way}_{hook}": Part(options=with_callbacks(lambda h=hook, w=way: LoadsState(h, w)))
        for way in ("load", "replace", "tensor", "assign")
        for hook in ("on_train_batch_start", "on_train_batch_end")
    },
    "accumulation": Part(
        options=with_callbacks(lambda: parts.GradientAccumulationScheduler({0: 1, 1: 3, 2: 2}))
    ),
    # averages
    **{
        f"swa_{name}": Part(
            options=with_callbacks(
                lambda s=start: parts.StochasticWeightAveraging(
                    swa_lrs=0.01, swa_epoch_start=s, annealing_epochs=2
                ),
                max_epochs=4,
            )
        )
        for name, start in [("int", 2), ("float", 0.5)]
    },
    "swa_norm": Part(
        module=normed,
        refused=r"batch normalization \(self\.backbone\.1\)",
        options=with_callbacks(lambda: parts.StochasticWeightAveraging(0.01)),
    ),
    "ema": Part(options=with_callbacks(lambda: EMA(decay=0.9)), found=average, module=normed),
    "ema_every": Part(
        options=with_callbacks(
            lambda: EMA(decay=0.9, update_every_n_steps=3, update_starting_at_step=4)
        ),
        found=average,
        module=normed,
    ),
    "ema_params": Part(
        options=with_callbacks(lambda: EMA(decay=0.9, use_buffers=False)),
        found=average,
        module=normed,
    ),
    "weight_averaging": Part(options=with_callbacks(parts.WeightAveraging), found=average),
    # finetuning
    "backbone": Part(
        module=Head, options=with_callbacks(lambda: parts.BackboneFinetuning(1, lambda e: 1.5))
    ),
    "backbone_norm": Part(
        module=lambda: Head(nn.BatchNorm1d(16)),
        options=with_callbacks(lambda: parts.BackboneFinetuning(1, lambda e: 1.5, train_bn=True)),
    ),
    "backbone_norm_frozen": Part(
        module=lambda: Head(nn.BatchNorm1d(16)),
        options=with_callbacks(lambda: parts.BackboneFinetuning(1, lambda e: 1.5, train_bn=False)),
    ),
    "finetuning": Part(module=Head, options=with_callbacks(Unfreezes)),
    "finetuning_norm": Part(
        module=lambda: Head(nn.BatchNorm1d(16)), options=with_callbacks(Unfreezes)
    ),
    "finetuning_norm_frozen": Part(
        module=lambda: Head(nn.BatchNorm1d(16)), options=with_callbacks(lambda: Unfreezes(False))
    ),
    # pruning
    **{
        f"pruning_{name}": Part(
            options=with_callbacks(lambda o=options: parts.ModelPruning(**o)), refused=GONE
        )
        for name, options in {
            "unstructured": {"pruning_fn": "l1_unstructured", "amount": 0.3},
            "local": {
                "pruning_fn": "l1_unstructured",
                "amount": 0.3,
                "use_global_unstructured": False,
                "parameter_names": ["weight"],
            },
            "no_lottery": {
                "pruning_fn": "l1_unstructured",
                "amount": 0.3,
                "use_lottery_ticket_hypothesis": False,
            },
            "structured": {
                "pruning_fn": "ln_structured",
                "amount": 0.3,
                "use_global_unstructured": False,
                "pruning_dim": 0,
                "pruning_norm": 2,
                "parameter_names": ["weight"],
            },
            "after_validation": {
                "pruning_fn": "l1_unstructured",
                "amount": 0.3,
                "prune_on_train_epoch_end": False,
            },
        }.items()
    },
    # watching
    "timer_end": Part(
        options=with_callbacks(lambda: parts.Timer({"hours": 1})),
        found=lambda t, m: callback_of(t, parts.Timer).time_elapsed("train") > 0,
    ),
    "timer_over": Part(
        options=with_callbacks(lambda: parts.Timer({"microseconds": 1}, interval="epoch")), steps=8
    ),
    "timer_step": Part(options=with_callbacks(lambda: parts.Timer({"microseconds": 1}))),
    "max_time": exact(max_time={"hours": 1}),
    "max_time_over": exact(max_time={"microseconds": 1}),
    "spike": Part(
        data=spiking,
        options=lambda folder: {"callbacks": [spike(folder)]},
        raises=Exception,
        found=lambda t, m: callback_of(t, SpikeDetection).bad_batches,
    ),
    # loop arguments
    "limit_train_int": exact(limit_train_batches=3),
    "limit_train_float": exact(limit_train_batches=0.5),
    "limit_train_zero": exact(limit_train_batches=0),
    "limit_val_int": exact(limit_val_batches=2),
    "limit_val_float": exact(limit_val_batches=0.5),
    "limit_val_zero": exact(limit_val_batches=0),
    "interval_int": exact(val_check_interval=3),
    "interval_float": exact(val_check_interval=0.25),
    "interval_across": exact(val_check_interval=11, check_val_every_n_epoch=None),
    "every_second_epoch": exact(check_val_every_n_epoch=2),
    "no_sanity": exact(num_sanity_val_steps=0),
    "all_sanity": exact(num_sanity_val_steps=-1),
    "overfit_int": exact(overfit_batches=2),
    "overfit_float": exact(overfit_batches=0.5),
    "overfit_shuffled": Part(
        options=lambda f: {"overfit_batches": 2},
        data=lambda: (loader(64, 8, shuffle=True), loader(32, 8)),
    ),
    "fast_dev_run": exact(fast_dev_run=True),
    "fast_dev_run_int": exact(fast_dev_run=3),
    "max_steps": exact(max_steps=11, max_epochs=-1),
    "max_steps_zero": exact(max_steps=0),
    "max_epochs_zero": exact(max_epochs=0),
    "min_steps": Part(options=with_callbacks(lambda: Stops(3), min_steps=13)),
    "min_epochs": Part(options=with_callbacks(lambda: Stops(3), min_epochs=2)),
    "stop": Part(options=with_callbacks(lambda: Stops(3))),
    "stop_at_validation": Part(options=with_callbacks(lambda: Stops(8))),
    "early_stopping": Part(
        options=with_callbacks(
            lambda: parts.EarlyStopping("val_loss", patience=1, min_delta=10.0), max_epochs=5
        )
    ),
    "accumulate": exact(accumulate_grad_batches=3),
    "accumulate_max_steps": exact(accumulate_grad_batches=3, max_steps=4),
    "accumulate_interval": exact(accumulate_grad_batches=3, val_check_interval=2),
    "reload_1": Part(
        module=Reloads,
        data=tuple,
        options=lambda f: {"reload_dataloaders_every_n_epochs": 1},
        found=lambda t, m: m.made,
    ),
    "reload_2": Part(
        module=Reloads,
        data=tuple,
        options=lambda f: {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 5},
        found=lambda t, m: m.made,
    ),
    # data
    **{
        f"combined_{mode}": Part(module=Pairs, data=combined(mode))
        for mode in ("min_size", "max_size_cycle")
    },
    "combined_max_size": Part(
        module=Pairs, data=combined("max_size"), refused="batch has another structure"
    ),
    "combined_sequential": Part(
        refused="does not support the .* mode",
        data=lambda: (CombinedLoader([loader(64, 8), loader(40, 8, seed=3)], "sequential"),),
    ),
    "list_of_loaders": Part(
        module=Pairs, data=lambda: ({"a": loader(64, 8), "b": loader(40, 8, seed=3)}, loader(32, 8))
    ),
    "iterable": Part(
        data=lambda: (DataLoader(Stream(), batch_size=8), DataLoader(Stream(), batch_size=8))
    ),
    "iterable_interval": Part(
        data=lambda: (DataLoader(Stream(), batch_size=8), DataLoader(Stream(), batch_size=8)),
        options=lambda f: {"val_check_interval": 3},
    ),
    "iterable_limit": Part(
        data=lambda: (DataLoader(Stream(), batch_size=8), DataLoader(Stream(), batch_size=8)),
        options=lambda f: {"limit_train_batches": 3, "limit_val_batches": 2},
    ),
    "dataloader_iter": Part(
        module=Iterates, refused=r"training_step\(dataloader_iter\); take a batch"
    ),
    "transfer": Part(module=Transfers, found=lambda t, m: m.transfers),
    "skip": Part(module=Skips),
    "skip_all": Part(module=SkipsAll),
    "none": Part(module=Nothing, refused="training_step returned None"),
    "checkpoints": Part(
        options=lambda f: {
            "enable_checkpointing": True,
            "callbacks": [
                parts.ModelCheckpoint(f / "ck", monitor="val_loss", save_top_k=2, save_last=True)
            ],
        },
        found=best,
    ),
    "checkpoints_steps": Part(
        options=lambda f: {
            "enable_checkpointing": True,
            "callbacks": [
                parts.ModelCheckpoint(f / "ck", monitor="loss", save_top_k=2, every_n_train_steps=3)
            ],
        },
        found=best,
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_part_does_what_stock_does(name: str, tmp_path: Path) -> None:
    warnings.filterwarnings("ignore", module="lightning")  # what stock says too
    warnings.filterwarnings("ignore", message="A checkpoint was saved in on_train_epoch_start")
    part = TABLE[name]
    if part.refused:
        with pytest.raises(Exception, match=part.refused):
            run(part, tmp_path / "ours", static=True)
        return
    ours = run(part, tmp_path / "ours", static=True)
    stock = run(part, tmp_path / "stock", static=False)
    assert ours.diary.entries == stock.diary.entries
    assert_close(ours.diary.losses, stock.diary.losses, 1e-5, "losses")
    assert_close(ours.diary.metrics, stock.diary.metrics, 1e-5, "metrics")
    assert_close(ours.state, stock.state, 2e-5, "weights")
    assert_close(
        [o["state"] for o in ours.optimizers], [o["state"] for o in stock.optimizers], 2e-5, "state"
    )
    assert_close(
        [o["param_groups"] for o in ours.optimizers],
        [o["param_groups"] for o in stock.optimizers],
        2e-5,
        "groups",
    )
    assert ours.step == stock.step
    if name.startswith("checkpoints") or name == "transfer":
        assert ours.found == stock.found
    elif stock.found is not None:
        assert_close(ours.found, stock.found, 1e-4, "found")
