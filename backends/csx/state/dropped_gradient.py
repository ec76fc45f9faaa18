"""What stands in ``p.grad`` where a program computed a gradient and did not keep it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fulgurite.backends.csx.diagnostics.errors import GradientNotKept
from fulgurite.backends.csx.diagnostics.user_lines import user_line

_ATEN = torch.ops.aten
_COPIES = (  # Module.to, .double, .cpu and deepcopy take gradients along
    *(_ATEN.detach.default, _ATEN.clone.default, _ATEN._to_copy.default, _ATEN.alias.default),
)
_ACCUMULATE = _ATEN.add_.Tensor


class DroppedGradient(Tensor):
    """A gradient without values, and without memory; every use of it is an error.

    Args:
        p: the parameter.
        name: its name.
    """

    of: str

    @staticmethod
    def __new__(cls, p: Tensor, name: str) -> DroppedGradient:
        """One of the layout of ``p``."""
        made: DroppedGradient = Tensor._make_wrapper_subclass(
            cls, p.shape, strides=p.stride(), dtype=p.dtype, device=p.device
        )
        made.of = name
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Copy it, or say what it is.

        Raises:
            GradientNotKept: its values are needed.
        """
        if func in _COPIES and type(args[0]) is cls:
            return DroppedGradient(_layout(args[0], kwargs or {}), args[0].of)
        if func is _ACCUMULATE and type(args[0]) is cls:
            return args[0]  # a backward pass after fit adds to what nobody knows
        leaves = pytree.tree_leaves((args, kwargs))
        _refuse(next(leaf for leaf in leaves if type(leaf) is cls))

    def share_memory_(self) -> DroppedGradient:
        """There is no memory to share."""
        return self

    def _refused(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self)

    __repr__ = tolist = numpy = untyped_storage = data_ptr = _refused  # type: ignore[assignment]
    __array__ = __iter__ = __dlpack__ = _refused


def forget(parameters: Iterable[nn.Parameter]) -> None:
    """Put zeros in place of dropped gradients, which are about to be cleared."""
    for p in parameters:
        if type(p.grad) is DroppedGradient:
            p.grad = torch.zeros_like(p, requires_grad=False)


def _layout(gradient: Tensor, options: dict[str, Any]) -> Tensor:
    return torch.empty_strided(
        gradient.shape,
        gradient.stride(),
        dtype=options.get("dtype") or gradient.dtype,
        device=options.get("device") or gradient.device,
    )


def _refuse(gradient: DroppedGradient) -> NoReturn:
    raise GradientNotKept(
        f"{gradient.of}.grad was used on the host. Gradients live in the training program, which"
        " keeps them where the code of a hook, or of the function that called fit, reads .grad;"
        " here it found none.",
        line=user_line(),
        remedy="self.log_dict(grad_norm(self, 2)) in on_before_optimizer_step, which is traced; or"
        " write p.grad in the host hook's own code; zero_grad() clears it",
    )
