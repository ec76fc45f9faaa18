"""Backend "CPU": ordinary eager Lightning on the host processor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fulgurite.backends.backend import Backend


@dataclass(frozen=True, kw_only=True)
class CPUBackend(Backend):
    """Eager Lightning on the CPU. It takes no options."""

    backend_type: ClassVar[str] = "CPU"
