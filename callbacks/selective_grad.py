"""Which gradients reach the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

Config = Mapping[str, Any]


class SelectiveGrad(pl.Callback):
    """Keeps the gradients of chosen parameters and makes all others zero, inside the step.

    A gradient becomes zero right before clipping and the update. The optimizer still sees the
    parameter: weight decay, and momentum that it has, go on moving it. To freeze a parameter
    altogether: ``requires_grad_(False)`` before training. On CSX what only a zeroed gradient needs
    is not computed.

    Args:
        selective_grads: ``{"param_filter": "decoder.*"}``, where the filter is a glob over names of
            parameters (``module.named_parameters()``) or a list of globs; or a list of such dicts.
            What any of them matches is kept.
    """

    def __init__(self, selective_grads: Config | Sequence[Config]) -> None:
        configs = [selective_grads] if isinstance(selective_grads, Mapping) else selective_grads
        self.filters = [glob for config in configs for glob in _globs(config)]
        if not self.filters:
            raise ValueError(
                f"SelectiveGrad: selective_grads names no parameters; got {selective_grads!r}."
                f" {_REMEDY}"
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that every filter matches a parameter.

        Raises:
            ValueError: one does not.
        """
        names = [name for name, _ in pl_module.named_parameters()]
        for glob in self.filters:
            if not any(fnmatchcase(name, glob) for name in names):
                near = get_close_matches(glob, names, n=1, cutoff=0.0)
                raise ValueError(
                    f"SelectiveGrad: no parameter's name matches {glob!r}. The nearest is"
                    f" {near[0] if near else 'none'!r}; [name for name, _ in"
                    " model.named_parameters()] lists all."
                )

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Make the gradients of all other parameters zero."""
        for name, p in pl_module.named_parameters():
            if p.grad is not None and not any(fnmatchcase(name, glob) for glob in self.filters):
                # in place, as a zero and not None: then the optimizer still decays weights and
                # counts steps
                p.grad.zero_()


_REMEDY = 'Write {"param_filter": "decoder.*"}, or a list of such dicts.'


def _globs(config: Any) -> list[str]:
    """The globs of one dict."""
    if not isinstance(config, Mapping):
        raise ValueError(f"SelectiveGrad: expected a dict; got {config!r}. {_REMEDY}")
    if unknown := sorted(set(config) - {"param_filter"}):
        meant = " It would change numbers, and has no counterpart here." * (
            "init_method" in unknown
        )
        raise ValueError(
            f"SelectiveGrad: {unknown[0]!r} is no key of selective_grads.{meant} {_REMEDY}"
        )
    globs = config.get("param_filter")
    globs = [globs] if isinstance(globs, str) else globs
    if not isinstance(globs, Sequence) or not all(isinstance(glob, str) for glob in globs):
        raise ValueError(
            f"SelectiveGrad: param_filter is a glob or a list of globs; got {globs!r}. {_REMEDY}"
        )
    return list(globs)
