"""Schedulers of weight decay: those of ``fulgurite.optim.scheduler`` for the key "weight_decay".

Return them from ``configure_optimizers`` beside the scheduler of the learning rate:
``return [optimizer], [lr_scheduler, wd_scheduler]``.

    >>> import torch
    >>> optimizer = torch.optim.AdamW([torch.zeros(1)], weight_decay=0.1)
    >>> scheduler = MultiStepWD(optimizer, gamma=0.5, milestones=[1])
    >>> optimizer.step()
    >>> scheduler.step()
    >>> optimizer.param_groups[0]["weight_decay"]
    0.05
"""

from __future__ import annotations

from typing import ClassVar

from fulgurite.optim import scheduler as generic


class _WeightDecay:
    """Base of the schedulers below, which set the weight decay."""

    param_group_key: ClassVar[str] = "weight_decay"


class ConstantWD(generic.ConstantScheduler, _WeightDecay):
    """The same weight decay always: ``val``."""


class PolynomialWD(generic.PolynomialScheduler, _WeightDecay):
    """A power of the steps that are left, from ``initial_val`` to ``end_val``."""


class LinearWD(generic.LinearScheduler, _WeightDecay):
    """A straight line from ``initial_val`` to ``end_val``."""


class ExponentialWD(generic.ExponentialScheduler, _WeightDecay):
    """Falls by ``decay_rate`` every ``total_iters`` steps."""


class InverseExponentialTimeDecayWD(generic.InverseExponentialTimeDecayScheduler, _WeightDecay):
    """Falls as 1 / (1 + decay_rate * t ** step_exponent / total_iters)."""


class InverseSquareRootDecayWD(generic.InverseSquareRootDecayScheduler, _WeightDecay):
    """Falls as 1 / sqrt(t), after ``warmup_steps``."""


class CosineDecayWD(generic.CosineDecayScheduler, _WeightDecay):
    """Half a cosine from ``initial_val`` to ``end_val``, which then stays."""


class SequentialWD(generic.SequentialScheduler, _WeightDecay):
    """One scheduler of weight decay after another."""


class PiecewiseConstantWD(generic.PiecewiseConstantScheduler, _WeightDecay):
    """Another of ``vals`` from each milestone on."""


class MultiStepWD(generic.MultiStepScheduler, _WeightDecay):
    """Times ``gamma`` at each milestone."""


class StepWD(generic.StepScheduler, _WeightDecay):
    """Times ``gamma`` every ``step_size`` steps."""


class CosineAnnealingWD(generic.CosineAnnealingScheduler, _WeightDecay):
    """A cosine from ``initial_val`` to ``eta_min`` at ``T_max``, and up again."""


class LambdaWD(generic.LambdaScheduler, _WeightDecay):
    """``initial_val`` times a function of the count."""


class CosineAnnealingWarmRestartsWD(generic.CosineAnnealingWarmRestartsScheduler, _WeightDecay):
    """Half a cosine again and again, each ``T_mult`` times as long."""


class MultiplicativeWD(generic.MultiplicativeScheduler, _WeightDecay):
    """Times a factor at every step."""


class ChainedWD(generic.ChainedScheduler, _WeightDecay):
    """The product of schedulers of weight decay."""


class CyclicWD(generic.CyclicScheduler, _WeightDecay):
    """A triangle between ``base_val`` and ``max_val``."""


class OneCycleWD(generic.OneCycleScheduler, _WeightDecay):
    """Up to ``max_val`` once, and down below ``initial_val``."""


class ScalePerParamWD(generic.ScalePerParamScheduler, _WeightDecay):
    """A scheduler's weight decay times ``group["adjust_val"]``, 1 without."""
