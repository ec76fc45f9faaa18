"""The batch of a program: what its leaves must look like, checked on every call.

A program does not check what it is given: a float64 batch into a float32 program returned garbage
(measured), so this does. Tensors with other strides are brought to the traced layout. Numbers and
strings in a batch are constants of the program; one that the step read may not change. Other
objects can only be passed on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fulgurite.backends.csx.contract.watched import watch, watch_object
from fulgurite.backends.csx.diagnostics.errors import InputChanged, UnsupportedInput
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, user_line
from fulgurite.backends.csx.state.storage import dtype_and_shape

CONSTANTS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_ENDED = (
    "of a CombinedLoader, mode='max_size_cycle' or 'min_size', for 'max_size' gives None where a"
    " loader has ended"
)


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
            return watch_object(leaf.value, refuse, note, i)
        return watch(leaf.value, note, i)

    def accept(self, batch: Any) -> list[Tensor] | None:
        """The tensors of a batch in the traced layout; None if a shape or a list's length differs.

        Raises:
            InputChanged: another structure or dtype, or a constant that the step read.
        """
        if self._flat and type(batch) is self._kind and len(batch) == len(self.leaves):
            leaves = batch
        else:
            leaves, tree = pytree.tree_flatten(batch)
            if tree != self._tree:
                now = (isinstance(leaf, Tensor) for leaf in leaves)
                before = (leaf.shape is not None for leaf in self.leaves)
                if _is_same_but_for_lengths(tree, self._tree, now, before):
                    return None
                remedy = "return batches of one structure from the dataset or collate_fn"
                if any(leaf is None for leaf in leaves):
                    remedy += f"; {_ENDED}"
                raise InputChanged(
                    f"The batch has another structure than the traced one: it was"
                    f" {_structure(self._tree)}, and now is {_structure(tree)}.",
                    remedy=remedy,
                )
        tensors, fits = [], True
        for i, shape, dtype, stride in self._expected:
            tensor = leaves[i]
            if not isinstance(tensor, Tensor) or tensor.dtype is not dtype:
                bring = f"bring it to {dtype} in the dataset or collate_fn"
                raise InputChanged(
                    f"{self.leaves[i].name} was {self.leaves[i].kind} when the program was built,"
                    f" and now is {_kind_of(tensor)}.",
                    remedy=f"a tensor in every batch; {_ENDED}" if tensor is None else bring,
                )
            if tensor.shape != shape:
                fits = False
            elif tensor.stride() != stride:
                laid_out = torch.empty_strided(shape, stride, dtype=dtype)
                tensor = laid_out.copy_(tensor)
            tensors.append(tensor)
        if self._constants:
            self._check_constants(leaves)
        return tensors if fits else None

    def _check_constants(self, leaves: Any) -> None:
        for i, leaf in self._constants:
            kind = leaf.value if leaf.opaque else type(leaf.value)
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
                    remedy=f"make it a tensor in the dataset: torch.tensor({leaves[i]!r})"
                    if isinstance(leaves[i], (int, float))
                    else "make it a tensor (an index, a mask) in the dataset; to keep it"
                    " beside a result, return it from the step, to a hook such as"
                    " on_train_batch_end",
                    line=self.read[i],
                )

    def difference(self, batch: Any) -> str:
        """In words, how the shapes of a batch differ from the traced ones."""
        leaves, tree = pytree.tree_flatten(batch)
        if tree != self._tree:
            built_for = _structure(self._tree)
            return f"the batch is {_structure(tree)}, and the program was built for {built_for}"
        parts = [
            f"{self.leaves[i].name} has shape {list(leaves[i].shape)}, and the program was built"
            f" for {list(shape)}"
            for i, shape, _, _ in self._expected
            if leaves[i].shape != shape
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
    return f"{type(value).__name__} {value!r}"


def _is_same_but_for_lengths(
    a: pytree.TreeSpec, b: pytree.TreeSpec, ours: Iterator[bool], others: Iterator[bool]
) -> bool:
    """Whether two batches differ in nothing but how many leaves are in their lists, and in tuples
    of no tensors: ``default_collate`` makes one of the strings of a batch.

    ``ours`` and ``others`` say of each leaf whether it is a tensor.
    """
    if a.is_leaf() and b.is_leaf():
        return next(ours) is next(others)
    children = a.children(), b.children()
    if a.type is b.type and all(one.is_leaf() for both in children for one in both):
        tensors = [*itertools.islice(ours, len(children[0]))]
        tensors += itertools.islice(others, len(children[1]))
        if a.type is list or (a.type is tuple and not any(tensors)):
            return True
        return (a.context, len(children[0])) == (b.context, len(children[1]))
    return (a.type, a.context, len(children[0])) == (b.type, b.context, len(children[1])) and all(
        _is_same_but_for_lengths(one, other, ours, others)
        for one, other in zip(*children, strict=True)
    )


def _structure(tree: pytree.TreeSpec) -> str:
    placeholder = pytree.tree_unflatten(["*"] * tree.num_leaves, tree)
    return str(placeholder).replace("'*'", "*")
