"""What tensors of a trace are called in messages.

State goes by the place that holds it (``self.head.weight``), the batch by its path
(``batch[0]``), the rest by what made it: ``The result of layer_norm, model.py:41``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fulgurite.backends.csx.diagnostics.user_lines import UserLine, line_of
from fulgurite.backends.csx.state.storage import StateInput, brief


class Names:
    """The names of one trace's tensors.

    Args:
        state: the state.

    Attributes:
        tracker: which node of the graph each tensor is, as the tracer knows it.
        made_by: the torch function that each tensor came from.
    """

    def __init__(self, state: Iterable[StateInput]) -> None:
        self._given = {
            id(held.tensor): held.places[0].name for item in state for held in item.tensors
        }
        self.tracker: Any = {}
        self.made_by: Any = WeakIdKeyDictionary()

    def give(self, names: dict[int, str]) -> None:
        """Add names, by the tensors' identity."""
        self._given |= names

    def __call__(self, tensor: Tensor) -> str:
        """The name of a tensor, for the begin of a sentence."""
        given = self._given.get(id(tensor))
        if given is not None:
            return given
        func, line = self.made_by.get(tensor), self._line(tensor)
        if func is None or line is None:
            return f"A tensor computed in the step ({brief(tensor)})"
        return f"The result of {function_name(func)}, {line.place} ({brief(tensor)})"

    def origin(self, tensor: Tensor) -> tuple[str, UserLine | None]:
        """The name of a tensor, and the user's line that made it."""
        return self(tensor), self._line(tensor)

    def _line(self, tensor: Tensor) -> UserLine | None:
        found = self.tracker.get(tensor)
        return None if found is None else line_of(found.proxy.node)


def in_sentence(name: str) -> str:
    """The name of a tensor, for the middle of a sentence."""
    return name.replace("A tensor", "a tensor", 1).replace("The result", "the result", 1)


def function_name(func: Any) -> str:
    """The name of a torch function without underscores: ``add``, ``indexing``."""
    name: str = getattr(func, "__name__", str(func)).strip("_")
    return "indexing" if name == "getitem" else name
