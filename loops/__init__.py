"""Lightning's loops with CSX's step: the order of a run's events, host hooks and traced ones.

CSX's strategy calls ``install`` by its dotted name; ``trainer`` may import from any file. This
package imports ``callbacks`` and ``backends``. Each class is Lightning's with a few methods
changed; their state keeps Lightning's keys, so checkpoints interchange.

data_position     which batch comes next after a resume, and from which random states
dealing           an epoch that goes on in another number of processes
accumulated       what an epoch has of logged values and metrics, for a checkpoint
resuming          at which moment of an epoch a checkpoint was written, and what is left to do
fetching          takes batches without Lightning's and torch's overhead, and times them
loader_errors     adds worker, samples and cause to errors of loaders
lean              calls the hooks around a step (``on_train_batch_start`` and the like)
finite            says once at which step a loss was first not finite
fit               the fit loop
epoch             the loop over the batches of an epoch
optimization      the step: the hooks inside it are traced from here (``on_before_backward`` ...)
evaluation_loops  validation, test and predict

    fit                                                        host
      sanity check: two validation batches                     host, programs
      on_train_start                                           host
      for each epoch:
        on_train_epoch_start                                   host
        for each batch:
          on_train_batch_start                                 host
          THE STEP                                             traced once, then one program
            training_step
            on_before_zero_grad, optimizer_zero_grad           first batch of a window
            on_before_backward, backward, on_after_backward
            on_before_optimizer_step                           last batch of a window, as are
            configure_gradient_clipping                        these four
            optimizer_step
            schedulers of fulgurite.optim: step
          self.log values -> Lightning's results               host
          lr_scheduler_step                                    host, for all other schedulers
          on_train_batch_end                                   host
          loggers, every log_every_n_steps                     host
          validation, when due:
            on_validation_start, ..._epoch_start               host
            for each batch:
              on_validation_batch_start                        host
              validation_step                                  traced once, then one program
              on_validation_batch_end                          host
            on_validation_epoch_end, on_validation_end         host
        on_train_epoch_end, checkpoints                        host
      on_train_end                                             host
"""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging

from fulgurite.backends.csx import strategy_of
from fulgurite.callbacks.check_loss import CheckLoss
from fulgurite.loops import resuming
from fulgurite.loops.epoch import TrainingEpochLoop as TrainingEpochLoop
from fulgurite.loops.evaluation_loops import EvaluationLoop as EvaluationLoop
from fulgurite.loops.evaluation_loops import PredictionLoop as PredictionLoop
from fulgurite.loops.fit import FitLoop as FitLoop
from fulgurite.loops.optimization import AutomaticOptimization as AutomaticOptimization
from fulgurite.loops.optimization import ManualOptimization as ManualOptimization
from fulgurite.loops.optimization import keep_statistics


def install(trainer: pl.Trainer) -> None:
    """Make the loops of a Trainer those of CSX.

    The objects stay and only their classes change, so whatever Lightning or the user set on them
    holds. ``detect_anomaly=True`` becomes a ``CheckLoss``: PyTorch's own looks at each gradient
    from the host.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if trainer._detect_anomaly and not any(isinstance(one, CheckLoss) for one in callbacks):
        callbacks.append(CheckLoss(gradients=True))
    for callback in callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            keep_statistics(callback)
    epoch_loop = trainer.fit_loop.epoch_loop
    # the strategy writes the checkpoints, and lies in a room below
    strategy_of(trainer).progress = resuming.add_progress
    for loop, kind in (
        (trainer.fit_loop, FitLoop),
        (epoch_loop, TrainingEpochLoop),
        (epoch_loop.automatic_optimization, AutomaticOptimization),
        (epoch_loop.manual_optimization, ManualOptimization),
        (epoch_loop.val_loop, EvaluationLoop),
        (trainer.validate_loop, EvaluationLoop),
        (trainer.test_loop, EvaluationLoop),
        (trainer.predict_loop, PredictionLoop),
    ):
        if isinstance(loop, kind):
            continue
        if type(loop) is not kind.__bases__[0]:
            raise TypeError(
                f"CSX replaces Lightning's {kind.__bases__[0].__name__}, but the trainer has a"
                f" {type(loop).__name__}. Use Lightning's own loops with CSX."
            )
        loop.__class__ = kind
