"""The epoch loop: Lightning's, which also resumes in the middle of a shuffled epoch."""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from typing import Any

from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from fulgurite.backends.csx.rng import collect_with
from fulgurite.backends.csx.strategy import strategy_of
from fulgurite.loops import position

_takes = functools.lru_cache(maxsize=8)(is_param_in_hook_signature)


class TrainingEpochLoop(_TrainingEpochLoop):
    """Lightning's ``_TrainingEpochLoop``."""

    def reset(self) -> None:
        """Reset; Lightning's warning that the data position is lost does not hold here."""
        with warnings.catch_warnings():
            if strategy_of(self.trainer).restored:
                message = "You're resuming from a checkpoint that ended before the epoch ended"
                warnings.filterwarnings("ignore", message=message)
            super().reset()

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        """Start an epoch: at its beginning, or where a checkpoint left it."""
        strategy, fit_loop = strategy_of(self.trainer), self.trainer.fit_loop
        positions = strategy.data_position
        if self.trainer.current_epoch > 0 and not fit_loop.is_resuming and not self.restarting:
            loaders = data_fetcher.combined_loader.flattened
            positions[position.ITERATOR] = collect_with(loaders)
        super().on_run_start(data_fetcher)
        restored = strategy.restored
        if restored is not None:
            strategy.restored = None
            positions |= position.replay(restored, data_fetcher, self.batch_progress.current.ready)

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Run one batch; before the first of an epoch, remember the random states."""
        if self.batch_progress.current.ready == 0:
            loaders = data_fetcher.combined_loader.flattened
            positions = strategy_of(self.trainer).data_position
            positions[position.FIRST_BATCH] = collect_with(loaders)
        super().advance(data_fetcher)

    def _build_kwargs(
        self, kwargs: OrderedDict[str, Any], batch: Any, batch_idx: int
    ) -> OrderedDict[str, Any]:
        """Lightning's, which inspects ``training_step``'s signature on every batch; here once."""
        kwargs["batch"] = batch
        method = self.trainer.lightning_module.training_step
        if _takes(getattr(method, "__func__", method), "batch_idx", min_args=2):
            kwargs["batch_idx"] = batch_idx
        return kwargs
