"""Numbers of param groups, such as the learning rate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from fulgurite.callbacks.sparse import (
    SparseCallback,
    is_log_step,
    is_static,
    log_steps,
    log_values,
)


class LogOptimizerParamGroup(SparseCallback):
    """Logs numbers of the optimizer's param groups as the step uses them.

    Logged on log steps: ``<key>/<group>``, such as ``lr/0``. With several optimizers groups count
    on from one to the next. Of a tuple (``betas``) each number is logged, as ``betas/0/1``. Under
    manual optimization: the numbers as they are when the step begins.

    Args:
        keys: one key of the param groups, or several.
    """

    def __init__(self, keys: str | Iterable[str]) -> None:
        given = [keys] if isinstance(keys, str) else keys
        wanted = list(given) if isinstance(given, Iterable) else []
        if not wanted or not all(isinstance(key, str) and key for key in wanted):
            raise ValueError(
                "LogOptimizerParamGroup: keys is a key of the optimizer's param groups or a list of"
                f" keys; got {keys!r}. For instance keys='lr', or keys=['lr', 'weight_decay']."
            )
        self.keys = wanted

    def every_n_steps(self, trainer: pl.Trainer) -> int:
        """Numbers are looked at on log steps."""
        return log_steps(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that an optimizer has these keys.

        Raises:
            ValueError: none of them has one.
        """
        groups = [group for o in trainer.optimizers for group in o.param_groups]
        known = sorted({key for group in groups for key in group} - {"params"})
        for key in self.keys:
            if groups and key not in known:
                raise ValueError(
                    f"LogOptimizerParamGroup: no param group has {key!r}. The optimizers have"
                    f" {', '.join(known)}."
                )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Log on CSX: the host shows the numbers that the step is about to use."""
        if is_static(trainer) and is_log_step(trainer):
            log_values(trainer, self._numbers(trainer))

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Log eager steps here: ``optimizer_step`` of the module may have set numbers."""
        if not is_static(trainer) and is_log_step(trainer):
            log_values(trainer, self._numbers(trainer))

    def _numbers(self, trainer: pl.Trainer) -> dict[str, float]:
        found: dict[str, float] = {}
        groups = [group for o in trainer.optimizers for group in o.param_groups]
        for i, group in enumerate(groups):
            for key in self.keys:
                value = group.get(key)
                if isinstance(value, (tuple, list)):
                    found |= {f"{key}/{i}/{k}": float(one) for k, one in enumerate(value)}
                elif value is not None:
                    found[f"{key}/{i}"] = float(value)
        return found
