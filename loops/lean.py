"""What happens around a step, without asking again on every batch who wants it.

Lightning calls every hook of every callback on every batch, overridden or not, each under a
profiler and with a debug line, and copies the logged values into three dicts: 115-145 µs a batch
around a step that does nothing (measured, Lightning 2.6.6). Here hooks that somebody overrides are
found once, and values go into the dicts when somebody is about to read them. A progress bar takes
0.3 to 2 ms a batch more than that (measured, Rich's on a terminal) to show what no eye can follow:
Lightning's bars and ours are told of a batch twenty times a second, and of the last one.

Callbacks that write checkpoints are called after the module's hook, where Lightning calls them
before: so a checkpoint has what the hook did, and the run that goes on from it need not do it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from fulgurite.backends.csx import overrides, strategy_of
from fulgurite.callbacks.sparse import SparseCallback, period

_BARS = (RichProgressBar, TQDMProgressBar)
_SHOWN_S = 0.05
_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class BatchHooks:
    """The hooks around the batches of one stage that somebody overrides, and the batch's transfer.

    Args:
        trainer: a ``pl.Trainer``, whose attributes have no types; its callbacks and module are
            asked.
        start: name of the hook before the step.
        end: name of the hook after it.

    Attributes:
        leave_batches: nobody has an occasion to change a batch before its step.
        periods: ``before_some`` and ``after_some`` are due on steps that are multiples of one.
    """

    def __init__(self, trainer: Any, start: str, end: str) -> None:
        self._trainer, self._module = trainer, trainer.lightning_module
        strategy = strategy_of(trainer)
        self._host_code, self._schedulers = strategy.host_code, strategy.schedulers
        self._names = (start, end)
        self.callbacks = list(trainer.callbacks)
        self._bars = [one for one in self.callbacks if _is_told_seldom(one)]
        self._loader: Any = (
            None  # the arguments after the batch's number, when bars were told of it
        )
        self._untold: tuple[Any, ...] | None = None  # the same and the number, of the latest batch
        self._tell_at = 0.0
        self._find_sparse()
        self._start, self._end = self._find(start), self._find(end)
        self._transfers = self._overrides_transfer()
        steps_schedulers = overrides(self._module, "lr_scheduler_step", pl.LightningModule)
        self._run_code = bool(self._start or self._end or self._transfers or steps_schedulers)
        self._of_module = self._set_on_module()
        self.leave_batches = not self._start and not self._transfers

    def hold(self) -> bool:
        """Whether callbacks, and hooks set on the module, are those found when the stage began."""
        same: bool = self.callbacks == self._trainer.callbacks
        return same and self._of_module == self._set_on_module()

    def _set_on_module(self) -> tuple[Any, Any]:
        """Hooks that somebody set on the module itself, over those of its class."""
        own, (start, end) = vars(self._module), self._names
        return own.get(start), own.get(end)

    def suffice(self, fetcher: _DataFetcher | None) -> bool:
        """Whether the lean loop can run the batch: no profiler, an ordinary loader."""
        return type(self._trainer.profiler) is PassThroughProfiler and not isinstance(
            fetcher, _DataLoaderIterDataFetcher
        )

    def transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Bring a batch to the step's device, through the hooks for it if somebody overrides one.

        A flat batch of tensors on the CPU is there already.
        """
        if not self._transfers:
            leaves = batch.values() if type(batch) is dict else batch
            flat = type(batch) in (tuple, list, dict, Tensor)
            if flat and (type(batch) is Tensor or all(map(_is_here, leaves))):
                return batch
        trainer = self._trainer
        batch = trainer.precision_plugin.convert_input(batch)
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)

    def before(self, *args: Any) -> Any:
        """Call the hooks before the step; returns what the module's returned."""
        if self._bars and args[2:] != self._loader:
            self.tell_bars()
            self._loader = args[2:]
            self._call_bars(0, *args)
        response = self._call(self._start, 0, args)
        if self._run_code:
            self._host_code.runs += 1
        return response

    def after(self, *args: Any) -> None:
        """Call the hooks after the step."""
        if self._bars:
            self._untold = args[2:]
        self._call(self._end, 1, args)
        if self._bars and perf_counter() >= self._tell_at:
            self.tell_bars()

    def tell_bars(self) -> None:
        """Let progress bars show the latest batch, as they do before something else is shown."""
        if self._untold is not None:
            untold, self._untold = self._untold, None
            self._call_bars(1, None, None, *untold)  # they look neither at outputs nor at the batch
            self._tell_at = perf_counter() + _SHOWN_S

    def _call_bars(self, which: int, *args: Any) -> None:
        self._call([(True, getattr(one, self._names[which])) for one in self._bars], which, args)

    def before_some(self, *args: Any) -> None:
        """Call the hooks of sparse callbacks before a step on which they are due."""
        self._call([(True, c.on_train_batch_start) for c in self._sparse], 0, args)

    def after_some(self, *args: Any) -> None:
        """Call the hooks of sparse callbacks after a step on which they are due."""
        self._call([(True, c.on_train_batch_end) for c in self._sparse], 1, args)

    def _find_sparse(self) -> None:
        """Sort out the callbacks whose hooks are needed on some steps only, and on which."""
        training = self._names == ("on_train_batch_start", "on_train_batch_end")
        periods = {
            callback: period(callback, self._trainer)
            for callback in self.callbacks
            if training and isinstance(callback, SparseCallback)
        }
        self._sparse = [callback for callback, every in periods.items() if every != 1]
        self.periods = {every for every in periods.values() if every > 1}

    def _find(self, name: str) -> list[tuple[bool, Callable[..., Any]]]:
        callbacks = [
            callback
            for callback in self.callbacks
            if overrides(callback, name, pl.Callback)
            and callback not in self._sparse
            and callback not in self._bars
        ]
        # callbacks before the module, as in Lightning, but for those that write checkpoints (see
        # above)
        found = [(True, getattr(one, name)) for one in callbacks if not isinstance(one, Checkpoint)]
        if overrides(self._module, name, pl.LightningModule):
            found.append((False, getattr(self._module, name)))
        return found + [
            (True, getattr(one, name)) for one in callbacks if isinstance(one, Checkpoint)
        ]

    def _call(self, hooks: list[Any], which: int, args: tuple[Any, ...]) -> Any:
        if not hooks:
            return None
        self._schedulers.show()
        result, module = None, self._module
        before = enter_hook(module, self._names[which])
        for of_callback, hook in hooks:
            if of_callback:
                hook(self._trainer, module, *args)
            else:
                result = hook(*args)
        enter_hook(module, before)
        return result

    def _overrides_transfer(self) -> bool:
        datamodule = self._trainer.datamodule
        owners: list[tuple[Any, type]] = [(self._module, pl.LightningModule)]
        if datamodule is not None:
            owners.append((datamodule, pl.LightningDataModule))
        return (
            type(self._trainer.precision_plugin).convert_input is not Precision.convert_input
            or type(self._trainer.strategy).batch_to_device is not _batch_to_device
            or any(overrides(owner, name, base) for name in _TRANSFER for owner, base in owners)
        )


