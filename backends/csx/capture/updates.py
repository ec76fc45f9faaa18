"""The updates of torch's and this package's optimizers, which audits leave out.

An update follows from its gradients, and from numbers and options that are compared on every step;
to trace it takes more than half of a trace (measured: MLP and GPT under AdamW). In the outline of a
recording an update is one operation, which reads the gradients. Checked against torch 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.optim import Optimizer

from fulgurite.backends.csx.state.optimizer_hooks import around_steps
from fulgurite.backends.csx.state.python_objects import Owner, owner_of

_KNOWN = (Owner.FRAMEWORK, Owner.FULGURITE)
"""Of whose optimizers it is known that an update of no parameters is nothing."""


@dataclass(frozen=True, slots=True)
class Update:
    """One update of the graph.

    Args:
        name: in messages.
        before: the nodes that were there when it began.
        inside: its own.
        gradients: the nodes of its parameters' gradients, None where there is none.
    """

    name: str
    before: frozenset[fx.Node]
    inside: frozenset[fx.Node]
    gradients: tuple[fx.Node | None, ...]


class Updates:
    """The updates of one trace.

    Args:
        optimizers: whose; those of other classes than torch's and ours are traced like any code.
        left_out: whether they are not to be run.

    Attributes:
        noted: those of the trace, in order.
    """

    def __init__(self, optimizers: Iterable[Optimizer], left_out: bool) -> None:
        self._optimizers = [one for one in optimizers if owner_of(type(one)) in _KNOWN]
        self.left_out = left_out
        self._begun: dict[int, tuple[frozenset[fx.Node], tuple[fx.Node | None, ...]]] = {}
        self._groups: dict[int, Any] = {}  # of optimizers that are not to find any
        self.noted: list[Update] = []

    @contextlib.contextmanager
    def watched(self, graph: fx.Graph, node_of: Callable[[Any], fx.Node | None]) -> Iterator[None]:
        """Note the updates in a graph while the block runs; ``node_of`` gives a tensor's node."""

        def begin(optimizer: Optimizer) -> None:
            groups = optimizer.param_groups
            gradients = [p.grad for group in groups for p in group["params"]]
            nodes = tuple([None if one is None else node_of(one) for one in gradients])
            self._begun[id(optimizer)] = frozenset(graph.nodes), nodes
            if self.left_out:
                self._groups[id(optimizer)], optimizer.param_groups = groups, []

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if closure is None:
                begin(optimizer)
                return None

            def evaluated() -> Any:
                value = closure()
                begin(optimizer)
                return value

            return args[:1], {**kwargs, "closure": evaluated}

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            there, gradients = self._begun.pop(id(optimizer))
            self._restore(optimizer)
            if not self._optimizers:
                return
            inside = frozenset(graph.nodes) - there
            name = f"the update by {type(optimizer).__name__}"
            self.noted.append(Update(name, there, inside, gradients))

        with contextlib.ExitStack() as stack:
            for one in self._optimizers:
                stack.enter_context(around_steps(one, before, after))
                stack.callback(self._restore, one)
            yield

    def trace_whole(self) -> None:
        """Leave none out: something else follows from what they do."""
        self._optimizers = []

    def _restore(self, optimizer: Optimizer) -> None:
        groups = self._groups.pop(id(optimizer), None)
        if groups is not None:
            optimizer.param_groups = groups
