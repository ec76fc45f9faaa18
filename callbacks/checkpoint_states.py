"""The parts of a checkpoint, by the names that parameter files use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

STATES: dict[str, tuple[str, ...]] = {
    "model": ("state_dict",),
    "optimizer": ("optimizer_states",),
    "schedulers": ("lr_schedulers",),
    "global_step": ("loops",),
    "callbacks": ("callbacks",),
    "random": ("fulgurite",),
    "precision": (
        "MixedPrecision",
        "EagerMixedPrecision",
        "CSXMixedPrecision",
        "native_amp_scaling_state",
    ),
}
"""Lightning's keys of each part. ``global_step`` is the progress of all loops, ``random`` random
states and the position in the data; what has none of these keys (hyperparameters, versions, states
of data modules, what hooks add) belongs to every part."""


def chosen(owner: str, argument: str, states: Any) -> tuple[str, ...]:
    """The names of parts that an argument gives, as a list or with commas; all for "all".

    Raises:
        ValueError: one of them is not known.
    """
    if isinstance(states, str):
        states = [state.strip() for state in states.split(",")]
    if not isinstance(states, Collection) or not all(isinstance(s, str) for s in states):
        raise _wrong(owner, argument, states, "")
    if [state.lower() for state in states] == ["all"]:
        return tuple(STATES)
    for state in states:
        if state not in STATES:
            near = get_close_matches(state, [*STATES, "all"], n=1, cutoff=0.5)
            raise _wrong(owner, argument, states, f" Did you mean {near[0]!r}?" if near else "")
    if not states:
        raise _wrong(owner, argument, states, "")
    return tuple(states)


def _wrong(owner: str, argument: str, given: Any, hint: str) -> ValueError:
    return ValueError(
        f"{owner}: {argument} is 'all' or parts of a checkpoint, as a list or with commas between;"
        f" got {given!r}.{hint} The parts are {', '.join(STATES)}."
    )


def keys_of(states: Iterable[str]) -> set[str]:
    """Lightning's keys of these parts."""
    return {key for state in states for key in STATES[state]}


def without(checkpoint: Mapping[str, Any], kept: Collection[str]) -> dict[str, Any]:
    """A checkpoint without the parts that are not ``kept``."""
    dropped = keys_of(STATES) - keys_of(kept)
    return {key: value for key, value in checkpoint.items() if key not in dropped}


def check_there(owner: str, checkpoint: Mapping[str, Any], wanted: Iterable[str]) -> None:
    """Raise a ValueError where a part that was asked for by name is not in a checkpoint."""
    there = [state for state in STATES if not keys_of([state]).isdisjoint(checkpoint)]
    missing = [state for state in wanted if state not in there]
    if missing:
        raise ValueError(
            f"{owner}: the checkpoint has no {', '.join(missing)}. It has {', '.join(there)}."
        )
