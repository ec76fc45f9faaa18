"""The batch of a program: what its leaves must look like, checked on every call.

A program does not check what it is given: a float64 batch into a float32 program returned garbage
(measured), so this does. Tensors with other strides are brought to the traced layout. Numbers and
strings in a batch are constants of the program; one that the step read may not change. Other
objects can only be passed on.

A trace works on containers of its own. Keys that it adds to a dict of the batch (``batch["pred"] =
y``), replaces or removes, and what it appends to a list, are done again in each batch
(``BatchChanges``): hooks after the step find it there.

A program has fixed shapes. Where batches come in a few, each gets a program; where they come in
many, the user has to pad them, or to put those of a size together (``VaryingDimension``).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fulgurite.backends.csx.contract import make_container_proxy, make_object_proxy, make_proxy
from fulgurite.backends.csx.diagnostics.trace_errors import InputChanged, UnsupportedInput
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, user_line
from fulgurite.backends.csx.state import dtype_and_shape

Path = tuple[Any, ...]
"""Keys and indices that lead from a batch to a container in it."""

OBJECT = object()
"""Ends a path to an object of the batch (``batch_objects``)."""


class BatchChanges:
    """What a step did to the dicts and lists of its batch, to be done again (a ``HostCall``).

    ``before`` is the batch as it was, in other containers; ``added`` are the keys that are new.
    """

    def __init__(self, batch: Any, before: Any) -> None:
        self.added: list[tuple[Path, Any]] = []
        self.value: Any = [
            (make_container_proxy(path), *change) for path, *change in self._of(batch, before, ())
        ]

    def _of(self, now: Any, before: Any, path: Path) -> Iterator[Any]:
        """(path, what is set, what is appended, which keys go) of each container."""
        if isinstance(now, dict):
            gone = [key for key in before if key not in now]
            self.added += [(path, key) for key in now if key not in before]
            items: Iterable[Any] = now.items()
        elif isinstance(now, list):
            gone, items = [], enumerate(now[: len(before)])
        else:
            if isinstance(now, tuple):
                for i, (one, other) in enumerate(zip(now, before, strict=True)):
                    yield from self._of(one, other, (*path, i))
            return
        put = []
        known = before if isinstance(before, dict) else range(len(before))
        for key, value in items:
            old = before[key] if key in known else None
            if _is_container(value) and _alike(value, old):
                yield from self._of(value, old, (*path, key))
            elif key not in known or value is not old:
                put.append((key, value))
        more = now[len(before) :] if isinstance(now, list) else []
        if put or more or gone:
            yield path, put, more, gone

    def __call__(self, value: Any) -> None:
        """Change this batch."""
        for container, put, more, gone in value:
            for key, new in put:
                container[key] = new
            if more:
                container.extend(more)
            for key in gone:
                container.pop(key, None)


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple))


def _alike(now: Any, before: Any) -> bool:
    """Whether a container is in the place of one of its kind, a tuple one of its length."""
    return type(now) is type(before) and (not isinstance(now, tuple) or len(now) == len(before))


def copy_containers(batch: Any) -> Any:
    """A batch in new containers that hold the same: what a step does to the old ones shows."""
    return pytree.tree_map(lambda leaf: leaf, batch)


def container_at(batch: Any, path: Path) -> Any:
    """A container in a batch, or what stands for an object."""
    return reduce(getitem, (key for key in path if key is not OBJECT), batch)


def without_added_keys(batch: Any, added: list[tuple[Path, Any]]) -> Any:
    """A batch without the keys that an earlier step added to it.

    A loader over a list of batches gives each dict again in every epoch, with those keys in it.
    """
    for path, key in added:
        batch = _without(batch, path, key)
    return batch


def _without(batch: Any, path: Path, key: Any) -> Any:
    if not isinstance(batch, dict) or (path[0] if path else key) not in batch:
        return batch
    if not path:
        rest = batch.copy()
        del rest[key]
        return rest
    inner = _without(batch[path[0]], path[1:], key)
    return batch if inner is batch[path[0]] else {**batch, path[0]: inner}


SHAPES = 4
"""How many shapes of batches get a program each, unless the backend was told another number."""

Shapes = Mapping[str, torch.Size]
"""Of the tensors of a batch, by their names."""


def shapes_of(batch: Any, name: Callable[[Any], str]) -> dict[str, torch.Size]:
    """The shapes of a batch's tensors; ``name`` makes a name of a path in it."""
    paths, _ = pytree.tree_flatten_with_path(batch)
    return {name(path): leaf.shape for path, leaf in paths if isinstance(leaf, Tensor)}


