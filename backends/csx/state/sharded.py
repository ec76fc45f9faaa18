"""Tensors that several processes hold in parts (weight streaming).

A *part* is flat: all elements in order, in as many stretches of equal length as there are
processes; the last is filled up with zeros. To the host such a tensor has its whole shape: whoever
reads it gets a gathered copy, in which all processes take part. It can be changed element by
element (``copy_``, ``mul_``, an average's ``lerp_``), which each process does to its part; whoever
changes some of its elements alone is told that they may be another process's.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.optim import Optimizer

from fulgurite.backends.csx.diagnostics.trace_errors import StateChanged, UnsupportedState
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, user_line
from fulgurite.backends.csx.graph.collectives import Processes, own_part
from fulgurite.backends.csx.graph.op_schema import is_alias, is_random, written
from fulgurite.backends.csx.state.fake_swap import swap

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from fulgurite.backends.checkpoints.chunks import FlatPart

_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_COPY = torch.ops.aten.copy_.default
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # since torch 2.13


class ShardedTensor(Tensor):
    """A tensor of which this process holds a part.

    Args:
        part: it, flat.
        shape: of the whole.
        processes: those that hold it.
        requires_grad: whether the whole does.
    """

    part: Tensor
    processes: Processes
    share: ClassVar[Callable[[Tensor], None] | None] = None  # see ``writing_wholes``

    @staticmethod
    def __new__(
        cls, part: Tensor, shape: torch.Size, processes: Processes, requires_grad: bool = False
    ) -> ShardedTensor:
        """One whose whole would be contiguous."""
        made: ShardedTensor = Tensor._make_wrapper_subclass(
            cls, shape, dtype=part.dtype, device=part.device, requires_grad=requires_grad
        )
        made.part, made.processes = part, processes
        return made

    @classmethod
    def cut(cls, whole: Tensor, processes: Processes) -> ShardedTensor:
        """One with this process's part of a whole, in memory of its own."""
        return cls(part_of(whole, processes), whole.shape, processes, whole.requires_grad)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Read it, gathered, or change it element by element.

        Raises:
            StateChanged: it would be changed in another way.
        """
        kwargs = kwargs or {}
        if func in _ALIASES:
            return cls(args[0].part, args[0].shape, args[0].processes)
        if any(isinstance(one, cls) for one in written(func, args, kwargs)):
            if cls.share is not None:
                return cls._write_wholes(func, args, kwargs)
            return cls._write_parts(func, args, kwargs)
        args, kwargs = pytree.tree_map_only(cls, cls.gathered, (args, kwargs))
        found = func(*args, **kwargs)
        # who writes into a view of a copy would change nothing
        return pytree.tree_map_only(Tensor, ReadOnly, found) if is_alias(func) else found

    @classmethod
    def _write_parts(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Change each element by itself: by a part's own elements, or those of a whole tensor."""
        lists = func.overloadpacket.__name__.startswith("_foreach_")
        by_element = lists or func is _COPY or torch.Tag.pointwise in func.tags
        first = args[0] if lists else [args[0]]
        if is_random(func) or not by_element or not all(isinstance(one, cls) for one in first):
            raise _changed(func.overloadpacket.__name__)
        shapes = [one.shape for one in first]
        for other in args[1:]:
            tensors = other if isinstance(other, list) else [other]
            same = [one.shape for one in tensors if isinstance(one, Tensor) and one.ndim]
            if same and same != shapes:  # parts of tensors of other shapes lie otherwise
                raise _changed(func.overloadpacket.__name__)

        def part(one: Tensor) -> Tensor:
            if isinstance(one, cls):
                return one.part
            return part_of(one, first[0].processes) if one.ndim else one

        args_of_parts, kwargs = pytree.tree_map_only(Tensor, part, (args, kwargs))
        func(*args_of_parts, **kwargs)
        return None if lists else args[0]

    @classmethod
    def _write_wholes(cls, func: Any, args: Any, kwargs: Any) -> Any:
        changed = [one for one in written(func, args, kwargs) if isinstance(one, cls)]
        wholes = {id(one): one.gathered() for one in changed}
        given = pytree.tree_map_only(
            cls,
            lambda one: wholes[id(one)] if id(one) in wholes else one.gathered(),
            (args, kwargs),
        )
        func(*given[0], **given[1])
        for one in changed:
            assert cls.share is not None
            cls.share(wholes[id(one)])
            one.part.copy_(part_of(wholes[id(one)], one.processes))
        return args[0] if isinstance(args[0], (list, tuple)) else changed[0]  # of eye(n, out=w) w

    @property
    def data(self) -> Tensor:
        """The same parts, without a gradient."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise _changed("p.data = value, of another shape or dtype,")
        part = value.part if isinstance(value, ShardedTensor) else part_of(value, self.processes)
        self.part.copy_(part.detach())

    def gathered(self) -> Tensor:
        """All of it, a copy; all processes take part."""
        count = self.processes.count
        found = torch.empty(self.part.numel() * count, dtype=self.dtype)
        _gather(found, self.part.detach())
        return found[: self.numel()].view(self.shape)

    def _flat(self) -> FlatPart:
        # 0.2 s, for torch.distributed.checkpoint
        from fulgurite.backends.checkpoints.chunks import FlatPart

        return FlatPart(self.shape, dist.get_rank() * self.part.numel(), self.part)

    # what torch.distributed.checkpoint asks of a tensor in parts (torch 2.13)

    def __create_write_items__(self, fqn: str, tensor: object) -> list[WriteItem]:
        return self._flat().__create_write_items__(fqn, tensor)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._flat().__create_chunk_list__()

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self._flat().__get_tensor_shard__(index)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        part = self.part.detach().clone()
        made = ShardedTensor(part, self.shape, self.processes, self.requires_grad)
        memo[id(self)] = made
        return as_parameter(made) if isinstance(self, nn.Parameter) else made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedState(
            f"A tensor of {list(self.shape)} would be pickled of which each process holds a part.",
            line=user_line(),
            remedy="trainer.save_checkpoint(path); or, in all processes, p.clone(), gathered",
        )

    def numpy(self, *, force: bool = False) -> Any:
        """A gathered copy, which cannot be written: that would change nothing else."""
        found = self.gathered().numpy(force=force)
        found.flags.writeable = False
        return found

    def tolist(self) -> Any:
        """A gathered copy."""
        return self.gathered().tolist()

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, in {self.processes.count} parts)"


@contextlib.contextmanager
def writing_wholes(share: Callable[[Tensor], None]) -> Iterator[None]:
    """Let sharded tensors be changed in place while the block runs: whole ones are, then cut.

    Args:
        share: makes a tensor that was changed the same in all processes.
    """
    ShardedTensor.share = share
    try:
        yield
    finally:
        ShardedTensor.share = None


class ReadOnly(Tensor):
    """A view of a gathered copy: ``p.data[0] = 0`` ends up here.

    Args:
        copy: it.
    """

    copy: Tensor

    @staticmethod
    def __new__(cls, copy: Tensor) -> ReadOnly:
        """One of the same layout."""
        made: ReadOnly = Tensor._make_wrapper_subclass(
            cls, copy.shape, strides=copy.stride(), dtype=copy.dtype, device=copy.device
        )
        made.copy = copy
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Read it.

        Raises:
            StateChanged: it would be changed.
        """
        kwargs = kwargs or {}
        if any(isinstance(one, cls) for one in written(func, args, kwargs)):
            raise _changed(func.overloadpacket.__name__)
        args, kwargs = pytree.tree_map_only(cls, lambda one: one.copy, (args, kwargs))
        found = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, cls, found) if is_alias(func) else found

    def numpy(self, *, force: bool = False) -> Any:
        """A copy."""
        return self.copy.numpy(force=force)

    def tolist(self) -> Any:
        """Its values."""
        return self.copy.tolist()

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return repr(self.copy)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Tensor.__reduce_ex__(self.copy.clone(), protocol)  # type: ignore[no-untyped-call]


