"""Fakes in the place of real tensors, behind the same Python objects.

While they are there other threads meet them too. What such a thread does with them waits until the
trace is over, and then sees the real tensors (``StateFakeTensor``).

``p.data = value`` in a step moves the tensor to other memory, as eagerly (``ReplacedData``). What
it leaves keeps its values for whoever still looks there (``old = p.data; p.data = q.data; q.data =
old`` swaps). The program's memory does not move: what is where at the step's end is copied into it,
after everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.overrides import resolve_name

from fulgurite.backends.csx.graph.fakes import twin
from fulgurite.backends.csx.graph.graph import storage_of
from fulgurite.backends.csx.graph.recorder import Nodes, recorder
from fulgurite.backends.patches import Patch, patches_of, trace_lock
from fulgurite.backends.torch_versions import CHECKED


def fake_for(real: Tensor, value: Tensor, nodes: Nodes) -> Tensor:
    """``value`` as a fake to put in the place of ``real``: a leaf with the user's hooks."""
    fake = same_to_graph(value, nodes)
    with DisableTorchFunction():
        if isinstance(real, nn.Parameter):
            fake._is_param = True  # what nn.Parameter looks at
        # what the user's hooks do to a gradient is part of the step
        hooks, at_leaf = ([*held.values()] for held in gradient_hooks(real))
        fake.requires_grad_(real.requires_grad or bool(hooks or at_leaf))
        for hook in hooks:
            fake.register_hook(hook)  # type: ignore[no-untyped-call]
        for hook in at_leaf:
            on_gradient(fake, hook)
        fake.requires_grad_(real.requires_grad)  # a frozen parameter keeps its hooks
    # ``swap`` exchanges the dicts too: the step finds what somebody has put on the tensor
    for key, value in vars(real).items():
        vars(fake).setdefault(key, value)
    return fake


def gradient_hooks(tensor: Tensor) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """The hooks that get a tensor's gradient: as it comes, and where it has been added."""
    at_leaf = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return tensor._backward_hooks or {}, at_leaf or {}


def same_to_graph(value: Tensor, nodes: Nodes) -> Tensor:
    """A fake as another object, which the graph takes for the same: that is no operation."""
    assert isinstance(value, FakeTensor)
    other = twin(value)
    nodes[other] = nodes[value]
    return other


def on_gradient(leaf: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call ``hook`` whenever a backward pass has reached ``leaf``."""
    leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def swap(a: Tensor, b: Tensor) -> None:
    """Exchange two tensors behind their Python objects.

    ``torch.utils.swap_tensors`` does this too, but refuses tensors with weak references, which
    optimizers and schedulers hold. Checked against torch 2.13.
    """
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    torch._C._swap_tensor_impl(a, b)


class StateFakeTensor(FakeTensor):
    """A fake in the place of a state tensor: other threads that use it wait for the real one."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch's, or of a tensor; the arguments are real when a trace is over.

        Raises:
            RuntimeError: it is not over after ``PATIENCE_S``.
        """
        if trace_lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            result = torch._C._disabled_torch_function_impl(function, types, args, kwargs or {})
            if function is Tensor.detach:
                result.__class__ = cls  # nn.Parameter(p) wants the class of p
            return result
        if not trace_lock.acquire(timeout=PATIENCE_S):
            raise RuntimeError(
                f"{resolve_name(function) or function} was called on a tensor that has no value:"
                " another thread traces the step that it is part of, and was not done after"
                f" {PATIENCE_S:g} s. If the step itself waits for this thread: compute in the"
                " step's own thread. Else take fulgurite.trace_lock before you read."
            )
        try:
            name = getattr(function, "__name__", "")
            if getattr(Tensor, name, None) is function:  # a parameter may have its own
                function = getattr(type(args[0]), name)
            return function(*args, **(kwargs or {}))
        finally:
            trace_lock.release()


PATIENCE_S = 60.0


def traced_as_fakes() -> Iterator[Patch]:
    """A patch by which a trace within a trace (torch.func.linearize) takes these fakes too."""
    kinds = (*proxy_tensor.HANDLED_TYPES, StateFakeTensor)
    why = "a trace refuses subclasses of FakeTensor that are no inputs of its own"
    yield from patches_of(proxy_tensor, {"HANDLED_TYPES": kinds}, why=why, checked=CHECKED)


class ReplacedData:
    """The inputs of one trace whose ``.data`` was replaced."""

    def __init__(self) -> None:
        self.left: list[tuple[Tensor, Tensor]] = []  # (the tensor, the memory that it left)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's data was replaced."""
        return any(tensor is one for one, _ in self.left)

    def replace(self, tensor: Tensor, value: Tensor) -> None:
        """``tensor.data = value``, of equal shape and dtype."""
        nodes = recorder().nodes
        with torch.no_grad():
            if value not in nodes:  # a constant
                value = value.clone()
            # where it was at first is the program's memory, however often it moves
            if not self.holds(tensor):
                self.left.append((tensor, tensor.detach()))
        with DisableTorchFunction():
            tensor.data = value
        nodes[tensor] = nodes[value]  # which torch does not see: the update would be lost

    def write_back(self) -> None:
        """Copy each into the memory that it left; all are read before one is written."""
        pairs = [(left, t) for t, left in self.left if storage_of(t) != storage_of(left)]
        values = [tensor.detach().clone() for _, tensor in pairs]
        for (left, _), value in zip(pairs, values, strict=True):
            left.copy_(value)
