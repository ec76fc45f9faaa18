"""Collectives: operations of a graph in which all processes take part, by torch's functional ones.

A step that is run once more, to compare or to look for something, must not ask the other processes,
which do no such thing: it is run ``alone``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fulgurite.backends.csx.graph.graph import Graph

BUCKET_BYTES = 25 * 2**20  # of gradients, as DistributedDataParallel's; a smaller one first
FIRST_BUCKET_BYTES = 2**20
NAMESPACE = "_c10d_functional"
functional: Any = getattr(torch.ops, NAMESPACE)
_wait_tensor: Any = functional.wait_tensor.default


def is_collective(target: Any) -> bool:
    """Whether an operation is one in which all processes take part, or waits for one."""
    return getattr(target, "namespace", None) == NAMESPACE


def is_gather(target: Any) -> bool:
    """Whether an operation begins to gather parts of one tensor."""
    return target is functional.all_gather_into_tensor.default


def is_scatter(target: Any) -> bool:
    """Whether an operation begins to add up a tensor, of which each process gets its part."""
    return target is functional.reduce_scatter_tensor.default


def is_wait(target: Any) -> bool:
    """Whether an operation waits for a collective: it gives the memory that it is given."""
    return target is _wait_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The processes that share the work.

    Args:
        group: the name of their process group.
        count: how many there are.
    """

    group: str
    count: int

    def begin_sum(self, tensor: Tensor, how: str = "sum") -> Tensor:
        """Begin to add up a tensor of each process, or another reduction; see ``wait``."""
        begun: Tensor = functional.all_reduce(tensor, how, self.group)
        return begun

    def begin_broadcast(self, tensor: Tensor) -> Tensor:
        """Begin to give all processes the first one's tensor; see ``wait``."""
        begun: Tensor = functional.broadcast(tensor, 0, self.group)
        return begun

    @staticmethod
    def wait(begun: Tensor) -> Tensor:
        """The result of what was begun, when it is there."""
        done: Tensor = functional.wait_tensor(begun)
        return done

    def reduced(self, tensor: Tensor, how: str) -> Tensor:
        """A tensor of each process, reduced: "sum", "mean" (or "avg"), "max", "min", "product"."""
        if how in ("mean", "avg"):
            return self.wait(self.begin_sum(tensor)) / self.count
        return self.wait(self.begin_sum(tensor, how))

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor of each process, with a gradient: the sum of all processes'."""
        summed: Tensor = _Sum.apply(tensor, self)  # type: ignore[no-untyped-call]
        return summed

    def gathered(self, tensor: Tensor, with_gradient: bool) -> Tensor:
        """A tensor of each process, of one shape, in a tensor with a first dimension more."""
        if with_gradient:
            gathered: Tensor = _Gather.apply(tensor, self)  # type: ignore[no-untyped-call]
            return gathered
        flat = tensor.detach().reshape(1, *tensor.shape).contiguous()
        return self.wait(functional.all_gather_into_tensor(flat, self.count, self.group))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, processes: Processes) -> Tensor:
        ctx.processes = processes
        return processes.reduced(tensor.contiguous(), "sum")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.processes.summed(gradient), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, processes: Processes) -> Tensor:
        ctx.processes = processes
        return processes.gathered(tensor, with_gradient=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        processes: Processes = ctx.processes
        begun = functional.reduce_scatter_tensor(
            gradient.contiguous(), "sum", processes.count, processes.group
        )
        return processes.wait(begun).squeeze(0), None


def processes() -> int:
    """How many processes train together with this one, itself among them."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def has_collectives(graph: Graph) -> bool:
    """Whether a graph has any."""
    return any(is_collective(node.target) for node in graph.operations())


def length_of_part(numel: int, count: int) -> int:
    """How many of so many elements each of some processes holds."""
    return -(-numel // count)


def own_part(whole: Tensor, count: int, group: str) -> Tensor:
    """This process's part of a flat tensor, a copy; the last part is filled up with zeros."""
    length = length_of_part(whole.numel(), count)
    own = whole[dist.get_rank() * length :][:length]
    return torch.cat([own, own.new_zeros(length - own.numel())])


_LIBRARY: Any = torch.library.Library("fulgurite_processes", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("own_part(Tensor whole, int count, str group) -> Tensor")
_LIBRARY.impl("own_part", own_part, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fulgurite_processes::own_part",
    lambda whole, count, group: whole.new_empty(length_of_part(whole.numel(), count)),
    lib=_LIBRARY,
)

OWN_PART: Any = torch.ops.fulgurite_processes.own_part.default


class Waits:
    """How long this process has waited for others.

    Attributes:
        seconds: in ``wait_tensor``, where the thread sleeps until the others' part is there.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A function that runs graphs, in which waiting is timed: 1 µs a run, 0.4 µs a wait.

        Compiled code and operations one by one look the operation up by its name at each call, so
        that it may be another one for the time of a run.
        """

        def waiting(tensor: Tensor) -> Tensor:
            began = perf_counter()
            done: Tensor = _wait_tensor(tensor)
            self.seconds += perf_counter() - began
            return done

        def timed_run(*args: Any) -> Any:
            functional.wait_tensor.default = waiting
            try:
                return run(*args)
            finally:
                _not_timed()

        return timed_run


def _not_timed() -> None:
    functional.wait_tensor.default = _wait_tensor


# a step forks the process that compiles, which would take the timed function for the operation
os.register_at_fork(after_in_child=_not_timed)


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives of each collective what it gives where this process is the only one."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if not is_collective(func):
            return func(*args, **(kwargs or {}))
        given = args[0]
        if func is functional.all_gather_into_tensor.default:
            return torch.cat([given] * args[1])
        if func is functional.reduce_scatter_tensor.default:
            # of what was added up each process gets its part; alone, the first one's
            return given.chunk(args[2])[0].clone()
        in_place = func._schema.is_mutable or is_wait(func)
        # a functional collective gives memory of its own, which operations after it may change in
        # place
        return given if in_place else given.clone()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let graphs run without the other processes, as if there were none, while the block runs."""
    with _Alone():  # type: ignore[no-untyped-call]
        yield
