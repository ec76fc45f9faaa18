"""Whether Lightning's arguments for machines agree with a device."""

from __future__ import annotations

from typing import Any

PLACEMENT = ("accelerator", "strategy", "devices", "num_nodes")
"""Lightning's arguments that say where a Trainer runs."""

ACCELERATORS = {"CPU": ("cpu",), "GPU": ("gpu", "cuda", "mps")}
"""What Lightning calls the machines of a backend; the first is what it is told."""


def contradiction(
    kind: str,
    given: str,
    accelerator: Any = "auto",
    strategy: Any = "auto",
    devices: Any = "auto",
    num_nodes: Any = 1,
) -> str | None:
    """Which of Lightning's arguments contradicts the type of a backend, and how; None if none does.

    Args:
        kind: the type.
        given: how it was given, as errors say it.
    """

    def contradicts(name: str, value: object, remedy: str) -> str:
        shown = value if isinstance(value, (str, int, list)) else type(value).__name__
        return f"{given} contradicts {name}={shown!r}. {remedy}"

    if isinstance(strategy, str):
        strategy = strategy.lower()
    machine = _machine_of(accelerator)
    if kind != "CSX":
        if machine not in ("auto", *ACCELERATORS[kind]):
            return contradicts("accelerator", accelerator, "Leave accelerator out.")
        if strategy == "csx" or _is_csx(strategy):
            return contradicts("strategy", strategy, "Use device='CSX'.")
        return None
    if machine not in ("auto", "csx"):
        return contradicts("accelerator", accelerator, "Leave accelerator out.")
    if strategy not in ("auto", "csx"):
        return contradicts("strategy", strategy, "Leave strategy out.")
    if devices not in ("auto", 1, "1", -1, "-1", [0]):
        return contradicts("devices", devices, "CSX runs in one process here: leave devices out.")
    if num_nodes != 1:
        return contradicts("num_nodes", num_nodes, "CSX runs in one process here: leave it out.")
    return None


def _machine_of(accelerator: Any) -> Any:
    """The machine that an accelerator is for; a name stands for itself, and needs no import."""
    if isinstance(accelerator, (str, type(None))):
        return accelerator
    from lightning.pytorch.accelerators import Accelerator, CPUAccelerator

    from fulgurite.backends.csx.plugins.accelerator import CSXAccelerator

    if not isinstance(accelerator, Accelerator):
        return accelerator
    is_cpu = isinstance(accelerator, CPUAccelerator)
    return "cpu" if is_cpu else "csx" if isinstance(accelerator, CSXAccelerator) else "gpu"


def _is_csx(strategy: Any) -> bool:
    if isinstance(strategy, str):
        return False
    from fulgurite.backends.csx.plugins.strategy import CSXStrategy

    return isinstance(strategy, CSXStrategy)
