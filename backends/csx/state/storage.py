"""The state of a program: the tensors that modules and optimizers already hold, in place.

Words: a *place* is a key of a dict on the host, a module's or an optimizer's: a step finds tensors
there, and leaves others. A *state input* is one storage: the input of the program that all tensors
over it share. Tied weights (one tensor in several places) and views of one buffer are one input
each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torchmetrics import Metric
from torchmetrics.wrappers import Running

from fulgurite.backends.csx.diagnostics.trace_errors import StateChanged, UnsupportedState
from fulgurite.backends.csx.graph.collectives import Processes
from fulgurite.backends.csx.graph.graph import storage_of
from fulgurite.backends.csx.state.sharded import ShardedTensor, resident
from fulgurite.backends.patches import MISSING


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A key of a dict, or of something that is used like one (``leaves.AttributeTree``).

    Places are equal if they are the same key of the same object; ``name`` is how the user calls
    the place, where a message may name it.
    """

    container: Any
    key: Any
    name: str = ""

    def get(self, default: Any = None) -> Any:
        """What is there now."""
        return self.container.get(self.key, default)

    def put(self, value: Any) -> None:
        """Put a value there; MISSING empties the place."""
        if value is MISSING:
            self.container.pop(self.key, None)
        else:
            self.container[self.key] = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Place) or hash(self) != hash(other):
            return False  # different tensors, which may be keys, are not compared by ==
        return (id(self.container), self.key) == (id(other.container), other.key)

    def __hash__(self) -> int:
        return hash((id(self.container), self.key))


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """One tensor of a program's state, and all the places that hold it (several: tied)."""

    tensor: Tensor
    places: list[Place] = field(default_factory=list)

    def put(self, tensor: Tensor) -> None:
        """Let all the places hold another tensor."""
        for place in self.places:
            place.put(tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPlace:
    """A place where the step left tensors, and found none of such shapes."""

    place: Place
    grows: bool = False  # the place holds a list, and the tensors were added to it
    is_optimizers: bool = False  # it is in the state of one
    is_state: bool = True  # what is there are tensors
    key: Any = None  # there, a parameter as a rule
    counts: Place | None = None  # receives whether the update counts that put them there
    before: Any = MISSING  # what the step found there


class OptimizerEntry:
    """An entry of an optimizer's state, or of a dict in it, used like a dict while there is none.

    Programs take tensors from the dict itself: where it was taken away, the same one comes back,
    which step of which program it ever is that makes it.

    Args:
        holder: the optimizer's state, or another entry.
        key: in it.
        known: the dicts of entries, by holder and key; receives what is there when it is taken.
    """

    def __init__(self, holder: Any, key: Any, known: dict[Any, tuple[Any, dict[Any, Any]]]) -> None:
        self._holder, self._key, self._known = holder, key, known

    def _content(self) -> dict[Any, Any]:
        of = self._holder._content() if isinstance(self._holder, OptimizerEntry) else self._holder
        return self._known.setdefault((id(of), self._key), (of, self._now()))[1]

    def _now(self) -> dict[Any, Any]:
        now = self._holder.get(self._key)
        return now if isinstance(now, dict) else {}

    def get(self, key: Any, default: Any = None) -> Any:
        """What is there."""
        return self._now().get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Put something there, a tensor as the parameter is held."""
        if not self._now():
            self._content().clear()
            self._holder[self._key] = self._content()
        p = self._key
        is_whole = isinstance(value, Tensor) and not isinstance(value, ShardedTensor)
        if is_whole and isinstance(p, ShardedTensor) and value.shape == p.shape:
            value = ShardedTensor.cut(value, p.processes)
        self._now()[key] = value

    def pop(self, key: Any, default: Any = None) -> Any:
        """Take something away; the last takes the entry with it."""
        self._content()  # is kept from here on
        value = self._now().pop(key, default)
        if not self._now():
            self._holder.pop(self._key, None)
        return value


class EntryList:
    """A list or tuple in an optimizer's state, used like a dict of its items by their places."""

    def __init__(self, holder: Any, key: Any) -> None:
        self._holder, self._key = holder, key

    def __getitem__(self, key: int) -> Any:
        return self._holder[self._key][key]

    def get(self, key: int, default: Any = None) -> Any:
        """What is there, if there is such a list."""
        items = self._holder.get(self._key)
        return items[key] if isinstance(items, (list, tuple)) and key < len(items) else default

    def __setitem__(self, key: int, value: Any) -> None:
        """Put something there; a tuple is replaced by another."""
        items = self._holder[self._key]
        if isinstance(items, tuple):
            self._holder[self._key] = type(items)([*items[:key], value, *items[key + 1 :]])
        else:
            items[key] = value


@dataclass(slots=True)
class SideEffects:
    """What a step did to places on the host, to be done again after every step.

    Attributes:
        writes: places that are set, and to what.
        lists: places of lists that are extended, by what ``list_values`` has for each.
        rebound: state whose places are set: it gets a new tensor after every step.
        replaced: state in whose places the step put another tensor: the program writes its own.
        new_places: those of the places which held no such tensors before.
        tables: those that the step found empty, and filled with what follows from constants alone.
    """

    writes: list[tuple[list[Place], Any]] = field(default_factory=list)
    lists: list[Place] = field(default_factory=list)
    list_values: list[Any] = field(default_factory=list)
    rebound: list[StateTensor] = field(default_factory=list)
    replaced: list[StateTensor] = field(default_factory=list)
    new_places: list[NewPlace] = field(default_factory=list)
    tables: list[Place] = field(default_factory=list)

    def set_after(self, places: list[Place], value: Any) -> None:
        """Every one of ``places`` holds ``value`` after every step; they share it."""
        self.writes.append((places, value))

    def append_after(self, place: Place, values: list[Any]) -> None:
        """The list in a place is extended by ``values`` after every step."""
        self.lists.append(place)
        self.list_values.append(values)

    def places_and_values(self) -> tuple[list[Place], list[Any]]:
        """The places that are set after every step, and their values.

        What several calls of ``set_after`` were given gets memory of its own for each.
        """
        places: list[Place] = []
        values: list[Any] = []
        taken: set[int] = set()

        # the step set each of them: a change in place of one must not show in the other
        def own(leaf: Any) -> Any:
            traced = isinstance(leaf, FakeTensor)
            return leaf.clone() if traced and storage_of(leaf) in taken else leaf

        for several, value in self.writes:
            mine = pytree.tree_map(own, value)
            leaves = pytree.tree_leaves(value)
            taken.update(storage_of(leaf) for leaf in leaves if isinstance(leaf, FakeTensor))
            places += several
            values += [mine] * len(several)
        return places, values


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
class StateInput:
    """One storage and the tensors over it; ``tensors`` has one element unless they are views."""

    tensors: tuple[StateTensor, ...]
    whole: bool = False  # the input is the whole storage, whatever ``tensors`` are

    @property
    def name(self) -> str:
        """The user's name of its first place."""
        return self.tensors[0].places[0].name

    def base(self) -> Tensor:
        """The program's input: the tensor itself, or for views their whole storage, flat."""
        tensors = [tensor_at(held.places[0]) for held in self.tensors]
        if not self.whole:
            return resident(tensors[0])
        # flat and whole: views may begin anywhere in it, and overlap
        first = tensors[0].detach()
        length = first.untyped_storage().nbytes() // first.element_size()
        return first.as_strided((length,), (1,), 0)

    @property
    def processes(self) -> Processes | None:
        """Those that hold it in parts; None where each holds all of it."""
        tensor = self.tensors[0].tensor
        return tensor.processes if isinstance(tensor, ShardedTensor) else None

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


def tensor_at(place: Place) -> Tensor:
    """The tensor in a place now."""
    value = place.get()
    if not isinstance(value, Tensor):
        raise StateChanged(
            f"{place.name} held a tensor when the program was built, and now is"
            f" {'gone' if value is None else type(value).__name__}.",
            remedy="change values in place (tensor.copy_(...)); parametrizations (weight_norm,"
            " spectral_norm, prune) in __init__() or configure_model(), prune between epochs too",
            named=PARAMETRIZING,
        )
    return value


def dotted_name(*path: str) -> str:
    """A dotted name of those parts that are not empty."""
    return ".".join(part for part in path if part)


_COMPUTED_BY_METRICS = ("_computed", "_forward_cache")  # of their state, for whoever asks again


def _is_the_hosts(one: nn.Module, key: str) -> bool:
    """Whether an attribute is no program's: a metric's results, states of one the host updates."""
    # a Running metric counts in Python which of its states comes next, so the host updates it
    if isinstance(one, Running) and key in one._defaults:
        return True
    return isinstance(one, Metric) and key in _COMPUTED_BY_METRICS


def module_places(module: nn.Module, root: str) -> Iterator[Place]:
    """Parameters, buffers and plain tensor attributes of a module and those in it.

    The states of metrics are such attributes. ``root`` is how the user reaches the module.
    """
    for path, one in module.named_modules():
        owner = dotted_name(root, path)
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
                if isinstance(value, Tensor) and not _is_the_hosts(one, key):
                    if value.layout is not torch.strided:
                        raise UnsupportedState(
                            f"{owner}.{key} is a {value.layout} tensor; a program's are dense.",
                            remedy=f"{owner}.{key} = {owner}.{key}.to_dense() before fit",
                        )
                    yield Place(container, key, f"{owner}.{key}")


def optimizer_places(optimizers: dict[str, Optimizer], names: dict[int, str]) -> Iterator[Place]:
    """The state of all optimizers, and tensors among their groups' numbers (a tensor ``lr``)."""
    for owner, optimizer in optimizers.items():
        for key in optimizer.state:
            yield from tensors_in(optimizer.state, key, entry_name(owner, key, names))
        for g, group in enumerate(optimizer.param_groups):
            for option, value in group.items():
                if isinstance(value, Tensor):
                    yield Place(group, option, f"{owner}.param_groups[{g}]['{option}']")
        for name in own_attributes(optimizer, optimizers.values()):
            yield from tensors_in(vars(optimizer), name, f"{owner}.{name}")


def own_attributes(optimizer: Optimizer, optimizers: Iterable[Optimizer]) -> list[str]:
    """The names of what one of the optimizers keeps beside what each has, and others' state."""
    states = {id(one.state) for one in optimizers}
    own = {key: one for key, one in vars(optimizer).items() if key not in TORCHS_OWN}
    return [key for key, one in own.items() if id(one) not in states]


TORCHS_OWN = {*vars(Optimizer([torch.zeros(())], {})), "step", "_opt_called"}
"""What torch's ``Optimizer`` and its schedulers keep there."""


def entry_name(owner: str, key: Any, names: dict[int, str]) -> str:
    """What messages call an entry of an optimizer's state, by the names of parameters."""
    return f"{owner}.state[{names.get(id(key)) or brief(key)}]"


def tensors_in(container: Any, key: Any, name: str = "") -> Iterator[Place]:
    """The places of tensors in one entry of an optimizer's state, also within dicts and lists."""
    value = container.get(key)
    if isinstance(value, Tensor):
        yield Place(container, key, name)
    elif isinstance(value, dict):
        for inner in value:
            text = brief(inner) if isinstance(inner, Tensor) else repr(inner)
            yield from tensors_in(value, inner, f"{name}[{text}]")
    elif isinstance(value, (list, tuple)):
        of_list = EntryList(container, key)
        for i in range(len(value)):
            yield from tensors_in(of_list, i, f"{name}[{i}]")


def state_inputs(places: Iterable[Place]) -> tuple[StateInput, ...]:
    """Group places by tensor, and tensors by storage."""
    held: dict[int, StateTensor] = {}
    for place in places:
        tensor = place.container[place.key]
        held.setdefault(id(tensor), StateTensor(tensor)).places.append(place)
    storages: dict[Any, list[StateTensor]] = {}
    for one in held.values():
        storages.setdefault(storage_key(one.tensor), []).append(one)
    for group in storages.values():
        # the input over the memory of several has one dtype
        if len({one.tensor.dtype for one in group}) > 1:
            names = " and ".join(one.places[0].name for one in group)
            raise UnsupportedState(
                f"{names} share memory under different dtypes.",
                remedy="give each its own memory (.clone())",
            )
    return tuple(StateInput(tuple(group), whole=len(group) > 1) for group in storages.values())


def storage_key(tensor: Tensor) -> Any:
    """What tensors over one storage have in common."""
    try:
        pointer = resident(tensor).untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without a storage
        pointer = 0
    return pointer or ("none", id(tensor))  # empty tensors have no memory, and share none


def brief(value: Any) -> str:
    """A tensor by dtype and shape, anything else by its type; strings and numbers as they are."""
    if isinstance(value, Tensor):
        return dtype_and_shape(value.dtype, value.shape)
    if isinstance(value, (str, int)):
        return repr(value)
    return "nothing" if value is None else f"a {type(value).__name__}"


def parameter_replaced(name: str, when: str) -> str:
    """What is said of a parameter in whose place another one was put."""
    return (
        f"{name} was replaced by another parameter {when}. The optimizer holds the old one: eagerly"
        " too, the new one would not be trained."
    )


def copying_remedy(name: str) -> str:
    """Code that changes a parameter's value instead."""
    return f"with torch.no_grad(): {name}.copy_(value)"


def dict_of(value: object) -> Any:
    """An object's ``__dict__``, or None; ``__getattr__`` of its class does not run."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
