"""The Trainer's arguments of its loops."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from models import loader

from lightning_parts.base import Part, Tiny, exact, with_callbacks


class Stops(pl.Callback):
    """Asks the trainer to stop after so many batches."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batches:
            trainer.should_stop = True


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


ARGUMENTS: dict[str, dict[str, Part]] = {
    "`limit_train_batches`": {str(n): exact(limit_train_batches=n) for n in (3, 0.5, 0)},
    "`limit_val_batches`": {str(n): exact(limit_val_batches=n) for n in (2, 0.5, 0)},
    "`val_check_interval`": {
        "3": exact(val_check_interval=3),
        "0.25": exact(val_check_interval=0.25),
        "11, across epochs": exact(val_check_interval=11, check_val_every_n_epoch=None),
    },
    "`check_val_every_n_epoch`": {"2": exact(check_val_every_n_epoch=2)},
    "`num_sanity_val_steps`": {str(n): exact(num_sanity_val_steps=n) for n in (0, -1)},
    "`overfit_batches`": {
        "2": exact(overfit_batches=2),
        "0.5": exact(overfit_batches=0.5),
        "2, shuffled": Part(
            options=lambda f: {"overfit_batches": 2},
            data=lambda: (loader(64, 8, shuffle=True), loader(32, 8)),
        ),
    },
    "`fast_dev_run`": {str(n): exact(fast_dev_run=n) for n in (True, 3)},
    "`max_steps`, `max_epochs`": {
        "11 steps": exact(max_steps=11, max_epochs=-1),
        "0 steps": exact(max_steps=0),
        "0 epochs": exact(max_epochs=0),
    },
    "`min_steps`, `min_epochs`": {
        "13 steps": Part(options=with_callbacks(lambda: Stops(3), min_steps=13)),
        "2 epochs": Part(options=with_callbacks(lambda: Stops(3), min_epochs=2)),
    },
    "`max_time`": {
        "time is left": exact(max_time={"hours": 1}),
        "it is over": exact(max_time={"microseconds": 1}),
    },
    "`trainer.should_stop`": {
        "within an epoch": Part(options=with_callbacks(lambda: Stops(3))),
        "at its end": Part(options=with_callbacks(lambda: Stops(8))),
    },
    "`accumulate_grad_batches`": {
        "3": exact(accumulate_grad_batches=3),
        "3, `max_steps=4`": exact(accumulate_grad_batches=3, max_steps=4),
        "3, `val_check_interval=2`": exact(accumulate_grad_batches=3, val_check_interval=2),
    },
    "`reload_dataloaders_every_n_epochs`": {
        str(n): Part(
            module=Reloads,
            data=tuple,
            options=lambda f, n=n: {
                "reload_dataloaders_every_n_epochs": n,
                "max_epochs": 2 * n + 1,
            },
            found=lambda t, m: m.made,
        )
        for n in (1, 2)
    },
}
