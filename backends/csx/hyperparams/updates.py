"""Updates of torch's optimizers while a step is traced: one operation each (see ``graph.update``).

The formula is traced once for each kind of parameter, on copies; what Python sees of the numbers
(``if weight_decay != 0``) is recorded then.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_innermost_proxy_mode
from torch.optim import adadelta, adamax, nadam, rmsprop

from fulgurite.backends.csx.graph.dtypes import NARROW
from fulgurite.backends.csx.graph.update import FORMULAS, UPDATE, Formula, How
from fulgurite.backends.csx.hyperparams.traced_float import is_traced, tensor_or_value
from fulgurite.backends.patches import Patch, patches_of
from fulgurite.backends.torch_versions import CHECKED

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
        if None in known.values():
            return formula(*args, **options)
        places = {number: [i] for i, number in enumerate(numbers)}
        empty: dict[str, Any] = {key: [] for key, value in given.items() if value == []}
        names = [key for key in lists if key != _GRADIENTS]
        fixed = {key: places.get(id(value), value) for key, value in rest.items()}
        how = How(module=module, name=name, lists=names, options={**fixed, **empty})
        state = [tensor for key in names for tensor in lists[key]]
        UPDATE(state, lists[_GRADIENTS], [*numbers.values()], how.text)
        tracing.last().meta[FORMULAS] = [known[_kind(row)] for row in rows]

    return update


def _is_plain(lists: dict[str, list[Any]], rest: dict[str, Any]) -> bool:
    """Whether an update is that of some tensors by some numbers, and nothing else."""
    counts = {len(tensors) for tensors in lists.values()}
    return (
        len(counts) == 1
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
        mode = get_innermost_proxy_mode()
        assert mode is not None
        tracer: Any = mode.tracer
        self._graph, self._tracker = tracer.graph, tracer.tensor_tracker
        self._numbers = [self._node_of(number) for number in numbers]

    def formula(self, run: Callable[[list[Tensor]], None], row: Sequence[Tensor]) -> Formula | None:
        """The operations that ``run`` does on tensors like these; None if it does others too."""
        before = self.last()
        copies = [tensor.clone() for tensor in row]
        operands = [self._node_of(copy) for copy in copies]
        run(copies)
        made = list(itertools.takewhile(lambda one: one is not before, reversed(self._graph.nodes)))
        formula = _taken_out(made[::-1], operands, self._numbers)
        for node in made:
            self._graph.erase_node(node)
        return formula

    def last(self) -> fx.Node:
        """The node that was made last."""
        node: fx.Node = next(reversed(self._graph.nodes))
        return node

    def _node_of(self, tensor: Tensor) -> fx.Node:
        node: fx.Node = self._tracker[tensor].proxy.node
        return node


def _taken_out(
    made: Iterable[fx.Node], operands: Iterable[fx.Node], numbers: Iterable[fx.Node]
) -> Formula | None:
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
