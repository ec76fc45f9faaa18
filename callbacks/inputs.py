"""What goes into the model."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fulgurite.backends.patches import patched
from fulgurite.callbacks.sparse import logs_in_step


class LogInputSummaries(pl.Callback):
    """Logs mean, standard deviation, minimum and maximum of each floating tensor of a batch.

    They are computed inside the training step. Logged: ``input.<where>/mean``, ``/std``, ``/min``
    and ``/max``; ``<where>`` is the place in the batch: ``0`` of a tuple, ``image`` of a dict, and
    of nested ones ``views.0``. The standard deviation divides by the number of elements.
    """

    def __init__(self) -> None:
        self._aside = ExitStack()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Wrap the training step: no hook inside a step is given the batch."""
        if stage != "fit":
            return
        step = trainer.strategy.training_step

        def training_step(batch: Any, *rest: Any) -> Any:
            if logs_in_step(trainer):
                pl_module.log_dict(summaries(batch))
            return step(batch, *rest)

        self._aside.enter_context(patched([(trainer.strategy, "training_step", training_step)]))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the wrapper off the training step."""
        self._aside.close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Take the wrapper off the training step."""
        self._aside.close()


@torch.no_grad()
def summaries(batch: Any) -> dict[str, Tensor]:
    """The values that are logged of a batch, by name, float32 [] each."""
    found: dict[str, Tensor] = {}
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.numel():
            continue
        name = ".".join(["input", *(_place(key) for key in path)])
        values = leaf.detach().float()
        std, mean = torch.std_mean(values, correction=0)
        found |= {f"{name}/mean": mean, f"{name}/std": std}
        found |= {f"{name}/min": values.min(), f"{name}/max": values.max()}
    return found


def _place(key: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)
