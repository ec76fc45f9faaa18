"""Callbacks that change what is trained: rates, batch sizes, averages, frozen and pruned layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import callbacks as parts
from lightning.pytorch.tuner import Tuner
from models import loader
from torch import nn

from fulgurite.optim.lr_scheduler import LinearLR
from lightning_parts.base import (
    Head,
    Part,
    Tiny,
    callback_of,
    normed,
    shuffled,
    with_callbacks,
)


def finder(**options: Any) -> Callable[[], Any]:
    return lambda: parts.LearningRateFinder(num_training_steps=12, **options)


def finder_found(trainer: Any, module: Any) -> Any:
    found = callback_of(trainer, parts.LearningRateFinder).optimal_lr
    return [found.results["lr"], found.results["loss"], [module.lr], [found.suggestion()]]


def find(trainer: Any, module: Any, data: Any) -> Any:
    """The finder without a callback, then a fit."""
    found = Tuner(trainer).lr_find(module, *data, num_training=12)
    trainer.fit(module, *data)
    return [*found.results["lr"], *found.results["loss"], found.suggestion(), module.lr]


class FindsLater(parts.LearningRateFinder):
    def on_fit_start(self, *args: Any) -> None:
        """Not yet."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, module)


class Scheduled(Tiny):
    """Dropout, Adam and a scheduler of torch's."""

    def __init__(self, make: Any = torch.optim.Adam, *norms: nn.Module, **options: Any) -> None:
        super().__init__(*norms, nn.Dropout(0.2))
        self.make, self.options = make, options

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters(), lr=self.lr, **self.options)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class InProgram(Tiny):
    """A scheduler that the program computes."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [LinearLR(optimizer, 0.05, end_learning_rate=0.01, total_iters=20)]


class Sized(Tiny):
    """Loaders of the batch size that a tuner sets."""

    def train_dataloader(self) -> Any:
        return loader(64, self.batch_size)

    def val_dataloader(self) -> Any:
        return loader(32, self.batch_size)


def scale(**options: Any) -> Any:
    def run(trainer: Any, module: Any, data: Any) -> Any:
        size = Tuner(trainer).scale_batch_size(module, max_trials=6, init_val=2, **options)
        trainer.fit(module)
        return [size, module.batch_size]

    return run


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


def average(trainer: Any, module: Any) -> Any:
    one = callback_of(trainer, parts.WeightAveraging)._average_model
    return {name: value.clone().float() for name, value in one.state_dict().items()}


def pruned(trainer: Any, module: Any) -> list[int]:
    """How many zeros the weights have."""
    return [int((p == 0).sum()) for p in module.parameters()]


def pruning(arguments: dict[str, Any] | None = None, **options: Any) -> Part:
    return Part(
        options=with_callbacks(
            lambda: parts.ModelPruning("l1_unstructured", amount=0.3, **options),
            **(arguments or {}),
        ),
        found=pruned,
    )


def averaging() -> Any:
    return parts.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=2)


def without_validation() -> tuple[Any, ...]:
    return (loader(64, 8, shuffle=True),)


def scheduled_norm() -> Any:
    return Scheduled(torch.optim.SGD, nn.BatchNorm1d(16), momentum=0.9)


def statistics(trainer: Any, module: Any) -> Any:
    norm = module.backbone[1]
    return {"mean": norm.running_mean, "var": norm.running_var, "seen": norm.num_batches_tracked}


dampened = lambda: Scheduled(torch.optim.SGD, momentum=0.9, dampening=0.5)  # noqa: E731
EMA = parts.EMAWeightAveraging
CALLBACKS: dict[str, dict[str, Part]] = {
    "`LearningRateFinder`, `Tuner.lr_find`": {
        "exponential": Part(options=with_callbacks(finder()), found=finder_found),
        "linear": Part(options=with_callbacks(finder(mode="linear", max_lr=0.1))),
        "beside a scheduler": Part(
            module=Scheduled, data=shuffled, options=with_callbacks(finder()), found=finder_found
        ),
        "SGD with dampening": Part(
            module=dampened, data=shuffled, options=with_callbacks(finder())
        ),
        "in a later epoch": Part(
            module=Scheduled,
            data=shuffled,
            options=with_callbacks(lambda: FindsLater(num_training_steps=12)),
        ),
        "by the Tuner": Part(fit=find),
        "with a scheduler of `fulgurite.optim`": Part(
            module=InProgram,
            options=with_callbacks(finder()),
            refused="LearningRateFinder with LinearLR of fulgurite.optim",
            why="it puts a scheduler of its own in the place of one that the program computes"
            " (instead: `Tuner.lr_find` before the fit)",
        ),
    },
    "`Tuner.scale_batch_size`, `BatchSizeFinder`": {
        "power": Part(module=Sized, data=tuple, fit=scale(mode="power")),
        "binsearch": Part(module=Sized, data=tuple, fit=scale(mode="binsearch")),
        "by validating": Part(module=Sized, data=tuple, fit=scale(method="validate")),
        "as a callback": Part(
            module=Sized,
            data=tuple,
            options=with_callbacks(lambda: parts.BatchSizeFinder(max_trials=6, init_val=2)),
            found=lambda t, m: m.batch_size,
        ),
    },
    "`GradientAccumulationScheduler`": {
        "one, three, two batches": Part(
            options=with_callbacks(lambda: parts.GradientAccumulationScheduler({0: 1, 1: 3, 2: 2}))
        ),
    },
    "`StochasticWeightAveraging`": {
        **{
            f"from {text}": Part(
                options=with_callbacks(
                    lambda s=start: parts.StochasticWeightAveraging(
                        swa_lrs=0.01, swa_epoch_start=s, annealing_epochs=2
                    ),
                    max_epochs=4,
                )
            )
            for text, start in [("an epoch", 2), ("a part of them", 0.5)]
        },
        **{
            f"with BatchNorm, {text}": Part(
                module=scheduled_norm,
                data=data,
                options=with_callbacks(averaging, max_epochs=4, **options),
                found=statistics,
            )
            for text, data, options in [
                ("validating", shuffled, {}),
                ("without validation, whose last step Lightning repeats", without_validation, {}),
                ("accumulating", without_validation, {"accumulate_grad_batches": 3}),
            ]
        },
        "with a scheduler of `fulgurite.optim`": Part(
            module=InProgram,
            options=with_callbacks(lambda: parts.StochasticWeightAveraging(0.01)),
            refused="StochasticWeightAveraging with LinearLR of fulgurite.optim",
            why="it puts a scheduler of its own in the place of one that the program computes; a"
            " scheduler of torch",
        ),
    },
    "`WeightAveraging`, `EMAWeightAveraging`": {
        "mean of the weights": Part(options=with_callbacks(parts.WeightAveraging), found=average),
        "decay": Part(options=with_callbacks(lambda: EMA(decay=0.9)), found=average, module=normed),
        "every third step": Part(
            options=with_callbacks(
                lambda: EMA(decay=0.9, update_every_n_steps=3, update_starting_at_step=4)
            ),
            found=average,
            module=normed,
        ),
        "without buffers": Part(
            options=with_callbacks(lambda: EMA(decay=0.9, use_buffers=False)),
            found=average,
            module=normed,
        ),
    },
    "`BackboneFinetuning`": {
        "without BatchNorm": Part(
            module=Head, options=with_callbacks(lambda: parts.BackboneFinetuning(1, lambda e: 1.5))
        ),
        **{
            f"BatchNorm, train_bn={train}": Part(
                module=lambda: Head(nn.BatchNorm1d(16)),
                options=with_callbacks(
                    lambda t=train: parts.BackboneFinetuning(1, lambda e: 1.5, train_bn=t)
                ),
            )
            for train in (True, False)
        },
    },
    "`BaseFinetuning`": {
        "without BatchNorm": Part(module=Head, options=with_callbacks(Unfreezes)),
        **{
            f"BatchNorm, train_bn={train}": Part(
                module=lambda: Head(nn.BatchNorm1d(16)),
                options=with_callbacks(lambda t=train: Unfreezes(t)),
            )
            for train in (True, False)
        },
    },
    "`ModelPruning`": {
        "unstructured": pruning(),
        "some parameters": pruning(use_global_unstructured=False, parameter_names=["weight"]),
        "no lottery ticket": pruning(use_lottery_ticket_hypothesis=False),
        "structured": Part(
            options=with_callbacks(
                lambda: parts.ModelPruning(
                    "ln_structured",
                    amount=0.3,
                    use_global_unstructured=False,
                    pruning_dim=0,
                    pruning_norm=2,
                    parameter_names=["weight"],
                )
            ),
            found=pruned,
        ),
        "after validation": pruning(prune_on_train_epoch_end=False),
        "within an epoch and a window of accumulation": pruning(
            {"val_check_interval": 4, "accumulate_grad_batches": 3},
            prune_on_train_epoch_end=False,
        ),
        "`max_programs=1`": Part(
            options=with_callbacks(lambda: parts.ModelPruning("l1_unstructured", amount=0.3)),
            backend={"max_programs": 1},
            refused=r"weight was pruned \(4 in all\)(.|\n)*prune in configure_model",
            why="what is pruned is another program; prune in `configure_model()`",
        ),
    },
}