def _is_told_seldom(callback: pl.Callback) -> bool:
    """Whether it is a bar of Lightning's or ours; one of the user's may count its calls."""
    package = type(callback).__module__.partition(".")[0]
    return isinstance(callback, _BARS) and package in ("lightning", "fulgurite")


def enter_hook(module: pl.LightningModule, name: str | None) -> str | None:
    """Tell the module which hook runs now, as ``self.log`` asks; returns which one ran before.

    Past ``nn.Module.__setattr__``, which costs 2 µs (measured).
    """
    attributes = vars(module)
    before: str | None = attributes["_current_fx_name"]
    attributes["_current_fx_name"] = name
    return before


_takes = functools.lru_cache(maxsize=16)(is_param_in_hook_signature)


def takes_batch_idx(step: Callable[..., Any]) -> bool:
    """Whether a module's step has a second argument, ``batch_idx``; its signature is read once."""
    takes: bool = _takes(getattr(step, "__func__", step), "batch_idx", min_args=2)
    return takes


_batch_to_device = pl.strategies.Strategy.batch_to_device


def _is_here(leaf: Any) -> bool:
    return type(leaf) is Tensor and leaf.is_cpu


def call_hooks(trainer: Any, name: str) -> None:
    """Call hooks without arguments as Lightning does, those that write checkpoints at the end."""
    module, callbacks = trainer.lightning_module, trainer.callbacks
    before = enter_hook(module, name)
    for saves in (False, True):
        for callback in callbacks:
            if isinstance(callback, Checkpoint) is saves:
                with trainer.profiler.profile(f"[Callback]{callback.state_key}.{name}"):
                    getattr(callback, name)(trainer, module)
        if not saves:
            with trainer.profiler.profile(f"[LightningModule]{type(module).__name__}.{name}"):
                getattr(module, name)()
    enter_hook(module, before)


def announce_batch(
    trainer: pl.Trainer, results: _ResultCollection, batch: Any, dataloader_idx: int | None = None
) -> None:
    """``_LoggerConnector.on_batch_start``, without finding out which loop is active."""
    connector = trainer._logger_connector
    # none, then True for the first batch, then False
    if connector._first_loop_iter is not False:
        connector._first_loop_iter = connector._first_loop_iter is None
    results.batch, results.batch_size, results.dataloader_idx = batch, None, dataloader_idx


@contextlib.contextmanager
def uncounted(*owners: _Loop | _BaseProgress) -> Iterator[None]:
    """Put progress counters back, and those inside of loops: a trace, or a build, is no step."""
    before = [(one, one.state_dict()) for owner in owners for one in _progresses(owner)]
    try:
        yield
    finally:
        for progress, state in before:
            progress.load_state_dict(state)


def _progresses(owner: object) -> Iterator[_BaseProgress]:
    if isinstance(owner, _BaseProgress):
        yield owner
    elif isinstance(owner, _Loop):
        for value in vars(owner).values():
            yield from _progresses(value)
