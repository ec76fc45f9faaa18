"""Loaders, how batches come to the step, and steps that train nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from models import loader, rows
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_parts.base import Part, Tiny


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(rows(64))


def streams() -> tuple[Any, ...]:
    return DataLoader(Stream(), batch_size=8), DataLoader(Stream(), batch_size=8)


class Pairs(Tiny):
    """Batches of two loaders; None where one has ended."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = [self.loss(one) for one in batch.values() if one is not None]
        self.log("pairs", float(len(losses)))
        return torch.stack(losses).sum()


def combined(mode: str) -> Callable[[], tuple[Any, ...]]:
    return lambda: (CombinedLoader({"a": loader(64, 8), "b": loader(40, 8, seed=3)}, mode),)


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


class NothingSometimes(Tiny):
    """No loss on some batches, which a counter tells."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 or self.current_epoch == 1 else loss


class Nothing(Tiny):
    """No loss on any batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", 1.0)


class NothingByHand(Nothing):
    """The same, as the remedy says."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Iterates(Tiny):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


DATA: dict[str, dict[str, Part]] = {
    "`CombinedLoader`": {
        **{
            mode: Part(module=Pairs, data=combined(mode))
            for mode in ("min_size", "max_size", "max_size_cycle")
        },
        "sequential, which stock refuses too": Part(
            raises=ValueError,  # of stock's too
            data=lambda: (CombinedLoader([loader(64, 8), loader(40, 8, seed=3)], "sequential"),),
        ),
        "a dict of loaders": Part(
            module=Pairs,
            data=lambda: ({"a": loader(64, 8), "b": loader(40, 8, seed=3)}, loader(32, 8)),
        ),
    },
    "`IterableDataset`": {
        "without a length": Part(data=streams),
        "`val_check_interval=3`": Part(data=streams, options=lambda f: {"val_check_interval": 3}),
        "limited": Part(
            data=streams, options=lambda f: {"limit_train_batches": 3, "limit_val_batches": 2}
        ),
    },
    "`training_step(dataloader_iter)`": {
        "in any stage": Part(
            module=Iterates,
            refused=r"runs once(.|\n)*def training_step\(self, batch, batch_idx\):",
            why="the step's Python runs once, and would fetch one batch for all; take the batch",
        )
    },
    "Hooks of a batch's transfer": {
        "all three": Part(module=Transfers, found=lambda t, m: m.transfers)
    },
    "`on_train_batch_start` returns -1": {
        "in one epoch": Part(module=Skips),
        "always": Part(module=SkipsAll),
    },
    "`training_step` returns None": {
        "for some batches, by a counter": Part(module=NothingSometimes),
        "for every batch, manual optimization": Part(module=NothingByHand),
        "for every batch": Part(
            module=Nothing,
            refused=r"returned None, and does so on every batch(.|\n)*automatic_optimization = F",
            why="nothing would be trained by it; manual optimization",
        ),
    },
}
