"""Schedules of any number of a param group, as functions of a count of optimizer steps.

A class says in ``param_group_key`` which number it sets; ``lr_scheduler`` and
``weight_decay_scheduler`` are these classes with their key. For another one, subclass:

    >>> import torch
    >>> class LinearMomentum(LinearScheduler):
    ...     param_group_key = "momentum"
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
    >>> scheduler = LinearMomentum(optimizer, 0.5, end_val=1.0, total_iters=4)
    >>> for _ in range(2):
    ...     optimizer.step()
    ...     scheduler.step()
    >>> optimizer.param_groups[0]["momentum"]
    0.75

In reading order: ``dual`` (functions of Python's numbers and of tensors), ``base`` (what all
share), ``formulas`` (from one number to another, constant between milestones, the user's own),
``cycles`` (up and down again), ``combined`` (schedulers of schedulers).
"""

from fulgurite.optim.scheduler.base import Scheduler as Scheduler
from fulgurite.optim.scheduler.combined import ChainedScheduler as ChainedScheduler
from fulgurite.optim.scheduler.combined import ScalePerParamScheduler as ScalePerParamScheduler
from fulgurite.optim.scheduler.combined import SequentialScheduler as SequentialScheduler
from fulgurite.optim.scheduler.cycles import CosineAnnealingScheduler as CosineAnnealingScheduler
from fulgurite.optim.scheduler.cycles import (
    CosineAnnealingWarmRestartsScheduler as CosineAnnealingWarmRestartsScheduler,
)
from fulgurite.optim.scheduler.cycles import CyclicScheduler as CyclicScheduler
from fulgurite.optim.scheduler.cycles import OneCycleScheduler as OneCycleScheduler
from fulgurite.optim.scheduler.formulas import ConstantScheduler as ConstantScheduler
from fulgurite.optim.scheduler.formulas import CosineDecayScheduler as CosineDecayScheduler
from fulgurite.optim.scheduler.formulas import ExponentialScheduler as ExponentialScheduler
from fulgurite.optim.scheduler.formulas import (
    InverseExponentialTimeDecayScheduler as InverseExponentialTimeDecayScheduler,
)
from fulgurite.optim.scheduler.formulas import (
    InverseSquareRootDecayScheduler as InverseSquareRootDecayScheduler,
)
from fulgurite.optim.scheduler.formulas import LambdaScheduler as LambdaScheduler
from fulgurite.optim.scheduler.formulas import LinearScheduler as LinearScheduler
from fulgurite.optim.scheduler.formulas import MultiplicativeScheduler as MultiplicativeScheduler
from fulgurite.optim.scheduler.formulas import MultiStepScheduler as MultiStepScheduler
from fulgurite.optim.scheduler.formulas import (
    PiecewiseConstantScheduler as PiecewiseConstantScheduler,
)
from fulgurite.optim.scheduler.formulas import PolynomialScheduler as PolynomialScheduler
from fulgurite.optim.scheduler.formulas import StepScheduler as StepScheduler
