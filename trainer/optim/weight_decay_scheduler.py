"""Schedulers of weight decay: those of ``fulgurite.optim.scheduler`` for the key "weight_decay".

Return them from ``configure_optimizers`` beside the scheduler of the learning rate:
``return [optimizer], [lr_scheduler, wd_scheduler]``.
"""

from __future__ import annotations

from fulgurite.optim import scheduler as generic


class _WeightDecay:
    """What the schedulers below set."""

    param_group_key = "weight_decay"


class ConstantWD(_WeightDecay, generic.ConstantScheduler):
    """The same weight decay always: ``val``."""


class PolynomialWD(_WeightDecay, generic.PolynomialScheduler):
    """A power of the steps that are left, from ``initial_val`` to ``end_val``."""


class LinearWD(_WeightDecay, generic.LinearScheduler):
    """A straight line from ``initial_val`` to ``end_val``."""


class ExponentialWD(_WeightDecay, generic.ExponentialScheduler):
    """Falls by ``decay_rate`` every ``total_iters`` steps."""


class InverseExponentialTimeDecayWD(_WeightDecay, generic.InverseExponentialTimeDecayScheduler):
    """Falls as 1 / (1 + decay_rate * t ** step_exponent / total_iters)."""


class InverseSquareRootDecayWD(_WeightDecay, generic.InverseSquareRootDecayScheduler):
    """Falls as 1 / sqrt(t), after ``warmup_steps``."""


class CosineDecayWD(_WeightDecay, generic.CosineDecayScheduler):
    """Half a cosine from ``initial_val`` to ``end_val``, which then stays."""


class SequentialWD(_WeightDecay, generic.SequentialScheduler):
    """One scheduler of weight decay after another."""


class PiecewiseConstantWD(_WeightDecay, generic.PiecewiseConstantScheduler):
    """Another of ``vals`` from each milestone on."""


class MultiStepWD(_WeightDecay, generic.MultiStepScheduler):
    """Times ``gamma`` at each milestone."""


class StepWD(_WeightDecay, generic.StepScheduler):
    """Times ``gamma`` every ``step_size`` steps."""


class CosineAnnealingWD(_WeightDecay, generic.CosineAnnealingScheduler):
    """A cosine from ``initial_val`` to ``eta_min`` at ``T_max``, and up again."""


class LambdaWD(_WeightDecay, generic.LambdaScheduler):
    """``initial_val`` times a function of the count."""


class CosineAnnealingWarmRestartsWD(_WeightDecay, generic.CosineAnnealingWarmRestartsScheduler):
    """Half a cosine again and again, each ``T_mult`` times as long."""


class MultiplicativeWD(_WeightDecay, generic.MultiplicativeScheduler):
    """Times a factor at every step."""


class ChainedWD(_WeightDecay, generic.ChainedScheduler):
    """The product of schedulers of weight decay."""


class CyclicWD(_WeightDecay, generic.CyclicScheduler):
    """A triangle between ``base_val`` and ``max_val``."""


class OneCycleWD(_WeightDecay, generic.OneCycleScheduler):
    """Up to ``max_val`` once, and down below ``initial_val``."""


class ScalePerParamWD(_WeightDecay, generic.ScalePerParamScheduler):
    """A scheduler's weight decay times ``group["adjust_val"]``, 1 without."""
