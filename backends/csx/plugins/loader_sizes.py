"""What can be known of a loader's batches before the first compile: are they of one size?

A smaller last batch is refused where one program is to take all. Where a run waits for its
programs, the fifth shape of a batch would be found after minutes of compiling the first four;
``validate_only`` would call a model static whose batches are not. So a few batches are made ahead,
at both ends of the data and between, and forgotten. The run does not notice: random states, and the
Python state of dataset and ``collate_fn``, are put back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch.utils._pytree as pytree
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.diagnostics.muted import muted
from fulgurite.backends.csx.diagnostics.trace_errors import InputChanged
from fulgurite.backends.csx.objects import (
    SHAPES,
    PythonState,
    Shapes,
    shapes_of,
    told_of_shapes,
    too_many_shapes,
    varying_dimensions,
)


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


_BATCHES, _SECONDS = 8, 1.0  # at most
_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def check_sizes(
    loader: CombinedLoader | None, backend: CSXBackend, module: pl.LightningModule, stage: str
) -> None:
    """Refuse a loader with batches of more shapes than there may be programs, or say so.

    Args:
        loader: all loaders of a stage; of a loader with a sampler of its own, and of one over an
            iterable dataset, nothing is known.
        backend: says how many programs there may be.
        module: the model; one that changes batches as they are transferred may pad them there.
        stage: for the message.

    Raises:
        InputChanged: with the dimensions that vary, the sizes, and the remedies.
    """
    if loader is None or any(is_overridden(hook, module, pl.LightningModule) for hook in _HOOKS):
        return
    most = SHAPES if isinstance(backend.max_programs, str) else backend.max_programs
    for one in loader.flattened:
        seen: list[Shapes] = []
        for shapes in _ahead(one):
            if shapes not in seen:
                seen.append(shapes)
            elif len(seen) == 1:
                break  # two in a row, from both ends of the data: they have one size
        if len(seen) > most and (found := varying_dimensions(seen)):
            if not isinstance(backend.max_programs, str):
                raise too_many_shapes(stage, found, most)
            rank_zero_info(f"CSX: {told_of_shapes(stage, found, most)}")


def _ahead(loader: Any) -> Iterator[Shapes]:
    """The shapes of some batches: the first, the last, and those between."""
    sampler = _plain_sampler(loader)
    if sampler is None:
        return
    dataset, size = loader.dataset, sampler.batch_size
    batches = len(dataset) // size
    others = [dataset]
    while (inner := getattr(others[-1], "dataset", None)) is not None:  # of a Subset
        others.append(inner)
    state = PythonState(nn.Module(), "", [*others, loader.collate_fn])
    fetcher = _MapDatasetFetcher(dataset, True, loader.collate_fn, True)
    began = perf_counter()
    picked = dict.fromkeys([0, batches - 1, *range(0, batches, max(1, batches // _BATCHES))])
    for i in [*picked][:_BATCHES]:
        if i < 0 or perf_counter() - began > _SECONDS:
            return
        try:
            # the run makes these batches again, and must draw and print as if nobody had looked
            with isolate_rng(include_cuda=False), muted("stdout", "stderr"):
                rows = [*range(i * size, (i + 1) * size)]
                batch = fetcher.fetch(rows)  # type: ignore[no-untyped-call]
        except Exception:  # the loader raises it again when the run gets there, and says where
            return
        finally:
            state.restore()
        yield shapes_of(batch, lambda path: f"batch{pytree.keystr(path)}")


def _plain_sampler(loader: Any) -> BatchSampler | None:
    """The batch sampler of a loader that takes rows in order, or shuffled, and may vary in size."""
    sampler = plain_batches(loader)
    if sampler is None or isinstance(loader.dataset, (IterableDataset, TensorDataset)):
        return None
    return sampler if type(sampler.sampler) in (RandomSampler, SequentialSampler) else None
