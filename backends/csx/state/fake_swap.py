"""Fakes in the place of real tensors, behind the same Python objects."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def fake_for(real: Tensor, value: Tensor) -> Tensor:
    """``value``, a fake, as one to put in the place of ``real``: a leaf with the user's hooks."""
    fake: Tensor
    if isinstance(real, nn.Parameter):
        fake = nn.Parameter(value.detach(), requires_grad=real.requires_grad)
    else:
        fake = value.detach().requires_grad_(real.requires_grad)
    for hook in (real._backward_hooks or {}).values():
        fake.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in (getattr(real, "_post_accumulate_grad_hooks", None) or {}).values():
        on_gradient(fake, hook)
    for key, value in vars(real).items():
        vars(fake).setdefault(key, value)
    return fake


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
