"""The fit loop: Lightning's, which also refuses loaders that cannot be static, and times them.

Where the backend only builds, it ends after the first batch's program and validation's.
"""

from __future__ import annotations

import contextlib
from typing import Any

from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.utilities.exceptions import _TunerExitException

from fulgurite.backends.csx.graph.rng import collect_with
from fulgurite.backends.csx.plugins.strategy import strategy_of
from fulgurite.backends.csx.program import report
from fulgurite.backends.csx.program.offline import BuiltOnly
from fulgurite.loops import building, feeding, position
from fulgurite.loops.finite import Losses
from fulgurite.loops.loader_errors import explained
from fulgurite.loops.shapes import check_last_batch


class FitLoop(_FitLoop):
    """Lightning's ``_FitLoop``."""

    def run(self) -> None:
        """Run, or only build; then Lightning's exit without the hooks of a training's end."""
        epoch_loop: Any = self.epoch_loop
        epoch_loop.losses = losses = Losses(self.trainer)
        epoch_loop.automatic_optimization.losses = losses
        epoch_loop.manual_optimization.losses = losses
        if not building.only_builds(self.trainer):
            with explained():
                super().run()
            return
        with building.uncounted(self), explained():
            with contextlib.suppress(BuiltOnly):
                super().run()
            if not self.skip:
                self._build_validation()
        building.close(self.trainer)
        raise _TunerExitException

    def _build_validation(self) -> None:
        trainer = self.trainer
        if trainer.enable_validation:
            trainer.validating = True
            self.epoch_loop.val_loop.run()
            trainer.training = True

    def setup_data(self) -> None:
        """Make the loader and its iterator, and remember the random states it was made from."""
        strategy, fetcher = strategy_of(self.trainer), self._data_fetcher
        states = collect_with([])
        strategy.loader_generators.clear()
        super().setup_data()
        if self._data_fetcher is not fetcher:
            check_last_batch(self._combined_loader, strategy.backend, "training")
            states["generators"] = list(strategy.loader_generators)
            strategy.data_position[position.ITERATOR] = states
            if strategy.restored is not None:
                assert self._combined_loader is not None
                loaders = self._combined_loader.flattened
                strategy.restored[position.MADE] = collect_with(loaders)

    def _load_combined_loader_states(self) -> None:
        """Give loaders their states back, and the process the random states they begin with."""
        super()._load_combined_loader_states()
        restored = strategy_of(self.trainer).restored
        if restored is not None and self._combined_loader is not None:
            ended = self.epoch_loop.batch_progress.is_last_batch
            position.restore_for_iterator(restored, self._combined_loader, ended)

    def advance(self) -> None:
        """Run one epoch; after the first, say if the program waits for the loader."""
        if self.trainer.current_epoch:
            super().advance()
            return
        if building.only_builds(self.trainer):
            super().advance()
            raise BuiltOnly(None)  # a hook skipped the whole epoch
        assert self._data_fetcher is not None
        with feeding.timed(self._data_fetcher, strategy_of(self.trainer).fabric) as times:
            super().advance()
        hint = feeding.hint(times, self._data_fetcher.combined_loader.flattened)
        if hint is not None:
            report.say(self.trainer, hint)

    def on_advance_end(self) -> None:
        """End an epoch; one that was gone on with steps plateau schedulers, too.

        Lightning leaves them out after a restart, as it has no metrics then. Here the epoch goes
        on within, and has those of its validation.
        """
        self.trainer._logger_connector.epoch_end_reached()
        configs = self.trainer.strategy.lr_scheduler_configs
        if {one.monitor for one in configs} - {None} <= self.trainer.callback_metrics.keys():
            self._restarting = False
        super().on_advance_end()
