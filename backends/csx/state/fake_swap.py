"""Fakes in the place of real tensors, behind the same Python objects."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def stand_in_for(real: Tensor, fake: Tensor) -> Tensor:
    """A fake in the place of ``real``: a leaf of the same kind, with the user's hooks on it."""
    stand_in: Tensor
    if isinstance(real, nn.Parameter):
        stand_in = nn.Parameter(fake.detach(), requires_grad=real.requires_grad)
    else:
        stand_in = fake.detach().requires_grad_(real.requires_grad)
    for hook in (real._backward_hooks or {}).values():
        stand_in.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in (getattr(real, "_post_accumulate_grad_hooks", None) or {}).values():
        on_gradient(stand_in, hook)
    for key, value in vars(real).items():
        vars(stand_in).setdefault(key, value)
    return stand_in


def on_gradient(leaf: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call ``hook`` whenever a backward pass has reached ``leaf``."""
    leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def swap(a: Tensor, b: Tensor) -> None:
    """Exchange two tensors behind their Python objects.

    ``torch.utils.swap_tensors`` does this too, but refuses tensors with weak references, which
    optimizers and schedulers hold. Checked against torch 2.13.
    """
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    torch._C._swap_tensor_impl(a, b)
