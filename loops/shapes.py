"""What can be known of a loader's shapes before the first step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.utils.data import BatchSampler, DataLoader

from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.diagnostics.errors import InputChanged


def check_last_batch(
    loader: CombinedLoader | None,
    backend: CSXBackend,
    stage: str,
    limits: Sequence[float] | None = None,
) -> None:
    """Refuse a sized loader whose last batch will be smaller, if that batch will be reached.

    Args:
        loader: all loaders of a stage.
        backend: its ``max_programs`` are 1 where that is to be refused.
        stage: for the message.
        limits: batches taken from each loader; None: those the loader itself knows.

    Raises:
        InputChanged: with the sizes, and the remedies.
    """
    if loader is None:
        return
    limits = limits or loader.limits or [math.inf] * len(loader.flattened)
    for i, (one, limit) in enumerate(zip(loader.flattened, limits, strict=False)):
        which = f"{stage} loader {i}" if len(loader.flattened) > 1 else f"{stage} loader"
        check_loader(which, one, backend, limit)


def check_loader(which: str, loader: object, backend: CSXBackend, limit: float | None) -> None:
    """Refuse a sized loader whose last batch will be smaller, if that batch will be reached.

    Args:
        which: the loader in the message.
        loader: any iterable; most say nothing about the last batch.
        backend: its ``max_programs`` are 1 where that is to be refused.
        limit: batches that are taken; None: all.

    Raises:
        InputChanged: with the sizes, and the remedies.
    """
    sizes = _sizes(loader)
    if sizes is None:
        return
    samples, batch_size = sizes
    batches, last = divmod(samples, batch_size)
    if not (last and batches and (limit is None or limit > batches)):
        return
    if backend.max_programs == 1:
        raise InputChanged(
            f"The last batch of the {which} would be smaller: {samples} samples in batches of"
            f" {batch_size} leave {last}, and a program has one batch size.",
            remedy="DataLoader(drop_last=True), or padding; or backend('CSX', max_programs='auto'),"
            " the default, which builds a second program for it",
        )
    if backend.only_builds:
        rank_zero_info(
            f"CSX: the last batch of the {which} is smaller ({last} of {batch_size} samples); its"
            " program is built when it first comes."
        )


def _sizes(loader: Any) -> tuple[int, int] | None:
    """(samples, batch size) where the last batch may be smaller; None where nothing is known."""
    if not isinstance(loader, DataLoader):
        return None
    sampler: Any = loader.batch_sampler
    if isinstance(sampler, _IndexBatchSamplerWrapper):
        sampler = sampler._batch_sampler
    if type(sampler) is not BatchSampler or sampler.drop_last:
        return None
    try:
        return len(sampler.sampler), sampler.batch_size  # type: ignore[arg-type]
    except TypeError:
        return None
