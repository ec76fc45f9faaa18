"""What a step does on the host, recorded while it is traced and done again after every step.

Logging, a scheduler that a manual ``training_step`` steps, and the Python side of a torchmetrics
update: none of them computes inside the program, all of them must happen on every step.

``self.log`` is reduced inside the program. Lightning keeps a *result* for each logged name: the
step's value, and for the epoch's a sum and a count. Here both are tensors that the program updates;
after a step the host only tells the result that there is something new; nothing waits for a value.
A stock ``self.log`` costs 355 µs, this 1 µs (measured, Lightning 2.6.6).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _get_default_dtype,
    _ResultCollection,
    _ResultMetric,
)
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite.backends.closures import Closure
from fulgurite.backends.csx.capture.metrics import BatchValue, BatchValueCall
from fulgurite.backends.csx.contract import is_replaying, operand
from fulgurite.backends.csx.diagnostics.user_lines import user_line
from fulgurite.backends.csx.graph import collectives
from fulgurite.backends.csx.hyperparams.counts import Held
from fulgurite.backends.csx.hyperparams.slots import TracedGroup
from fulgurite.backends.csx.hyperparams.traced_float import TracedNumber
from fulgurite.backends.patches import Patch, applied, patches_of
from fulgurite.backends.program_scheduler import ProgramScheduler
from fulgurite.backends.step_context import running
from fulgurite.backends.torch_versions import CHECKED

stock_log = pl.LightningModule.log
_SIGNATURE = inspect.signature(stock_log)


@dataclass(slots=True)
class LogCall:
    """One ``self.log``.

    Args:
        hook: the hook that logged.
        key: the name of the result in Lightning's collection.
        result: where the value goes: its sum and count belong to the program.
        value: a traced tensor, or a Metric.
        batch_size: weight of the value in a mean; it may be a traced tensor.
    """

    hook: str
    key: str
    result: _ResultMetric
    value: Any
    batch_size: int | Tensor
    results: _ResultCollection | None = field(default=None, init=False)
    mean: Tensor | None = field(default=None, init=False)  # of all processes, where it is known

    def bind(self, results: _ResultCollection) -> None:
        """Find the result in a loop's collection, or put it there."""
        if self.results is not None and self.key not in results:  # the program serves two loops
            self.result = _ResultMetric(self.result.meta, self.result.is_tensor)
        self.result = results.setdefault(self.key, self.result)
        self.results = results

    def reduce(self) -> dict[int, Accumulator]:
        """Add the value to the epoch's, in traced operations; the tensors that were written."""
        result, meta, value = self.result, self.result.meta, self.value
        if result.is_tensor and meta.on_step:
            # of all processes, with sync_dist
            self.value = meta.sync(value) if self.mean is None else self.mean
        if not result.is_tensor or not meta.on_epoch:
            return {}
        # what validation has left there was made in inference mode, and is written by this program
        for name in ("value", "cumulated_batch_size"):
            _take_out_of_inference(vars(result), name)
        dtype = torch.promote_types(result.value.dtype, value.dtype)
        vars(result)["value"] = _in_dtype(result.value, dtype)
        found = {id(result.value): Accumulator(self, "value", dtype)}
        if meta.is_mean_reduction:
            result.value.add_(value * self.batch_size)
            size = self.batch_size
            if not isinstance(size, Tensor):
                size = torch.full((), size)  # traced: a number would be added right now
            result.cumulated_batch_size.add_(size)
            found[id(result.cumulated_batch_size)] = Accumulator(
                self, "cumulated_batch_size", result.cumulated_batch_size.dtype
            )
        elif meta.is_sum_reduction:
            result.value.add_(value)
        else:
            reduce = _IN_TENSORS.get(meta.reduce_fx, meta.reduce_fx)
            result.value.copy_(reduce(result.value, value))
        return found

    def __call__(self, value: Any) -> None:
        """Tell the result that the program has updated it; ``value`` is the step's."""
        result, attributes = self.result, vars(self.result)  # past nn.Module.__setattr__
        if not result.is_tensor:
            attributes["value"], attributes["_forward_cache"] = value, value._forward_cache
        elif result.meta.on_step:
            attributes["_forward_cache"] = value
            if not result.meta.on_epoch:
                attributes["value"] = value
        attributes["_update_count"] += 1
        attributes["_computed"] = None
        attributes["has_reset"] = False


@dataclass(slots=True, kw_only=True)
class BatchValueLog(LogCall):
    """One ``self.log`` of what the host computes of a batch (``of``), and so reduces too.

    ``value`` is the weight of the batch.
    """

    of: BatchValueCall

    def reduce(self) -> dict[int, Accumulator]:
        """Nothing: the program has no part in it."""
        return {}

    def __call__(self, value: Any) -> None:
        """Log it as Lightning does.

        Raises:
            ValueError: it is not one number.
        """
        number = self.of.latest
        if not isinstance(number, (Tensor, Real)) or torch.as_tensor(number).numel() != 1:
            shown = f"shape {list(number.shape)}" if isinstance(number, Tensor) else type(number)
            raise ValueError(
                f"self.log({self.result.meta.name!r}, ...) takes one number, and"
                f" {type(self.of.metric).__name__} returned a value of {shown}."
            )
        assert self.results is not None
        self.results.update_metrics(self.key, torch.as_tensor(number).detach().squeeze(), value)


