"""Backend "GPU": ordinary eager Lightning on a graphics card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fulgurite.backends.backend import Backend


def gpu_device() -> torch.device:
    """Where eager code on backend GPU has its tensors."""
    return torch.device("cuda" if torch.cuda.is_available() else "mps")


@dataclass(frozen=True, kw_only=True)
class GPUBackend(Backend):
    """Eager Lightning on the GPU. It takes no options.

    Raises:
        MisconfigurationException: no usable GPU.
    """

    backend_type: ClassVar[str] = "GPU"

    def _validate(self) -> None:
        if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
            raise MisconfigurationException(
                "device 'GPU' was asked for, but PyTorch finds no usable GPU here (neither CUDA nor"
                " MPS). Use device='CSX' or device='CPU', or install a PyTorch build with GPU"
                " support."
            )
