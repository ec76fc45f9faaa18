"""What a step does on the host, recorded while it is traced and done again after every step.

Logging, a scheduler that a manual ``training_step`` steps, and the Python side of a torchmetrics
update: none of them computes inside the program, all of them must happen on every step.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torchmetrics import MaxMetric, Metric, MetricCollection, MinMetric
from torchmetrics.aggregation import BaseAggregator
from torchmetrics.utilities.data import dim_zero_mean

from fulgurite.backends.closures import Closure
from fulgurite.backends.csx.capture.logs import record_log
from fulgurite.backends.csx.diagnostics.user_lines import user_line
from fulgurite.backends.csx.hyperparams.slots import NotedGroup
from fulgurite.backends.csx.hyperparams.traced_float import TracedNumber
from fulgurite.backends.patches import Patch, applied, patches_of
from fulgurite.backends.schedules import ProgramScheduler
from fulgurite.backends.step_context import running
from fulgurite.backends.torch_versions import CHECKED

_TORCHMETRICS = "torchmetrics 1.9"
_NORMALIZE = "normalize_logits_if_needed"


class HostCall(Protocol):
    """Something that ``StepFunction`` does again on the host after every step.

    ``value`` is what it takes from the program. A new kind of call is a class like this, recorded
    in ``record_host_calls``.
    """

    value: Any

    def __call__(self, value: Any) -> None: ...


@dataclass(slots=True)
class SchedulerCall:
    """One ``scheduler.step(...)`` inside a manual ``training_step``."""

    step: Callable[..., None]
    value: Any

    def __call__(self, value: Any) -> None:
        """Step the scheduler."""
        args, kwargs = value
        self.step(*args, **kwargs)


class NumberCall:
    """A number of a param group that the step computed from the numbers: the next step's."""

    def __init__(self, group: NotedGroup, key: str, number: TracedNumber) -> None:
        self.sets = group.optimizer, group.index, key
        self._kind = int if isinstance(number, int) else float
        self.value: Any = number.tensor

    def __call__(self, value: Any) -> None:
        """Set it."""
        optimizer, group, key = self.sets
        optimizer.param_groups[group][key] = self._kind(value.item())


@dataclass(slots=True)
class MetricCall:
    """The Python side of a Metric's updates: it counts them, and forgets what it had computed."""

    metric: Metric
    updates: int
    anew: bool  # the step resets it first
    value: Any = None

    def __call__(self, value: Any) -> None:
        """Count."""
        attributes = vars(self.metric)  # past nn.Module.__setattr__, 3 µs a step (measured)
        before = 0 if self.anew else attributes["_update_count"]
        attributes["_update_count"] = before + self.updates
        attributes["_computed"] = None


class ClosureCall:
    """One call of a ``step_closure`` or ``checkpoint_closure`` function inside the step.

    Args:
        closure: the function.
        trainer: whose step it is, where Lightning runs it.
        args: of the call; tensors are taken as they are now.
        kwargs: the others.
    """

    def __init__(
        self, closure: Closure, trainer: pl.Trainer | None, args: Any, kwargs: dict[str, Any]
    ) -> None:
        closure.check(trainer)
        self._closure, self._trainer = closure, trainer
        leaves, self._tree = pytree.tree_flatten((args, kwargs))
        self._numbers = [i for i, leaf in enumerate(leaves) if isinstance(leaf, TracedNumber)]
        self.value: Any = [_taken(leaf) for leaf in leaves]

    def __call__(self, value: Any) -> None:
        """Run it."""
        for i in self._numbers:
            value[i] = value[i].item()
        args, kwargs = pytree.tree_unflatten(value, self._tree)
        self._closure.run(args, kwargs, self._trainer, self)


def _taken(leaf: Any) -> Any:
    """A value for later: the step may still write a tensor."""
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