def _changed(how: str) -> StateChanged:
    return StateChanged(
        f"{how} would change a tensor in place of which each process holds"
        " a part, and not element by element.",
        line=user_line(),
        remedy="p.copy_(value) with a whole value, the same in all processes; or in the step, which"
        " works on parts by itself",
    )


def resident(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.part if isinstance(tensor, ShardedTensor) else tensor


def is_finite(tensor: Tensor) -> bool:
    """Whether all of a tensor is; each process looks at what it holds, and all take part."""
    found = resident(tensor).isfinite().all()
    if isinstance(tensor, ShardedTensor):
        found = found.int()
        dist.all_reduce(found, dist.ReduceOp.MIN)
    return bool(found)


def as_parameter(tensor: ShardedTensor) -> ShardedTensor:
    """The same as a parameter: ``isinstance(p, nn.Parameter)`` asks for this attribute."""
    tensor._is_param = True
    return tensor


def is_cut(shape: torch.Size, dtype: torch.dtype, count: int) -> bool:
    """Whether so many processes hold a tensor in parts, or each all of it."""
    return dtype.is_floating_point and shape.numel() >= count


def part_of(whole: Tensor, processes: Processes) -> Tensor:
    """This process's part of a whole, in memory of its own."""
    return own_part(whole.detach().reshape(-1), processes.count, processes.group)


def shard_parameters(parameters: Iterable[nn.Parameter], processes: Processes) -> None:
    """Let each parameter hold a part of its values, behind the same Python object."""
    every = list(parameters)
    memories = Counter(p.untyped_storage().data_ptr() for p in every if not _is_sharded(p))
    if any(count > 1 for memory, count in memories.items() if memory):
        raise UnsupportedState(
            "Parameters share memory, and would be cut apart.",
            remedy="the same parameter in all places (b.weight = a.weight), which is cut once; or"
            " execution='pipeline'",
        )
    for p in every:
        held = _is_sharded(p)  # since an earlier run
        if is_cut(p.shape, p.dtype, processes.count) and not held:
            sharded: Tensor = as_parameter(ShardedTensor.cut(p, processes))
            vars(sharded).update(vars(p))
            swap(p, sharded)


def _is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, ShardedTensor)


