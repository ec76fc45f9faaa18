"""The epoch loop: Lightning's, lean around the step, which also resumes in a shuffled epoch."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from time import perf_counter
from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fulgurite.backends.csx import InputChanged, Order, refuse_stop_iteration, rng, strategy_of
from fulgurite.loops import data_position, dealing, fetching, resuming
from fulgurite.loops.finite import Losses
from fulgurite.loops.lean import (
    BatchHooks,
    announce_batch,
    takes_batch_idx,
)
from fulgurite.loops.loader_errors import name_batch


class TrainingEpochLoop(_TrainingEpochLoop):
    """Lightning's ``_TrainingEpochLoop``."""

    losses: Losses
    hooks: BatchHooks
    _lean: bool  # whether this epoch's batches are ours
    _several: bool = False  # processes
    _begins: bool  # whether the next batch is the first of this epoch that runs
    _is_due: bool  # whether hooks that are needed on some steps only are called on this batch
    _validates: bool
    _limits: tuple[Any, ...] | None = None  # for which that is so; None outside of an epoch
    order: Order | None = None  # of an epoch that other processes began
    stopped: dict[str, Any] | None = None  # of an epoch that ended early: what a checkpoint keeps
    fetched: Any = None  # the batch that runs, as the loader gave it
    data_s: float = 0.0  # that this fit waited for batches, and for the loaders' iterators
    _fetch_began: float = 0.0
    _stored: int = 0  # after which batch, of all, its values were copied

    def run(self, data_fetcher: _DataFetcher) -> None:
        """Run an epoch; whatever ends it, the last step's values can be read afterwards."""
        self.stopped = None
        try:
            super().run(data_fetcher)
            self.stopped = resuming.stopped(self.trainer)
            training = strategy_of(self.trainer).training
            if self.stopped is not None and training is not None:
                training.warn_of_unseen()
        finally:
            if hasattr(self, "hooks"):  # not where the first epoch could not begin
                self.hooks.tell_bars()
            # those of the last steps are kept where reading one waits for the device
            self.losses.check()
            self._limits = self.fetched = None
            self.store_metrics()

    def store_metrics(self) -> None:
        """Copy the last step's values into the Trainer's dicts: once, for validation's come after.

        Lightning does so on every batch; here before others read the dicts: where validation
        begins, at the end of an epoch, in a checkpoint, after an exception.
        """
        strategy_of(self.trainer).schedulers.show_again()
        ready, connector = self.batch_progress.total.ready, self.trainer._logger_connector
        if self._results and ready != self._stored:
            metrics = self._results.metrics(on_step=True)
            connector._progress_bar_metrics.update(metrics["pbar"])
            connector._callback_metrics.update(metrics["callback"])
            connector._logged_metrics.update(metrics["log"])
        self._stored = ready

    def reset(self) -> None:
        """Reset; Lightning's warning that the data position is lost does not hold here."""
        if self.trainer.fit_loop.resumed in resuming.WITHIN:
            return
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
            # the first epoch's iterator is made in setup_data, those of later ones by Lightning's
            # on_run_start, below
            positions[data_position.ITERATOR] = rng.collect_with(loaders)
        if not fit_loop.resumed and fit_loop.loader_states:
            data_fetcher.combined_loader._load_state_dicts(fit_loop.loader_states)
            fit_loop.loader_states = []
        began, before_s = perf_counter(), self.data_s
        super().on_run_start(data_fetcher)  # prefetches, which may be counted too
        self._stored = self.batch_progress.total.ready
        self.data_s = before_s + perf_counter() - began
        # no pair of limits, so that the first batch asks; None outside of an epoch
        self._limits = ()
        self._schedulers = strategy.schedulers
        self._schedulers.sort(strategy.lr_scheduler_configs)
        data_position.forget_rounds(positions)
        dealing.forget(self)
        restored = strategy.restored
        if restored is not None:
            strategy.restored = None
            seen, exact = self.batch_progress.current.ready, data_position.PROGRESS in restored
            ended = exact and self.batch_progress.is_last_batch
            first = self.trainer.current_epoch == 0
            if dealing.deal(self, restored, data_fetcher, first):
                positions |= {
                    moment: restored[moment]
                    for moment in data_position.MOMENTS
                    if moment in restored
                }
            else:
                data_position.replay(
                    positions, restored, data_fetcher, seen, first=first, ended=ended
                )
        else:
            data_position.follow_rounds(data_fetcher.combined_loader, positions, {})
        self._begins, self._is_due = True, False
        self.hooks = self._find_hooks()
        self._lean, self._several = self.hooks.suffice(data_fetcher), self.trainer.world_size > 1
        if self._lean:
            fetching.shorten(data_fetcher)
        if self.trainer.fit_loop.resumed in resuming.WITHIN:
            self._finish_batch(data_fetcher, self.trainer.fit_loop.resumed)

    def _on_before_fetch(self) -> None:
        super()._on_before_fetch()
        self._fetch_began = perf_counter()

    def _on_after_fetch(self) -> None:
        self.data_s += perf_counter() - self._fetch_began
        super()._on_after_fetch()

    def _finish_batch(self, data_fetcher: _DataFetcher, moment: str) -> None:
        """Do what was still to be done of the last batch when the checkpoint was written.

        But for its row in the loggers: the run that wrote the checkpoint went on to write it.
        """
        if moment == resuming.BATCH_END:
            self.batch_progress.increment_completed()
            loggers = self.trainer.loggers
            self.trainer.loggers = [DummyLogger() for _ in loggers]
            self._log()
            self.trainer.loggers = loggers
        self._skip_next_val = moment == resuming.VALIDATION_END
        if moment != resuming.BATCH_DONE:
            self.on_advance_end(data_fetcher)

    def _find_hooks(self) -> BatchHooks:
        return BatchHooks(self.trainer, "on_train_batch_start", "on_train_batch_end")

    def _should_check_val_epoch(self) -> bool:
        """Lightning's, which looks on every batch; here once an epoch, and when a limit changes."""
        trainer, limits = self.trainer, self._limits
        if limits is None:
            return super()._should_check_val_epoch()
        now = trainer.limit_val_batches, trainer.check_val_every_n_epoch
        if now != limits:
            self._limits, self._validates = now, super()._should_check_val_epoch()
        return self._validates

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Run one batch; before the first of an epoch, remember the random states."""
        if self.batch_progress.current.ready == 0:
            loaders = data_fetcher.combined_loader.flattened
            positions = strategy_of(self.trainer).data_position
            # a loader without workers draws the epoch's order as its first batch is fetched
            positions[data_position.FIRST_BATCH] = rng.collect_with(loaders)
        if not self.hooks.hold():
            self.hooks = self._find_hooks()
        try:
            # what Lightning does otherwise where it goes on in the middle is left to Lightning: its
            # code for that changes with each version
            if self.restarting or not self._lean:
                strategy_of(self.trainer).on_host_code()
                super().advance(data_fetcher)
            else:
                self._advance(data_fetcher)
        except StopIteration as error:
            refuse_stop_iteration(error)
            raise
        except InputChanged as error:
            name_batch(error, data_fetcher, self.batch_progress.current.ready - 1)
            raise

    def _advance(self, data_fetcher: _DataFetcher) -> None:
        """The events of a batch, in the order of Lightning's ``advance``."""
        # as Lightning does before a batch is trained: the next validation begins at its beginning
        self.val_loop._restarting = False
        began = perf_counter()
        batch, _, _ = next(data_fetcher)
        self.data_s += perf_counter() - began
        self.fetched = batch
        progress, batch_idx = self.batch_progress, self.batch_progress.current.ready
        progress.is_last_batch = data_fetcher.done
        ends = self._batches_that_stepped + 1 == self.max_steps
        if progress.is_last_batch or ends:
            ends = ends or self.trainer.current_epoch + 1 == self.trainer.max_epochs
            strategy_of(self.trainer).on_host_code(ends=True, last=ends)
        batch = self.hooks.transfer(batch, 0)
        progress.increment_ready()
        announce_batch(self.trainer, self._results, batch)
        output = self._train(batch, batch_idx)
        progress.increment_processed()
        self._step_schedulers()
        self.hooks.after(output, batch, batch_idx)
        if self._is_due:
            self.hooks.after_some(output, batch, batch_idx)
            self._begins = False
        self._results.batch = self._results.batch_size = None
        progress.increment_completed()
        self._log()

    def _train(self, batch: Any, batch_idx: int) -> Any:
        """The hooks before the step, and the step; returns what it returned."""
        if batch is None:
            self._warning_cache.warn(
                "train_dataloader yielded None. If this was on purpose, ignore this warning..."
            )
            return None
        response = self.hooks.before(batch, batch_idx)
        self._is_due = self._begins
        for every in self.hooks.periods:
            if (self._batches_that_stepped + 1) % every == 0:
                self._is_due = True
        if self._is_due:
            self.hooks.before_some(batch, batch_idx)
        # what the strategy does there it does once an epoch; several processes vote at each step
        if batch_idx == 0 or self._several:
            self.trainer.strategy.on_train_batch_start(batch, batch_idx)
        if response == -1:
            self._skip_the_rest()
        self.batch_progress.increment_started()
        return self._step(batch, batch_idx)

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        """After a batch: validation, plateau schedulers, counters, where there is any of them."""
        trainer, validates = self.trainer, self._should_check_val_epoch()
        if self._several:
            strategy_of(trainer).requeue_if_asked()
        steps = trainer.accumulate_grad_batches == 1
        # Lightning's own asks of each part whether it is due: here that is known
        if validates or self._schedulers.on_host or trainer.should_stop or not steps:
            try:
                super().on_advance_end(data_fetcher)
            except SIGTERMException:  # at its very end, if others do not know of the signal
                if strategy_of(trainer).all_stop():
                    raise
            return
        self._batches_that_stepped += 1
        stops = trainer.received_sigterm and strategy_of(trainer).all_stop()
        if stops and not self._is_training_done:
            raise SIGTERMException

    def _broadcast_sigterm_tensor(self) -> None:
        """Nothing: several processes tell each other of a signal with the step's gradients."""

    def _skip_the_rest(self) -> None:
        """A hook returned -1: this batch is not trained, and is the epoch's last."""
        self.batch_progress.increment_by(0, is_last_batch=True)
        self.batch_progress.increment_processed()
        self._step_schedulers()
        raise StopIteration

    def _step(self, batch: Any, batch_idx: int) -> Any:
        trainer = self.trainer
        kwargs = self._build_kwargs(OrderedDict(), batch, batch_idx)
        if trainer.lightning_module.automatic_optimization:
            return self.automatic_optimization.run(trainer.optimizers[0], batch_idx, kwargs)
        return self.manual_optimization.run(kwargs)

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Step those schedulers that the program does not."""
        strategy = strategy_of(self.trainer)
        configs, on_host = strategy.lr_scheduler_configs, strategy.schedulers.on_host
        # Lightning steps whatever is in the strategy's list
        strategy.lr_scheduler_configs = on_host
        try:
            super().update_lr_schedulers(interval, update_plateau_schedulers)
        finally:
            strategy.lr_scheduler_configs = configs

    def _step_schedulers(self) -> None:
        if self._schedulers.on_host:
            self.update_lr_schedulers("step", update_plateau_schedulers=False)
            if self._num_ready_batches_reached():
                self.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def _log(self) -> None:
        """Send the step's values to the loggers, when it is time."""
        trainer = self.trainer
        every = trainer.log_every_n_steps
        due = every and (self._batches_that_stepped + 1) % every == 0
        if trainer.loggers and (due or trainer.should_stop or trainer.fast_dev_run):
            trainer._logger_connector.update_train_step_metrics()

    def _build_kwargs(
        self, kwargs: OrderedDict[str, Any], batch: Any, batch_idx: int
    ) -> OrderedDict[str, Any]:
        """Lightning's, which inspects ``training_step``'s signature on every batch; here once."""
        kwargs["batch"] = batch
        if takes_batch_idx(self.trainer.lightning_module.training_step):
            kwargs["batch_idx"] = batch_idx
        return kwargs


TrainingEpochLoop.__name__ = _TrainingEpochLoop.__name__  # profilers have rows of it
