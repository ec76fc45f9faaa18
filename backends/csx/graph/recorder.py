"""The recorder of a trace: it notes every operation, below autograd, as a node of a graph.

It is a dispatch mode in the slot that torch keeps for its own tracer (torch.fx's, by proxies),
which does the same at three times the cost: for symbolic shapes, subclasses and dynamo, of which a
static step has none. A tensor is known by the object itself while it lives. One that no noted
operation made is a constant, and an attribute of the graph. Checked against torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fulgurite.backends.csx.graph.fakes import new_fake, results_of, twin

_DEVICE = torch.ops.prim.device.default
_LITERAL = torch.ops.aten.lift_fresh.default
_COPIED_LITERAL = torch.ops.aten.lift_fresh_copy.default


class Nodes:
    """Which node of a graph each tensor is, by the tensor object."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], fx.Node]] = {}

    def get(self, tensor: Tensor) -> fx.Node | None:
        """The node of a tensor; None where no operation made it."""
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def __getitem__(self, tensor: Tensor) -> fx.Node:
        node = self.get(tensor)
        if node is None:
            raise KeyError(id(tensor))
        return node

    def __setitem__(self, tensor: Tensor, node: fx.Node) -> None:
        self._known[id(tensor)] = weakref.ref(tensor), node

    def __contains__(self, tensor: Tensor) -> bool:
        return self.get(tensor) is not None


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what runs inside of it.

    Args:
        fakes: the mode of the fakes that it runs on.
        describe: is given each node of an operation when it has been made.
        value_of: the value of a tensor that has one while it is traced, else None.
        notes_results: whether a node gets a fake of its result, for whoever lowers the graph or
            looks at memory; one that is only compared with another needs none.

    Attributes:
        graph: what was noted.
        nodes: which of its nodes each tensor is.
    """

    def __init__(
        self,
        fakes: FakeTensorMode,
        describe: Callable[[fx.Node], None],
        value_of: Callable[[Tensor], Tensor | None],
        notes_results: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # the tracer's slot: a trace inside of this one (torch.func.linearize) takes it meanwhile,
        # torch's collectives and checkpoints ask whether somebody is in it
        self._mode_key = torch._C._TorchDispatchModeKey.PROXY
        self._fakes, self._describe, self._value_of = fakes, describe, value_of
        self._notes_results = notes_results
        self.graph, self.nodes, self._root = fx.Graph(), Nodes(), nn.Module()
        self._constants: dict[int, str] = {}

    def record(
        self, run: Callable[..., Sequence[Tensor]], examples: Sequence[Tensor]
    ) -> fx.GraphModule:
        """The graph of ``run(*examples)``, whose outputs are the tensors that it returns."""
        for i, example in enumerate(examples):
            node = self.graph.placeholder(f"input_{i}")
            self._is_now(example, node)
        with self, _no_cached_casts():
            results = run(*examples)
        self.graph.output([self._operand(result) for result in results])
        return _make_graph_module(self._root, self.graph, "step")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # autograd asks as often as for all that follows
        if func is _DEVICE or func.namespace == "profiler":  # Optimizer.step's time span
            return func(*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        if not all(type(one) in proxy_tensor.HANDLED_TYPES or one in self.nodes for one in tensors):
            return NotImplemented  # of a class of its own, which has the first word
        if _is_made_of_others(func, _device(tensors)):
            with self:
                return func.decompose(*args, **kwargs)
        reads = torch.Tag.data_dependent_output in func.tags
        if reads and all(self._value(one) is not None for one in tensors):
            args, kwargs = pytree.tree_map_only(Tensor, self._value, (args, kwargs))
            with _disable_current_modes(), torch.no_grad():
                return func(*args, **kwargs)
        if func is _LITERAL:  # the literal is the graph's: what is written later is a copy's
            func = _COPIED_LITERAL
        operands = self._operands(args)
        named = {name: self._operands(value) for name, value in kwargs.items()}
        result = results_of(self._fakes, func, args, kwargs)
        name: str = func.overloadpacket.__name__
        node = self.graph.create_node("call_function", func, operands, named, name)
        self._describe(node)
        self._note(result, node)
        return result

    def _operands(self, value: Any) -> Any:
        """Arguments with nodes in the place of tensors."""
        if isinstance(value, Tensor):
            return self._operand(value)
        if isinstance(value, (list, tuple)):
            return type(value)([self._operands(one) for one in value])
        return value

    def _operand(self, tensor: Tensor) -> fx.Node:
        node = self.nodes.get(tensor)
        return self._constant(tensor) if node is None else node

    def _constant(self, tensor: Tensor) -> fx.Node:
        """A node for a tensor that nothing in the graph made."""
        name = self._constants.get(id(tensor))
        if name is None:
            name = self._constants[id(tensor)] = f"constant{len(self._constants)}"
            setattr(self._root, name, tensor)
        node = self.graph.create_node("get_attr", name)
        self._note_result(node, tensor)
        return node

    def _is_now(self, tensor: Tensor, node: fx.Node) -> None:
        self.nodes[tensor] = node
        self._note_result(node, tensor)

    def _note_result(self, node: fx.Node, tensor: Tensor) -> None:
        if self._notes_results:
            node.meta["val"] = _snapshot(tensor, self._fakes)

    def _note(self, result: Any, node: fx.Node) -> None:
        """Note which tensors a node is; one of several has a node that takes it out."""
        if isinstance(result, Tensor):
            self._is_now(result, node)
        elif isinstance(result, (list, tuple)):
            taken = []
            for i, one in enumerate(result):
                if isinstance(one, (Tensor, list, tuple)):
                    item = self.graph.create_node("call_function", operator.getitem, (node, i))
                    item.meta.update(node.meta)  # its line
                    self._note(one, item)
                    taken.append(item.meta.get("val"))
                else:
                    taken.append(one)
            node.meta["val"] = tuple(taken) if isinstance(result, tuple) else taken
        else:
            node.meta["val"] = result

    def _value(self, tensor: Tensor) -> Tensor | None:
        return self._value_of(tensor) if isinstance(tensor, FakeTensor) else tensor


def _snapshot(tensor: Tensor, fakes: FakeTensorMode) -> Tensor:
    """A fake in the same memory, without what autograd knows: the tensor itself may not live on."""
    if isinstance(tensor, FakeTensor):
        return twin(tensor)
    # not ``from_tensor``, which keeps its fake for whoever reads the constant next
    return new_fake(fakes, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


@functools.cache
def _is_made_of_others(func: Any, device: str | None) -> bool:
    """Whether autograd would have run other operations in the place of one.

    In inference mode nobody has.
    """
    key = torch._C._dispatch_key_for_device(device) if device else None
    own = key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
    made: bool = not own and func._can_decompose()
    return made


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in what an operation is given, or gives."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        yield from tensors_in([*value.values()])


def _device(tensors: Sequence[Tensor]) -> str | None:
    return tensors[0].device.type if tensors else None


def recorder() -> Recorder:
    """The one that notes what runs now."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    assert isinstance(mode, Recorder)
    return mode


@contextlib.contextmanager
def _no_cached_casts() -> Iterator[None]:
    """Cast anew in every autocast: a cached cast is of another trace."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
