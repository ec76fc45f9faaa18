"""Where a step on parts gathers a whole tensor, and how long it holds it (``shard_state``).

A whole tensor is held from its first use in the forward pass to its last one there, and once more
in the backward pass: views and lower precisions of it, which autograd keeps from the one for the
other, are made again. Where lower precision is all that a pass uses, that is what is sent. Small
tensors, which take little memory, come in one message and are held as long as anybody needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.backends.csx.diagnostics.user_lines import module_of, split_backward
from fulgurite.backends.csx.graph.op_schema import is_view
from fulgurite.backends.csx.graph.passes.overlap import Message, Operations, nbytes_of, value_of

_ATEN: Any = torch.ops.aten
_CONVERT: Any = torch.ops.prims.convert_element_type.default

HELD_SHARE, HELD_BYTES = 0.25, 2**20
"""Small are those that together take at most this share of the largest one, or so many bytes."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A node that stands for a whole tensor, of which each process has a part.

    Args:
        node: it.
        part: makes the part's node, before the node that is given.
        written: what writes the part at the step's end; operations after it use what was written.
        computed: the part is not there before the step computes it.
    """

    node: fx.Node
    part: Callable[[fx.Node], fx.Node]
    written: fx.Node | None = None
    computed: bool = False


def small_bytes(sizes: list[int]) -> int:
    """Tensors of at most so many bytes are small among those of these sizes."""
    most, total, found = max(HELD_SHARE * max(sizes, default=0), HELD_BYTES), 0, 0
    for size in sorted(sizes):
        total += size
        if total > most:
            break
        found = size
    # of those of one size none is small where not all are
    return found if sum(size for size in sizes if size <= found) <= most else found - 1


class Gathers:
    """The gathered tensors of a graph.

    Args:
        operations: of the graph.
        wholes: what stands for them; gone afterwards.
        small: the bytes of those that are held for the whole step, at most.

    Attributes:
        messages: those of large tensors, each of which is needed where it arrives.
    """

    def __init__(self, operations: Operations, wholes: list[Whole], small: int) -> None:
        self._operations, self.messages = operations, list[Message]()
        used = [one for one in wholes if one.node.users]
        order = operations.order()
        self._ends = {
            one.node: len(order) if one.written is None else order[one.written] for one in used
        }
        self._order = order
        held = [one for one in used if nbytes_of(one.node) <= small and not one.computed]
        for dtype in dict.fromkeys(value_of(one.node).dtype for one in held):
            self._hold([one for one in held if value_of(one.node).dtype == dtype])
        for one in used:
            if one not in held:
                self._gather(one)
        for one in wholes:
            operations.fresh.erase_node(one.node)

    def _users(self, whole: Whole, written: bool) -> list[fx.Node]:
        """Those before, or after, the part is written, in order."""
        users = sorted(whole.node.users, key=self._order.__getitem__)
        return [one for one in users if (self._order[one] > self._ends[whole.node]) is written]

    def _hold(self, wholes: list[Whole]) -> None:
        """Gather small tensors in one message, before the first use of any."""
        users = {one.node: self._users(one, written=False) for one in wholes}
        firsts = [some[0] for some in users.values() if some]
        for one in wholes:
            self._gather_for(one, self._users(one, written=True))
        if not firsts:
            return
        first = min(firsts, key=self._order.__getitem__)
        wholes = [one for one in wholes if users[one.node]]
        do = self._operations
        with do.fresh.inserting_before(first):
            parts = [one.part(first) for one in wholes]
            row = do.flat(do.rows_together(first, parts, 1), first)
            flat = do.gathered(row, first).wait
            rows = do.call(first, _ATEN.reshape.default, flat, [-1, value_of(row).numel()])
            pieces = do.columns(first, rows, [value_of(part).numel() for part in parts])
            for one, piece in zip(wholes, pieces, strict=True):
                gathered = self._shaped(piece, value_of(one.node), first)
                for user in users[one.node]:
                    user.replace_input_with(one.node, gathered)

    def _gather(self, whole: Whole) -> None:
        """Gather a large tensor for each pass."""
        for user in self._users(whole, written=False):
            if user.target is _CONVERT and nbytes_of(user) < nbytes_of(whole.node):
                self._ends[user] = self._ends[whole.node]
                lower = replace(whole, node=user, part=self._cast(whole, value_of(user).dtype))
                self._gather(lower)
                self._operations.fresh.erase_node(user)
        self._view_again(whole.node)
        users = self._users(whole, written=False)
        self._gather_for(whole, [one for one in users if not _is_backward(one)])
        self._gather_for(whole, [one for one in users if _is_backward(one)])
        self._gather_for(whole, self._users(whole, written=True))

    def _cast(self, whole: Whole, dtype: torch.dtype) -> Callable[[fx.Node], fx.Node]:
        return lambda before: self._operations.call(before, _CONVERT, whole.part(before), dtype)

    def _gather_for(self, whole: Whole, users: list[fx.Node]) -> None:
        if users:
            with self._operations.fresh.inserting_before(users[0]):
                message = self._operations.gathered(whole.part(users[0]), users[0])
                gathered = self._shaped(message.wait, value_of(whole.node), users[0])
            self.messages.append(message)
            for user in users:
                user.replace_input_with(whole.node, gathered)

    def _shaped(self, flat: fx.Node, value: Tensor, like: fx.Node) -> fx.Node:
        """The whole tensor of a flat one, without the padding at its end, in its own shape."""
        do = self._operations
        if value_of(flat).numel() > value.numel():
            flat = do.call(like, _ATEN.slice.Tensor, flat, 0, 0, value.numel())
        return do.call(like, _ATEN.reshape.default, flat, list(value.shape))

    def _view_again(self, viewed: fx.Node) -> None:
        """Give backward passes views of their own: one of the forward pass would keep the whole."""
        for view in [one for one in viewed.users if is_view(one.target)]:
            self._view_again(view)
            later = [one for one in view.users if _is_backward(one)]
            if later and not _is_backward(view):
                first = min(later, key=self._order.__getitem__)
                with self._operations.fresh.inserting_before(first):
                    again = self._operations.fresh.node_copy(view)
                again.meta = {**first.meta, "val": value_of(view)}
                self._order[again] = self._order[first]
                for user in later:
                    user.replace_input_with(view, again)
                if not view.users:
                    self._operations.fresh.erase_node(view)


def _is_backward(node: fx.Node) -> bool:
    return split_backward(module_of(node))[1]
