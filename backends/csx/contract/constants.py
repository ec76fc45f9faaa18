"""Tensors that follow from constants alone keep their value while tracing.

A mask built in the step from ``ones`` and ``triu`` does not depend on data. Python may look at it
(torch's own TransformerEncoder compares its mask with a causal one), so its value is computed
beside the traced operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from fulgurite.backends.csx.contract.dtype_rules import with_explicit_dtype
from fulgurite.backends.csx.contract.leaks import CreatedTensors
from fulgurite.backends.csx.contract.rules import misuse
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, line_of
from fulgurite.backends.csx.graph.op_schema import (
    is_alias,
    is_mutable,
    is_random,
    is_uninitialized,
    written,
)
from fulgurite.backends.csx.graph.recorder import tensors_in
from fulgurite.backends.csx.hyperparams.torch_optim import TRACEABLE
from fulgurite.backends.csx.state import Layout, dotted_name

RunBelow = Callable[[Callable[[Any, Any], Any], Any, Any, Any], Any]

_DEVICE = torch.ops.prim.device.default
LARGEST = 1 << 22  # elements; larger constants are not followed (assumed: none is looked at)


class Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follow constants through the operations of a trace.

    Constants are the results of deterministic operations whose tensor arguments all are constants.
    An in-place operation with another argument ends that for all tensors over the same memory.

    Real tensors that no module holds are constants too, and may only be read.

    Args:
        line: the user's line that runs now.
        contract: looks at operations that no call of a function has brought: a backward pass's.

    Attributes:
        created: every tensor that the trace made.
    """

    def __init__(self, line: Callable[[], UserLine | None], contract: RunBelow) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._line, self._contract, self.created = line, contract, CreatedTensors()
        self._foreign: set[int] = set()  # storages of fakes over tensors that no module holds
        self._values: Any = WeakIdKeyDictionary()
        self._spoiled: set[int] = set()  # storages
        self._alive: list[object] = []  # so that no storage's identity is used twice

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """The value of a traced tensor that is a constant, else None."""
        value: Tensor | None = self._values.get(tensor)
        if value is None:
            return getattr(tensor, "constant", None)
        return None if value.untyped_storage()._cdata in self._spoiled else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # what autograd asks more often than for all that follows
        func, kwargs = TRACEABLE.get(func, func), kwargs or {}
        run = functools.partial(self._run, func)
        if torch._C._len_torch_function_stack():  # else torch took the mode away for a function
            return self._contract(run, func, args, kwargs)
        return run(args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = with_explicit_dtype(func, args, kwargs)
        tensors = list(tensors_in((args, kwargs)))
        changed = written(func, args, kwargs)
        self._check_writes(changed)
        known = all(self._value(t) is not None for t in tensors)
        result = func(*args, **kwargs)
        for output in tensors_in(result):
            if isinstance(output, FakeTensor):
                self.created.add(output)
                # a view of a real tensor: a write to it would be one to what no module holds
                if _is_view(func) and not all(isinstance(t, FakeTensor) for t in tensors):
                    storage = output.untyped_storage()
                    self._foreign.add(storage._cdata)
                    self._alive.append(storage)
        if known and self._follows(func, result):
            self._compute(func, args, kwargs, result)
        else:
            for tensor in changed:
                value = self._values.get(tensor)
                if value is not None:
                    self._spoiled.add(value.untyped_storage()._cdata)
        return result

    def _check_writes(self, changed: list[Tensor]) -> None:
        for tensor in changed:
            foreign = not isinstance(tensor, FakeTensor)
            if foreign or tensor.untyped_storage()._cdata in self._foreign:
                raise misuse("foreign", self._line())

    def _value(self, tensor: Tensor) -> Tensor | None:
        return self.value_of(tensor) if isinstance(tensor, FakeTensor) else tensor

    @staticmethod
    def _follows(func: Any, result: Any) -> bool:
        outputs = list(tensors_in(result))
        return (
            bool(outputs)
            and all(t.numel() <= LARGEST for t in outputs)
            and not is_random(func)
            and not is_uninitialized(func)
        )

    def _compute(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        def real(leaf: Any) -> Any:
            return self._value(leaf) if isinstance(leaf, Tensor) else leaf

        # with real values, beside the trace: none of it is to be in the graph
        with _disable_current_modes(), torch.no_grad():
            values = func(*pytree.tree_map(real, args), **pytree.tree_map(real, kwargs))
            if func is torch.ops.aten.lift_fresh.default:  # the graph keeps the literal itself
                values = values.clone()
        leaves = zip(pytree.tree_leaves(result), pytree.tree_leaves(values), strict=True)
        for fake, value in leaves:
            if isinstance(fake, FakeTensor):
                self._values[fake] = value
                self._alive.append(value)


def _is_view(func: Any) -> bool:
    """Whether an operation's result shares the memory of an argument; not so a literal's."""
    literal = func is torch.ops.aten.lift_fresh.default
    return is_alias(func) and not is_mutable(func) and not literal


def constants_as_inputs(
    module: fx.GraphModule, position: int, mode: FakeTensorMode
) -> list[Tensor]:
    """Turn the tensors that were read from outside into inputs, from ``position`` on.

    They are noted as the fakes that ``mode`` made of them for the trace: views lie in their memory.

    As attributes of the graph they would be copied into the compiled program, and a change in place
    on the host would go unseen.

    Raises:
        UnsupportedState: one of them is a fake, whose operations are not in the graph.
    """
    graph = module.graph
    before = list(graph.nodes)[position]  # placeholders come first
    placeholders: dict[int, fx.Node] = {}  # one for each tensor, however often it was read
    constants: list[Tensor] = []
    for node in list(graph.find_nodes(op="get_attr")):
        target = str(node.target)
        value = getattr(module, target)
        if not isinstance(value, Tensor):
            continue
        if isinstance(value, FakeTensor):
            raise misuse("thread", line_of(node) or line_of(next(iter(node.users))))
        if id(value) not in placeholders:
            with graph.inserting_before(before):
                placeholders[id(value)] = graph.placeholder(f"constant_{len(constants)}")
            placeholders[id(value)].meta = {**node.meta, "val": mode.from_tensor(value)}
            constants.append(value)
        node.replace_all_uses_with(placeholders[id(value)])
        graph.erase_node(node)
    module.recompile()
    return constants


@dataclass(frozen=True, slots=True)
class ConstantSource:
    """Where a constant comes from: a container in an attribute of a module, or nowhere we know."""

    tensor: Tensor
    name: str = ""
    owner: dict[str, Any] | None = None
    path: tuple[Any, ...] = ()

    def now(self) -> Tensor:
        """The tensor in that place now, or StateChanged if it is of another shape or dtype."""
        if self.owner is None:
            return self.tensor
        value: Any = self.owner  # then what is in it
        try:
            for key in self.path:
                value = value[key]
        except (KeyError, IndexError, TypeError):
            value = None
        if isinstance(value, Tensor):
            found: Tensor = value
            if found is self.tensor or Layout.of(found) == Layout.of(self.tensor):
                return found
        raise misuse("constant_changed", None, tensor=self.name)


T = TypeVar("T")


def constant_sources(
    module: nn.Module, root: str, constants: list[Tensor], known: dict[int, T]
) -> list[ConstantSource | T]:
    """Find each constant in the lists, tuples and dicts that are attributes of modules.

    ``root`` is how the user reaches ``module``, ``known`` are sources by the tensor's identity.

    Raises:
        UnsupportedState: the step computed a gradient for a tensor that no module holds.
    """
    found: dict[int, Any] = dict(known)
    wanted = {id(constant) for constant in constants}
    for path, owner in module.named_modules():
        for key, value in vars(owner).items():
            if type(value) in (list, tuple, dict) and key not in ("_parameters", "_buffers"):
                _search(value, (key,), dotted_name(root, path, key), vars(owner), wanted, found)
    for constant in constants:
        if constant.is_leaf and isinstance(constant.grad, FakeTensor):
            constant.grad = None
            name = found[id(constant)].name if id(constant) in found else "A tensor of its own"
            raise misuse("no_parameter", None, tensor=name)
    return [found.get(id(constant), ConstantSource(constant)) for constant in constants]


def _search(
    value: Any,
    path: tuple[Any, ...],
    name: str,
    owner: dict[str, Any],
    wanted: set[int],
    found: dict[int, ConstantSource],
) -> None:
    if isinstance(value, Tensor):
        if id(value) in wanted:
            found[id(value)] = ConstantSource(value, name, owner, path)
    elif type(value) in (list, tuple, dict) and len(path) < 4:
        for key, inner in value.items() if type(value) is dict else enumerate(value):
            _search(inner, (*path, key), f"{name}[{key!r}]", owner, wanted, found)
