"""Updates of an optimizer that may not count.

Eagerly the host decides whether ``optimizer.step()`` is called. Here it always runs, and a tensor
can cancel it: every state that it wrote becomes ``torch.where(skip, before, after)``: parameters,
the optimizer's state, and what hooks on the step changed (``skipped_where``). What was written is
read off the recorded operations, so it does not matter through which tensor (``p``, ``p.data``, a
view) that happened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, fx

from fulgurite.backends.csx.graph.graph import storage_of
from fulgurite.backends.csx.graph.op_schema import written_nodes
from fulgurite.backends.csx.graph.recorder import recorder
from fulgurite.backends.csx.state.storage import Place, StateTensor
from fulgurite.backends.torch_versions import last_node


@contextlib.contextmanager
def skipped_where(skip: Tensor, state: Iterable[StateTensor]) -> Iterator[None]:
    """Let what the block writes hold only where ``skip``, a bool without dimensions, is False.

    Args:
        skip: whether the block does not count.
        state: the tensors of the program.
    """
    graph = recorder().graph
    first = last_node(graph)
    # the forward pass may have put another tensor into a place: that one counts
    places = [place for held in state for place in held.places]
    tensors = [held.tensor for held in state for _ in held.places]
    values = [place.get() for place in places]
    found = [v if isinstance(v, Tensor) else t for v, t in zip(values, tensors, strict=True)]
    with torch.no_grad():
        # of all, for nobody knows yet what the block writes; what it does not is dropped at the end
        before = {id(t): (t, t.detach().clone(), storage_of(t)) for t in found}
    last = last_node(graph)
    yield
    written = _written_after(last)
    with torch.no_grad():
        for tensor, value, storage in before.values():
            # written in place, or moved to other memory by ``tensor.data = value``
            if storage in written or storage_of(tensor) != storage:
                tensor.copy_(torch.where(skip, value, tensor))
        _choose_replacements(
            skip, [(place, t, before[id(t)][1]) for place, t in zip(places, found, strict=True)]
        )
    _drop_unused(first, last)


def _choose_replacements(skip: Tensor, places: list[tuple[Place, Tensor, Tensor]]) -> None:
    """Let what the block put into places hold only where ``skip`` is False.

    Each of ``places`` comes with its tensor before the block, and a copy of that tensor.
    """
    chosen: dict[int, Tensor] = {}  # by what was put there: tied places stay one tensor
    for place, tensor, before in places:
        now = place.get()
        if now is tensor or not isinstance(now, Tensor):
            continue
        if (now.shape, now.dtype) == (before.shape, before.dtype):  # else an error, at the end
            if id(now) not in chosen:
                chosen[id(now)] = torch.where(skip, before, now)
            place.put(chosen[id(now)])


def _drop_unused(first: fx.Node, last: fx.Node) -> None:
    """Erase the copies after ``first`` up to ``last`` that nobody needed.

    A copy that stayed would count as a read of the state that it is of.
    """
    while last is not first:
        node, last = last, last.prev
        if not node.users:
            node.graph.erase_node(node)


def _written_after(node: fx.Node) -> set[int]:
    """The memory that operations after ``node`` write."""
    memory: set[int] = set()
    while (node := node.next).op != "root":
        values = [written.meta.get("val") for written in written_nodes(node)]
        memory |= {storage_of(value) for value in values if isinstance(value, Tensor)}
    return memory