@contextlib.contextmanager
def record_host_calls(trainer: pl.Trainer | None, schedulers: list[Any]) -> Iterator[list[Any]]:
    """Record logging, scheduler steps and closures instead of doing them; yields the list.

    They are in the order of the calls, closures last: what they raise leaves the step complete.

    Args:
        trainer: whose step it is, where Lightning runs it.
        schedulers: those that the step may call; what a program computes itself is left alone.
    """
    calls: list[Any] = []
    closures: list[ClosureCall] = []

    def note(closure: Closure, args: Any, kwargs: Any) -> None:
        closures.append(ClosureCall(closure, trainer, args, kwargs))

    def log(self: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        assert trainer is not None
        call = record_log(calls, trainer, self, *args, **kwargs)
        if call is not None:
            calls.append(call)

    def record(scheduler: Any) -> Callable[..., None]:
        step = scheduler.step

        def recorded(*args: Any, **kwargs: Any) -> None:
            calls.append(SchedulerCall(step, (args, kwargs)))
            for group in scheduler.optimizer.param_groups:
                if isinstance(group, NotedGroup):
                    group.scheduled_at = user_line()

        return recorded

    patches: list[Patch] = []
    why = "it is done on the host, after every step"
    for scheduler in schedulers:
        if not isinstance(scheduler, ProgramScheduler):
            step = {"step": record(scheduler)}
            patches += patches_of(scheduler, step, why=why, checked=CHECKED)
    if trainer is not None:
        patches += patches_of(pl.LightningModule, {"log": log}, why=why, checked="lightning 2.6")
    with applied(patches), running(note=note, calls=calls):
        yield calls
    calls += closures


def _where_branch(tensor: Tensor, normalization: str | None) -> Tensor:
    """torchmetrics' ``normalize_logits_if_needed`` as it is off the CPU, where it is static."""
    if not normalization:
        return tensor
    normal = tensor.sigmoid() if normalization == "sigmoid" else tensor.softmax(dim=1)
    return torch.where(((tensor < 0) | (tensor > 1)).any(), normal, tensor)


_stock_nan_check = BaseAggregator._cast_and_nan_check_input


def _without_nan(self: BaseAggregator, x: Any, weight: Any = None) -> tuple[Tensor, Tensor]:
    """The aggregators' NaN handling without a look at values: NaN elements weigh nothing.

    Strategy "warn" removes them without the warning; "error" has no static form.
    """
    if self.nan_strategy in ("error", "disable"):
        return _stock_nan_check(self, x, weight)
    x = torch.as_tensor(x, dtype=self.dtype)
    weight = torch.ones_like(x) if weight is None else torch.as_tensor(weight, dtype=self.dtype)
    nans = x.isnan() | weight.isnan()
    if isinstance(self.nan_strategy, float):
        return torch.where(nans, self.nan_strategy, x), torch.where(nans, 1.0, weight)
    neutral = {MaxMetric: -torch.inf, MinMetric: torch.inf}.get(type(self), 0.0)
    return torch.where(nans, neutral, x), torch.where(nans, 0.0, weight)


def static_metrics(root: nn.Module) -> Iterator[Patch]:
    """Patches by which torchmetrics takes the branches that do not look at values."""
    why = "an aggregator would look for NaN on the host"
    checks = {"_cast_and_nan_check_input": _without_nan}
    yield from patches_of(BaseAggregator, checks, why=why, checked=_TORCHMETRICS)
    for module in root.modules():
        if isinstance(module, Metric) and "validate_args" in vars(module):
            off, why = {"validate_args": False}, "the values of labels would be checked"
            yield from patches_of(module, off, why=why, checked=_TORCHMETRICS)
        if isinstance(module, Metric) and dim_zero_mean in module._reductions.values():
            on, why = {"full_state_update": True}, "forward() would weigh by a count of Python's"
            yield from patches_of(module, on, why=why, checked=_TORCHMETRICS)
        if isinstance(module, MetricCollection) and not module._groups_checked:
            off, why = {"_enable_compute_groups": False}, "the values of states would be compared"
            yield from patches_of(module, off, why=why, checked=_TORCHMETRICS)
    static, why = {_NORMALIZE: _where_branch}, "on CPU a Python condition recognizes logits"
    for name, functions in list(sys.modules.items()):
        if name.startswith("torchmetrics.functional.") and _NORMALIZE in vars(functions):
            yield from patches_of(functions, static, why=why, checked=_TORCHMETRICS)
