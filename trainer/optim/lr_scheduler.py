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

from collections.abc import Mapping, Sequence
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


def _generic(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The ``locals()`` of a constructor here, as the arguments of the class that it inherits from.

    So a signature is written once, where editors and type checkers read it, and nothing forwards
    its arguments one by one.
    """
    own = ("self", "__class__")
    return {_GENERIC_NAMES.get(k, k): v for k, v in arguments.items() if k not in own}


class _LearningRate:
    """What the schedulers below set."""

    param_group_key: ClassVar[str] = "lr"


class ConstantLR(generic.ConstantScheduler, _LearningRate):
    """The same learning rate always.

    ``total_iters`` is how long it lasts in a SequentialLR. Torch's ConstantLR, a factor for some
    steps, is a PiecewiseConstantLR here.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        learning_rate: float,
        total_iters: int | None = None,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(**_generic(locals()))


class PolynomialLR(generic.PolynomialScheduler, _LearningRate):
    """end + (initial - end) (1 - t / total_iters) ** power, then end; torch's has end 0.

    With ``cycle`` it jumps up after each ``total_iters`` and falls again, as Keras'
    PolynomialDecay.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float | None = None,
        *,
        end_learning_rate: float,
        total_iters: int,
        power: float = 1.0,
        cycle: bool = False,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(**_generic(locals()))


class LinearLR(generic.LinearScheduler, _LearningRate):
    """A straight line from initial to end in ``total_iters`` steps, then end.

    Torch's with initial = lr * start_factor and end = lr * end_factor.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float | None = None,
        *,
        end_learning_rate: float,
        total_iters: int,
        cycle: bool = False,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(**_generic(locals()))


class ExponentialLR(generic.ExponentialScheduler, _LearningRate):
    """initial * decay_rate ** (t / total_iters), the exponent rounded down with ``staircase``.

    Torch's with total_iters = 1 and decay_rate = gamma.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float | None = None,
        *,
        total_iters: int,
        decay_rate: float,
        staircase: bool = False,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(**_generic(locals()))


class InverseExponentialTimeDecayLR(generic.InverseExponentialTimeDecayScheduler, _LearningRate):
    """initial / (1 + decay_rate * t ** step_exponent / total_iters).

    With ``staircase``, t ** step_exponent / total_iters is rounded down. Keras' InverseTimeDecay at
    step_exponent = 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float | None = None,
        *,
        step_exponent: int,
        total_iters: int,
        decay_rate: float,
        staircase: bool = False,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(**_generic(locals()))


class InverseSquareRootDecayLR(generic.InverseSquareRootDecayScheduler, _LearningRate):
    """initial * scale / sqrt(max(t, warmup_steps))."""

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float | None = 1.0,
        scale: float = 1.0,
        warmup_steps: int = 1,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(**_generic(locals()))


class CosineDecayLR(generic.CosineDecayScheduler, _LearningRate):
    """Half a cosine from initial to end in ``total_iters`` steps, then end; Keras' CosineDecay."""

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float | None = None,
        *,
        end_learning_rate: float,
        total_iters: int,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(**_generic(locals()))


class SequentialLR(generic.SequentialScheduler, _LearningRate):
    """One scheduler after another, each counting from its own milestone.

    Without ``milestones``, each begins where the one before has arrived. It begins after the count
    ``last_epoch``.
    """


class PiecewiseConstantLR(generic.PiecewiseConstantScheduler, _LearningRate):
    """learning_rates[i] once i of the milestones have been reached."""

    def __init__(
        self,
        optimizer: Optimizer,
        learning_rates: Sequence[float],
        milestones: Sequence[int],
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(**_generic(locals()))


class MultiStepLR(generic.MultiStepScheduler, _LearningRate):
    """initial * gamma ** (how many milestones have been reached)."""

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float | None = None,
        *,
        gamma: float = 0.1,
        milestones: Sequence[int],
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(**_generic(locals()))


class StepLR(generic.StepScheduler, _LearningRate):
    """initial * gamma ** floor(t / step_size)."""

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float | None = None,
        *,
        step_size: int,
        gamma: float = 0.1,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(**_generic(locals()))


class CosineAnnealingLR(generic.CosineAnnealingScheduler, _LearningRate):
    """A cosine from initial to ``eta_min`` at ``T_max``, and up again after it."""

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float | None = None,
        *,
        T_max: int,
        eta_min: float = 0.0,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(**_generic(locals()))


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
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(**_generic(locals()))


class CosineAnnealingWarmRestarts(generic.CosineAnnealingWarmRestartsScheduler, _LearningRate):
    """Half a cosine from initial to ``eta_min``, again and again.

    The first takes ``T_0`` steps, each other ``T_mult`` times as many as the one before.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float | None = None,
        *,
        T_0: int,
        T_mult: int = 1,
        eta_min: float = 0.0,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(**_generic(locals()))


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
        super().__init__(**_generic(locals()))


class CyclicLR(generic.CyclicScheduler, _LearningRate):
    """A triangle between ``base_lr`` and ``max_lr``, scaled by a mode or ``scale_fn``.

    Torch's with cycle_momentum=False: this one sets learning rates, and no momentum.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        base_lr: float,
        max_lr: float,
        step_size_up: int = 2000,
        step_size_down: int | None = None,
        mode: str = "triangular",
        gamma: float = 1.0,
        scale_mode: str = "cycle",
        param_group_tags: str | Sequence[str | None] | None = None,
        scale_fn: Function | None = None,
    ) -> None:
        super().__init__(**_generic(locals()))


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
        total_steps: int = 1000,
        pct_start: float = 0.3,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        anneal_strategy: str = "cos",
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(**_generic(locals()))


class ChainedLR(generic.ChainedScheduler, _LearningRate):
    """The learning rate of the first, times each other's divided by its initial one."""


class ChainedScheduler(ChainedLR):
    """ChainedLR by torch's name; equals torch's for schedulers that multiply."""


class ScalePerParamLR(generic.ScalePerParamScheduler, _LearningRate):
    """A scheduler's learning rate times ``group["adjust_learning_rate"]``, 1 without."""

    adjust_keys = ("adjust_learning_rate", "adjust_val")
