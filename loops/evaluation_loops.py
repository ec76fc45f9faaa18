"""Validation, test and predict: Lightning's loops, lean around the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _OUT_DICT
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.seed import isolate_rng

from fulgurite.backends.csx import BuiltOnly, InputChanged, refuse_stop_iteration, rng, strategy_of
from fulgurite.loops.lean import (
    BatchHooks,
    announce_batch,
    call_hooks,
    enter_hook,
    takes_batch_idx,
    uncounted,
)
from fulgurite.loops.loader_errors import explained, name_batch


class EvaluationLoop(_EvaluationLoop):
    """Lightning's ``_EvaluationLoop``."""

    _hooks: BatchHooks
    _has_streams: bool  # whose numbers of batches nobody knows
    _loader: int  # of the latest batch
    began: dict[str, Any]  # random states, of the process and the loaders
    first_loop_iter: bool | None = None  # Lightning's flag of the training that waits for it
    ended: bool = False  # whether its last hooks are called
    generators: list[torch.Tensor] | None = None  # of loaders, in the checkpoint that goes on

    def setup_data(self) -> None:
        """Make the loaders, and refuse those that cannot be static."""
        super().setup_data()
        if self.generators is not None and self._combined_loader is not None:
            rng.restore_loaders(self._combined_loader.flattened, self.generators)
            self.generators = None
        strategy = strategy_of(self.trainer)
        stage = {"validate": "validation"}.get(str(self._stage.value), str(self._stage.value))
        strategy.check_loaders(stage, self._combined_loader, self._max_batches)
        if strategy.only_builds:  # the first of each loader tells all that a program is built from
            self._max_batches = [min(1, limit) for limit in self._max_batches]

    def increment_progress_to_evaluation_end(self) -> None:
        """Skip a validation; one that was done before the checkpoint must not draw again."""
        done = not self.trainer.fit_loop.epoch_loop.restarted_on_train_batch_end
        with isolate_rng(include_cuda=False) if done else nullcontext():
            super().increment_progress_to_evaluation_end()

    def run(self) -> list[_OUT_DICT]:
        """Run over all loaders; within a fit, the values of its last step can be read from here."""
        if self.trainer.state.fn == TrainerFn.FITTING:
            self.trainer.fit_loop.epoch_loop.store_metrics()
        strategy = strategy_of(self.trainer)
        builds = strategy.only_builds
        if builds and self.trainer.sanity_checking:
            return []  # the fit loop builds these programs after training's
        # Lightning puts the training's flag back after a validation; a checkpoint in its middle
        # needs it before
        self.first_loop_iter = self.trainer._logger_connector._first_loop_iter
        within_fit = self.trainer.state.fn == TrainerFn.FITTING
        if within_fit:
            self.setup_data()  # alone, a loop makes its loaders each time that it is asked
        else:
            strategy.begin_run()
        loader = self._combined_loader if within_fit else None
        self.began = states = rng.collect_with([] if loader is None else loader.flattened)
        try:
            with (
                strategy.reporting_errors(),
                explained(),
                uncounted(self) if builds else nullcontext(),
            ):
                results: list[_OUT_DICT] = super().run()
        except SIGTERMException:
            rng.restore(
                states["rng"]
            )  # a fit that goes on validates anew, and draws the same again
            raise
        if builds and self.trainer.state.fn != TrainerFn.FITTING:
            strategy.say_built()
        strategy.on_host_code()
        if strategy.training is not None:
            strategy.training.forget_pruned()  # by ModelPruning, within an epoch
        return results

    def on_run_end(self) -> list[_OUT_DICT]:
        """Call the hooks of the end, and return what was logged; nothing of it where none was."""
        if not strategy_of(self.trainer).only_builds:
            self._hooks.tell_bars()
            logged: list[_OUT_DICT] = super().on_run_end()
            return logged
        self._logged_outputs = []
        self._on_evaluation_model_train()
        self.trainer._logger_connector.reset_results()
        return []

    def _on_evaluation_end(self, *args: Any, **kwargs: Any) -> None:
        """Call the hooks of the very end, those from which checkpoints are written last."""
        trainer, hook = self.trainer, f"on_{'test' if self.trainer.testing else 'validation'}_end"
        self.ended = True
        try:
            call_hooks(trainer, hook)
        finally:
            self.ended = False
        call._call_strategy_hook(trainer, hook)
        trainer._logger_connector.reset_results()

    def on_run_start(self) -> None:
        """Call the hooks of the start, and find those around the batches."""
        if self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking:
            self.trainer.fit_loop.epoch_loop.hooks.tell_bars()
        super().on_run_start()
        self._find_hooks()
        self._loader = 0
        self._has_streams = _has_streams(self._combined_loader)

    def _find_hooks(self) -> None:
        stage = "test" if self.trainer.testing else "validation"
        names = f"on_{stage}_batch_start", f"on_{stage}_batch_end"
        self._hooks = BatchHooks(self.trainer, *names)
        self._step_name = f"{stage}_step"
        self._several = self._is_sequential and self.num_dataloaders > 1

    def _evaluation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Iterator[Any] | None
    ) -> None:
        """Run one batch, or build its program."""
        self._loader = dataloader_idx
        self._agree_on_batch(has_one=True)
        try:
            self._run_batch(batch, batch_idx, dataloader_idx, dataloader_iter)
        except BuiltOnly:
            # the hook's name stays where an exception leaves a hook
            self.trainer.lightning_module._current_fx_name = None
        except StopIteration as error:
            refuse_stop_iteration(error)
            raise
        except InputChanged as error:
            name_batch(error, self._data_fetcher, batch_idx)
            raise

    def _store_dataloader_outputs(self) -> None:
        """A loader has ended: all processes put together what they have logged of it."""
        self._agree_on_batch(has_one=False)
        super()._store_dataloader_outputs()

    def _agree_on_batch(self, has_one: bool) -> None:
        if self._has_streams:
            stage = "test" if self.trainer.testing else "validation"
            strategy_of(self.trainer).agree_on_batch(stage, self._loader, has_one)

    def _run_batch(
        self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Iterator[Any] | None
    ) -> None:
        """The events of a batch, in the order of Lightning's own method."""
        trainer = self.trainer
        if not self._hooks.hold():
            self._find_hooks()
        hooks = self._hooks
        if not hooks.suffice(self._data_fetcher):
            strategy_of(trainer).on_host_code()
            super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
            return
        progress, results = self.batch_progress, self._results
        if progress.is_last_batch:
            fits = trainer.state.fn == TrainerFn.FITTING
            last = not fits or trainer.current_epoch + 1 == trainer.max_epochs
            strategy_of(trainer).on_host_code(ends=True, last=last)
        batch = hooks.transfer(batch, dataloader_idx)
        loader = (dataloader_idx,) if self._several else ()
        progress.increment_ready()
        announce_batch(trainer, results, batch, *loader)
        hooks.before(batch, batch_idx, *loader)
        progress.increment_started()
        output = self._run_step(batch, batch_idx, *loader)
        progress.increment_processed()
        hooks.after(output, batch, batch_idx, *loader)
        # Lightning brings its dicts up to date on every batch; here where a batch's own value is
        # wanted
        logs = any(metric.meta.on_step for metric in results.values())
        if logs:
            trainer._logger_connector.on_batch_end()
        results.batch = results.batch_size = None
        progress.increment_completed()
        if not trainer.sanity_checking:
            self._has_run = True
            if logs:
                step = self._seen_batches_per_dataloader[dataloader_idx]
                trainer._logger_connector.update_eval_step_metrics(step)
            self._seen_batches_per_dataloader[dataloader_idx] += 1
        ends = trainer.received_sigterm and strategy_of(trainer).all_stop()
        if ends and not progress.is_last_batch:
            raise SIGTERMException

    def _run_step(self, batch: Any, batch_idx: int, *loader: int) -> Any:
        """``strategy.validation_step`` or ``test_step`` with the arguments it takes."""
        module, name = self.trainer.lightning_module, self._step_name
        step = getattr(module, name)
        before = enter_hook(module, name)
        index = (batch_idx,) if takes_batch_idx(step) else ()
        arguments = (batch, *index, *loader)
        output = getattr(self.trainer.strategy, name)(*arguments)
        enter_hook(module, before)
        return output


