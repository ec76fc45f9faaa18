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

from fulgurite.backends.csx.stand_ins import storage_of
from fulgurite.backends.csx.state import Held


@contextlib.contextmanager
def skipped_where(skip: Tensor, state: Iterable[Held]) -> Iterator[None]:
    """Let what the block writes hold only where ``skip``, a bool without dimensions, is False.

    Args:
        skip: whether the block does not count.
        state: the tensors of the program.
    """
    mode = get_innermost_proxy_mode()
    assert mode is not None
    with torch.no_grad():  # copies that nobody needs are dropped with other dead operations
        before = [(h, h.tensor.detach().clone(), storage_of(h.tensor)) for h in state]
    last = next(reversed(mode.tracer.graph.nodes))
    yield
    written = _written_after(last)
    with torch.no_grad():
        for held, value, storage in before:
            if storage in written or storage_of(held.tensor) != storage:
                held.tensor.copy_(torch.where(skip, value, held.tensor))
            _choose_replacement(skip, held, value)


def _choose_replacement(skip: Tensor, held: Held, before: Tensor) -> None:
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
