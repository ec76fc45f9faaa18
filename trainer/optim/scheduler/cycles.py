"""Up and down again. Below, t is the count of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch.optim import Optimizer

from fulgurite.backends.program_scheduler import Number
from fulgurite.optim.scheduler import dual
from fulgurite.optim.scheduler.base import InitialScheduler, Scheduler, check, positive_steps


class CosineAnnealingScheduler(InitialScheduler):
    """eta_min + (initial - eta_min) (1 + cos(pi t / T_max)) / 2, which rises again after T_max.

    Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983, without restarts.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        initial_val: float | None = None,
        *,
        T_max: int,
        eta_min: float = 0.0,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        self.T_max = self.total_iters = positive_steps(self, T_max=T_max)
        self.eta_min = eta_min
        super().__init__(optimizer, initial_val, param_group_tags)

    def value(self, count: Number, group: int) -> Number:
        """The formula above."""
        left = (1 + dual.cos(math.pi * (count / self.T_max))) / 2
        return self.eta_min + (self.start(group) - self.eta_min) * left


class CosineAnnealingWarmRestartsScheduler(InitialScheduler):
    """Half a cosine from initial to eta_min, again and again: SGDR, as above, with restarts.

    Args:
        T_0: steps until the first restart.
        T_mult: each stretch is so many times as long as the one before; an integer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        initial_val: float | None = None,
        *,
        T_0: int,
        T_mult: int = 1,
        eta_min: float = 0.0,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        self.T_0 = positive_steps(self, T_0=T_0)
        check(T_mult >= 1 and T_mult == int(T_mult), self, "an integer T_mult >= 1", T_mult=T_mult)
        self.T_mult, self.eta_min = int(T_mult), eta_min
        super().__init__(optimizer, initial_val, param_group_tags)

    def value(self, count: Number, group: int) -> Number:
        """The half cosine from the last restart to the next."""
        left = (1 + dual.cos(math.pi * self._passed(count))) / 2
        return self.eta_min + (self.start(group) - self.eta_min) * left

    def _passed(self, count: Number) -> Number:
        """How much of the stretch between two restarts has passed, from 0 to 1."""
        stretches = count / self.T_0
        if self.T_mult == 1:
            return (count - dual.floor(stretches) * self.T_0) / self.T_0
        # a logarithm next to a whole number may be rounded down: where it is meant to be whole, the
        # error is below 1e-13, and the count before is 1e-10 away even after 10^9 steps
        restarts = dual.log(stretches * (self.T_mult - 1) + 1) / math.log(self.T_mult)
        longer = dual.nearest(dual.power(self.T_mult, dual.floor(restarts + 1e-11)))
        restarted = self.T_0 * (longer - 1) / (self.T_mult - 1)
        return (count - restarted) / (self.T_0 * longer)


class CyclicScheduler(Scheduler):
    """A triangle between two numbers: base_val + (max_val - base_val) * height * scale.

    Smith, Cyclical Learning Rates for Training Neural Networks, https://arxiv.org/abs/1506.01186.
    The height goes from 0 to 1 in ``step_size_up`` steps and back in ``step_size_down``.

    Args:
        step_size_down: None: as many as up.
        mode: the scale: "triangular": 1; "triangular2": halved with each cycle; "exp_range":
            gamma ** t.
        scale_mode: what ``scale_fn`` is given: "cycle", 1 in the first; "iterations": t.
        scale_fn: the scale, in place of a mode.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        base_val: float,
        max_val: float,
        step_size_up: int = 2000,
        step_size_down: int | None = None,
        mode: str = "triangular",
        gamma: float = 1.0,
        scale_mode: str = "cycle",
        param_group_tags: str | Sequence[str | None] | None = None,
        scale_fn: dual.Function | None = None,
    ) -> None:
        self.step_size_up = positive_steps(self, step_size_up=step_size_up)
        down = step_size_up if step_size_down is None else step_size_down
        self.step_size_down = positive_steps(self, step_size_down=down)
        modes = ("triangular", "triangular2", "exp_range")
        check(mode in modes, self, f"a mode of {modes}, or scale_fn", mode=mode)
        scale_modes = ("cycle", "iterations")
        check(scale_mode in scale_modes, self, f"one of {scale_modes}", scale_mode=scale_mode)
        self.base_val, self.max_val = base_val, max_val
        self.mode, self.gamma = mode, gamma
        self.scale_mode, self.scale_fn = scale_mode, scale_fn
        self.follows_count_alone = scale_fn is None
        super().__init__(optimizer, param_group_tags)

    def value(self, count: Number, group: int) -> Number:
        """The formula above."""
        up, down = self.step_size_up, self.step_size_down
        cycle = dual.floor(count / (up + down))
        passed = count - cycle * (up + down)
        height = dual.where(passed <= up, passed / up, (up + down - passed) / down)
        return self.base_val + (self.max_val - self.base_val) * height * self._scale(count, cycle)

    def _scale(self, count: Number, cycle: Number) -> Number:
        if self.scale_fn is not None:
            return dual.call(self.scale_fn, cycle + 1 if self.scale_mode == "cycle" else count)
        if self.mode == "triangular":
            return 1.0
        exp_range = self.mode == "exp_range"
        return dual.power(self.gamma, count) if exp_range else dual.power(0.5, cycle)


class OneCycleScheduler(Scheduler):
    """From initial up to max_val, then down to initial / final_div_factor, and that from then on.

    Smith and Topin, Super-Convergence, https://arxiv.org/abs/1708.07120. With p = pct_start and T =
    total_steps, the top is at p T - 1 and the end at T - 1.

    Args:
        three_phase: down to initial at 2 p T - 2, and from there to the end.
        anneal_strategy: the way between two: "cos", half a cosine, or "linear".
    """

    def __init__(
        self,
        optimizer: Optimizer,
        initial_val: float,
        max_val: float,
        total_steps: int = 1000,
        pct_start: float = 0.3,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        anneal_strategy: str = "cos",
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        self.total_iters: int = positive_steps(self, total_steps=total_steps)
        check(0 < pct_start < 1, self, "a pct_start between 0 and 1", pct_start=pct_start)
        strategies = ("cos", "linear")
        expected = f"an anneal_strategy of {strategies}"
        check(anneal_strategy in strategies, self, expected, anneal_strategy=anneal_strategy)
        self.initial_val, self.max_val = initial_val, max_val
        self.anneal_strategy = anneal_strategy
        top, end = pct_start * total_steps - 1, total_steps - 1.0
        points = [(0.0, initial_val), (top, max_val), (end, initial_val / final_div_factor)]
        if three_phase:
            points.insert(2, (2 * top, initial_val))
        self._points = points
        check(
            all(a < b for (a, _), (b, _) in pairwise(points)),
            self,
            "steps in each of its phases",
            total_steps=total_steps,
            pct_start=pct_start,
            three_phase=three_phase,
        )
        super().__init__(optimizer, param_group_tags)

    def value(self, count: Number, group: int) -> Number:
        """The way from the point before to the point after."""
        count = dual.at_most(count, self._points[-1][0])
        value: Number = self.initial_val
        for (step, number), (end_step, end) in pairwise(self._points):
            passed = (count - step) / (end_step - step)
            if self.anneal_strategy == "cos":
                passed = (1 - dual.cos(math.pi * passed)) / 2
            value = dual.where(count >= step, number + (end - number) * passed, value)
        return value
