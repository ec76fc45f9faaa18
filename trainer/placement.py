"""Whether Lightning's arguments for machines agree with a device, and how many systems they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
    if devices not in (*AUTO, [0]) and not _is_count(devices):
        return contradicts("devices", devices, "CSX takes a number of systems on each node.")
    if not _is_count(num_nodes):
        return contradicts("num_nodes", num_nodes, "CSX takes a number of nodes.")
    return None


AUTO = ("auto", -1, "-1")
"""Lightning's words for as many devices as there are."""


def systems(
    num_csx: int | None, devices: Any, num_nodes: int, plugins: Any = None
) -> tuple[int, int, str | None]:
    """How many CSX systems, each a process, a Trainer has: on each node, and how many nodes.

    Args:
        num_csx: those of all nodes, where a ``cluster_config`` says so.
        devices: Lightning's: those on each node; a number, or one of ``AUTO``.
        num_nodes: Lightning's.
        plugins: Lightning's; a cluster environment, such as Ray's, knows how many there are.

    Returns:
        Systems on each node, nodes, and how two of those who say so contradict each other, or None.
    """
    said = dict(_said(num_csx, devices, num_nodes, plugins))
    first = next(iter(said), None)
    if first is None:
        return 1, num_nodes, None
    for other, count in said.items():
        if count != said[first]:
            return 1, num_nodes, f"{first} contradicts {other}. Leave one of them out."
    nodes = max(1, min(num_nodes if num_nodes > 1 else _launched_nodes(), said[first]))
    return said[first] // nodes, nodes, None


def _said(
    num_csx: int | None, devices: Any, num_nodes: int, plugins: Any
) -> Iterator[tuple[str, int]]:
    """Who says how many systems there are in all, and how many."""
    if devices == [0] or _is_count(devices):
        count = 1 if devices == [0] else int(devices)
        nodes = "" if num_nodes == 1 else f", num_nodes={num_nodes}"
        yield f"devices={devices!r}{nodes} ({count * num_nodes} in all)", count * num_nodes
    if num_csx is not None:
        yield f"cluster_config: num_csx={num_csx}", num_csx
    for one in plugins if isinstance(plugins, (list, tuple)) else [plugins]:
        if _has_made_processes(one):
            yield f"{type(one).__name__} ({one.world_size()} processes)", one.world_size()
            return
    for launcher, marks, size in _LAUNCHERS:
        # an interactive job is one task, from which Lightning starts the others
        if marks == "SLURM_PROCID" and not _is_started_by_srun():
            continue
        if marks in os.environ and os.environ.get(size, "").isdigit():
            yield f"{size}={os.environ[size]} of {launcher}", int(os.environ[size])
            return


_LAUNCHERS = (
    ("torchrun", "TORCHELASTIC_RUN_ID", "WORLD_SIZE"),
    ("SLURM", "SLURM_PROCID", "SLURM_NTASKS"),
)
"""Who starts processes, and sets variables: one that marks it, and one with their number."""


def _launched_nodes() -> int:
    """The nodes of who started the processes; 1 where nobody says."""
    found = os.environ
    if "TORCHELASTIC_RUN_ID" in found:
        each = int(found.get("LOCAL_WORLD_SIZE", "1"))
        return max(1, int(found.get("WORLD_SIZE", "1")) // each)
    return int(found.get("SLURM_NNODES", "1")) if _is_started_by_srun() else 1


def _is_started_by_srun() -> bool:
    """Whether each task of SLURM is a system; in an interactive job Lightning starts them."""
    named = os.environ.get("SLURM_JOB_NAME")
    return "SLURM_PROCID" in os.environ and named not in ("bash", "interactive")


def _is_count(value: Any) -> bool:
    """Whether it is a number of at least one, as Lightning takes it."""
    if isinstance(value, str):
        return value.isdigit() and int(value) > 0
    return type(value) is int and value > 0


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


def _has_made_processes(plugin: Any) -> bool:
    """Whether it is a cluster environment, in a process that it knows."""
    if plugin is None:
        return False
    from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment

    is_told = type(plugin) is LightningEnvironment  # how many there are, by the strategy
    knows = isinstance(plugin, ClusterEnvironment) and not is_told
    return knows and bool(plugin.creates_processes_externally)


def _is_csx(strategy: Any) -> bool:
    if isinstance(strategy, str):
        return False
    from fulgurite.backends.csx.plugins.strategy import StaticGraph

    return isinstance(strategy, StaticGraph)
