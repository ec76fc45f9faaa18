"""Schedulers of the learning rate: those of ``fulgurite.optim.scheduler`` for the key "lr".

Names and arguments are those of parameter files. Below, t is the count of optimizer steps, initial
is ``initial_learning_rate`` and end ``end_learning_rate``. If initial is None, it is each group's
own learning rate, before any scheduler set it. ``param_group_tags`` chooses groups by their
``group["tags"]``; None chooses all.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from fulgurite.optim import scheduler as generic
from fulgurite.optim.scheduler.dual import Function


class ConstantLR(generic.ConstantScheduler):
    """The same learning rate always.

    ``total_iters`` is how long it lasts in a SequentialLR. Torch's ConstantLR, a factor for some
    steps, is a PiecewiseConstantLR here.
    """

    param_group_key = "lr"

    def __init__(
        self,
        optimizer: Optimizer,
        learning_rate: float,
        total_iters: int | None = None,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(optimizer, learning_rate, total_iters, param_group_tags)


class PolynomialLR(generic.PolynomialScheduler):
    """end + (initial - end) (1 - t / total_iters) ** power, then end; torch's has end 0.

    With ``cycle`` it jumps up after each ``total_iters`` and falls again, as Keras'
    PolynomialDecay.
    """

    param_group_key = "lr"

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
        super().__init__(
            optimizer,
            initial_learning_rate,
            end_val=end_learning_rate,
            total_iters=total_iters,
            power=power,
            cycle=cycle,
            param_group_tags=param_group_tags,
        )


class LinearLR(generic.LinearScheduler):
    """A straight line from initial to end in ``total_iters`` steps, then end.

    Torch's with initial = lr * start_factor and end = lr * end_factor.
    """

    param_group_key = "lr"

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
        super().__init__(
            optimizer,
            initial_learning_rate,
            end_val=end_learning_rate,
            total_iters=total_iters,
            cycle=cycle,
            param_group_tags=param_group_tags,
        )


class ExponentialLR(generic.ExponentialScheduler):
    """initial * decay_rate ** (t / total_iters), the exponent rounded down with ``staircase``.

    Torch's with total_iters = 1 and decay_rate = gamma.
    """

    param_group_key = "lr"

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
        super().__init__(
            optimizer,
            initial_learning_rate,
            total_iters=total_iters,
            decay_rate=decay_rate,
            staircase=staircase,
            param_group_tags=param_group_tags,
        )


class InverseExponentialTimeDecayLR(generic.InverseExponentialTimeDecayScheduler):
    """initial / (1 + decay_rate * t ** step_exponent / total_iters).

    With ``staircase``, t ** step_exponent / total_iters is rounded down. Keras' InverseTimeDecay at
    step_exponent = 1.
    """

    param_group_key = "lr"

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
        super().__init__(
            optimizer,
            initial_learning_rate,
            step_exponent=step_exponent,
            total_iters=total_iters,
            decay_rate=decay_rate,
            staircase=staircase,
            param_group_tags=param_group_tags,
        )


class InverseSquareRootDecayLR(generic.InverseSquareRootDecayScheduler):
    """initial * scale / sqrt(max(t, warmup_steps))."""

    param_group_key = "lr"

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float | None = 1.0,
        scale: float = 1.0,
        warmup_steps: int = 1,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, scale, warmup_steps, param_group_tags)


class CosineDecayLR(generic.CosineDecayScheduler):
    """Half a cosine from initial to end in ``total_iters`` steps, then end; Keras' CosineDecay."""

    param_group_key = "lr"

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float | None = None,
        *,
        end_learning_rate: float,
        total_iters: int,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(
            optimizer,
            initial_learning_rate,
            end_val=end_learning_rate,
            total_iters=total_iters,
            param_group_tags=param_group_tags,
        )


class SequentialLR(generic.SequentialScheduler):
    """One scheduler after another, each counting from its own milestone.

    Without ``milestones``, each begins where the one before has arrived. It begins after the count
    ``last_epoch``.
    """

    param_group_key = "lr"