class VaryingDimension(NamedTuple):
    """A dimension of a tensor that is not the same in all batches."""

    name: str
    dimension: int
    dimensions: int  # of the tensor
    sizes: tuple[int, ...]  # that were seen, ascending

    def __str__(self) -> str:
        *others, last = map(str, self.sizes)
        return f"{self.name}, dimension {self.dimension}: {', '.join(others)} and {last} seen"

    def buckets(self) -> str:
        """Code that brings batches to a few sizes."""
        if self.dimension == 0 and len(self.sizes) > 2:  # not the last batch alone
            return "batches of as many rows, padded in collate_fn, and a mask"
        if self.dimension == 0:
            return "batches of one size, DataLoader(drop_last=True)"
        sizes = sorted({-(-self.sizes[-1] * part // 24) * 8 for part in (1, 2, 3)})
        dim = "" if self.dimension == 1 else f", dim={self.dimension}"
        return (
            "fulgurite.utils.data.PadToBuckets(collate_fn,"
            f" sizes={tuple(sizes)}{dim}) as collate_fn"
        )

    def remedy(self) -> str:
        """Code that pads, and what else there is."""
        size, i = -(-self.sizes[-1] // 8) * 8, self.dimension
        before = "0, 0, " * (self.dimensions - 1 - i)
        return (
            f"pad to one size, in collate_fn or the dataset ({size} here, and a mask where padding"
            " must not count):\n"
            f"      x = torch.nn.functional.pad(x, ({before}0, {size} - x.shape[{i}]))\n"
            "    or to the next of a few sizes (buckets), each of which gets a program"
        )


def told_of_shapes(stage: str, found: list[VaryingDimension], most: int) -> str:
    """What becomes of batches of more shapes than ``most`` where that is no error, in a line."""
    seen = f" ({'; '.join(map(str, found))})" if found else ""
    hardest = min(found, key=lambda one: (one.dimension, -len(one.sizes)), default=None)
    faster = "batches of one structure" if hardest is None else hardest.buckets()
    return (
        f"{stage} batches have more than {most} shapes{seen}. {most} are compiled; batches of any"
        " other run as in Lightning, at its speed (in several processes, with a loss scale and"
        f" under weight streaming they are traced each time). Faster: {faster}; or max_programs=n"
        " compiles n"
    )


def too_many_shapes(stage: str, found: list[VaryingDimension], most: int) -> InputChanged:
    """The error for batches of more shapes than ``most``, each of which has a program."""
    return InputChanged(
        f"The {stage} step needs another program: {'; '.join(map(str, found))}. Each shape is a"
        f" program of its own, and {most} may be built.",
        remedy=f"{found[0].remedy()}; or backend('CSX', max_programs=n), for n of them",
    )


def varying_dimensions(batches: Iterable[Shapes]) -> list[VaryingDimension]:
    """The dimensions in which tensors of these batches differ."""
    first, *others = batches
    found = []
    for name, shape in first.items():
        shapes = {shape, *(other[name] for other in others if name in other)}
        if len({len(one) for one in shapes}) == 1:
            for i, sizes in enumerate(zip(*shapes, strict=True)):
                if len(set(sizes)) > 1:
                    found.append(VaryingDimension(name, i, len(shape), tuple(sorted(set(sizes)))))
    return found


CONSTANTS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_TENSOR, _NONE, _OTHER = "a tensor", "None", "another object"


@dataclass(frozen=True, slots=True)
class Leaf:
    """What a program expects of one leaf: a tensor's layout, or a constant's value.

    Of another object (``opaque``) the value is its type.
    """

    name: str
    shape: torch.Size | None
    stride: tuple[int, ...]
    dtype: torch.dtype | None
    value: Any
    opaque: bool = False

    @property
    def sort(self) -> str:
        """Whether it is a tensor, None, or something else."""
        if self.shape is not None:
            return _TENSOR
        return _NONE if self.value is None else _OTHER

    @property
    def kind(self) -> str:
        """What it is, in words."""
        if self.opaque:
            return f"a {self.value.__name__}"
        if self.shape is None or self.dtype is None:
            return f"constant {self.value!r}"
        return dtype_and_shape(self.dtype, self.shape)

    def __str__(self) -> str:
        return f"{self.name}: {self.kind}"


class BatchSpec:
    """Structure, shapes, dtypes and constants of the batch that a program was traced with.

    Args:
        batch: that batch.
        name: the user's name of a leaf, by its path in the batch.

    Raises:
        UnsupportedInput: a tensor is not dense.
    """

    def __init__(self, batch: Any, name: Callable[[Any], str]) -> None:
        paths, self._tree = pytree.tree_flatten_with_path(batch)
        self.leaves = tuple(_leaf(name(path), value) for path, value in paths)
        self._kind = type(batch)
        children = self._tree.children() if self._kind in (tuple, list) else ()
        self._flat = bool(children) and all(child.is_leaf() for child in children)
        self.read: dict[int, UserLine | None] = {}  # by what line
        self._tensors = [i for i, leaf in enumerate(self.leaves) if leaf.shape is not None]
        self._expected = [
            (i, leaf.shape, leaf.dtype, leaf.stride)
            for i, leaf in enumerate(self.leaves)
            if leaf.shape is not None
        ]
        self._constants = [(i, leaf) for i, leaf in enumerate(self.leaves) if leaf.shape is None]

    def tensors(self, batch: Any) -> list[Tensor]:
        """The tensor leaves of a batch of this structure, unchecked."""
        leaves = pytree.tree_leaves(batch)
        return [leaves[i] for i in self._tensors]

    def with_tensors(self, batch: Any, tensors: list[Tensor]) -> Any:
        """A batch of this structure with other tensors: those that ``accept`` returned."""
        leaves = pytree.tree_leaves(batch)
        for i, tensor in zip(self._tensors, tensors, strict=True):
            leaves[i] = tensor
        return pytree.tree_unflatten(leaves, self._tree)

    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of the tensors, by their names."""
        return {leaf.name: leaf.shape for leaf in self.leaves if leaf.shape is not None}

    def tensor_leaves(self) -> list[Leaf]:
        """What is expected of the tensors, in order."""
        return [self.leaves[i] for i in self._tensors]

    def rebuild(self, tensors: list[Tensor]) -> Any:
        """The traced batch with other tensors in it, and its constants watched."""
        given = iter(tensors)
        leaves = [
            next(given) if leaf.shape is not None else self._watch(i, leaf)
            for i, leaf in enumerate(self.leaves)
        ]
        return pytree.tree_unflatten(leaves, self._tree)

    def _watch(self, i: int, leaf: Leaf) -> Any:
        def note() -> None:
            self.read.setdefault(i, user_line())

        def refuse() -> None:
            raise UnsupportedInput(
                f"{leaf.name} is a {leaf.value.__name__}, which a step can only pass on: into its"
                " result, an attribute, a list. It works on tensors, numbers, strings and None in"
                " lists, tuples, dicts and named tuples.",
                line=user_line(),
                remedy="turn it into a dict of tensors in collate_fn or on_after_batch_transfer",
            )

        if leaf.opaque:
            return make_object_proxy(leaf.value, refuse, note, i)
        return make_proxy(leaf.value, note, i)

    def accept(self, batch: Any) -> list[Tensor] | None:
        """The tensors of a batch in the traced layout; None if a shape or a list's length differs.

        Raises:
            InputChanged: another structure or dtype, or a constant that the step read.
        """
        # every step comes here: a tuple of tensors is its own list of leaves
        if self._flat and type(batch) is self._kind and len(batch) == len(self.leaves):
            leaves = batch
        else:
            leaves, tree = pytree.tree_flatten(batch)
            if tree != self._tree:
                now = (_sort(leaf) for leaf in leaves)
                before = (leaf.sort for leaf in self.leaves)
                if _is_same_but_for_lengths(tree, self._tree, now, before):
                    return None
                raise InputChanged(
                    f"The batch has another structure than the traced one: it was"
                    f" {_structure(self._tree)}, and now is {_structure(tree)}.",
                    remedy="return batches of one structure from the dataset or collate_fn",
                )
        tensors, fits = [], True
        for i, shape, dtype, stride in self._expected:
            tensor = leaves[i]
            if tensor is None:
                return None
            if not isinstance(tensor, Tensor) or tensor.dtype is not dtype:
                raise InputChanged(
                    f"{self.leaves[i].name} was {self.leaves[i].kind} when the program was built,"
                    f" and now is {_kind_of(tensor)}.",
                    remedy=f"bring it to {dtype} in the dataset or collate_fn",
                )
            if tensor.shape != shape:  # of all dtypes first: those are errors, another shape is not
                fits = False
            elif tensor.stride() != stride:
                laid_out = torch.empty_strided(shape, stride, dtype=dtype)
                tensor = laid_out.copy_(tensor)
            tensors.append(tensor)
        if self._constants and not self._constants_fit(leaves):
            return None
        return tensors if fits else None

    def _constants_fit(self, leaves: Any) -> bool:
        """Check them; False where a tensor is in the place of None."""
        for i, leaf in self._constants:
            if leaf.value is None and isinstance(leaves[i], Tensor):
                return False
            kind = leaf.value if leaf.opaque else type(leaf.value)
            # an object that was only passed on may be of any class
            if type(leaves[i]) is not kind and (i in self.read or not leaf.opaque):
                raise InputChanged(
                    f"{leaf.name} was {leaf.kind} when the program was built, and now is"
                    f" {_kind_of(leaves[i])}.",
                    remedy="return batches of one structure from the dataset or collate_fn",
                )
            if i in self.read and not leaf.opaque and leaves[i] != leaf.value:
                raise InputChanged(
                    f"{leaf.name} was {leaf.value!r} when the step was traced and read it, and now"
                    f" is {leaves[i]!r}. It is a constant of the program.",
                    remedy=f"for a branch, in on_train_batch_start: self.chosen = {leaf.name}, and"
                    " if self.chosen: in the step; in a computation, torch.where(t, a, b) with a"
                    f" tensor of the dataset: torch.tensor({leaves[i]!r})"
                    if isinstance(leaves[i], bool)
                    else f"make it a tensor in the dataset: torch.tensor({leaves[i]!r})"
                    if isinstance(leaves[i], (int, float))
                    else "make it a tensor (an index, a mask) in the dataset; to keep it"
                    " beside a result, return it from the step, to a hook such as"
                    " on_train_batch_end",
                    line=self.read[i],
                )
        return True

    def difference(self, batch: Any) -> str:
        """In words, how the shapes of a batch differ from the traced ones."""
        leaves, tree = pytree.tree_flatten(batch)
        if tree != self._tree:
            built_for = _structure(self._tree)
            return f"the batch is {_structure(tree)}, and the program was built for {built_for}"
        parts = [
            f"{leaf.name} is {_kind_of(now)}, and the program was built for {leaf.kind}"
            if now is None or leaf.shape is None
            else f"{leaf.name} has shape {list(now.shape)}, and the program was built for"
            f" {list(leaf.shape)}"
            for leaf, now in zip(self.leaves, leaves, strict=True)
            if _sort(now) != leaf.sort or (leaf.shape is not None and now.shape != leaf.shape)
        ]
        return "; ".join(parts)


def _leaf(name: str, value: Any) -> Leaf:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise UnsupportedInput(
                f"{name} is a {value.layout} tensor; a program takes dense ones.",
                remedy=".to_dense() in the dataset or collate_fn",
            )
        stride = value.stride()
        # of an expanded tensor elements share memory: no other batch could be copied into that
        if not value.is_contiguous() and 0 in stride:
            stride = torch.empty(value.shape, device="meta").stride()
        return Leaf(name, value.shape, stride, value.dtype, None)
    if isinstance(value, CONSTANTS):
        return Leaf(name, None, (), None, value)
    return Leaf(name, None, (), None, type(value), opaque=True)


def _kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return dtype_and_shape(value.dtype, value.shape)
    if not isinstance(value, CONSTANTS):
        return f"a {type(value).__name__}"
    return "None" if value is None else f"{type(value).__name__} {value!r}"


def _is_same_but_for_lengths(
    a: pytree.TreeSpec, b: pytree.TreeSpec, ours: Iterator[str], others: Iterator[str]
) -> bool:
    """Whether two batches differ in nothing but None in the place of a part, as a CombinedLoader's
    ``max_size`` gives it, and in how many leaves are in their lists, and in tuples of no tensors:
    ``default_collate`` makes one of the strings of a batch.

    ``ours`` and ``others`` say of each leaf what it is.
    """
    if a.is_leaf() or b.is_leaf():
        mine = [*itertools.islice(ours, a.num_leaves)]
        theirs = [*itertools.islice(others, b.num_leaves)]
        both_leaves = a.is_leaf() and b.is_leaf()
        return [_NONE] in (mine, theirs) or (both_leaves and mine == theirs)
    children = a.children(), b.children()
    if a.type is b.type and all(one.is_leaf() for both in children for one in both):
        sorts = [*itertools.islice(ours, len(children[0]))]
        sorts += itertools.islice(others, len(children[1]))
        if a.type is list or (a.type is tuple and _TENSOR not in sorts):
            return True
        return (a.context, len(children[0])) == (b.context, len(children[1]))
    return (a.type, a.context, len(children[0])) == (b.type, b.context, len(children[1])) and all(
        _is_same_but_for_lengths(one, other, ours, others)
        for one, other in zip(*children, strict=True)
    )


def _sort(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return _TENSOR
    return _NONE if leaf is None else _OTHER


def _structure(tree: pytree.TreeSpec) -> str:
    placeholder = pytree.tree_unflatten(["*"] * tree.num_leaves, tree)
    text = str(placeholder).replace("'*'", "*")
    return re.sub(r"\*(, \*){7,}", lambda row: f"{row[0].count('*')} elements", text)
