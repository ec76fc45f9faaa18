"""Schedulers of the learning rate: those of ``fulgurite.optim.scheduler`` for the key "lr".

Names and arguments are those of parameter files. Below, t is the count of optimizer steps, initial
is ``initial_learning_rate`` and end ``end_learning_rate``. If initial is None, it is each group's
own learning rate, before any scheduler set it. ``param_group_tags`` chooses groups by their
``group["tags"]``; None chooses all.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.8)
    >>> warm_up = LinearLR(optimizer, 0.0, end_learning_rate=0.8, total_iters=2)
    >>> decay = CosineDecayLR(optimizer, end_learning_rate=0.0, total_iters=2)
    >>> scheduler = SequentialLR(optimizer, [warm_up, decay])
    >>> for _ in range(5):
    ...     print(round(optimizer.param_groups[0]["lr"], 3), end=" ")
    ...     optimizer.step()
    ...     scheduler.step()
    0.0 0.4 0.8 0.4 0.0
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

from torch.optim import Optimizer

from fulgurite.optim import scheduler as generic
from fulgurite.optim.scheduler.dual import Function

_GENERIC_NAMES = {
    "learning_rate": "val",
    "learning_rates": "vals",
    "initial_learning_rate": "initial_val",
    "end_learning_rate": "end_val",
    "base_lr": "base_val",
    "max_lr": "max_val",
    "lr_lambda": "val_lambda",
}
"""Arguments that ``fulgurite.optim.scheduler`` calls otherwise; all others have the same name."""
_NAMES = {generic_name: name for name, generic_name in _GENERIC_NAMES.items()}


class _LearningRate:
    """Base of the schedulers below, which set the learning rate.

    A constructor here names what the generic class calls otherwise, and hands on the rest, which is
    what type checkers and ``fulgurite check --no-imports`` read. Who asks Python finds all
    arguments: those of the generic class, under the names here.
    """

    param_group_key: ClassVar[str] = "lr"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        bases = [base for base in cls.__bases__ if issubclass(base, generic.Scheduler)]
        if cls.__module__ == __name__ and bases:  # not a subclass of somebody's
            _name_arguments(cls, bases[0])


def _name_arguments(kind: Any, generic_kind: Any) -> None:
    """Put a constructor with all arguments before that of a class.

    It is written and compiled, as those of dataclasses are, so that Python's own errors about
    arguments name the class and the arguments here.
    """
    arguments = inspect.signature(generic_kind.__init__, eval_str=True).parameters.values()
    shown = [one.replace(name=_NAMES.get(one.name, one.name)) for one in arguments]
    plain = inspect.Signature([one.replace(annotation=one.empty) for one in shown])
    given = ", ".join(f"{one.name}={one.name}" for one in shown[1:])
    names = {"construct": kind.__init__}
    exec(compile(f"def __init__{plain}: construct(self, {given})", __file__, "exec"), names)
    constructor = kind.__init__ = names["__init__"]
    constructor.__qualname__, constructor.__module__ = f"{kind.__qualname__}.__init__", __name__
    types = {one.name: one.annotation for one in shown[1:]}
    constructor.__annotations__ = {**types, "return": None}


class _Initial(_LearningRate):
    """Begins at an initial learning rate."""

    def __init__(
        self, optimizer: Optimizer, initial_learning_rate: float | None = None, **rest: Any
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, **rest)  # type: ignore[call-arg]


class _InitialToEnd(_LearningRate):
    """Goes from an initial learning rate to an end."""

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float | None = None,
        *,
        end_learning_rate: float,
        **rest: Any,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            optimizer, initial_learning_rate, end_val=end_learning_rate, **rest
        )


class ConstantLR(generic.ConstantScheduler, _LearningRate):
    """The same learning rate always.

    ``total_iters`` is how long it lasts in a SequentialLR. Torch's ConstantLR, a factor for some
    steps, is a PiecewiseConstantLR here.
    """

    def __init__(
        self, optimizer: Optimizer, learning_rate: float, *rest: Any, **named: Any
    ) -> None:
        super().__init__(optimizer, *(learning_rate, *rest), **named)


class PolynomialLR(_InitialToEnd, generic.PolynomialScheduler):
    """end + (initial - end) (1 - t / total_iters) ** power, then end; torch's has end 0.

    With ``cycle`` it jumps up after each ``total_iters`` and falls again, as Keras'
    PolynomialDecay.
    """


class LinearLR(_InitialToEnd, generic.LinearScheduler):
    """A straight line from initial to end in ``total_iters`` steps, then end.

    Torch's with initial = lr * start_factor and end = lr * end_factor.
    """


class ExponentialLR(_Initial, generic.ExponentialScheduler):
    """initial * decay_rate ** (t / total_iters), the exponent rounded down with ``staircase``.

    Torch's with total_iters = 1 and decay_rate = gamma.
    """


class InverseExponentialTimeDecayLR(_Initial, generic.InverseExponentialTimeDecayScheduler):
    """initial / (1 + decay_rate * t ** step_exponent / total_iters).

    With ``staircase``, t ** step_exponent / total_iters is rounded down. Keras' InverseTimeDecay at
    step_exponent = 1.
    """


class InverseSquareRootDecayLR(generic.InverseSquareRootDecayScheduler, _LearningRate):
    """initial * scale / sqrt(max(t, warmup_steps))."""

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float | None = 1.0,
        *rest: Any,
        **named: Any,
    ) -> None:
        super().__init__(optimizer, *(initial_learning_rate, *rest), **named)


class CosineDecayLR(_InitialToEnd, generic.CosineDecayScheduler):
    """Half a cosine from initial to end in ``total_iters`` steps, then end; Keras' CosineDecay."""


