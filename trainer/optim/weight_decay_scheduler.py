"""Schedulers of weight decay: those of ``fulgurite.optim.scheduler`` for the key "weight_decay".

Return them from ``configure_optimizers`` beside the scheduler of the learning rate:
``return [optimizer], [lr_scheduler, wd_scheduler]``.
"""

from __future__ import annotations

from fulgurite.optim import scheduler as generic


class ConstantWD(generic.ConstantScheduler):
    """The same weight decay always: ``val``."""

    param_group_key = "weight_decay"


class PolynomialWD(generic.PolynomialScheduler):
    """A power of the steps that are left, from ``initial_val`` to ``end_val``."""

    param_group_key = "weight_decay"


class LinearWD(generic.LinearScheduler):
    """A straight line from ``initial_val`` to ``end_val``."""

    param_group_key = "weight_decay"


class ExponentialWD(generic.ExponentialScheduler):
    """Falls by ``decay_rate`` every ``total_iters`` steps."""

    param_group_key = "weight_decay"


class InverseExponentialTimeDecayWD(generic.InverseExponentialTimeDecayScheduler):
    """Falls as 1 / (1 + decay_rate * t ** step_exponent / total_iters)."""

    param_group_key = "weight_decay"


class InverseSquareRootDecayWD(generic.InverseSquareRootDecayScheduler):
    """Falls as 1 / sqrt(t), after ``warmup_steps``."""

    param_group_key = "weight_decay"


class CosineDecayWD(generic.CosineDecayScheduler):
    """Half a cosine from ``initial_val`` to ``end_val``, which then stays."""

    param_group_key = "weight_decay"


class SequentialWD(generic.SequentialScheduler):
    """One scheduler of weight decay after another."""

    param_group_key = "weight_decay"


class PiecewiseConstantWD(generic.PiecewiseConstantScheduler):
    """Another of ``vals`` from each milestone on."""

    param_group_key = "weight_decay"


class MultiStepWD(generic.MultiStepScheduler):
    """Times ``gamma`` at each milestone."""

    param_group_key = "weight_decay"


class StepWD(generic.StepScheduler):
    """Times ``gamma`` every ``step_size`` steps."""

    param_group_key = "weight_decay"


class CosineAnnealingWD(generic.CosineAnnealingScheduler):
    """A cosine from ``initial_val`` to ``eta_min`` at ``T_max``, and up again."""

    param_group_key = "weight_decay"


class LambdaWD(generic.LambdaScheduler):
    """``initial_val`` times a function of the count."""

    param_group_key = "weight_decay"


class CosineAnnealingWarmRestartsWD(generic.CosineAnnealingWarmRestartsScheduler):
    """Half a cosine again and again, each ``T_mult`` times as long."""

    param_group_key = "weight_decay"


class MultiplicativeWD(generic.MultiplicativeScheduler):
    """Times a factor at every step."""

    param_group_key = "weight_decay"


class ChainedWD(generic.ChainedScheduler):
    """The product of schedulers of weight decay."""

    param_group_key = "weight_decay"


class CyclicWD(generic.CyclicScheduler):
    """A triangle between ``base_val`` and ``max_val``."""

    param_group_key = "weight_decay"


class OneCycleWD(generic.OneCycleScheduler):
    """Up to ``max_val`` once, and down below ``initial_val``."""

    param_group_key = "weight_decay"


class ScalePerParamWD(generic.ScalePerParamScheduler):
    """A scheduler's weight decay times ``group["adjust_val"]``, 1 without."""

    param_group_key = "weight_decay"
