"""``optimizer.learning_rate`` of old files as schedulers of new ones, with equal numbers."""

from __future__ import annotations

import re
from typing import Any

from fulgurite.config.document.problems import Path, nearest
from fulgurite.config.legacy.draft import Draft

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")

NAMES = {
    name.lower().removesuffix("lr"): name
    for name in (
        *("ConstantLR", "PolynomialLR", "LinearLR", "ExponentialLR", "CosineDecayLR"),
        *("InverseExponentialTimeDecayLR", "InverseSquareRootDecayLR", "PiecewiseConstantLR"),
        *("MultiStepLR", "StepLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts"),
        *("LambdaLR", "MultiplicativeLR", "CyclicLR", "OneCycleLR"),
    )
}
"""The name of a schedule, in lower case and without "lr": its class in ``lr_scheduler``."""

RENAMED = {
    "steps": "total_iters",
    "decay_steps": "total_iters",
    "boundaries": "milestones",
    "values": "learning_rates",
    "t_max": "T_max",
    "t_0": "T_0",
    "t_mult": "T_mult",
}
"""Arguments of all schedules in the first generation of files, and what they are now."""

_RATE = ("learning_rate", "initial_learning_rate", "base_lr")
_RATE_HERE = {"ConstantLR": "learning_rate", "CyclicLR": "base_lr"}
_FACTOR = ("gamma", "decay_rate")
_FACTOR_HERE = {"ExponentialLR": "decay_rate", "InverseExponentialTimeDecayLR": "decay_rate"}

WITHOUT_EFFECT = {
    ("PiecewiseConstantLR", "initial_learning_rate"): "had no effect: learning_rates has them all",
    ("LinearLR", "alpha"): "had no effect: end_learning_rate says where the line goes",
    ("LinearLR", "power"): "had no effect: a line has power 1",
    ("LinearLR", "cycle"): "had no effect: the learning rate stayed at its end",
    ("PolynomialLR", "cycle"): "had no effect: the learning rate stayed at its end",
}
"""Arguments that old schedules took and did not use."""


def number(value: Any) -> Any:
    """A number that was written as a string, ``1e-4`` say, as one; all else as it is."""
    if not isinstance(value, str) or not _NUMBER.fullmatch(value.strip()):
        return value
    return int(value) if value.strip().lstrip("+-").isdigit() else float(value)


def convert_schedules(given: dict[str, Any] | list[Any], draft: Draft, scaled: bool) -> None:
    """Put ``init.schedulers``.

    Args:
        given: a schedule, or a list of them: one after the other, or multiplied.
        draft: gets it.
        scaled: whether param groups have a factor of the learning rate each.
    """
    old: Path = ("optimizer", "learning_rate")
    at: Path = ("trainer", "init", "schedulers", 0)
    inner = (*at, "ScalePerParamLR", "scheduler") if scaled else at
    made = _scheduler(given, old, inner, draft)
    if scaled:
        made = {"ScalePerParamLR": {"scheduler": made}}
    draft.put(at[:-1], [made], old)


def _scheduler(given: Any, old: Path, at: Path, draft: Draft) -> dict[str, Any]:
    """One scheduler; ``draft`` gets the origin of each of its keys."""
    draft.origins[at] = old
    if not isinstance(given, list):
        return _single(given, old, at, draft)
    kinds = {str(item["main_scheduler"]).lower(): i for i, item in enumerate(given) if _says(item)}
    if len(kinds) > 1:
        at_last = (*old, max(kinds.values()), "main_scheduler")
        draft.problem(at_last, f"differs from the other schedules': {', '.join(kinds)}. Give one.")
    chained = kinds.keys() & {"chained", "chainedlr"}
    if len(given) == 1 and not chained:
        return _scheduler(given[0], (*old, 0), at, draft)
    name = "ChainedScheduler" if chained else "SequentialLR"
    inner = (*at, name, "schedulers")
    draft.origins[inner[:-1]] = draft.origins[inner] = old
    parts = [_scheduler(item, (*old, i), (*inner, i), draft) for i, item in enumerate(given)]
    return {name: {"schedulers": parts}}


def _says(item: Any) -> bool:
    return isinstance(item, dict) and item.get("main_scheduler") is not None


def _single(given: Any, old: Path, at: Path, draft: Draft) -> dict[str, Any]:
    word = given.get("scheduler") if isinstance(given, dict) else None
    if not isinstance(word, str):
        draft.problem(old, f"expected a schedule, as {{scheduler: Linear, ...}}; got {given!r}.")
        return {}
    name = NAMES.get(word.lower().removesuffix("lr"))
    if name is None:
        near = nearest(word, [known.removesuffix("LR") for known in NAMES.values()])
        draft.problem((*old, "scheduler"), f"no schedule is named {word!r}.{near}")
        return {}
    draft.origins[*at, name] = (*old, "scheduler")
    arguments: dict[str, Any] = {}
    for key, value in given.items():
        if key in ("scheduler", "main_scheduler"):
            continue
        new = _argument(name, key)
        if (name, new) in WITHOUT_EFFECT:
            draft.note((*old, key), WITHOUT_EFFECT[name, new], (*at, name), value)
        elif key != "decay_steps" or "steps" not in given:
            arguments[new] = _numbers(value)
            draft.origins[*at, name, new] = (*old, key)
    if name == "ExponentialLR":
        arguments.setdefault("total_iters", 1)
    if name == "CosineAnnealingWarmRestarts":
        text = "restarts every T_0 steps here; the old one was constant in each after the first"
        draft.note((*old, "scheduler"), text, (*at, name))
    return {name: arguments}


def _argument(name: str, key: str) -> str:
    """An argument's name now."""
    if key in _RATE:
        return _RATE_HERE.get(name, "initial_learning_rate")
    if key in _FACTOR:
        return _FACTOR_HERE.get(name, "gamma")
    return RENAMED.get(key, key)


def _numbers(value: Any) -> Any:
    return [number(item) for item in value] if isinstance(value, list) else number(value)
