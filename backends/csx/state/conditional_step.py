"""A step of an optimizer that may not count: where a tensor says so, its writes are taken back.

Eagerly the host decides whether ``optimizer.step()`` is called. Here it always runs, and every
state that it wrote becomes ``torch.where(skip, before, after)``: parameters, the optimizer's state,
and what hooks on the step changed. What was written is read off the recorded operations, so it does
not matter through which tensor (``p``, ``p.data``, a view) that happened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_innermost_proxy_mode

from fulgurite.backends.csx.graph.graph import storage_of
from fulgurite.backends.csx.state.storage import Slot, StateTensor


@contextlib.contextmanager
def skipped_where(skip: Tensor, state: Iterable[StateTensor]) -> Iterator[None]:
    """Let what the block writes hold only where ``skip``, a bool without dimensions, is False.

    Args:
        skip: whether the block does not count.
        state: the tensors of the program.
    """
    mode = get_innermost_proxy_mode()
    assert mode is not None
    graph = mode.tracer.graph
    first = next(reversed(graph.nodes))
    # the forward pass may have put another tensor into a slot: that one counts
    slots = [(slot, slot.container.get(slot.key), h.tensor) for h in state for slot in h.slots]
    found = [now if isinstance(now, Tensor) else tensor for _, now, tensor in slots]
    with torch.no_grad():
        before = {id(t): (t, t.detach().clone(), storage_of(t)) for t in found}
    last = next(reversed(graph.nodes))
    yield
    written = _written_after(last)
    with torch.no_grad():
        for tensor, value, storage in before.values():
            if storage in written or storage_of(tensor) != storage:
                tensor.copy_(torch.where(skip, value, tensor))
        _choose_replacements(
            skip, [(slot, t, before[id(t)][1]) for (slot, *_), t in zip(slots, found, strict=True)]
        )
    _drop_unused(first, last)


def _choose_replacements(skip: Tensor, slots: list[tuple[Slot, Tensor, Tensor]]) -> None:
    """The same for slots that the block put another tensor into.

    Args:
        skip: whether the block does not count.
        slots: each with its tensor before the block, and a copy of that.
    """
    chosen: dict[int, Tensor] = {}
    for slot, tensor, before in slots:
        now = slot.container.get(slot.key)
        if now is tensor or not isinstance(now, Tensor):
            continue
        if (now.shape, now.dtype) == (before.shape, before.dtype):  # else an error, at the end
            if id(now) not in chosen:
                chosen[id(now)] = torch.where(skip, before, now)
            slot.container[slot.key] = chosen[id(now)]


def _drop_unused(first: fx.Node, last: fx.Node) -> None:
    """Erase copies that nobody needed, after ``first`` up to ``last``: none counts as a reading."""
    while last is not first:
        node, last = last, last.prev
        if not node.users:
            node.graph.erase_node(node)


def _choose_replacement(skip: Tensor, held: StateTensor, before: Tensor) -> None:
    """The same for slots that the block put another tensor into."""
    chosen: dict[int, Tensor] = {}
    for slot in held.slots:
        now = slot.container.get(slot.key)
        if now is held.tensor or not isinstance(now, Tensor):
            continue
        if (now.shape, now.dtype) == (before.shape, before.dtype):  # else an error, at the end
            if id(now) not in chosen:
                chosen[id(now)] = torch.where(skip, before, now)
            slot.container[slot.key] = chosen[id(now)]


def _written_after(node: fx.Node) -> set[int]:
    """The memory that operations after ``node`` write."""
    written: set[int] = set()
    while (node := node.next).op != "root":
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        given = dict(zip((a.name for a in schema.arguments), node.args, strict=False))
        given.update(node.kwargs)
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                nodes = pytree.tree_leaves(given.get(argument.name))
                values = [n.meta.get("val") for n in nodes if isinstance(n, fx.Node)]
                written |= {storage_of(value) for value in values if isinstance(value, Tensor)}
    return written
