"""The random states of a process: torch's on the CPU, Python's and numpy's.

``collect`` is quick, for every epoch asks. ``portable`` makes of what it returns tensors and plain
Python values, so that checkpoints which hold it load with ``weights_only=True``.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import torch


def collect() -> dict[str, Any]:
    """The states now."""
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
    }


def restore(states: dict[str, Any]) -> None:
    """Put back what ``collect`` returned, portable or not."""
    torch.set_rng_state(states["torch"])
    version, state, next_gauss = states["python"]
    state = tuple(state.tolist()) if isinstance(state, torch.Tensor) else state
    random.setstate((version, state, next_gauss))
    numpy = states["numpy"]
    if not isinstance(numpy, dict):
        name, keys, position, has_gauss, gauss = numpy
        numpy = (name, keys.numpy().astype(np.uint32), position, has_gauss, gauss)
    np.random.set_state(numpy)


_draws = 0


def note_draw() -> None:
    """The code of a step that is traced draws from Python's or numpy's generator."""
    global _draws
    _draws += 1


class Undrawn:
    """The random states now, to be put back when a trace is undone.

    Other threads draw beside a trace: what they drew must not come again. So where there are any,
    the states are put back only if the step itself drew.
    """

    def __init__(self) -> None:
        self._states, self._draws = collect(), _draws

    def restore(self) -> None:
        """Put them back."""
        if _draws != self._draws or threading.active_count() == 1:
            restore(self._states)


def portable(states: dict[str, Any]) -> dict[str, Any]:
    """What ``collect`` or ``collect_with`` returned, in tensors and plain Python values."""
    if "rng" in states:
        return {**states, "rng": portable(states["rng"])}
    version, state, next_gauss = states["python"]
    numpy = states["numpy"]
    if isinstance(numpy, dict):
        keys, position = numpy["state"]["key"], numpy["state"]["pos"]
        keys = torch.from_numpy(keys.astype(np.int64))
        numpy = (numpy["bit_generator"], keys, position, numpy["has_gauss"], numpy["gauss"])
    return {
        "torch": states["torch"],
        "python": (version, torch.as_tensor(state, dtype=torch.int64), next_gauss),
        "numpy": numpy,
    }


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers own, each once."""
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    owners = [loader, *samplers, getattr(samplers[1], "sampler", None)]
    found: list[torch.Generator] = []
    for owner in owners:
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and generator not in found:
            found.append(generator)
    return found


def collect_loaders(loaders: list[Any]) -> list[torch.Tensor]:
    """The states of all generators that loaders own, in order."""
    return [generator.get_state() for loader in loaders for generator in generators_of(loader)]


def restore_loaders(loaders: list[Any], states: list[torch.Tensor]) -> None:
    """Put back what ``collect_loaders`` returned, where the loaders still own as many."""
    generators = [generator for loader in loaders for generator in generators_of(loader)]
    if len(generators) == len(states):
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def collect_with(loaders: list[Any]) -> dict[str, Any]:
    """The random states of the process, and of the generators that loaders own."""
    return {"rng": collect(), "generators": collect_loaders(loaders)}


def restore_with(states: dict[str, Any], loaders: list[Any]) -> None:
    """Put back what ``collect_with`` returned."""
    restore(states["rng"])
    restore_loaders(loaders, states["generators"])
