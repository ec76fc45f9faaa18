"""Traced tensors that the user kept where nothing fills them: they raise when somebody uses them.

What a module holds gets the value of every step (``side_effects``). A global, a closure, an object
that no module holds would keep a tensor without a value: such a tensor becomes a ``Leaked``, which
knows where it was made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fulgurite.backends.csx.contract.rules import misuse
from fulgurite.backends.csx.diagnostics.errors import LeakedTensor
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, user_line

_ORIGIN, _CONSTANT = "_fulgurite_origin", "_fulgurite_constant"
_RESULT = "The result of the step"


class Leaked(Tensor):
    """A tensor of a trace that is over; every use of it is an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise LeakedTensor, which says where the tensor came from."""
        found: list[Leaked] = []
        _collect((args, kwargs), found)
        name, line = vars(found[0]).get(_ORIGIN, ("A tensor of the step", None))
        use = user_line()
        if name == _RESULT:
            raise misuse("not_run", use, tensor=name)
        where = f" at {use.place}" if use is not None else ""
        error = misuse("leaked", line, tensor=name, where=where)
        assert isinstance(error, LeakedTensor)
        error.used_at = use
        error.is_constant = all(vars(one).get(_CONSTANT, False) for one in found)
        raise error


def valueless(example: Tensor) -> Leaked:
    """A result of a step that was built and not run."""
    empty = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device="meta")
    result: Leaked = Tensor._make_subclass(Leaked, empty)
    vars(result)[_ORIGIN] = (_RESULT, None)
    return result


def _collect(value: Any, found: list[Leaked]) -> None:
    """Find leaked tensors among arguments, without asking them anything."""
    if type(value) is Leaked:
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        _collect(list(value.values()), found)


class Created:
    """The tensors that a trace made, by weak references."""

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[Tensor]] = []

    def add(self, tensor: Tensor) -> None:
        """Remember a tensor."""
        self._tensors.append(weakref.ref(tensor))

    def living(self) -> list[weakref.ref[Tensor]]:
        """Those that somebody still holds."""
        return [reference for reference in self._tensors if reference() is not None]

    def spoil_the_living(
        self,
        origin: Callable[[Tensor], tuple[str, UserLine | None]],
        is_constant: Callable[[Tensor], bool],
    ) -> list[weakref.ref[Tensor]]:
        """Make those that still live errors when used: whoever holds them is the user.

        ``origin`` gives the name of a tensor and the user's line that made it.
        """
        spoiled: list[weakref.ref[Tensor]] = []
        for reference in self._tensors:
            tensor = reference()
            if tensor is not None and isinstance(tensor, FakeTensor):
                made, constant = origin(tensor), is_constant(tensor)
                tensor.__class__ = Leaked  # type: ignore[assignment]
                vars(tensor)[_ORIGIN], vars(tensor)[_CONSTANT] = made, constant
                spoiled.append(reference)
        self._tensors.clear()
        return spoiled


def origin_of(leaked: Tensor) -> tuple[str, UserLine | None]:
    """The name of a leaked tensor, and the user's line that made it."""
    found: tuple[str, UserLine | None] = vars(leaked)[_ORIGIN]
    return found
