"""torchmetrics in a step: the program updates a metric where it can, and the host where it cannot.

``forward`` both updates a metric and computes it for the batch alone. Where no static program can
compute that (its shapes or branches depend on values), the program updates the metric and the step
gets a ``BatchValue``, which ``self.log`` takes, and whose other uses are errors. The host computes
it after the step if the step logs it, or logs the metric with ``on_step=True``. Where no program
can do the update itself, the host does it after the step; ``compute()`` and ``reset()`` in the step
would then come too early, and are errors. Checked with torchmetrics 1.9.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torchmetrics import MaxMetric, Metric, MetricCollection, MinMetric
from torchmetrics.aggregation import BaseAggregator
from torchmetrics.utilities.data import dim_zero_mean
from torchmetrics.wrappers import Running

from fulgurite.backends.csx.contract import METRIC_REMEDY, SPECIAL_METHODS, Contract
from fulgurite.backends.csx.diagnostics.trace_errors import TraceError, UnsupportedState
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, modules_under
from fulgurite.backends.csx.state import Snapshot
from fulgurite.backends.patches import Patch, applied, patches_of
from fulgurite.backends.torch_versions import last_node

_TORCHMETRICS = "torchmetrics 1.9"
_NORMALIZE = "normalize_logits_if_needed"
_NOT_STATIC = (TraceError, DynamicOutputShapeException, DataDependentOutputException)
_stock_forward, _stock_copy = Metric.forward, Metric._copy_state_dict


@dataclass(slots=True)
class UpdateCall:
    """The update of a metric that no program can do, done after every step."""

    metric: Metric
    value: Any

    def __call__(self, value: Any) -> None:
        """Update."""
        args, kwargs = value
        self.metric.update(*args, **kwargs)


@dataclass(slots=True)
class BatchValueCall:
    """The value of a metric for a batch alone, computed after every step if that is ``wanted``.

    ``latest`` is that of the step before; it may be no tensor.
    """

    metric: Metric
    value: Any
    wanted: bool = False
    latest: Any = field(default=None, init=False)
    _alone: Metric | None = field(default=None, init=False)

    def __call__(self, value: Any) -> None:
        """Compute it, with another metric of the same kind, and keep it where Lightning looks."""
        if self._alone is None:
            self._alone = copy.deepcopy(self.metric)
        self._alone.reset()
        args, kwargs = value
        vars(self.metric)["_forward_cache"] = self.latest = self._alone(*args, **kwargs)


class BatchValue:
    """What a metric's ``forward`` returns where no program can compute it.

    ``self.log`` takes it, for the host computes it in time (``call``; None: it does not); any other
    use is an error.
    """

    call: BatchValueCall | None

    def __init__(
        self,
        metric: Metric,
        why: Exception,
        line: Callable[[], UserLine | None],
        call: BatchValueCall | None = None,
    ) -> None:
        # past __setattr__
        vars(self).update(_metric=type(metric).__name__, _why=why, _line=line, call=call)

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise, on the user's line."""
        why = self._why.what if isinstance(self._why, TraceError) else str(self._why)
        raise UnsupportedState(
            f"The step uses what {self._metric} returned for this batch, which no static program"
            f" can compute. ({why})",
            line=self._line(),
            remedy=METRIC_REMEDY,
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        leaves = pytree.tree_leaves((args, kwargs))
        next(leaf for leaf in leaves if isinstance(leaf, BatchValue)).refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask for what is not there
            raise AttributeError(name)
        self.refuse()


for _use in SPECIAL_METHODS.split():
    setattr(BatchValue, f"__{_use}__", BatchValue.refuse)


@contextlib.contextmanager
def metrics_in_step(
    root: nn.Module,
    calls: list[Any],
    graph: fx.Graph,
    contract: Contract,
    line: Callable[[], UserLine | None],
) -> Iterator[set[int]]:
    """While the block runs, metrics do on the host what no program can do.

    Yields the identities of those that the step has reset.

    Args:
        root: the module that has them.
        calls: receives what is done after every step.
        graph: of the trace; it loses what was tried in vain.
        contract: forgets what it refused, where that was tried.
        line: the user's line that runs now.
    """
    metrics = _Metrics(calls, graph, contract, line)
    with applied(metrics.patches(root)):
        yield metrics.reset_ids
    calls[:] = [call for call in calls if not isinstance(call, BatchValueCall) or call.wanted]


class _Metrics:
    def __init__(
        self,
        calls: list[Any],
        graph: fx.Graph,
        contract: Contract,
        line: Callable[[], UserLine | None],
    ) -> None:
        self._calls, self._graph, self._contract, self._line = calls, graph, contract, line
        self._trying = False
        self._late: set[int] = set()  # identities of metrics that the host updates
        self.reset_ids: set[int] = set()  # and of those that the step has reset

    def patches(self, root: nn.Module) -> Iterator[Patch]:
        """Patches of all metrics, and of those of ``root``."""

        def forward(metric: Metric, *args: Any, **kwargs: Any) -> Any:
            return self._forward(metric, args, kwargs)

        why = "what is computed of a batch may depend on values"
        yield from patches_of(Metric, {"forward": forward}, why=why, checked=_TORCHMETRICS)
        why = "forward() would copy all that a list holds, in every step"
        yield from patches_of(
            Metric, {"_copy_state_dict": _copy_states}, why=why, checked=_TORCHMETRICS
        )
        why = "an update may depend on values"
        for metric in root.modules():
            if not isinstance(metric, Metric):
                continue
            replaced = {name: self._in_time(metric, name) for name in ("compute", "reset")}
            replaced["update"] = self._updating(metric)
            if isinstance(metric, Running):
                replaced["forward"] = self._running(metric)
            yield from patches_of(metric, replaced, why=why, checked=_TORCHMETRICS)

    def _forward(self, metric: Metric, args: Any, kwargs: Any) -> Any:
        if self._trying:
            return _stock_forward(metric, *args, **kwargs)
        value, why = self._tried(metric, lambda: _stock_forward(metric, *args, **kwargs))
        if why is None:
            return value
        metric.update(*args, **kwargs)
        self._calls.append(call := BatchValueCall(metric, _taken(args, kwargs)))
        return BatchValue(metric, why, self._line, call)

    def _updating(self, metric: Metric) -> Callable[..., None]:
        stock = metric.update

        def update(*args: Any, **kwargs: Any) -> None:
            if self._trying:
                stock(*args, **kwargs)
                return
            if isinstance(metric, Running):  # it counts in Python
                self._update_late(metric, args, kwargs)
                return
            _, why = self._tried(metric, lambda: stock(*args, **kwargs))
            if why is not None:
                self._update_late(metric, args, kwargs)

        return update

    def _update_late(self, metric: Metric, args: Any, kwargs: Any) -> None:
        """Let the host update a metric after every step."""
        self._calls.append(UpdateCall(metric, _taken(args, kwargs)))
        self._late.update(map(id, metric.modules()))  # with a wrapper those that it wraps

    def _running(self, running: Running) -> Callable[..., Any]:
        """``forward`` of a Running metric: the metric inside computes the value of the batch."""
        inside = running.base_metric

        def value_of(*args: Any, **kwargs: Any) -> Any:
            value = _stock_forward(inside, *args, **kwargs)
            inside.reset()
            return value

        def forward(*args: Any, **kwargs: Any) -> Any:
            value, why = self._tried(running, lambda: value_of(*args, **kwargs))
            self._update_late(running, args, kwargs)
            return value if why is None else BatchValue(running, why, self._line)

        return forward

    def _in_time(self, metric: Metric, name: str) -> Callable[..., Any]:
        """``compute`` or ``reset`` for the step's code.

        It is an error where the host updates the metric after the step: it would come too early.
        """
        stock = getattr(metric, name)
        grows = any(isinstance(state, list) for state in metric._defaults.values())

        def method(*args: Any, **kwargs: Any) -> Any:
            if self._trying:
                return stock(*args, **kwargs)
            why = ""
            if id(metric) in self._late or isinstance(metric, Running):
                why = "no static program can update this metric: the host does it after the step"
            elif name == "reset":
                self.reset_ids.add(id(metric))
            elif grows and id(metric) not in self.reset_ids:
                why = "it keeps all batches, which are more in every step"
            try:
                if not why:
                    return stock(*args, **kwargs)
            except TraceError as error:
                raise error.replaced(line=error.line, remedy=METRIC_REMEDY) from None
            what = f"The step calls {type(metric).__name__}.{name}(), but {why}."
            raise UnsupportedState(what, line=self._line(), remedy=METRIC_REMEDY)

        return method

    def _tried(self, metric: Metric, run: Callable[[], Any]) -> tuple[Any, Exception | None]:
        """The result of ``run``, or why it cannot be in a program; then all is as it was before."""
        before, refused = Snapshot(metric.modules()), self._contract.refused
        fakes = [state for state in before.tensors() if isinstance(state, FakeTensor)]
        states = [(state, state.clone(), state._version) for state in fakes]
        last = last_node(self._graph)
        self._trying = True
        try:
            return run(), None
        except _NOT_STATIC as error:
            before.restore()
            _erase_unused(self._graph, last)
            with torch.no_grad():
                # written in place before it failed: the host's update would count that twice
                for state, value, version in states:
                    if state._version != version:
                        state.copy_(value)
            self._contract.refused = refused  # it was tried in vain, which is no misuse
            return None, error
        finally:
            self._trying = False


def _erase_unused(graph: fx.Graph, last: fx.Node) -> None:
    """Take out the operations after ``last`` that change nothing; some of them cannot run."""
    for node in reversed(graph.nodes):
        if node is last:
            return
        changes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        if not node.users and not changes:
            graph.erase_node(node)


def _taken(args: Any, kwargs: Any) -> Any:
    """Arguments for later: the step may still write a tensor."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))


def _copy_states(self: Metric) -> dict[str, Any]:
    """Torchmetrics' copy of the states of a metric, with the elements of lists themselves."""
    states = {key: vars(self)[key] for key in self._defaults}
    return {
        key: state.detach().clone() if isinstance(state, Tensor) else list(state)
        for key, state in states.items()
    }


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


def _unchecked(*args: Any, **kwargs: Any) -> None:
    """In place of a check."""


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
    for functions in modules_under("torchmetrics.functional"):
        yield from _static_functions(functions)


@functools.cache
def _static_functions(functions: ModuleType) -> list[Patch]:
    """The same of one module of ``torchmetrics.functional``."""
    names = [one for one in vars(functions) if one.endswith("tensor_validation")]
    unchecked, why = dict.fromkeys(names, _unchecked), "labels would be looked at"
    found = [*patches_of(functions, unchecked, why=why, checked=_TORCHMETRICS)]
    if _NORMALIZE in vars(functions):
        static, why = {_NORMALIZE: _where_branch}, "a Python condition recognizes logits"
        found += patches_of(functions, static, why=why, checked=_TORCHMETRICS)
    return found


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


def metric_calls(
    module: nn.Module, snapshot: Snapshot, reset_ids: Collection[int]
) -> Iterator[MetricCall]:
    """The Python side of each metric's updates; ``reset_ids``: whose identity, the step resets."""
    for metric in module.modules():
        if isinstance(metric, Metric):
            before = snapshot.before(vars(metric))["_update_count"]
            # reset in the step, it has counted from zero: the count before means nothing
            anew = id(metric) in reset_ids
            if anew or metric._update_count != before:
                yield MetricCall(metric, metric._update_count - (0 if anew else before), anew)
                metric._update_count = before