_FOR_EACH = ("torch.optim.", "fulgurite.optim.")


def makes_for_each(optimizer: Optimizer) -> bool:
    """Whether an optimizer's state of a parameter is known to be the same whatever others there
    are, and a number for each element; of one that is not torch's or ours nobody knows."""
    return type(optimizer).__module__.startswith(_FOR_EACH)


@contextlib.contextmanager
def parts_in_place(optimizer: Optimizer) -> Iterator[None]:
    """Put parts in the place of an optimizer's sharded parameters, behind the same Python objects;
    and whole ones, of which all processes make state, where it may depend on their shape."""
    tensors = (p for group in optimizer.param_groups for p in group["params"])
    swapped: list[tuple[Tensor, Tensor]] = []
    try:
        for tensor in tensors:
            if isinstance(tensor, ShardedTensor):
                held = tensor.part if makes_for_each(optimizer) else tensor.gathered()
                stand_in: Tensor = nn.Parameter(held, requires_grad=tensor.requires_grad)
                swap(tensor, stand_in)
                swapped.append((tensor, stand_in))
        yield
    finally:
        for tensor, stand_in in swapped:
            swap(tensor, stand_in)


def gathered(value: Any) -> Any:
    """Whole tensors in the place of sharded ones, in a state dict; all processes take part."""
    return pytree.tree_map_only(ShardedTensor, ShardedTensor.gathered, value)


def shard_state(optimizer: Optimizer) -> None:
    """Hold tensors that were loaded into an optimizer's state as its parameters are held."""
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, Tensor):
                continue
            if not isinstance(p, ShardedTensor) or value.shape != p.shape:
                state[key] = gathered(value)
            elif not isinstance(value, ShardedTensor):
                state[key] = ShardedTensor.cut(value, p.processes)


def sharded_as(whole: ShardedTensor, value: Any, optimizer: Optimizer) -> Any:
    """A state that an optimizer made while ``parts_in_place`` ran.

    Raises:
        UnsupportedState: it is neither of the parameter's shape nor a number.
    """
    in_parts = makes_for_each(optimizer)
    if isinstance(value, Tensor) and value.shape == (whole.part.shape if in_parts else whole.shape):
        part = value if in_parts else part_of(value, whole.processes)
        return ShardedTensor(part, whole.shape, whole.processes)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise _of_wholes(optimizer)
    return value


def refuse_of_wholes(optimizer: Optimizer, line: UserLine | None) -> None:
    """Refuse an optimizer that makes its state of the shape of the whole parameter.

    Raises:
        UnsupportedState: Adafactor keeps rows and columns, Muon takes matrices alone.
    """
    if type(optimizer).__name__ in ("Adafactor", "Muon"):
        raise _of_wholes(optimizer).replaced(line=line)


def _of_wholes(optimizer: Optimizer) -> UnsupportedState:
    return UnsupportedState(
        f"{type(optimizer).__name__} needs its parameters in their shape, of which each process"
        " holds a part in a row.",
        remedy="an optimizer whose state is a number for each element, such as torch.optim.AdamW;"
        " or execution='pipeline'",
    )
