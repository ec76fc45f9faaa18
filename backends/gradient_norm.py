"""``fulgurite.gradient_norm()``: the norm that gradients had before they were clipped.

One module can ask for it on every device. Whoever runs a step keeps the norms of that step; whoever
clips by norm tells them.
"""

from __future__ import annotations

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from fulgurite.backends.step_context import step_context


def gradient_norm() -> Tensor:
    """The total norm of the gradients before they were last clipped in this step, float32 [].

    It is the 2-norm over all parameters of that optimizer, where Lightning clips by norm
    (``gradient_clip_val``, ``self.clip_gradients``). To log it::

        def configure_gradient_clipping(
            self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
        ):
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            self.log("grad_norm", fulgurite.gradient_norm())

    Raises:
        RuntimeError: nothing was clipped by norm in this step.
    """
    norms = step_context.get().norms
    if not norms:
        where = "in this step" if norms is not None else "yet: no training step runs"
        raise RuntimeError(
            f"fulgurite.gradient_norm() was called, and nothing was clipped by norm {where}. Call"
            " it after self.clip_gradients(...) in configure_gradient_clipping, with"
            " Trainer(gradient_clip_val=1.0); clipping by value computes no norm. In a loop of your"
            " own: norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)."
        )
    return norms[-1]


def clip_by_norm(plugin: Precision, optimizer: Optimizer, clip_val: float) -> None:
    """What ``Precision.clip_grad_by_norm`` does, and keep the norm."""
    norm = torch.nn.utils.clip_grad_norm_(plugin.main_params(optimizer), clip_val)
    norms = step_context.get().norms
    if norms is not None:
        norms[:] = [norm]
