"""Ctrl-C and SIGTERM end a run after the step in flight, with a checkpoint.

    with StopOnSignal() as stop:
        trainer = Trainer(device="CSX", callbacks=[stop])
        trainer.fit(module, loader)
    if stop.signal:
        print(f"stopped by {stop.signal.name}, checkpoint {stop.checkpoint}")
        sys.exit(stop.exit_status)

Lightning's loops look after every batch whether SIGTERM came, and then raise ``SIGTERMException``.
Here Ctrl-C sets the same flag: nothing is asked per batch, on any device. Lightning's own handler
for SIGTERM stays and calls this one last.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fulgurite.callbacks.checkpoint import Checkpoint

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class _Received:
    """Which signal came first, and whether a second Ctrl-C did.

    An object of its own: a trace that fails puts the attributes of callbacks back.
    """

    first: signal.Signals | None = None
    at_once: bool = False


class StopOnSignal(pl.Callback):
    """A callback, and the context in which signals are received.

    The first signal ends a training after its step, a validation or test after its batch; the fit
    then returns to the end of the ``with`` block, whose rest is left out. Of a fit that trained a
    checkpoint is written, from which it goes on as if nothing had been. A second Ctrl-C raises
    KeyboardInterrupt at once. Where a signal comes before or while programs are built, it is
    obeyed after the first step. Only the main thread receives signals; in others this does nothing.

    Attributes:
        checkpoint: the checkpoint written because of a signal; None if nothing new was trained.
    """

    def __init__(self) -> None:
        self.checkpoint: Path | None = None
        self._received = _Received()
        self._process: int | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._trainer: Any = None
        self._begun: int | None = None

    @property
    def signal(self) -> signal.Signals | None:
        """The first signal that came, or None."""
        return self._received.first

    @property
    def exit_status(self) -> int:
        """The exit status of a process ended by the signal: 130 Ctrl-C, 143 SIGTERM; else 0."""
        return 0 if self.signal is None else 128 + self.signal

    # -- the context ---------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Receive signals from here on."""
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self._receive) for one in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Give the signals back; a run that was stopped is no error.

        Raises:
            KeyboardInterrupt: for the second Ctrl-C; or something failed after the first, as
                compilers and data workers do that got it too. That error is its cause.
            SystemExit: the same for SIGTERM.
        """
        for one, handler in self._before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)
        self._before, self._process, self._trainer = {}, None, None
        if self._received.at_once and isinstance(
            error, SystemExit
        ):  # Lightning's of a KeyboardInterrupt
            raise KeyboardInterrupt from None
        if self.signal is not None and isinstance(error, Exception):
            by_user = self.signal == signal.SIGINT
            # a terminal sends Ctrl-C to the compilers and data workers too, and they fail for that
            raise (KeyboardInterrupt() if by_user else SystemExit(self.exit_status)) from error
        return self.signal is not None and isinstance(error, SIGTERMException)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            _receive_in_worker(number)
        elif self.signal is None:
            self._received.first = signal.Signals(number)
            self._ask()
        elif number == signal.SIGINT:
            self._received.at_once = True
            raise KeyboardInterrupt

    def _ask(self) -> None:
        """Let the loops end after this batch; in a window of micro-batches, after its last."""
        trainer = self._trainer
        if trainer is not None:
            window = trainer.state.fn == TrainerFn.FITTING and trainer.accumulate_grad_batches > 1
            waits = window and (trainer.training or trainer.fit_loop._should_accumulate())
            # this flag Lightning's loops ask after each batch; within a window it waits for the
            # window's end, for a checkpoint there would be of half a step
            trainer._signal_connector.received_sigterm = not waits

    # -- the callback --------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the trainer; begin nothing after a signal.

        Raises:
            RuntimeError: there is no context that would receive signals.
        """
        if self._process is None:
            raise RuntimeError(
                "StopOnSignal receives signals only in a with block: write\n"
                "    with StopOnSignal() as stop:\n"
                "        trainer = Trainer(..., callbacks=[stop])\n"
                "        trainer.fit(...)"
            )
        self._trainer, self._begun = trainer, None
        self._obey()

    def _obey(self) -> None:
        if self.signal is not None:
            raise SIGTERMException

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin nothing after a signal; Lightning forgot it when it set its handlers."""
        self._obey()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remember the step at which this run began, and stop if a signal came already."""
        self._begun = trainer.global_step
        self._obey()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Watch for the ends of windows where there are any: the lean loops find hooks here."""
        vars(self).pop("on_train_batch_end", None)
        if trainer.accumulate_grad_batches > 1:
            # as an attribute and only then: a method of the class would cost a call on every batch
            setattr(self, "on_train_batch_end", self._at_batch_end)  # noqa: B010

    def _at_batch_end(self, trainer: Any, *args: Any) -> None:
        if self.signal is not None and not trainer.fit_loop._should_accumulate():
            trainer._signal_connector.received_sigterm = True

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin nothing after a signal, but the validation of a fit: it ends after a batch."""
        if trainer.state.fn != TrainerFn.FITTING:
            self._obey()

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin nothing after a signal."""
        self._obey()

    def on_predict_batch_start(self, *args: Any) -> None:
        """Lightning's prediction loop does not look for signals."""
        self._obey()

    def on_exception(
        self, trainer: Any, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write the checkpoint, if a signal ended a fit that trained."""
        if self.signal is None and trainer.received_sigterm:
            self._received.first = signal.SIGTERM  # another process got it, and told this one
        trained = self._begun is not None and trainer.global_step > self._begun
        whole = isinstance(exception, SIGTERMException) or trainer.accumulate_grad_batches == 1
        if self.signal is None or self._received.at_once or not (trained and whole):
            return
        if trainer.validating:
            # a validation has no state to go on from: it is done anew from its first batch
            _validate_anew(trainer.fit_loop.epoch_loop.val_loop.batch_progress)
        self.checkpoint = _save(trainer)


def _receive_in_worker(number: int) -> None:
    """In a forked data worker: ignore Ctrl-C, which is for the parent; end on SIGTERM."""
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _validate_anew(progress: Any) -> None:
    """Make a resumed fit begin with the whole validation that was broken off.

    Lightning 2.6.6 goes back to a validation where one batch was begun and not done.
    """
    progress.current.reset()
    done = progress.total.completed
    progress.total.ready = progress.total.started = done + 1
    progress.total.processed = done


def _save(trainer: pl.Trainer) -> Path:
    """Write a checkpoint where this run writes others; returns its path."""
    callback = trainer.checkpoint_callback
    if isinstance(callback, Checkpoint):
        return callback.save(trainer)
    folder = callback.dirpath if isinstance(callback, ModelCheckpoint) else None
    path = Path(folder or trainer.default_root_dir, f"stopped-step={trainer.global_step}.ckpt")
    trainer.save_checkpoint(path)
    return path