class PiecewiseConstantLR(generic.PiecewiseConstantScheduler):
    """learning_rates[i] once i of the milestones have been reached."""

    param_group_key = "lr"

    def __init__(
        self,
        optimizer: Optimizer,
        learning_rates: Sequence[float],
        milestones: Sequence[int],
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(optimizer, learning_rates, milestones, param_group_tags)


class MultiStepLR(generic.MultiStepScheduler):
    """initial * gamma ** (how many milestones have been reached)."""

    param_group_key = "lr"

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float | None = None,
        *,
        gamma: float = 0.1,
        milestones: Sequence[int],
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(
            optimizer,
            initial_learning_rate,
            gamma=gamma,
            milestones=milestones,
            param_group_tags=param_group_tags,
        )


class StepLR(generic.StepScheduler):
    """initial * gamma ** floor(t / step_size)."""

    param_group_key = "lr"

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float | None = None,
        *,
        step_size: int,
        gamma: float = 0.1,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(
            optimizer,
            initial_learning_rate,
            step_size=step_size,
            gamma=gamma,
            param_group_tags=param_group_tags,
        )


class CosineAnnealingLR(generic.CosineAnnealingScheduler):
    """A cosine from initial to ``eta_min`` at ``T_max``, and up again after it."""

    param_group_key = "lr"

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float | None = None,
        *,
        T_max: int,
        eta_min: float = 0.0,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(
            optimizer,
            initial_learning_rate,
            T_max=T_max,
            eta_min=eta_min,
            param_group_tags=param_group_tags,
        )


class LambdaLR(generic.LambdaScheduler):
    """initial * lr_lambda(t), of tensors: a function, or a list with one per param group.

    ``lr_lambda`` gets the count as a float64 tensor [] on the host too.
    """

    param_group_key = "lr"

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float | None = None,
        *,
        lr_lambda: Function | Sequence[Function],
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(
            optimizer,
            initial_learning_rate,
            val_lambda=lr_lambda,
            param_group_tags=param_group_tags,
        )


class CosineAnnealingWarmRestarts(generic.CosineAnnealingWarmRestartsScheduler):
    """Half a cosine from initial to ``eta_min``, again and again.

    The first takes ``T_0`` steps, each other ``T_mult`` times as many as the one before.
    """

    param_group_key = "lr"

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
        super().__init__(
            optimizer,
            initial_learning_rate,
            T_0=T_0,
            T_mult=T_mult,
            eta_min=eta_min,
            param_group_tags=param_group_tags,
        )


class MultiplicativeLR(generic.MultiplicativeScheduler):
    """initial * coefficient ** t; or initial * lr_lambda(1) * ... * lr_lambda(t), of tensors.

    ``lr_lambda`` is a function of the count as a float64 tensor [], or a list with one per param
    group.
    """

    param_group_key = "lr"

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float | None = None,
        coefficient: float | None = None,
        param_group_tags: str | Sequence[str | None] | None = None,
        lr_lambda: Function | Sequence[Function] | None = None,
    ) -> None:
        super().__init__(
            optimizer, initial_learning_rate, coefficient, param_group_tags, val_lambda=lr_lambda
        )


class CyclicLR(generic.CyclicScheduler):
    """A triangle between ``base_lr`` and ``max_lr``, scaled by a mode or ``scale_fn``.

    Torch's with cycle_momentum=False: this one sets learning rates, and no momentum.
    """

    param_group_key = "lr"

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
        super().__init__(
            optimizer,
            base_lr,
            max_lr,
            step_size_up,
            step_size_down,
            mode,
            gamma,
            scale_mode,
            param_group_tags,
            scale_fn=scale_fn,
        )


class OneCycleLR(generic.OneCycleScheduler):
    """Up to ``max_lr`` once, and down to initial / final_div_factor.

    Torch's with initial = max_lr / div_factor and cycle_momentum=False: this one sets learning
    rates, and no momentum. After ``total_steps`` the last one stays, where torch's raises.
    """

    param_group_key = "lr"

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
        super().__init__(
            optimizer,
            initial_learning_rate,
            max_lr,
            total_steps,
            pct_start,
            final_div_factor,
            three_phase,
            anneal_strategy,
            param_group_tags,
        )


class ChainedLR(generic.ChainedScheduler):
    """The learning rate of the first, times each other's divided by its initial one."""

    param_group_key = "lr"


class ChainedScheduler(ChainedLR):
    """ChainedLR by torch's name; equals torch's for schedulers that multiply."""


class ScalePerParamLR(generic.ScalePerParamScheduler):
    """A scheduler's learning rate times ``group["adjust_learning_rate"]``, 1 without."""

    param_group_key = "lr"
    adjust_keys = ("adjust_learning_rate", "adjust_val")
