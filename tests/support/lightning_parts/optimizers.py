"""Schedulers, and an optimizer's state that host code loads, replaces or clears."""

from __future__ import annotations

import io
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import lr_scheduler

from lightning_parts.base import Part, Tiny, with_callbacks
from lightning_parts.callbacks import Scheduled, dampened


class TwoSchedulers(Tiny):
    """One for each step, one for each epoch, of one optimizer."""

    def __init__(self, *makers: Any) -> None:
        super().__init__()
        self.makers = makers

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [make(optimizer) for make in self.makers]


def warm_up(optimizer: Any) -> Any:
    made = lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 10, 1.0))
    return {"scheduler": made, "interval": "step"}


def plateau(optimizer: Any, **options: Any) -> Any:
    made = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    return {"scheduler": made, "monitor": "val_loss", **options}


def plateau_each_step(optimizer: Any) -> Any:
    return plateau(optimizer, monitor="loss_step", interval="step", frequency=5)


def by_epoch(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, 1, 0.5)


def two(*makers: Any) -> Part:
    return Part(module=lambda: TwoSchedulers(*makers))


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


class Clears(pl.Callback):
    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 3:
            trainer.optimizers[0].state.clear()


def loads(*how: str) -> Part:
    return Part(options=with_callbacks(lambda: LoadsState(*how)))


OPTIMIZERS: dict[str, dict[str, Part]] = {
    "Two schedulers of one optimizer": {
        "warm-up per step, `ReduceLROnPlateau` per epoch": two(warm_up, plateau),
        "`ReduceLROnPlateau` every fifth step": two(by_epoch, plateau_each_step),
        "three": two(warm_up, by_epoch, plateau),
    },
    "Optimizer state between steps": {
        **{
            f"{text}, `{hook}`": Part(
                options=with_callbacks(lambda h=hook, w=way: LoadsState(h, w))
            )
            for way, text in {
                "load": "loaded",
                "replace": "a parameter's replaced",
                "tensor": "a tensor replaced",
                "assign": "all assigned",
            }.items()
            for hook in ("on_train_batch_start", "on_train_batch_end")
        },
        "loaded while accumulating": Part(
            options=with_callbacks(
                lambda: LoadsState("on_train_batch_end", "load"), accumulate_grad_batches=3
            )
        ),
        "cleared": Part(module=Scheduled, options=with_callbacks(Clears, val_check_interval=3)),
        "cleared, with dampening": Part(
            module=dampened, options=with_callbacks(Clears, val_check_interval=3)
        ),
    },
}
