"""The accelerator that goes with strategy "csx"."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry, CPUAccelerator

from fulgurite.backends.csx.compile.fabrics import fabric_devices

ACCELERATOR = "csx"


class CSXAccelerator(Accelerator):
    """One CSX system. Its tensors live where its fabric keeps them."""

    def __init__(self, *, with_strategy: bool = False) -> None:
        self._with_strategy = with_strategy

    def setup_device(self, device: torch.device) -> None:
        """Refuse to run without the strategy, which Lightning does not choose by itself."""
        if not self._with_strategy:
            raise MisconfigurationException(
                "accelerator='csx' alone does not select the CSX backend: Lightning would train"
                " eagerly. Use lightning.Trainer(strategy='csx'), or"
                " fulgurite.Trainer(device='CSX')."
            )

    def teardown(self) -> None:
        """Nothing is held outside the strategy."""

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """``devices=`` of the Trainer: how many systems, each a process of its own."""
        if devices in ("auto", -1, "-1", [0]):
            return 1
        if type(devices) is int and devices > 0:
            return devices
        if isinstance(devices, str) and devices.isdigit() and int(devices) > 0:
            return int(devices)
        raise MisconfigurationException(
            f"CSX takes a number of systems; got devices={devices!r}. Use devices=1, or more."
        )

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """The torch devices of ``devices`` systems."""
        return [*fabric_devices()] * devices

    @staticmethod
    def auto_device_count() -> int:
        """What ``devices="auto"`` means."""
        return 1

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        """What ``DeviceStatsMonitor`` logs: the host's."""
        return CPUAccelerator().get_device_stats(device)

    @staticmethod
    def is_available() -> bool:
        """A fabric is always there: the host's."""
        return True

    @staticmethod
    def name() -> str:
        """The name in Lightning's registry."""
        return ACCELERATOR

    @classmethod
    def register(cls) -> None:
        """Make the name known to Lightning, so that its misuse gets our error and not theirs."""
        if ACCELERATOR not in AcceleratorRegistry:
            AcceleratorRegistry.register(ACCELERATOR, cls, description="CSX, by strategy='csx'")
