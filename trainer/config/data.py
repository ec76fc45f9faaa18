"""Loaders of a file as a LightningDataModule."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from fulgurite.config.arguments import Call


class FileData(pl.LightningDataModule):
    """The loaders that a file names, made when they are first asked for.

    Args:
        stages: the file's stages, as ``checking.Phase`` has them.
    """

    def __init__(self, stages: dict[str, dict[str, Any]]) -> None:
        super().__init__()
        self._stages = stages
        self._made: dict[int, Any] = {}

    def _loader(self, call: Call) -> Any:
        """One loader per place in the file."""
        if id(call) not in self._made:
            self._made[id(call)] = loader_of(call)
        return self._made[id(call)]

    def _loaders(self, *keys: tuple[str, str]) -> Any:
        for stage, key in keys:
            found = self._stages.get(stage, {}).get(key)
            if found:
                calls = found if isinstance(found, list) else [found]
                return [self._loader(call) for call in calls]
        return []

    def train_dataloader(self) -> Any:
        """Of ``fit``."""
        [loader] = self._loaders(("fit", "train_dataloader"))
        return loader

    def val_dataloader(self) -> Any:
        """Of ``fit``, else of ``validate``."""
        return self._loaders(("fit", "val_dataloader"), ("validate", "val_dataloader"))

    def test_dataloader(self) -> Any:
        """Of ``test``."""
        return self._loaders(("test", "test_dataloader"))

    def predict_dataloader(self) -> Any:
        """Of ``predict``."""
        return self._loaders(("predict", "predict_dataloader"))


def loader_of(call: Call) -> DataLoader[Any]:
    """The loader that a call makes."""
    made = call()
    assert isinstance(made, DataLoader)
    return made
