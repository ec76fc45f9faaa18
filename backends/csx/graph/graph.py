"""A traced step between capture and fabric: its operations, and what each input is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule

from fulgurite.backends.csx.diagnostics.user_lines import line_of
from fulgurite.backends.csx.graph.op_schema import written_nodes
from fulgurite.backends.csx.graph.update import is_used


class Kind(Enum):
    """What an input of a graph is."""

    STATE = "state"  # updated in place: parameters, buffers, optimizer state, metric states
    GRADIENT = "gradient"  # p.grad between steps: state that exists only where a step reads it
    NUMBERS = "numbers"  # the float64 vector of param-group numbers
    COUNTER = "counter"  # of the run, int64: steps done, epochs, batches
    CONSTANT = "constant"  # a tensor that no module holds, by alias; only read
    BATCH = "batch"


class Role(Enum):
    """Whose tensor an input is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER = "optimizer"
    BATCH = "batch"
    OTHER = "other"  # states of metrics, plain attributes, gradients between steps, numbers


class Placement(Enum):
    """Where the processes of a run hold a tensor of an input."""

    REPLICATED = "replicated"  # each process holds all of it
    SHARDED = "sharded"  # each process holds a part of it, flat (state/sharded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input of a graph: ``index`` counts within its kind, as the capture numbered it."""

    kind: Kind
    index: int
    name: str
    example: Tensor  # fake
    kept: bool = False  # a gradient that is of use even where it is only written
    zero: bool = False  # a gradient that is zero whenever the step begins
    role: Role = Role.OTHER
    placement: Placement = Placement.REPLICATED


@dataclass(frozen=True, slots=True)
class View:
    """An output that is memory of an input, as under stock: the host may change it in place.

    Args:
        input: the position of the input.
        output: the number of the output.
        shape, stride: of the tensor there.
        offset: from the input's own, in elements.
        is_input: it is the very tensor.
    """

    input: int
    output: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_input: bool

    def of(self, base: Tensor) -> Tensor:
        """The tensor over the memory of the input of a run."""
        if self.is_input:
            return base
        base = base.detach()
        return base.as_strided(self.shape, self.stride, int(base.storage_offset()) + self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Operations (an fx module whose placeholders are ``inputs``, in order) under a fake mode."""

    module: fx.GraphModule
    inputs: tuple[Input, ...]
    mode: FakeTensorMode
    as_traced: Graph | None = None  # before any pass; None where that is another step

    @property
    def runs(self) -> Graph:
        """What runs where nothing is compiled."""
        return self.as_traced or self

    def copied(self) -> fx.Graph:
        """The operations again, for a pass to change."""
        return copy.deepcopy(self.module.graph)

    def with_operations(self, operations: fx.Graph) -> Graph:
        """The same inputs with other operations.

        Their Python code is made when somebody asks for it: 0.06 s for 2,400 operations, which most
        passes would spend in vain (measured, torch 2.13).
        """
        module = _LazyGraphModule(self.module, operations)
        return Graph(module=module, inputs=self.inputs, mode=self.mode)

    def placeholders(self) -> list[fx.Node]:
        """The nodes of the inputs, in order."""
        return list(self.module.graph.find_nodes(op="placeholder"))

    def operations(self) -> Iterator[fx.Node]:
        """The nodes that compute."""
        return (node for node in self.module.graph.nodes if node.op == "call_function")

    def text(self) -> str:
        """The operations, a line each, with the user's line that it comes from."""
        lines = (f"{node.format_node()}    # {line_of(node)}\n" for node in self.operations())
        return "".join(lines)

    def written(self) -> frozenset[int]:
        """Positions of the inputs that the graph updates in place."""
        changed = {node for operation in self.operations() for node in written_nodes(operation)}
        return frozenset(i for i, node in enumerate(self.placeholders()) if node in changed)


class LazyGraph(Graph):
    """A graph whose operations are made of another's when somebody looks at them first.

    What trains seldom does: a step runs as it was traced until it is compiled, and another process
    compiles it.

    Args:
        traced: the step as it was traced.
        written: the positions of the inputs that it updates in place.
        make: makes the operations; called once.
    """

    __slots__ = ("_make", "_written")
    _make: Callable[[], fx.GraphModule]
    _written: frozenset[int]

    def __init__(
        self, traced: Graph, written: frozenset[int], make: Callable[[], fx.GraphModule]
    ) -> None:
        known = {"inputs": traced.inputs, "mode": traced.mode, "as_traced": traced}
        for name, value in {**known, "_make": make, "_written": written}.items():
            # Graph is frozen. The slot "module" stays empty, so that Python asks __getattr__ for
            # it
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> fx.GraphModule:
        """The module, when it is looked at first."""
        if name != "module":
            raise AttributeError(name)
        module = self._make()
        object.__setattr__(self, name, module)
        return module

    def written(self) -> frozenset[int]:
        """Positions of the inputs that the graph updates in place."""
        return self._written


def used_numbers(graph: Graph) -> set[int]:
    """Positions in the vector of numbers that operations use."""
    used = set()
    for item, node in zip(graph.inputs, graph.runs.placeholders(), strict=True):
        for user in node.users if item.kind is Kind.NUMBERS else ():
            # select(numbers, dim, index)
            if len(user.args) > 2 and any(is_used(user, reader) for reader in user.users):
                used.add(user.args[2])
    return used  # type: ignore[return-value]


def like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Another tensor of a layout, or of one that differs in its dtype alone."""
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype or x.dtype, device=x.device)


def storage_of(tensor: Tensor) -> int:
    """What tensors over the same memory have in common."""
    return int(tensor.untyped_storage()._cdata)
