"""torch's own code in the form that traces: plain formulas of optimizers, no opaque kernels.

To support an optimizer of torch's that reads values on the host, give it a row in
``eager_updates``. Each update becomes one operation (see ``graph.update``): its formula is traced
once for each kind of parameter, on copies; what Python sees of the numbers
(``if weight_decay != 0``) is recorded then.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution
from torch.fx import _symbolic_trace
from torch.nn.modules import batchnorm
from torch.optim import (
    Optimizer,
    _adafactor,
    adadelta,
    adagrad,
    adam,
    adamax,
    asgd,
    nadam,
    radam,
    rmsprop,
    sgd,
)
from torch.optim.swa_utils import AveragedModel
from torch.utils import checkpoint

from fulgurite.backends.csx.diagnostics.user_lines import modules_under
from fulgurite.backends.csx.graph.dtypes import NARROW
from fulgurite.backends.csx.graph.recorder import recorder
from fulgurite.backends.csx.graph.update import FORMULAS, UPDATE, Formula, UpdateSpec
from fulgurite.backends.csx.hyperparams.number_functions import as_tensor, widened
from fulgurite.backends.csx.hyperparams.traced_float import as_number, is_traced, tensor_or_value
from fulgurite.backends.patches import Patch, patches_of
from fulgurite.backends.step_context import step_context
from fulgurite.backends.torch_versions import CHECKED, CHECKPOINTING, last_node

TRACEABLE: dict[Any, Any] = {
    torch.ops.aten._efficientzerotensor.default: torch.ops.aten.zeros.default
}
"""Operations that do not trace, each with one that gives the same numbers. Forward mode makes zero
tensors without memory of tangents that it need not compute; their products are on device "meta",
from which second derivatives (``torch.func.hessian``) do not come back under fakes (torch 2.13)."""


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    """Turn oneDNN off for ``torch.lstm``, which would take an opaque path that does not trace.

    Not for a whole trace: the layout of a convolution's result (``channels_last``) rests on it.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def eager_updates(optimizers: list[Optimizer]) -> Iterator[Patch]:
    """Patches by which torch's optimizers, and BatchNorm, run their eager formulas on numbers."""
    why = "a count of steps would be read on the host"
    for module in modules_under("torch.optim"):
        if hasattr(module, "_get_value"):
            yield from patches_of(module, {"_get_value": host_value}, why=why, checked=CHECKED)
    why = "BatchNorm(momentum=None) would read its count of batches on the host"
    # a global of the module by this name, which its code finds before Python's own
    float_ = {"float": lambda count: host_value(count)}
    yield from patches_of(batchnorm, float_, why=why, checked=CHECKED)
    why = "values decide a Python branch; the capturable form, here on any device, has none"
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    devices = {p.device.type for group in groups for p in group["params"]}
    capturable: dict[Any, dict[str, Any]] = {
        radam: {"_single_tensor_radam": _in_double(radam._single_tensor_radam, 4)},
        asgd: {"_single_tensor_asgd": _in_double(asgd._single_tensor_asgd, 3, 4, 5)},
    }
    for module, formula in capturable.items():
        formula["_get_capturable_supported_devices"] = lambda **_: devices
        yield from patches_of(module, formula, why=why, checked=CHECKED)
    why = "Python's would choose by a traced number's value"
    choices = {"min": _of_numbers(min, torch.minimum), "max": _of_numbers(max, torch.maximum)}
    yield from patches_of(_adafactor, choices, why=why, checked=CHECKED)


def host_value(x: Any) -> Any:
    """A scalar that eagerly is read as a Python float: it stays a tensor, in Python's precision."""
    if not isinstance(x, Tensor):
        return x
    with DisableTorchFunction():  # float64 is no step's but a number's, which this becomes
        return as_number(x.to(torch.float64))


def _in_double(formula: Callable[..., None], *positions: int) -> Callable[..., None]:
    """The capturable form of a formula, with the scalars of its state in Python's precision.

    Args:
        formula: torch's, one list for each kind of state.
        positions: of the lists of scalars among its arguments.
    """

    @functools.wraps(formula)
    def capturable(*args: Any, **options: Any) -> None:
        lists = list(args)
        for position in positions:
            lists[position] = [as_number(x.to(torch.float64)) for x in args[position]]
        formula(*lists, **{**options, "capturable": True})
        for position in positions:
            for x, value in zip(args[position], lists[position], strict=True):
                x.copy_(value)

    return capturable


