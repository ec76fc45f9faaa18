"""Traced tensors that the user kept where nothing fills them: they raise when somebody uses them.

An attribute of a module and a list that is one get the value of every step (``leftovers``). A
global, a closure, a dict, an object that is no module would keep a tensor without a value: such a
tensor becomes a ``Leaked``, which knows where it was made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fulgurite.backends.csx.errors import LeakedTensor
from fulgurite.backends.csx.lines import UserLine, user_line

_ORIGIN = "_fulgurite_origin"
KEEP = (
    "self.last = x or self.outs.append(x), with an attribute or a list of the module, which are\n"
    "      filled after every step; return x from the step; or pass it to a @fulgurite.step_closure"
)


class Leaked(Tensor):
    """A tensor of a trace that is over; every use of it is an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Say where the tensor came from.

        Raises:
            LeakedTensor: always.
        """
        found: list[Leaked] = []
        _collect((args, kwargs), found)
        name, line = vars(found[0]).get(_ORIGIN, ("A tensor of the step", None))
        use = user_line()
        where = f" at {use.place}" if use is not None else ""
        raise LeakedTensor(
            f"{name} was used{where}, after the trace that made it. It was kept outside of the"
            " module, where no step leaves a value.",
            line=line,
            remedy=KEEP,
        )


def _collect(value: Any, found: list[Leaked]) -> None:
    """Find leaked tensors among arguments, without asking them anything."""
    if type(value) is Leaked:
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        _collect(list(value.values()), found)


class Born:
    """The tensors that a trace made, by weak references."""

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[Tensor]] = []

    def add(self, tensor: Tensor) -> None:
        """Remember a tensor."""
        self._tensors.append(weakref.ref(tensor))

    def spoil_the_living(self, origin: Callable[[Tensor], tuple[str, UserLine | None]]) -> None:
        """Make those that still live errors when used: whoever holds them is the user.

        Args:
            origin: the name of a tensor, and the user's line that made it.
        """
        for reference in self._tensors:
            tensor = reference()
            if tensor is not None and isinstance(tensor, FakeTensor):
                made = origin(tensor)
                tensor.__class__ = Leaked  # type: ignore[assignment]
                vars(tensor)[_ORIGIN] = made
        self._tensors.clear()
