"""The fit loop: Lightning's, which also refuses loaders that cannot be static, and times them.

Where the backend only builds, it ends after the first batch's program and validation's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException

from fulgurite.backends.csx import BuiltOnly, rng, strategy_of
from fulgurite.loops import data_position, fetching, resuming
from fulgurite.loops.finite import Losses
from fulgurite.loops.lean import uncounted
from fulgurite.loops.loader_errors import explained

# Lightning enters PyTorch's mode for detect_anomaly=True, which reads gradients in the backward
# pass: a step that is traced has none to read. ``loops.install`` adds a CheckLoss.
_without_anomaly_mode = functools.partial(torch.autograd.set_detect_anomaly, False)


class FitLoop(_FitLoop):
    """Lightning's ``_FitLoop``."""

    resumed: str | None = None  # the moment of the checkpoint, until its rest was done
    loader_states: list[Any] = []
    warned_hooks: frozenset[str] = frozenset()  # of whose checkpoints the run has warned

    @property
    def done(self) -> bool:
        """Whether the run ends here; not before the rest of a checkpoint's moment was done."""
        ended: bool = self.resumed not in resuming.UNFINISHED and super().done
        return ended

    def run(self) -> None:
        """Run, or only build; then Lightning's exit without the hooks of a training's end."""
        strategy = strategy_of(self.trainer)
        strategy.begin_run()
        epoch_loop: Any = self.epoch_loop
        # of this run alone: a Trainer that fits again counts its batches anew, and warns again
        epoch_loop.losses = losses = Losses(self.trainer)
        epoch_loop.automatic_optimization.losses = losses
        epoch_loop.manual_optimization.losses = losses
        epoch_loop.stopped, epoch_loop.data_s = None, 0.0
        self.warned_hooks = frozenset()
        if not strategy.only_builds:
            self.resumed = resuming.begin(self.trainer)
            with self._said(), strategy.reporting_errors(), explained(), _without_anomaly_mode():
                super().run()
            if self.resumed is not None:  # nothing was left to do
                self._restore_random_states()
                self.resumed = None
            return
        with uncounted(self), explained(), _without_anomaly_mode():
            with contextlib.suppress(BuiltOnly):
                super().run()
            if not self.skip:
                self._build_validation()
        strategy.say_built()
        # Lightning's tuner ends a fit by this: all is torn down, and no hook of a training's end is
        # called
        raise _TunerExitException

    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        """Say what a fit took when it has trained and ends: by itself, by Ctrl-C or by SIGTERM."""
        first = self.trainer.global_step

        def say() -> None:
            steps = self.trainer.global_step - first
            if steps > 0:
                strategy_of(self.trainer).say_fit(steps, self.epoch_loop.data_s)

        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            say()
            raise
        say()

    def _build_validation(self) -> None:
        trainer = self.trainer
        if trainer.enable_validation:
            trainer.validating = True
            self.epoch_loop.val_loop.run()
            trainer.training = True

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Take the counters of a checkpoint; a run that goes on begins with no sanity check."""
        super().load_state_dict(state_dict, prefix)
        if resuming.is_exact(self.trainer):
            # Lightning leaves the sanity check out where this loop is about to go on; the run that
            # wrote the checkpoint has made it
            self.epoch_loop.val_loop._restarting = True

    def reset(self) -> None:
        """Begin; where a checkpoint says at which moment it was written, exactly there."""
        if self.resumed is None:
            super().reset()
            return
        # Lightning's reset, but for its guess of the moment by its counters
        torch.set_grad_enabled(True)
        self._restarting = self.epoch_loop._restarting = False  # the setter does not always
        self.epoch_loop.val_loop._restarting = False
        self._restart_stage = resuming.restart_stage(self.resumed)

    def on_run_start(self) -> None:
        """Call the hooks of the start; an epoch whose end was being saved is not done yet."""
        current = self.epoch_progress.current
        # Lightning takes each epoch that was processed for one that is completed
        completed = current.completed
        super().on_run_start()
        if self.resumed == resuming.EPOCH_END:
            current.completed = completed
        elif self.resumed in resuming.WITHIN:
            resuming.set_window(self.trainer)

    def on_advance_start(self) -> None:
        """Begin an epoch; the first from a checkpoint's random states, if it is not within one."""
        strategy_of(self.trainer).refuse_watched()
        if self.resumed in (resuming.EPOCH_END, resuming.EPOCH_DONE):
            self._restore_random_states()
            self._resuming_from_checkpoint = False
        super().on_advance_start()

    def _restore_random_states(self) -> None:
        """Those of a checkpoint that was written between two epochs."""
        strategy, loader = strategy_of(self.trainer), self._combined_loader
        restored, strategy.restored = strategy.restored, None
        if restored is None or loader is None:
            return
        data_position.restore_now(restored, loader.flattened)
        if self.trainer.current_epoch == 0 and self.resumed == resuming.EPOCH_DONE:
            assert self._data_fetcher is not None
            data_position.begin_first_epoch(restored, self._data_fetcher)

    def setup_data(self) -> None:
        """Make the loader and its iterator, and remember the random states it was made from."""
        strategy, fetcher = strategy_of(self.trainer), self._data_fetcher
        # before Lightning makes the iterator: with workers, it draws the epoch's order. The
        # loaders' own generators are seen as each loader goes through process_dataloader
        states = rng.collect_with([])
        strategy.loader_generators.clear()
        began = perf_counter()
        super().setup_data()
        self.epoch_loop.data_s += perf_counter() - began
        if self._data_fetcher is not fetcher:
            strategy.check_loaders("training", self._combined_loader)
            states["generators"] = list(strategy.loader_generators)
            strategy.data_position[data_position.ITERATOR] = states
            if strategy.restored is not None:
                assert self._combined_loader is not None
                loaders = self._combined_loader.flattened
                strategy.restored[data_position.MADE] = rng.collect_with(loaders)

    def _load_combined_loader_states(self) -> None:
        """Give loaders their states back, and the process the random states they begin with."""
        ended = self.epoch_loop.batch_progress.is_last_batch
        if ended and resuming.is_exact(self.trainer):
            self.loader_states = self._combined_loader_states_to_load
        super()._load_combined_loader_states()
        restored = strategy_of(self.trainer).restored
        if restored is not None and self._combined_loader is not None:
            data_position.restore_for_iterator(restored, self._combined_loader, ended)

    def advance(self) -> None:
        """Run one epoch; after the first, say if the program waits for the loader."""
        if self.resumed == resuming.EPOCH_END:
            return
        strategy = strategy_of(self.trainer)
        if self.trainer.current_epoch:
            super().advance()
            return
        if strategy.only_builds:
            super().advance()
            raise BuiltOnly(None)  # a hook skipped the whole epoch
        assert self._data_fetcher is not None
        with fetching.timed(self._data_fetcher, strategy) as times:
            super().advance()
        hint = fetching.hint(times, self._data_fetcher.combined_loader.flattened)
        if hint is not None:
            strategy.say(hint)

    def on_advance_end(self) -> None:
        """End an epoch; one whose end was being saved ends without its hooks, which were called."""
        resumed, self.resumed = self.resumed, None
        if resumed == resuming.EPOCH_END:
            self._finish_epoch()
            return
        self.trainer._logger_connector.epoch_end_reached()
        configs = self.trainer.strategy.lr_scheduler_configs
        # our checkpoints have the metrics of the epoch so far, Lightning's have none
        if {one.monitor for one in configs} - {None} <= self.trainer.callback_metrics.keys():
            self._restarting = False  # Lightning would leave plateau schedulers out
        try:
            super().on_advance_end()
        except SIGTERMException:  # at its very end, if others do not know of the signal
            if strategy_of(self.trainer).all_stop():
                raise

    def _finish_epoch(self) -> None:
        """What Lightning does in ``on_advance_end`` after the hooks."""
        connector, epoch_loop = self.trainer._logger_connector, self.epoch_loop
        connector.on_epoch_end()
        if epoch_loop._num_ready_batches_reached():
            epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        epoch_loop._batches_that_stepped -= 1  # loggers get the step of the epoch's last batch
        connector.update_train_epoch_metrics()
        epoch_loop._batches_that_stepped += 1
        self.epoch_progress.increment_completed()
