"""``use_autogen``: a loss as one generated kernel in the forward pass and one in the backward.

Under ``use_autogen=True`` a loss' ``forward`` runs in a fused region: what is traced there, and its
backward, becomes one kernel each, whatever the policy (``backends.csx.diagnostics.regions``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakSet

from torch import nn

from fulgurite.backends.csx.diagnostics.regions import fused_region

_Loss = TypeVar("_Loss", bound=nn.Module)

_OPTION = "use_autogen"
_UNTYPED = ("size_average", "reduce")
"""Arguments of old that torch's losses leave without a type, which parameter files ask for."""
_decorated = WeakSet[type[nn.Module]]()


def autogen_loss(loss: type[_Loss]) -> type[_Loss]:
    """Give a loss class the keyword ``use_autogen: bool = False``; the class itself is returned.

    Its ``__init__`` need not know of it; one that takes an argument of this name gets it. Instances
    have it as an attribute. Under False the loss is what it was. Subclasses inherit the argument
    where they inherit ``__init__``, or call it, and with it what it does, for a ``forward`` of
    their own too. A loss that another one calls in its ``forward`` is part of that one's kernels.

    >>> import torch
    >>> @autogen_loss
    ... class Brier(nn.Module):
    ...     def forward(self, scores, wanted):
    ...         return (scores.softmax(-1) - wanted).square().sum(-1).mean()
    >>> Brier(use_autogen=True)(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]))
    tensor(0.5000)

    Args:
        loss: a subclass of ``torch.nn.Module``.

    Raises:
        TypeError: ``loss`` is something else; when one is made, ``use_autogen`` is no bool.
    """
    if not isinstance(loss, type) or not issubclass(loss, nn.Module):
        kind = "the class" if isinstance(loss, type) else type(loss).__name__
        raise TypeError(
            f"autogen_loss decorates a class of losses, a subclass of torch.nn.Module; got {kind}"
            f" {getattr(loss, '__qualname__', repr(loss))}. Write the loss as the forward of one."
        )
    if loss not in _decorated:
        _decorated.add(loss)
        setattr(loss, _OPTION, False)  # of instances that were made without this __init__
        _take_the_option(loss)
        _fuse_forward(loss)
        _fuse_subclasses(loss)
    return loss


def _take_the_option(loss: type[nn.Module]) -> None:
    """Let ``__init__`` take the option, and store it."""
    construct = _method(loss, "__init__")
    signature = inspect.signature(construct)
    known = _OPTION in signature.parameters

    @functools.wraps(construct)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if known:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            fused = bound.arguments[_OPTION]
        else:
            fused = kwargs.pop(_OPTION, False)
        if not isinstance(fused, bool):
            raise TypeError(f"{type(self).__name__}: use_autogen is True or False; got {fused!r}.")
        construct(self, *args, **kwargs)
        setattr(self, _OPTION, fused)

    constructor: Any = __init__
    constructor.__qualname__ = f"{loss.__qualname__}.__init__"
    constructor.__module__ = loss.__module__
    # parameter files and editors ask for it: to them the option is an argument as any other
    constructor.__signature__ = signature if known else _with_option(signature)
    constructor.__annotations__ = {**construct.__annotations__, _OPTION: bool}
    loss.__init__ = constructor  # type: ignore[method-assign]


def _method(kind: type[nn.Module], name: str) -> Callable[..., Any]:
    """A class' own method, or one that calls that of the next class, whichever that is."""
    if name in vars(kind):
        own: Callable[..., Any] = vars(kind)[name]
        return own

    @functools.wraps(getattr(kind, name))
    def inherited(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(kind, self), name)(*args, **kwargs)

    return inherited


def _with_option(signature: inspect.Signature) -> inspect.Signature:
    """The signature with the option as its last keyword."""
    named = [
        one.replace(annotation=bool | None)
        if one.name in _UNTYPED and one.annotation is one.empty
        else one
        for one in signature.parameters.values()
    ]
    rest = [named.pop()] if named and named[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    option = inspect.Parameter(
        _OPTION, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool
    )
    return signature.replace(parameters=[*named, option, *rest])


def _fuse_forward(loss: type[nn.Module]) -> None:
    """Run a class' own ``forward`` in a fused region where its instance says so."""
    forward = _method(loss, "forward")

    @functools.wraps(forward)
    def fused(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.use_autogen:
            return forward(self, *args, **kwargs)
        with fused_region(type(self).__name__):
            return forward(self, *args, **kwargs)

    loss.forward = fused


def _fuse_subclasses(loss: type[nn.Module]) -> None:
    """Do the same to each subclass that will define a ``forward``."""
    own = vars(loss).get("__init_subclass__")

    def __init_subclass__(kind: type[nn.Module], /, **kwargs: Any) -> None:
        if own is None:
            super(loss, kind).__init_subclass__(**kwargs)
        else:
            own.__get__(None, kind)(**kwargs)
        if "forward" in vars(kind):
            _fuse_forward(kind)

    loss.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment]