def begin_mean(call: object) -> Tensor | None:
    """A copy of a logged value for the processes to average, where the log asks for their mean.

    None for other calls. The program exchanges it together with its gradients.
    """
    if type(call) is not LogCall or not call.result.is_tensor or call.mean is not None:
        return None
    meta = call.result.meta
    is_wanted = meta.on_step and meta.sync.should and not meta.sync.rank_zero_only
    if is_wanted and meta.sync.op == "mean" and meta.sync.group in (None, dist.group.WORLD):
        call.mean = call.value.clone()
    return call.mean


def logs_reduced_later(calls: Iterable[object]) -> list[str]:
    """The logs of a step's calls whose values all processes reduce at the epoch's end."""
    logs = [call for call in calls if isinstance(call, LogCall) and call.result.is_tensor]
    return [
        f"self.log({log.result.meta.name!r}, ..., sync_dist=True)"
        for log in logs
        if log.result.meta.on_epoch
        and log.result.meta.sync.should
        and not log.result.meta.sync.rank_zero_only
    ]


_IN_TENSORS: dict[Any, Any] = {
    max: lambda a, b: torch.where(b > a, b, a),
    min: lambda a, b: torch.where(b < a, b, a),
}
"""Python's own, which ask tensors for their truth, and what they do with NaN."""


def _take_out_of_inference(attributes: dict[str, Any], name: str) -> None:
    """Let a tensor that was made in inference mode be changed in place while a step is traced."""
    tensor = attributes.get(name)
    if isinstance(tensor, Tensor) and tensor.is_inference():
        with _disable_current_modes(), torch.inference_mode(False):
            attributes[name] = tensor.clone()


def _in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor that is not traced, in another dtype: a sum of float64 is one, as in stock's."""
    with _disable_current_modes():
        return tensor.to(dtype)


@dataclass(frozen=True, slots=True)
class Accumulator:
    """Where a sum or a count of ``self.log`` is: a ``ConstantSource`` that Lightning may refill."""

    call: LogCall
    name: str
    dtype: torch.dtype

    def now(self) -> Tensor:
        """The tensor; Lightning puts another one there when an epoch begins, in its own dtype."""
        held = vars(self.call.result)
        tensor: Tensor = held[self.name]
        if tensor.dtype is not self.dtype:
            tensor = held[self.name] = tensor.to(self.dtype)
        return tensor


def begin_step(trainer: pl.Trainer, calls: Iterable[LogCall]) -> None:
    """Before a program runs: bind its calls; in an epoch's first batch, reset as ``log`` would."""
    connector, results = trainer._logger_connector, trainer._results
    if connector._first_loop_iter is False and all(call.results is results for call in calls):
        return
    assert results is not None
    for call in calls:
        if call.results is not results:
            call.bind(results)
        if connector._first_loop_iter is not False:
            if connector.should_reset_tensors(call.hook):
                results.reset(metrics=False, fx=call.hook)
            connector._current_fx = call.hook


def record_log(
    earlier: list[Any], trainer: pl.Trainer, module: pl.LightningModule, *args: Any, **kwargs: Any
) -> LogCall | None:
    """``self.log(...)`` while the step is traced; None where Lightning logs nothing (barebones).

    Args:
        earlier: the step's calls so far: one name has one result.
        trainer: whose result collection is meant.
        module: who logs.
        args: those of ``log``.
        kwargs: those of ``log``.
    """
    bound = _SIGNATURE.bind(module, *args, **kwargs)
    given = {key: operand(value) for key, value in list(bound.arguments.items())[1:]}
    value = given["value"]
    computed = value.call if isinstance(value, BatchValue) else None
    if computed is not None:
        given["value"], computed.wanted = 0.0, True
    elif isinstance(value, BatchValue):
        value.refuse()
    pending = {call.key: call.result for call in earlier if isinstance(call, LogCall)}
    registered = _register(trainer, module, given, pending)
    if registered is None:
        return None
    key, result = registered
    # the value of this batch alone costs another update on the host: it is computed if it is logged
    for call in earlier if result.meta.on_step else ():
        if isinstance(call, BatchValueCall) and call.metric is value:
            call.wanted = True
    if isinstance(value, TracedNumber):
        value = value.tensor
    if isinstance(value, Tensor):
        dtype = value.dtype
        kept = isinstance(given["value"], Tensor) and dtype in (torch.float32, torch.float64)
        value = value.detach().clone()  # as stock: the step may still write it, a weight surely
        value = value.squeeze().to(dtype if kept else _get_default_dtype())
    elif isinstance(value, Real):
        value = torch.full((), float(value), dtype=_get_default_dtype())
    results, size = trainer._results, given.get("batch_size")
    assert results is not None
    batch_size = results._extract_batch_size(result, size, result.meta)
    hook = module._current_fx_name
    assert hook is not None
    if computed is not None:
        return BatchValueLog(hook, key, result, batch_size, batch_size, of=computed)
    return LogCall(hook, key, result, value, batch_size)


