"""What a step changes in the containers of its batch: hooks after the step find it there.

A trace works on containers of its own. Keys that it adds to a dict of the batch (``batch["pred"] =
y``), replaces or removes, and what it appends to a list, are done again in each batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from operator import getitem
from typing import Any

import torch.utils._pytree as pytree

from fulgurite.backends.csx.contract.watched import watch_container

Path = tuple[Any, ...]
"""Keys and indices that lead from a batch to a container in it."""

OBJECT = object()
"""Ends a path to an object of the batch (``objects``)."""


class BatchChanges:
    """What a step did to the dicts and lists of its batch, to be done again (a ``HostCall``).

    ``before`` is the batch as it was, in other containers; ``added`` are the keys that are new.
    """

    def __init__(self, batch: Any, before: Any) -> None:
        self.added: list[tuple[Path, Any]] = []
        self.value: Any = [
            (watch_container(path), *change) for path, *change in self._of(batch, before, ())
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


def copied(batch: Any) -> Any:
    """A batch in other containers."""
    return pytree.tree_map(lambda leaf: leaf, batch)


def container_at(batch: Any, path: Path) -> Any:
    """A container in a batch, or what stands for an object."""
    return reduce(getitem, (key for key in path if key is not OBJECT), batch)


def without(batch: Any, added: list[tuple[Path, Any]]) -> Any:
    """A batch that comes again, without the keys that an earlier step added to it."""
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
