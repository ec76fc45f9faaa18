"""A look at a few batches before anything is compiled: do their sizes vary?

Where a run waits for its programs, the fifth shape of a batch would be found after minutes of
compiling the first four; ``validate_only`` would call a model static whose batches are not. So a
few batches are made ahead, at both ends of the data and between, and forgotten. The run does not
notice: random states, and the Python state of dataset and ``collate_fn``, are put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch.utils._pytree as pytree
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from fulgurite.backends.csx.capture import SHAPES, PythonState, Shapes, shapes_of, too_many, varying
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.diagnostics.muted import muted
from fulgurite.loops.shapes import plain_batches

_BATCHES, _SECONDS = 8, 1.0  # at most
_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def check_sizes(
    loader: CombinedLoader | None, backend: CSXBackend, module: pl.LightningModule, stage: str
) -> None:
    """Refuse a loader with batches of more shapes than there may be programs.

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
        if len(seen) > most and (found := varying(seen)):
            raise too_many(stage, found, most)


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
