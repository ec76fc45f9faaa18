"""Lists of modules that the step appends to: outputs, unless it reads them too.

``self.outs.append(loss)`` is Lightning's idiom for collecting outputs, and works: what a step
appended is appended after every step. A step that also *reads* the list (``len``, an index,
``torch.stack(self.outs)``) would see the list as it was in the first step, for ever.

While a step is traced, the user's code gets a proxy for such a list, which notes reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from fulgurite.backends.csx.diagnostics.user_lines import UserLine


class WatchedList(list[Any]):
    """Stands for the list ``original`` while a step is traced; ``line`` is the user's, now."""

    __slots__ = ("changed_at", "cleared", "line", "original", "read_at")

    def __init__(self, original: list[Any], line: Callable[[], UserLine | None]) -> None:
        super().__init__(original)
        self.original, self.line = original, line
        self.read_at: UserLine | None = None
        self.changed_at: UserLine | None = None
        self.cleared = False

    def note_read(self) -> None:
        """Somebody looks at the content; what the step itself put there is no other step's."""
        if self.read_at is None and not self.cleared:
            self.read_at = self.line()

    def note_change(self) -> None:
        """Somebody adds to the content."""
        self.changed_at = self.line()

    def clear(self) -> None:
        """Empty it."""
        super().clear()
        self.note_change()
        self.cleared = True

    def content(self) -> list[Any]:
        """What it holds, without noting a read."""
        return list(list.__iter__(self))


def _noting(name: str, note: Callable[[WatchedList], None]) -> Callable[..., Any]:
    original = getattr(list, name)

    def method(self: WatchedList, *args: Any, **kwargs: Any) -> Any:
        note(self)
        return original(self, *args, **kwargs)

    return method


_OPERATORS = ("len", "iter", "getitem", "delitem", "contains", "reversed", "eq", "repr")
_METHODS = ("index", "count", "copy", "pop", "remove", "insert", "sort", "reverse")
for _name in (*(f"__{name}__" for name in _OPERATORS), *_METHODS):
    setattr(WatchedList, _name, _noting(_name, WatchedList.note_read))
for _name in ("append", "extend", "__iadd__", "__setitem__"):
    setattr(WatchedList, _name, _noting(_name, WatchedList.note_change))

pytree.register_pytree_node(  # results of a step, arguments of a checkpoint
    WatchedList,
    lambda watched: (list(watched), None),
    lambda leaves, _: list(leaves),
    serialized_type_name=f"{__name__}.{WatchedList.__name__}",
)


def may_collect(values: list[Any]) -> bool:
    """Whether outputs may be collected in a list: it is empty, or holds tensors already."""
    return not values or any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(values))


def note_lists(arguments: Iterable[Any]) -> None:
    """Note the lists among a torch function's arguments: it reads them past their methods."""
    for argument in arguments:
        if type(argument) is WatchedList:
            argument.note_read()