def _of_numbers(python: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def choose(a: Any, b: Any) -> Any:
        return function(as_tensor(a), as_tensor(b)) if is_traced(b) else python(a, b)

    return choose


def _unchecked(is_all_true: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    def checked(valid: Tensor) -> Any:
        return True if isinstance(valid, FakeTensor) else is_all_true(valid)

    return checked


class _Averaged:
    """Stands for ``AveragedModel.n_averaged``: there is an average, which one step more counts."""

    def __init__(self, count: Tensor) -> None:
        self._count = count

    def __eq__(self, other: object) -> bool:
        return False  # to 0: what a first update gives is chosen after it

    __hash__ = None  # type: ignore[assignment]

    def __gt__(self, other: object) -> bool:
        return True

    def to(self, device: Any) -> Tensor:
        """The count, for the formula of an average."""
        with step_context.get().schedules.in_double():
            return as_number(self._count.to(torch.float64), whole=True)

    def __iadd__(self, more: int) -> Tensor:
        return self._count.add_(more)


def averaged_models() -> Iterator[Patch]:
    """A patch by which ``AveragedModel.update_parameters`` looks at no count."""
    update = AveragedModel.update_parameters

    def parts(model: nn.Module, use_buffers: bool) -> list[Tensor]:
        buffers = model.buffers() if use_buffers else ()
        return [one.detach() for one in (*model.parameters(), *buffers)]

    def static(self: AveragedModel, model: nn.Module) -> None:
        count: Tensor = self.n_averaged
        is_first = count == 0
        vars(self)["n_averaged"] = _Averaged(count)
        try:
            update(self, model)
        finally:
            del vars(self)["n_averaged"]
        own = parts(self.module, self.use_buffers)
        for average, current in zip(own, parts(model, self.use_buffers), strict=True):
            average.copy_(torch.where(is_first, current, average))

    why = "the first update would be told from others by a value"
    given = {"update_parameters": static}
    yield from patches_of(AveragedModel, given, why=why, checked=CHECKED)


def plain_library_code() -> Iterator[Patch]:
    """Patches by which library code that only pays eagerly runs in its plain form."""

    def plain(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    class Plain:
        @staticmethod
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            return function(*args)

    why = "run twice in a trace, a dropout would get two masks, and gradients be silently wrong"
    once = {CHECKPOINTING: plain, "CheckpointFunction": Plain}
    yield from patches_of(checkpoint, once, why=why, checked=CHECKED)
    why = "a distribution would check the values of its arguments"
    yield from patches_of(Distribution, {"_validate_args": False}, why=why, checked=CHECKED)
    unchecked = {"_is_all_true": _unchecked(torch._is_all_true)}  # where it was asked to check
    yield from patches_of(torch, unchecked, why=why, checked=CHECKED)
    why = "an error that the user gets would be printed with a stack of torch's own"
    log = logging.getLogger("torch._subclasses.fake_tensor")
    yield from patches_of(log, {"disabled": True}, why=why, checked=CHECKED)
    why = "what the step has given to torch.compile would be compiled by itself"
    yield from patches_of(_symbolic_trace, {"_is_fx_tracing_flag": True}, why=why, checked=CHECKED)
    why = "the error of formatting a tensor would be printed; the trace raises it at its end"
    yield from patches_of(logging, {"raiseExceptions": False}, why=why, checked="Python 3.11")


_GRADIENTS = "grads"
_PREFIX = "_single_tensor_"
_PLAIN = (bool, int, float, type(None))
_NOT = ("capturable", "differentiable", "has_complex", "has_sparse_grad")
"""Options with which an update is traced as it is."""


_FORMULAS = (rmsprop, adamax, nadam, adadelta)
"""Modules of torch's optimizers whose formulas are as they are, besides those that are given."""


def as_operations(patches: Iterable[Patch]) -> Iterator[Patch]:
    """Patches of torch's formulas, with each update as one operation where it can be.

    Args:
        patches: of formulas that have other reasons to be another one.
    """
    why = "traced for each parameter, updates are half of a trace and of a step one by one"
    more = ((owner, f"{_PREFIX}{owner.__name__.rpartition('.')[2]}") for owner in _FORMULAS)
    plain = (
        patch
        for owner, name in more
        for patch in patches_of(owner, {name: getattr(owner, name)}, why=why, checked=CHECKED)
    )
    for patch in (*patches, *plain):
        name = patch.name.removeprefix(_PREFIX)
        formula = _as_operation(patch.replacement, patch.owner.__name__, name)
        yield replace(patch, replacement=formula)


def _as_operation(formula: Callable[..., None], module: str, name: str) -> Callable[..., None]:
    signature = inspect.signature(formula)

    @functools.wraps(formula)
    def update(*args: Any, **options: Any) -> None:
        given = signature.bind(*args, **options).arguments
        lists = {key: value for key, value in given.items() if isinstance(value, list) and value}
        rest = {key: value for key, value in given.items() if not isinstance(value, list)}
        if not _is_plain(lists, rest):
            return formula(*args, **options)
        numbers = {id(value): tensor_or_value(value) for value in rest.values() if is_traced(value)}
        tracing, known = _Tracing([*numbers.values()]), dict[Any, Formula | None]()
        rows = list(zip(*lists.values(), strict=True))
        for row in rows:
            if _kind(row) not in known:
                known[_kind(row)] = tracing.formula(
                    lambda copies: formula(
                        **{**given, **{key: [x] for key, x in zip(lists, copies, strict=True)}}
                    ),
                    row,
                )
        # a formula that computes with more than its operands cannot be written out at another
        # place
        if None in known.values():
            return formula(*args, **options)
        places = {number: [i] for i, number in enumerate(numbers)}
        empty: dict[str, Any] = {key: [] for key, value in given.items() if value == []}
        names = [key for key in lists if key != _GRADIENTS]
        fixed = {key: places.get(id(value), value) for key, value in rest.items()}
        how = UpdateSpec(module=module, name=name, lists=names, options={**fixed, **empty})
        state = [tensor for key in names for tensor in lists[key]]
        UPDATE(state, lists[_GRADIENTS], [*numbers.values()], how.text)
        tracing.last().meta[FORMULAS] = [known[_kind(row)] for row in rows]

    return update


def _is_plain(lists: dict[str, list[Any]], rest: dict[str, Any]) -> bool:
    """Whether an update is that of some tensors by some numbers, and nothing else."""
    counts = {len(tensors) for tensors in lists.values()}
    # of two in one memory the second begins with what the first has become
    memories = {one.untyped_storage()._cdata for one in next(iter(lists.values()), ())}
    return (
        counts == {len(memories)}
        and all(_is_plain_tensor(one) for tensors in lists.values() for one in tensors)
        and all(is_traced(value) or type(value) in _PLAIN for value in rest.values())
        and not any(rest.get(name) for name in _NOT)
    )


def _is_plain_tensor(x: Any) -> bool:
    return (
        isinstance(x, Tensor)
        and x.is_floating_point()
        and x.dtype not in NARROW
        and x.layout is torch.strided
    )


def _kind(row: Sequence[Tensor]) -> tuple[tuple[torch.dtype, bool], ...]:
    """What the operations of a formula depend on: a scalar meets numbers in another type."""
    return tuple([(x.dtype, x.ndim > 0) for x in row])


class _Tracing:
    """Traces formulas beside what is being traced, and leaves nothing there.

    Args:
        numbers: that they may use.
    """

    def __init__(self, numbers: Sequence[Tensor]) -> None:
        self._graph, self._nodes = recorder().graph, recorder().nodes
        self._numbers = [self._nodes[number] for number in numbers]

    def formula(self, run: Callable[[list[Tensor]], None], row: Sequence[Tensor]) -> Formula | None:
        """The operations that ``run`` does on tensors like these; None if it does others too."""
        before = self.last()
        # the formula changes its tensors in place, and the trace goes on with those of the step
        copies = [tensor.clone() for tensor in row]
        operands = [self._nodes[copy] for copy in copies]
        run(copies)
        made = list(itertools.takewhile(lambda one: one is not before, reversed(self._graph.nodes)))
        formula = _taken_out(made[::-1], operands, self._numbers)
        # the last one first: what another node reads cannot be erased
        for node in made:
            self._graph.erase_node(node)
        return formula

    def last(self) -> fx.Node:
        """The node that was made last."""
        node: fx.Node = last_node(self._graph)
        return node


def _taken_out(
    made: Iterable[fx.Node], operands: Iterable[fx.Node], numbers: Iterable[fx.Node]
) -> Formula | None:
    """The nodes as a graph of their own; None if they use more than operands and numbers."""
    graph, operands = fx.Graph(), list(operands)
    own = {node: graph.placeholder(f"operand_{i}") for i, node in enumerate(operands)}
    own |= {node: graph.placeholder(f"number_{i}") for i, node in enumerate(numbers)}
    for node in made:
        if node in operands:
            continue
        if node.op != "call_function" or not own.keys() >= set(node.all_input_nodes):
            return None
        own[node] = graph.node_copy(node, own.__getitem__)
    return Formula(graph)


def fused_rounding(optimizers: list[Optimizer]) -> Iterator[Patch]:
    """Patches by which ``fused=True`` optimizers round at the end, in their plain formulas too.

    To be made before the groups' ``fused`` is changed.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    fused = {id(p) for group in groups if group.get("fused") for p in group["params"]}
    for owner in (adam, sgd, adagrad):
        name = f"_single_tensor_{owner.__name__.rpartition('.')[2]}"
        formula = {name: _rounding_at_the_end(getattr(owner, name), fused)}
        why = "a fused kernel rounds 16-bit weights once, the plain formula in each operation"
        yield from patches_of(owner, formula, why=why, checked=CHECKED)


def _rounding_at_the_end(formula: Callable[..., None], fused: set[int]) -> Callable[..., None]:
    @functools.wraps(formula)
    def rounding(params: list[Tensor], grads: list[Tensor], *rest: Any, **options: Any) -> None:
        if not params or id(params[0]) not in fused or params[0].dtype not in NARROW:
            return formula(params, grads, *rest, **options)
        states = [item for item in rest if isinstance(item, list)]
        wide = {id(held): [widened(t) for t in held] for held in (params, grads, *states)}
        # in float32 throughout, and rounded once below, as inside a fused kernel
        formula(*(wide.get(id(item), item) for item in (params, grads, *rest)), **options)
        for held in (params, *states):
            for t, result in zip(held, wide[id(held)], strict=True):
                if result is not t:
                    t.copy_(result)

    return rounding
