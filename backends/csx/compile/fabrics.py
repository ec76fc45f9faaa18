"""The fabrics there are, and which of them a backend asks for."""

from __future__ import annotations

import torch

from fulgurite.backends.backend import Backend, current_backend
from fulgurite.backends.csx.compile.fabric import Fabric
from fulgurite.backends.csx.compile.host.host_fabric import HostFabric
from fulgurite.backends.csx.config import CSXBackend

FABRICS: dict[str, type[Fabric]] = {"auto": HostFabric, "host": HostFabric}
"""By the backend's option ``fabric``."""


def make_fabric(backend: CSXBackend) -> Fabric:
    """The fabric that a backend asks for."""
    return FABRICS[backend.fabric](backend)


def fabric_devices(backend: Backend | None = None) -> tuple[torch.device, ...]:
    """Where the programs of a backend keep their tensors; without one, of the live backend."""
    backend = backend or current_backend()
    return FABRICS[backend.fabric if isinstance(backend, CSXBackend) else "auto"].devices()
