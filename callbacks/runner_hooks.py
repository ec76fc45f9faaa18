"""The twelve hooks of a runner, called from Lightning's events on every device.

A *span* is a training or an evaluation, an epoch of it, or a batch. Each begins with a ``_start``
hook, and ends with an ``_end`` hook only if nothing was raised in between. Evaluation is validation
and test; what Lightning validates before a fit, to see whether it can, is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from fulgurite.backends.patches import patched
from fulgurite.callbacks.sparse import Undoing

_TRANSFER = "on_before_batch_transfer"


class Runner(Protocol):
    """What a runner may define. As a base class: hooks that do nothing, and cost nothing."""

    def on_train_start(self) -> None:
        """Before the training loop."""

    def on_train_end(self, early_exit: bool) -> None:
        """After the training loop; ``early_exit``: it was stopped before its epochs and steps."""

    def on_train_epoch_start(self) -> None:
        """Before each training epoch."""

    def on_train_epoch_end(self, early_exit: bool) -> None:
        """After each training epoch; ``early_exit``: it was left before its last batch."""

    def on_train_batch_start(self, data: Any) -> Any:
        """Before each training step; what it returns, if not None, is trained instead of it.

        Args:
            data: a batch as the loader gave it, on the host.
        """
        return data

    def on_train_batch_end(self, loss: Tensor | None, epoch: int, step: int) -> None:
        """After each training step.

        Args:
            loss: what the step returned as loss, detached, on the device; reading it waits for it.
            epoch: the epoch's number, from 0.
            step: the batch's number in it, from 0.
        """

    def on_eval_start(self) -> None:
        """Before each evaluation."""

    def on_eval_end(self, early_exit: bool) -> None:
        """After each evaluation; ``early_exit`` is False, for nothing ends one early."""

    def on_eval_epoch_start(self) -> None:
        """Before the batches of an evaluation."""

    def on_eval_epoch_end(self, early_exit: bool) -> None:
        """After the batches of an evaluation; ``early_exit`` as in ``on_eval_end``."""

    def on_eval_batch_start(self, data: Any) -> Any:
        """Before each evaluation step; as ``on_train_batch_start``."""
        return data

    def on_eval_batch_end(self, loss: Tensor | None, epoch: int, step: int) -> None:
        """After each evaluation step; as ``on_train_batch_end``, None where it returns no loss."""


HOOKS = tuple(name for name in vars(Runner) if name.startswith("on_"))
"""The names of the twelve."""


class RunnerHooks(Undoing):
    """Calls the hooks that a runner overrides; the others cost nothing.

    Args:
        runner: any object with some of the twelve hooks.
    """

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self._runner = runner
        for hook in filter(self._overrides, HOOKS):
            for event, call in self._events(hook).items():
                setattr(self, event, call)  # Lightning and the lean loops look at the instance

    def _overrides(self, hook: str) -> bool:
        method = getattr(self._runner, hook, None)
        return method is not None and getattr(method, "__func__", method) is not vars(Runner)[hook]

    def _events(self, hook: str) -> dict[str, Callable[..., None]]:
        """Lightning's events at which a hook is called, and what is called then."""
        call = getattr(self._runner, hook)
        span = hook.removeprefix("on_train").removeprefix("on_eval")
        if span == "_batch_start":
            return {}  # Lightning's event cannot replace the batch: see setup
        made: Callable[[Any], Callable[..., None]]
        if hook.startswith("on_eval"):
            made = _EVALUATION.get(span, _started)
            called = _not_in_sanity_check(made(call))
            return {f"on_{stage}{span}": called for stage in ("validation", "test")}
        made = _TRAINING.get(span, _started)
        return {hook: made(call)}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Put the ``_batch_start`` hooks where a batch can still become another one.

        Before its transfer to the device, that is, on all devices; what other hooks for the
        transfer there are comes afterwards.

        Raises:
            MisconfigurationException: a step fetches its batches itself (``dataloader_iter``).
        """
        starts = {
            kind: getattr(self._runner, f"on_{kind}_batch_start")
            for kind in ("train", "eval")
            if self._overrides(f"on_{kind}_batch_start")
        }
        if not starts:
            return
        _refuse_own_fetching(pl_module, starts)
        owner = _owner_of_transfer(trainer, pl_module)
        change = (owner, _TRANSFER, _replacing(trainer, starts, getattr(owner, _TRANSFER)))
        self.undo.enter_context(patched([change]))


def _started(call: Callable[[], None]) -> Callable[..., None]:
    return lambda trainer, module: call()


def _trained(call: Callable[[bool], None]) -> Callable[..., None]:
    def end(trainer: Any, module: Any) -> None:
        epochs = trainer.fit_loop.epoch_progress.current.completed
        all_steps = 0 <= trainer.max_steps <= trainer.global_step
        all_epochs = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= epochs
        call(not (all_steps or all_epochs))

    return end


def _epoch_trained(call: Callable[[bool], None]) -> Callable[..., None]:
    def end(trainer: Any, module: Any) -> None:
        batches, progress = trainer.num_training_batches, trainer.fit_loop.epoch_loop.batch_progress
        # the length of a stream is not known: its last batch is known when it has come
        if batches == float("inf"):
            call(not progress.is_last_batch)
        else:
            call(progress.current.completed < batches)

    return end


def _batch_trained(call: Callable[[Any, int, int], None]) -> Callable[..., None]:
    def end(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss, window = loss_of(outputs), trainer.accumulate_grad_batches
        if loss is not None and window > 1 and module.automatic_optimization:
            loss = loss * window  # Lightning's is divided by it
        call(loss, trainer.current_epoch, batch_idx)

    return end


def _evaluated(call: Callable[[bool], None]) -> Callable[..., None]:
    return lambda trainer, module: call(False)


def _batch_evaluated(call: Callable[[Any, int, int], None]) -> Callable[..., None]:
    def end(
        trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, loader: int = 0
    ) -> None:
        call(loss_of(outputs), trainer.current_epoch, batch_idx)

    return end


_Made = dict[str, Callable[[Any], Callable[..., None]]]
_TRAINING: _Made = {"_end": _trained, "_epoch_end": _epoch_trained, "_batch_end": _batch_trained}
_EVALUATION: _Made = {"_end": _evaluated, "_epoch_end": _evaluated, "_batch_end": _batch_evaluated}


def _not_in_sanity_check(event: Callable[..., None]) -> Callable[..., None]:
    def unless(trainer: pl.Trainer, *args: Any) -> None:
        if not trainer.sanity_checking:
            event(trainer, *args)

    return unless


def loss_of(outputs: Any) -> Tensor | None:
    """The loss in what a step returned: a tensor, a dict with it, a tuple that begins with it."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("loss")
    elif isinstance(outputs, (tuple, list)) and outputs:
        outputs = outputs[0]
    return outputs.detach() if isinstance(outputs, Tensor) else None