class SequentialLR(generic.SequentialScheduler, _LearningRate):
    """One scheduler after another, each counting from its own milestone.

    Without ``milestones``, each begins where the one before has arrived. It begins after the count
    ``last_epoch``.
    """


class PiecewiseConstantLR(generic.PiecewiseConstantScheduler, _LearningRate):
    """learning_rates[i] once i of the milestones have been reached."""

    def __init__(
        self, optimizer: Optimizer, learning_rates: Sequence[float], *rest: Any, **named: Any
    ) -> None:
        super().__init__(optimizer, *(learning_rates, *rest), **named)


class MultiStepLR(_Initial, generic.MultiStepScheduler):
    """initial * gamma ** (how many milestones have been reached)."""


class StepLR(_Initial, generic.StepScheduler):
    """initial * gamma ** floor(t / step_size)."""


class CosineAnnealingLR(_Initial, generic.CosineAnnealingScheduler):
    """A cosine from initial to ``eta_min`` at ``T_max``, and up again after it."""


class LambdaLR(generic.LambdaScheduler, _LearningRate):
    """initial * lr_lambda(t), of tensors: a function, or a list with one per param group.

    ``lr_lambda`` gets the count as a float64 tensor [] on the host too.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float | None = None,
        *,
        lr_lambda: Function | Sequence[Function],
        **rest: Any,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, val_lambda=lr_lambda, **rest)


class CosineAnnealingWarmRestarts(_Initial, generic.CosineAnnealingWarmRestartsScheduler):
    """Half a cosine from initial to ``eta_min``, again and again.

    The first takes ``T_0`` steps, each other ``T_mult`` times as many as the one before.
    """


class MultiplicativeLR(generic.MultiplicativeScheduler, _LearningRate):
    """initial * coefficient ** t; or initial * lr_lambda(1) * ... * lr_lambda(t), of tensors.

    ``lr_lambda`` is a function of the count as a float64 tensor [], or a list with one per param
    group.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float | None = None,
        coefficient: float | None = None,
        param_group_tags: str | Sequence[str | None] | None = None,
        lr_lambda: Function | Sequence[Function] | None = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, coefficient, param_group_tags, lr_lambda)


class CyclicLR(generic.CyclicScheduler, _LearningRate):
    """A triangle between ``base_lr`` and ``max_lr``, scaled by a mode or ``scale_fn``.

    Torch's with cycle_momentum=False: this one sets learning rates, and no momentum.
    """

    def __init__(
        self, optimizer: Optimizer, base_lr: float, max_lr: float, *rest: Any, **named: Any
    ) -> None:
        super().__init__(optimizer, base_lr, *(max_lr, *rest), **named)


class OneCycleLR(generic.OneCycleScheduler, _LearningRate):
    """Up to ``max_lr`` once, and down to initial / final_div_factor.

    Torch's with initial = max_lr / div_factor and cycle_momentum=False: this one sets learning
    rates, and no momentum. After ``total_steps`` the last one stays, where torch's raises.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float,
        max_lr: float,
        *rest: Any,
        **named: Any,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, *(max_lr, *rest), **named)


class ChainedLR(generic.ChainedScheduler, _LearningRate):
    """The learning rate of the first, times each other's divided by its initial one."""


class ChainedScheduler(ChainedLR):
    """ChainedLR by torch's name; equals torch's for schedulers that multiply."""


class ScalePerParamLR(generic.ScalePerParamScheduler, _LearningRate):
    """A scheduler's learning rate times ``group["adjust_learning_rate"]``, 1 without."""

    adjust_keys = ("adjust_learning_rate", "adjust_val")
