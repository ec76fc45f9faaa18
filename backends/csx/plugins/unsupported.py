"""What CSX cannot do, as errors that name it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature


def refuse_unsupported(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise where a run asks for what CSX does not have."""
    if module._compiler_ctx is not None:
        raise MisconfigurationException(
            "CSX does not support a module that went through torch.compile; pass the module itself."
        )
    _refuse_iterators(module)


def _refuse_iterators(module: pl.LightningModule) -> None:
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        function = getattr(module, step)  # None: there is no such stage
        if function is not None and is_param_in_hook_signature(
            function, "dataloader_iter", explicit=True
        ):
            raise MisconfigurationException(
                f"CSX does not support {step}(self, dataloader_iter): the step's Python runs once,"
                " while it is traced, and would fetch one batch for all steps. Remedy: take the"
                " batch, which Lightning fetches for each step, and leave next(dataloader_iter)"
                f" out:\n    def {step}(self, batch, batch_idx):"
            )


def refuse_watched(module: pl.LightningModule) -> None:
    """Refuse the hooks of ``wandb.watch`` (W&B 0.31), which count steps and look at values."""
    for one in module.modules():
        for name in getattr(one, "_wandb_hook_names", ()):
            if name.startswith(("gradients/", "parameters/")):
                raise MisconfigurationException(
                    f"CSX does not support wandb.watch (it writes {name}): Python in hooks of"
                    " tensors and modules runs while the step is traced, and never again. Remedy:"
                    " self.log_dict(grad_norm(self, norm_type=2)) in on_before_optimizer_step, and"
                    " wandb.Histogram of parameters in on_train_batch_end."
                )


def refuse_exchange(trainer: pl.Trainer, computed: list[Any]) -> None:
    """Refuse callbacks that exchange schedulers, where programs compute them."""
    remedies = {
        StochasticWeightAveraging: "a scheduler of torch.optim.lr_scheduler",
        LearningRateFinder: "Tuner(trainer).lr_find(module, ...) before the fit",
    }
    for callback in trainer.callbacks if computed else ():  # type: ignore[attr-defined]
        for kind, remedy in remedies.items():
            by_tuner = getattr(callback, "_early_exit", False)  # which puts the scheduler back
            if isinstance(callback, kind) and not by_tuner:
                raise MisconfigurationException(
                    f"CSX does not support {kind.__name__} with"
                    f" {type(computed[0]).__name__} of fulgurite.optim, which the program computes:"
                    f" {kind.__name__} puts a scheduler of its own in that one's place."
                    f" Remedy: {remedy}."
                )
