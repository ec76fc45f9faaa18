"""How much of the data a run has seen."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info

from fulgurite.callbacks.check_loss import NonFiniteLoss
from fulgurite.callbacks.sparse import SparseCallback, batches_ready, same_size, samples_in


class SamplesStreamedInfo(SparseCallback):
    """Counts the training samples that came from the loader, over all runs of a checkpoint's line.

    It logs nothing. When CheckLoss ends a run, it says how many came since the last checkpoint:
    those among which a bad one may be.

    Attributes:
        samples_streamed_till_curr_step: up to the begin or end of an epoch, the last checkpoint or
            the call of ``count``; checkpoints keep it.
        samples_streamed_till_ckpt_step: up to the last checkpoint.
    """

    def __init__(self) -> None:
        self.samples_streamed_till_curr_step = 0
        self.samples_streamed_till_ckpt_step = 0
        self._ready = self._size = 0

    def every_n_steps(self, trainer: pl.Trainer) -> int:
        """0: an epoch's first batch tells all sizes; 1 where batches may differ in size."""
        return 0 if same_size(trainer) else 1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remember how many batches the loader gave before this run."""
        self._ready = batches_ready(trainer)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Add the samples of the batch."""
        self._size = samples_in(batch) or 0
        self.count(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Bring the count up to date."""
        self.count(trainer)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Bring the count up to date, and keep it in the checkpoint."""
        self.count(trainer)
        self.samples_streamed_till_ckpt_step = self.samples_streamed_till_curr_step
        # Lightning has asked for the states of callbacks before this hook, with the count of before
        checkpoint["callbacks"][self.state_key] = self.state_dict()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Say which samples may be to blame for a bad loss."""
        if trainer.training:
            self.count(trainer)
        if isinstance(exception, NonFiniteLoss):
            rank_zero_info(
                f"{self.samples_streamed_till_curr_step:,} samples were streamed,"
                f" {self.samples_since_checkpoint:,} of them since the last checkpoint."
            )

    @property
    def samples_since_checkpoint(self) -> int:
        """How many came after the last checkpoint."""
        return self.samples_streamed_till_curr_step - self.samples_streamed_till_ckpt_step

    def state_dict(self) -> dict[str, Any]:
        """The count."""
        return {"samples_streamed": self.samples_streamed_till_curr_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the count of a checkpoint."""
        self.samples_streamed_till_curr_step = state_dict["samples_streamed"]
        self.samples_streamed_till_ckpt_step = state_dict["samples_streamed"]

    def count(self, trainer: pl.Trainer) -> None:
        """Bring the count up to date; from outside, within an epoch."""
        ready = batches_ready(trainer)
        self.samples_streamed_till_curr_step += (ready - self._ready) * self._size
        self._ready = ready