def _register(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    given: dict[str, Any],
    pending: dict[str, _ResultMetric],
) -> tuple[str, _ResultMetric] | None:
    """Let Lightning check the call now, on the user's line, with a stand-in for the value.

    Other processes do not hear of it: they need not be at the same line.

    Returns the result that the value belongs to and its key; it is not in the collection yet.
    """
    loop = trainer._active_loop
    if loop is None or trainer._results is None or trainer.barebones:
        stock_log(module, **given)
        return None
    owner: Any = loop.epoch_loop if hasattr(loop, "epoch_loop") else loop
    results, connector = owner._results, trainer._logger_connector
    current_fx = connector._current_fx
    with DisableTorchFunction(), _disable_current_modes(), collectives.alone():
        value = given["value"]
        if isinstance(value, Tensor):
            given = {**given, "value": torch.zeros(value.shape, dtype=value.dtype)}
        # a collection of its own: the stand-in's zeros must not be added to the run's sums
        alone = type(results)(training=results.training)
        alone.batch_size, alone.dataloader_idx = 1, results.dataloader_idx
        owner._results = alone
        try:
            stock_log(module, **given)
        finally:
            owner._results, connector._current_fx = results, current_fx
        if not alone:  # a module inside the one that is trained: Lightning warns, and logs nothing
            return None
        [(key, result)] = alone.items()
        known = pending.get(key, results.get(key))
        if known is None or (is_replaying() and key not in pending):  # as in the first trace
            result = _ResultMetric(result.meta, result.is_tensor)
        elif known.meta == result.meta:
            result = known
        else:
            raise MisconfigurationException(
                f"You called `self.log({result.meta.name}, ...)` twice in `{result.meta.fx}` with"
                " different arguments. This is not allowed"
            )
    return key, result


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
    """A number that the step has computed from others, or set: the host has it after each.

    Args:
        name: in messages.
        sets: a param group's optimizer, its place there and the key; or a slot of counts.
        held: where those are.
        number: what the step made of it.
    """

    def __init__(self, name: str, sets: Any, held: list[Held], number: Any) -> None:
        self.name, self.sets, self._held = name, sets, held
        self.value: Any = number

    def __call__(self, value: Any) -> None:
        """Set it."""
        if not self._held:
            optimizer, group, key = self.sets
            optimizer.param_groups[group][key] = value
        for container, key in self._held:
            container[key] = value


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
        self.value: Any = [_taken(leaf) for leaf in leaves]

    def __call__(self, value: Any) -> None:
        """Run it."""
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

    # their arguments are taken now: the step may change a tensor in place afterwards
    def note(closure: Closure, args: Any, kwargs: Any) -> None:
        closures.append(ClosureCall(closure, trainer, args, kwargs))

    def log(self: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        assert trainer is not None
        call = record_log(calls, trainer, self, *args, **kwargs)
        if call is not None:
            calls.append(call)

    def step_later(step: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(SchedulerCall(step, (args, kwargs)))
        for group in scheduler.optimizer.param_groups:
            if isinstance(group, TracedGroup):
                group.scheduled_at = user_line()

    def record(kind: type[LRScheduler]) -> Callable[..., None]:
        stock = kind.step

        def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(self, ProgramScheduler) or not hasattr(self, "_last_lr"):
                stock(self, *args, **kwargs)  # the latter: it is being made
            else:
                step_later(functools.partial(stock, self), self, *args, **kwargs)

        return recorded

    patches: list[Patch] = []
    why = "it is done on the host, after every step"
    # torch's, whoever steps them: Lightning knows those alone that it was given
    for kind in vars(lr_scheduler).values():
        if isinstance(kind, type) and issubclass(kind, LRScheduler) and "step" in vars(kind):
            patches += patches_of(kind, {"step": record(kind)}, why=why, checked=CHECKED)
    for scheduler in schedulers:
        if not isinstance(scheduler, ProgramScheduler):
            step = {"step": functools.partial(step_later, scheduler.step, scheduler)}
            patches += patches_of(scheduler, step, why=why, checked=CHECKED)
    if trainer is not None:
        patches += patches_of(pl.LightningModule, {"log": log}, why=why, checked="lightning 2.6")
    with applied(patches), running(note=note, calls=calls):
        yield calls
    calls += closures
