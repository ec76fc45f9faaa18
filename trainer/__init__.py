"""Fulgurite: any LightningModule, one argument changed, becomes one static program.

    from fulgurite import Trainer
    Trainer(device="CSX", max_epochs=3).fit(module, train_loader, val_loader)

Names are imported when they are first used, so that ``import fulgurite`` costs nothing.

Trainer         Lightning's Trainer with ``device`` or ``backend`` (``fulgurite.trainer``)
backend         makes a backend, or returns the live one (``fulgurite.backends``)
CSConfig        the cluster's configuration (``fulgurite.backends``)
global_step     the number of optimizer steps done, as a tensor (``fulgurite.backends.step_count``)
TraceError      base of the errors about steps that are not static (``backends.csx.errors``)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulgurite.backends import CSConfig as CSConfig
    from fulgurite.backends import backend as backend
    from fulgurite.backends.csx.errors import TraceError as TraceError
    from fulgurite.backends.step_count import global_step as global_step
    from fulgurite.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOMES = {
    "Trainer": "fulgurite.trainer",
    "backend": "fulgurite.backends",
    "CSConfig": "fulgurite.backends",
    "global_step": "fulgurite.backends.step_count",
    "TraceError": "fulgurite.backends.csx.errors",
}

__all__ = ["CSConfig", "TraceError", "Trainer", "__version__", "backend", "global_step"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fulgurite' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
