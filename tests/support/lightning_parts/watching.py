"""Callbacks that look on: times, statistics, checkpoints, an early end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import callbacks as parts
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers import Logger
from models import rows
from torch.utils.data import DataLoader

from lightning_parts.base import Part, Tiny, callback_of, with_callbacks


def spiking() -> tuple[Any, ...]:
    data = rows(64)
    data.tensors[0][32:40] *= 100
    return (DataLoader(data, batch_size=8),)


def spike(folder: Path) -> Any:
    return SpikeDetection(warmup=2, atol=1.0, exclude_batches_path=folder / "skip.json")


def best(trainer: Any, module: Any) -> Any:
    one = trainer.checkpoint_callback
    return [Path(one.best_model_path).name, sorted(p.name for p in Path(one.dirpath).iterdir())]


class Kept(Logger):
    """Keeps what is logged."""

    name, version = "kept", 0

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((step, metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """There are none."""


def kept(make: Callable[[], Any], **options: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {
        "callbacks": [make()],
        "logger": Kept(),
        "log_every_n_steps": 3,
        "max_epochs": 2,
        **options,
    }


def names_logged(trainer: Any, module: Any) -> list[Any]:
    """At which steps which names were logged; what a machine says of itself differs."""
    return [[step, *metrics] for step, metrics in trainer.logger.logged]


def counts_logged(trainer: Any, module: Any) -> list[Any]:
    """The same, with the values that are no times."""
    return [
        [step, *metrics, *(v for k, v in metrics.items() if k.endswith(("samples", "batches")))]
        for step, metrics in trainer.logger.logged
    ]


class Counted(Tiny):
    """Says how many operations a batch takes."""

    flops_per_batch = 1000


class Fails(Tiny):
    """An error on the host after the fifth step."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == 5:
            raise RuntimeError("the fifth")


def left(trainer: Any, module: Any) -> Any:
    """What the checkpoint of an exception holds."""
    file = torch.load(callback_of(trainer, parts.OnExceptionCheckpoint).ckpt_path)
    return [file["global_step"], file["epoch"], *file["state_dict"].values()]


WATCHING: dict[str, dict[str, Part]] = {
    "`Timer`": {
        "time is left": Part(
            options=with_callbacks(lambda: parts.Timer({"hours": 1})),
            found=lambda t, m: callback_of(t, parts.Timer).time_elapsed("train") > 0,
        ),
        "it ends after an epoch": Part(
            options=with_callbacks(lambda: parts.Timer({"microseconds": 1}, interval="epoch")),
            steps=8,
        ),
        "it ends after a step": Part(
            options=with_callbacks(lambda: parts.Timer({"microseconds": 1})), steps=1
        ),
    },
    "`DeviceStatsMonitor`": {
        "names and steps": Part(options=kept(parts.DeviceStatsMonitor), found=names_logged),
        "no CPU's": Part(
            options=kept(lambda: parts.DeviceStatsMonitor(cpu_stats=False)), found=names_logged
        ),
    },
    "`ThroughputMonitor`": {
        name: Part(
            module=Counted,
            options=kept(lambda: parts.ThroughputMonitor(lambda batch: len(batch[0])), **options),
            found=counts_logged,
        )
        for name, options in {
            "names, steps and counts": {},
            "accumulating": {"accumulate_grad_batches": 3},
        }.items()
    },
    "`SpikeDetection`": {
        "a spike ends the fit": Part(
            data=spiking,
            options=lambda folder: {"callbacks": [spike(folder)]},
            raises=Exception,
            found=lambda t, m: callback_of(t, SpikeDetection).bad_batches,
        ),
    },
    "`EarlyStopping`": {
        "of a validation loss": Part(
            options=with_callbacks(
                lambda: parts.EarlyStopping("val_loss", patience=1, min_delta=10.0), max_epochs=5
            )
        ),
    },
    "`ModelCheckpoint`": {
        name: Part(
            options=lambda f, o=options: {
                "enable_checkpointing": True,
                "callbacks": [parts.ModelCheckpoint(f / "ck", save_top_k=2, **o)],
            },
            found=best,
        )
        for name, options in {
            "the best and the last": {"monitor": "val_loss", "save_last": True},
            "by steps": {"monitor": "loss", "every_n_train_steps": 3},
        }.items()
    },
    "`OnExceptionCheckpoint`": {
        "an error on the host": Part(
            module=Fails,
            options=lambda f: {
                "enable_checkpointing": True,
                "callbacks": [parts.OnExceptionCheckpoint(f)],
            },
            raises=RuntimeError,
            found=left,
        ),
    },
}
