"""Fulgurite: any LightningModule, one argument changed, becomes one static program.

    from fulgurite import Trainer
    Trainer(device="CSX", max_epochs=3).fit(module, train_loader, val_loader)

Names are imported when they are first used, so that ``import fulgurite`` costs nothing.

Trainer             Lightning's Trainer with ``device`` or ``backend`` (``fulgurite.trainer``)
backend             makes a backend, or returns the live one (``fulgurite.backends``)
current_backend     the live one, or None (``backends.backend``)
CSConfig            the cluster's configuration (``fulgurite.backends``)
compile, trace      for loops of one's own: a function as a program (``fulgurite.function``);
                    ``fulgurite.utils.data.DataExecutor`` is the loop
step_closure        a function that runs on the host after each step (``backends.closures``)
checkpoint_closure  one that runs where a checkpoint is written (``backends.closures``)
global_step         the number of steps done, as a tensor (``backends.step_context``)
gradient_norm       of the gradients before they were clipped (``backends.step_context``)
MixedPrecision      ``precision=`` by the keys of parameter files (``fulgurite.mixed_precision``)
nn                  losses that become one kernel, nonlinearities by name (``fulgurite.nn``)
optim               optimizers, and schedulers that a program computes (``fulgurite.optim``)
load, run_config    parameter files (``fulgurite.config``); the command is ``fulgurite.cli``
runners             ``run`` and the runners of old scripts: import ``fulgurite.runners``
trace_lock          held while a step is traced; for threads that read its weights
                    (``backends.patches``)
callbacks           the runners' hooks, and more, as callbacks (``fulgurite.callbacks``)
errors              TraceError, its kinds, and FrozenValueWarning (``fulgurite.errors``)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulgurite import callbacks as callbacks
    from fulgurite import errors as errors
    from fulgurite import nn as nn
    from fulgurite import optim as optim
    from fulgurite.backends import CSConfig as CSConfig
    from fulgurite.backends import backend as backend
    from fulgurite.backends.backend import current_backend as current_backend
    from fulgurite.backends.closures import checkpoint_closure as checkpoint_closure
    from fulgurite.backends.closures import step_closure as step_closure
    from fulgurite.backends.csx.contract import (
        FrozenValueWarning as FrozenValueWarning,
    )
    from fulgurite.backends.csx.diagnostics.trace_errors import TraceError as TraceError
    from fulgurite.backends.patches import trace_lock as trace_lock
    from fulgurite.backends.step_context import global_step as global_step
    from fulgurite.backends.step_context import gradient_norm as gradient_norm
    from fulgurite.config.run.loading import load as load
    from fulgurite.config.run.running import run_config as run_config
    from fulgurite.function import compile as compile
    from fulgurite.function import trace as trace
    from fulgurite.mixed_precision import MixedPrecision as MixedPrecision
    from fulgurite.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOMES = {
    "Trainer": "fulgurite.trainer",
    "backend": "fulgurite.backends",
    "current_backend": "fulgurite.backends.backend",
    "CSConfig": "fulgurite.backends",
    "MixedPrecision": "fulgurite.mixed_precision",
    "global_step": "fulgurite.backends.step_context",
    "gradient_norm": "fulgurite.backends.step_context",
    "compile": "fulgurite.function",
    "load": "fulgurite.config.run.loading",
    "run_config": "fulgurite.config.run.running",
    "trace": "fulgurite.function",
    "trace_lock": "fulgurite.backends.patches",
    "step_closure": "fulgurite.backends.closures",
    "checkpoint_closure": "fulgurite.backends.closures",
    "TraceError": "fulgurite.errors",
    "FrozenValueWarning": "fulgurite.errors",
}

__all__ = [
    "CSConfig",
    "FrozenValueWarning",
    "MixedPrecision",
    "TraceError",
    "Trainer",
    "__version__",
    "backend",
    "callbacks",
    "checkpoint_closure",
    "compile",
    "current_backend",
    "errors",
    "global_step",
    "gradient_norm",
    "load",
    "nn",
    "optim",
    "run_config",
    "step_closure",
    "trace",
    "trace_lock",
]


def __getattr__(name: str) -> Any:
    if name in ("callbacks", "errors", "nn", "optim"):
        return importlib.import_module(f"fulgurite.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'fulgurite' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
