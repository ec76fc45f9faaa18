"""The Python state of objects, remembered before a trace or a trial and put back after it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fulgurite.backends.csx.state.storage import brief
from fulgurite.backends.interrupts import shielded

_CONTAINERS = (dict, list, set)


def dict_kind(item: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Whose methods see a dict as it is: a subclass's own may make its elements when asked."""
    return OrderedDict if isinstance(item, OrderedDict) else dict


def elements(item: dict[Any, Any]) -> dict[Any, Any]:
    """What a dict holds, in its order."""
    return dict(dict_kind(item).items(item))


def _refill_ordered(item: OrderedDict[Any, Any], before: dict[Any, Any]) -> None:
    for key, value in before.items():
        OrderedDict.__setitem__(item, key, value)


_REFILL: dict[Any, Callable[[Any, Any], None]] = {
    OrderedDict: _refill_ordered,  # before dict, whose clear would break its order
    dict: dict.update,
    list: list.extend,
    set: set.update,
}


class Snapshot:
    """The Python state of objects, to be put back after a failed trace.

    Attribute dicts are copied, and the dicts, lists and sets in them, three levels deep; the
    objects that they hold are not.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        self._before: dict[int, tuple[Any, Any, str, object]] = {}
        for item in objects:
            self._keep(vars(item), 4, type(item).__name__, item)

    def _keep(self, container: Any, levels: int, name: str, root: object) -> None:
        if id(container) in self._before or not levels:
            return
        copy = elements(container) if isinstance(container, dict) else container.copy()
        self._before[id(container)] = (container, copy, name, root)
        items = copy.items() if isinstance(copy, dict) else enumerate(copy)
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
        with shielded(), torch.no_grad():
            snapshot.restore()
            for tensor, value in values:
                tensor.copy_(value)

    return restore


def _holds_the_same(container: Any, copy: Any) -> bool:
    if len(container) != len(copy):
        return False
    if isinstance(container, dict):
        pairs = zip(elements(container).items(), copy.items(), strict=True)
        return all(a is c and b is d for (a, b), (c, d) in pairs)
    return isinstance(container, list) and all(map(is_, container, copy))