def _refuse_own_fetching(module: pl.LightningModule, starts: Mapping[str, Any]) -> None:
    steps = {"train": ("training_step",), "eval": ("validation_step", "test_step")}
    for kind in starts:
        for step in steps[kind]:
            method = getattr(module, step)
            if is_param_in_hook_signature(method, "dataloader_iter", explicit=True):
                raise MisconfigurationException(
                    f"{step}(dataloader_iter) fetches its batches itself, so the runner's"
                    f" on_{kind}_batch_start would not see them. Write {step}(batch, batch_idx),"
                    " or leave the hook out."
                )


def _owner_of_transfer(trainer: Any, module: pl.LightningModule) -> Any:
    """Whose ``on_before_batch_transfer`` Lightning calls: the module's or the datamodule's."""
    data = trainer.datamodule
    if data is None or (is_overridden(_TRANSFER, module) and not is_overridden(_TRANSFER, data)):
        return module
    return data


def _replacing(
    trainer: Any, starts: Mapping[str, Callable[[Any], Any]], own: Callable[..., Any]
) -> Callable[..., Any]:
    def on_before_batch_transfer(batch: Any, dataloader_idx: int) -> Any:
        evaluates = trainer.validating or trainer.testing  # neither in Lightning's sanity check
        start = starts.get("train" if trainer.training else "eval" if evaluates else "")
        data = start(batch) if start is not None else None
        if data is not None and data is not batch:
            # Lightning has converted the batch before this hook, and knows nothing of the new one
            batch = trainer.precision_plugin.convert_input(data)
        return own(batch, dataloader_idx)

    return on_before_batch_transfer
