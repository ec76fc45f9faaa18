"""Loaders: a class or function of the file's, and a DataLoader around what it makes.

    train_dataloader: {data_processor: my.data.Pictures, split: train, batch_size: 32}

A LightningDataModule, a DataLoader, a Dataset, or a function that returns one of them. Around a
Dataset a DataLoader is made: its arguments stand beside those of the dataset. An argument that both
have is the dataset's.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

from fulgurite.config.document.problems import Path
from fulgurite.config.types.classes import Named
from fulgurite.config.types.report import Call
from fulgurite.config.types.shapes import OneClass, Report
from fulgurite.config.types.signatures import names_of
from fulgurite.config.types.values import check_arguments

_DATASET = frozenset({"dataset"})
_LOADER = "torch.utils.data.DataLoader"


@dataclass(frozen=True, kw_only=True)
class DataCall(Call):
    """What makes a loader.

    Args:
        loader: arguments of the DataLoader around a dataset; None if none are given.
    """

    loader: Call | None


@dataclass(frozen=True)
class DataShape(OneClass):
    """A class or function that makes data, with the arguments of a DataLoader beside its own."""

    def called(self, found: Named, report: Report) -> Call | None:
        """The call, its loader's arguments apart."""
        target, loader = self._target(found, report), report.classes.library(_LOADER)
        own, beside = dict(found.arguments), dict[str, Any]()
        if target is not None and not _makes_loaders(target, report):
            takes = names_of(target)
            for key in names_of(loader, _DATASET):
                if key in own and key not in takes:
                    beside[key] = own.pop(key)
        call = super().called(replace(found, arguments=own), report)
        if call is None:
            return None
        return DataCall(**vars(call), loader=self._loader(beside, found.arguments_path, report))

    def _target(self, found: Named, report: Report) -> Any:
        try:
            return report.classes.find(self.category, found.name)
        except LookupError:  # said by the base
            return None

    def _loader(self, given: dict[str, Any], path: Path, report: Report) -> Call | None:
        if not given:
            return None
        target = report.classes.library(_LOADER)
        arguments = check_arguments(target, given, path, report, _DATASET)
        return Call(path=path, name="DataLoader", target=target, arguments=arguments, skip=_DATASET)


def _makes_loaders(target: Any, report: Report) -> bool:
    kinds = map(report.classes.library, (_LOADER, "lightning.pytorch.LightningDataModule"))
    return inspect.isclass(target) and issubclass(target, tuple(kinds))