EvaluationLoop.__name__ = _EvaluationLoop.__name__  # profilers have rows of it


class PredictionLoop(_PredictionLoop):
    """Lightning's ``_PredictionLoop``."""

    _has_streams: bool

    def setup_data(self) -> None:
        """Make the loaders."""
        super().setup_data()
        strategy = strategy_of(self.trainer)
        strategy.check_loaders("predict", self._combined_loader, self.max_batches)
        self._has_streams = _has_streams(self._combined_loader)
        if strategy.only_builds:
            self.max_batches = [min(1, limit) for limit in self.max_batches]

    def run(self) -> Any:
        """Run over all loaders, or only build."""
        strategy = strategy_of(self.trainer)
        strategy.begin_run()
        if not strategy.only_builds:
            with strategy.reporting_errors(), explained():
                return super().run()
        with uncounted(self), explained():
            results = super().run()
        strategy.say_built()
        return results

    def _predict_step(self, *args: Any) -> None:
        """Run one batch, or build its program."""
        if self._has_streams:
            strategy_of(self.trainer).agree_on_batch("predict", args[2], has_one=True)
        try:
            super()._predict_step(*args)
        except BuiltOnly:
            self.trainer.lightning_module._current_fx_name = None
        except StopIteration as error:
            refuse_stop_iteration(error)
            raise

    def on_run_end(self) -> Any:
        """Call the hooks of the end, and return the predictions."""
        strategy = strategy_of(self.trainer)
        if self._has_streams:
            strategy.agree_on_batch("predict", self.num_dataloaders - 1, has_one=False)
        if not strategy.only_builds:
            return super().on_run_end()
        self._on_predict_model_train()
        return [] if self.return_predictions else None


def _has_streams(loaders: CombinedLoader | None) -> bool:
    """Whether nobody knows how many batches a loader has."""
    found = [] if loaders is None else loaders.flattened
    return any(has_iterable_dataset(one) or sized_len(one) is None for one in found)


PredictionLoop.__name__ = _PredictionLoop.__name__
