"""The state of a program: the tensors that modules and optimizers already hold, in place.

Words: a *slot* is a place that holds a tensor, a key of a module's or an optimizer's dict. A *state
input* is one storage: the input of the program that all tensors over it share. Tied weights (one
tensor in several slots) and views of one buffer are one input each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torchmetrics import Metric

from fulgurite.backends.csx.diagnostics.errors import StateChanged, UnsupportedState


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One place that holds a tensor. ``name`` is how the user reaches it."""

    container: dict[Any, Any]
    key: Any
    name: str


def dtype_and_shape(dtype: torch.dtype, shape: torch.Size) -> str:
    """``float32[16, 8]``, as in every message."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


@dataclass(frozen=True, slots=True)
class Layout:
    """What the program relies on in a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """The layout of a tensor; ``offset`` counts elements from its storage's begin."""
        return cls(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def __str__(self) -> str:
        return dtype_and_shape(self.dtype, self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """One tensor and all the slots that hold it (several: tied)."""

    tensor: Tensor
    slots: list[Slot] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class StateInput:
    """One storage and the tensors over it; ``tensors`` has one element unless they are views."""

    tensors: tuple[StateTensor, ...]
    whole: bool = False  # the input is the whole storage, whatever ``tensors`` are

    @property
    def name(self) -> str:
        """The user's name of its first slot."""
        return self.tensors[0].slots[0].name

    def base(self) -> Tensor:
        """The program's input: the tensor itself, or for views their whole storage, flat."""
        tensors = [slot_tensor(held.slots[0]) for held in self.tensors]
        if not self.whole:
            return tensors[0]
        first = tensors[0].detach()
        length = first.untyped_storage().nbytes() // first.element_size()
        return first.as_strided((length,), (1,), 0)

    def view(self, base: Tensor, i: int) -> Tensor:
        """Tensor ``i`` of this input over ``base``."""
        if not self.whole:
            return base
        tensor = self.tensors[i].tensor
        return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


PARAMETRIZING = frozenset(
    {
        *("weight_norm", "spectral_norm", "orthogonal", "register_parametrization", "prune"),
        *("remove_weight_norm", "remove_spectral_norm", "remove_parametrizations"),
    }
)
"""Functions that take a parameter of a layer away, and put others in its place."""


def slot_tensor(slot: Slot) -> Tensor:
    """The tensor in a slot now."""
    value = slot.container.get(slot.key)
    if not isinstance(value, Tensor):
        raise StateChanged(
            f"{slot.name} held a tensor when the program was built, and now is"
            f" {'gone' if value is None else type(value).__name__}.",
            remedy="change values in place (tensor.copy_(...)); parametrizations (weight_norm,"
            " spectral_norm, prune) in __init__() or configure_model()",
            named=PARAMETRIZING,
        )
    return value


def member(*path: str) -> str:
    """A dotted name of those parts that are not empty."""
    return ".".join(part for part in path if part)


_COMPUTED_BY_METRICS = ("_computed", "_forward_cache")  # of their state, for whoever asks again


def module_slots(module: nn.Module, root: str) -> Iterator[Slot]:
    """Parameters, buffers and plain tensor attributes of all modules; metric states are these.

    Args:
        module: holds them all.
        root: how the user reaches it.
    """
    for path, one in module.named_modules():
        owner = member(root, path)
        if isinstance(one, torch.jit.ScriptModule):
            raise UnsupportedState(
                f"{owner} is a scripted module, whose tensors Python cannot reach.",
                remedy=f"{owner} without torch.jit.script: the whole step is compiled",
            )
        for container in (one._parameters, one._buffers, one.__dict__):
            for key, value in container.items():
                if is_lazy(value):
                    raise UnsupportedState(
                        f"{owner}.{key} has no shape yet: it belongs to a lazy module.",
                        remedy="run one batch through the model before fit, or give its sizes",
                    )
                kept = isinstance(one, Metric) and key in _COMPUTED_BY_METRICS
                if isinstance(value, Tensor) and not kept:
                    if value.layout is not torch.strided:
                        raise UnsupportedState(
                            f"{owner}.{key} is a {value.layout} tensor; a program's are dense.",
                            remedy=f"{owner}.{key} = {owner}.{key}.to_dense() before fit",
                        )
                    yield Slot(container, key, f"{owner}.{key}")


def optimizer_slots(optimizers: dict[str, Optimizer], names: dict[int, str]) -> Iterator[Slot]:
    """The state of all optimizers, and tensors among their groups' numbers (a tensor ``lr``)."""
    for owner, optimizer in optimizers.items():
        for key in optimizer.state:
            name = f"{owner}.state[{names.get(id(key)) or brief(key)}]"
            yield from _state_slots(optimizer.state, key, name)
        for g, group in enumerate(optimizer.param_groups):
            for option, value in group.items():
                if isinstance(value, Tensor):
                    yield Slot(group, option, f"{owner}.param_groups[{g}]['{option}']")


def _state_slots(container: dict[Any, Any], key: Any, name: str) -> Iterator[Slot]:
    value = container[key]
    if isinstance(value, Tensor):
        yield Slot(container, key, name)
    elif isinstance(value, dict):
        for inner in value:
            yield from _state_slots(value, inner, f"{name}[{inner!r}]")


def state_inputs(slots: Iterable[Slot]) -> tuple[StateInput, ...]:
    """Group slots by tensor, and tensors by storage."""
    held: dict[int, StateTensor] = {}
    for slot in slots:
        tensor = slot.container[slot.key]
        held.setdefault(id(tensor), StateTensor(tensor)).slots.append(slot)
    storages: dict[Any, list[StateTensor]] = {}
    for one in held.values():
        storages.setdefault(_storage_key(one.tensor), []).append(one)
    for group in storages.values():
        if len({one.tensor.dtype for one in group}) > 1:
            names = " and ".join(one.slots[0].name for one in group)
            raise UnsupportedState(
                f"{names} share memory under different dtypes.",
                remedy="give each its own memory (.clone())",
            )
    return tuple(StateInput(tuple(group), whole=len(group) > 1) for group in storages.values())


def _storage_key(tensor: Tensor) -> Any:
    try:
        pointer = tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without a storage
        pointer = 0
    return pointer or ("none", id(tensor))


def brief(value: Any) -> str:
    """A tensor by dtype and shape, anything else by its type; strings and numbers as they are."""
    if isinstance(value, Tensor):
        return dtype_and_shape(value.dtype, value.shape)
    if isinstance(value, (str, int)):
        return repr(value)
    return "nothing" if value is None else f"a {type(value).__name__}"


class Binding:
    """A program's state and the tensors that are in their slots now.

    Host code may put another tensor of the same layout into a slot (``Metric.reset`` does); the
    program then works on that one.

    Args:
        state: the program's.
        trained: the identity of parameters that an optimizer holds too: they must stay.
    """

    def __init__(
        self, state: tuple[StateInput, ...], trained: frozenset[int] = frozenset()
    ) -> None:
        self._state, self._trained = state, trained
        self._layouts = [[Layout.of(held.tensor) for held in item.tensors] for item in state]
        self._places = [
            (slot.container, slot.key)
            for item in state
            for held in item.tensors
            for slot in held.slots
        ]
        self._input_of_place = [
            i for i, item in enumerate(state) for held in item.tensors for _ in held.slots
        ]
        self._seen: list[Tensor] = []
        self._inputs: list[Tensor] = []
        self._pointers: list[Any] = []
        self.storages: frozenset[Any] = frozenset()

    def inputs(self) -> list[Tensor]:
        """The program's state inputs, in order."""
        try:
            now = [container[key] for container, key in self._places]
        except KeyError:
            now = []
        if len(now) != len(self._seen):
            self.check()
        elif not all(map(is_, now, self._seen)):
            pairs = zip(self._input_of_place, now, self._seen, strict=True)
            self._rebind({i for i, tensor, seen in pairs if tensor is not seen})
        return self._inputs.copy()

    def check(self) -> None:
        """Verify every slot and bind anew.

        Raises:
            StateChanged: a slot is empty, another layout is in it, or tensors are tied otherwise.
        """
        self._inputs = [item.tensors[0].tensor for item in self._state]
        self._pointers = [None] * len(self._state)
        self._rebind(range(len(self._state)))

    def _rebind(self, changed: Iterable[int]) -> None:
        for i in changed:
            item = self._state[i]
            for held, layout in zip(item.tensors, self._layouts[i], strict=True):
                _check_held(held, layout)
                if id(held.tensor) in self._trained:
                    _check_trained(held)
            self._inputs[i] = item.base()
            self._pointers[i] = _storage_key(self._inputs[i])
        self.storages = frozenset(self._pointers)
        if len(self.storages) != len(self._pointers):
            shared = [
                item.name
                for item, pointer in zip(self._state, self._pointers, strict=True)
                if self._pointers.count(pointer) > 1
            ]
            raise StateChanged(
                f"{' and '.join(shared)} share memory, which they did not when the program was"
                " built.",
                remedy="tie them before fit, or give each its own memory (.clone())",
            )
        self._seen = [container[key] for container, key in self._places]


def _check_held(held: StateTensor, layout: Layout) -> None:
    tensor = slot_tensor(held.slots[0])
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        tensor = tensor.clone()
        _put(held, tensor)
    if any(slot_tensor(slot) is not tensor for slot in held.slots):
        names = " and ".join(slot.name for slot in held.slots)
        raise StateChanged(
            f"{names} were one tensor when the program was built, and no longer are.",
            remedy="tie them before fit, or leave them untied",
        )
    now = Layout.of(tensor)
    if now != layout and _may_be_laid_out(tensor, layout):
        # self.queue = torch.cat([self.queue, x])[-n:] does not begin where its memory does
        copied = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype)
        _put(held, copied.copy_(tensor))
    elif now != layout:
        raise StateChanged(
            f"{held.slots[0].name} was {layout} with strides {layout.stride} when the program was"
            f" built, and now is {now} with strides {now.stride}.",
            remedy="change values in place (tensor.copy_(...))",
        )


def _put(held: StateTensor, tensor: Tensor) -> None:
    for slot in held.slots:
        slot.container[slot.key] = tensor


def _may_be_laid_out(tensor: Tensor, layout: Layout) -> bool:
    """Whether a copy of a tensor can stand in its place, laid out as the program expects."""
    same = (tensor.shape, tensor.dtype) == (layout.shape, layout.dtype)
    return same and not layout.offset and not tensor.requires_grad


def parameter_replaced(name: str, when: str) -> str:
    """What is said of a parameter in whose place another one was put."""
    return (
        f"{name} was replaced by another parameter {when}. The optimizer holds the old one: eagerly"
        " too, the new one would not be trained."
    )


def copying_remedy(name: str) -> str:
    """Code that changes a parameter's value instead."""
    return f"with torch.no_grad(): {name}.copy_(value)"


def _check_trained(held: StateTensor) -> None:
    slot = held.slots[0]
    if slot_tensor(slot) is not held.tensor:
        raise StateChanged(
            parameter_replaced(slot.name, "after the program was built"),
            remedy=copying_remedy(slot.name),
        )


_CONTAINERS = (dict, list, set)
_REFILL: dict[Any, Callable[[Any, Any], None]] = {
    OrderedDict: OrderedDict.update,  # before dict, whose clear would break its order
    dict: dict.update,
    list: list.extend,
    set: set.update,
}


class Snapshot:
    """The Python state of objects, to be put back after a failed trace.

    Attribute dicts and the dicts, lists and sets in them (three levels) are copied; what they hold
    is not.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        self._before: dict[int, tuple[Any, Any, str, object]] = {}
        for item in objects:
            self._keep(vars(item), 4, type(item).__name__, item)

    def _keep(self, container: Any, levels: int, name: str, root: object) -> None:
        if id(container) in self._before or not levels:
            return
        self._before[id(container)] = (container, container.copy(), name, root)
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in items:
            if isinstance(value, _CONTAINERS):
                inner = f"{name}.{key}" if levels == 4 else f"{name}[{brief(key)}]"
                self._keep(value, levels - 1, inner, root)

    def containers(self) -> Iterator[tuple[Any, Any, str, object]]:
        """Each container, its copy, its name, and the object that it belongs to."""
        yield from self._before.values()

    def tensors(self) -> list[Tensor]:
        """The tensors that the containers hold."""
        values = [c.values() if isinstance(c, dict) else c for _, c, _, _ in self._before.values()]
        return [value for items in values for value in items if isinstance(value, Tensor)]

    def before(self, container: Any) -> Any:
        """The copy of a container, or None if it was not there."""
        kept = self._before.get(id(container))
        return None if kept is None else kept[1]

    def restore(self) -> None:
        """Make everything as it was; what did not change is not touched."""
        for container, copy, _, _ in self._before.values():
            if not _holds_the_same(container, copy):
                kind = next(kind for kind in _REFILL if isinstance(container, kind))
                kind.clear(container)
                _REFILL[kind](container, copy)


def remember(optimizer: Optimizer) -> Callable[[], None]:
    """A function that puts back an optimizer as it is now, and the values of its tensors."""
    snapshot = Snapshot([optimizer])
    values = [(tensor, tensor.detach().clone()) for tensor in snapshot.tensors()]

    def restore() -> None:
        snapshot.restore()
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)

    return restore


def _holds_the_same(container: Any, copy: Any) -> bool:
    if len(container) != len(copy):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), copy.items(), strict=True)
        return all(a is c and b is d for (a, b), (c, d) in pairs)
    return isinstance(container, list) and all(map(is_, container, copy))
