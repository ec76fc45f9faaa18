"""What can be known of a loader's shapes before the first step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    several = len(loader.flattened) > 1
    named = {
        f"{stage} loader {i}" if several else f"{stage} loader": pair
        for i, pair in enumerate(zip(loader.flattened, limits, strict=False))
    }
    check_loaders(named, backend)


def check_loaders(loaders: Mapping[str, tuple[object, float | None]], backend: CSXBackend) -> None:
    """Refuse sized loaders whose last batch will be smaller, if that batch will be reached.

    Args:
        loaders: any iterables, most of which say nothing about the last batch, by what messages
            call them, each with how many of its batches are taken; None: all.
        backend: its ``max_programs`` are 1 where that is to be refused.

    Raises:
        InputChanged: with all of these, their sizes, and the remedies.
    """
    found = []
    for which, (loader, limit) in loaders.items():
        samples, batch_size = _sizes(loader) or (0, 1)
        batches, last = divmod(samples, batch_size)
        if last and batches and (limit is None or limit > batches):
            found.append(
                f"The last batch of the {which} is smaller: {samples} samples in batches of"
                f" {batch_size} leave {last}"
            )
    if found and backend.max_programs == 1:
        raise InputChanged(
            f"{'. '.join(found)}. A program has one batch size.",
            remedy="DataLoader(drop_last=True), or padding; or backend('CSX', max_programs='auto'),"
            " the default, which builds a second program for it",
        )
    if backend.only_builds:
        for text in found:
            rank_zero_info(f"CSX: {text}; its program is built when it first comes.")


def _sizes(loader: Any) -> tuple[int, int] | None:
    """(samples, batch size) where the last batch may be smaller; None where nothing is known."""
    sampler = plain_batches(loader)
    if sampler is None or sampler.drop_last:
        return None
    try:
        return len(sampler.sampler), sampler.batch_size  # type: ignore[arg-type]
    except TypeError:
        return None


def plain_batches(loader: Any) -> BatchSampler | None:
    """The batch sampler of a loader whose batches are so many rows each; None of any other."""
    sampler: Any = loader.batch_sampler if isinstance(loader, DataLoader) else None
    if isinstance(sampler, _IndexBatchSamplerWrapper):
        sampler = sampler._batch_sampler
    return sampler if type(sampler) is BatchSampler else None
