"""``optimizer`` of old files in the words of new ones, with equal numbers; its learning rate too.

Where a default of the old optimizers is another than ours, the new file says the old one. What
``learning_rate`` says becomes a number of the optimizer, or schedulers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fulgurite.config.document.problems import Path, nearest
from fulgurite.config.legacy.draft import Draft

_OPTIMIZER: Path = ("trainer", "init", "optimizer")

OLD_DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {"eps": 1e-6},
    "adamw": {"eps": 1e-6, "weight_decay": 0.0},
    "adamax": {"eps": 1e-6},
    "radam": {"eps": 1e-6},
    "adagrad": {"eps": 1e-6},
}
"""Defaults that differ from those of ``fulgurite.optim`` and ``torch.optim``."""

NO_DECAY = {"params": "*bias*", "modules": "*Norm*", "weight_decay": 0.0}
"""What old optimizers left out of weight decay by themselves: biases, and normalization layers."""

RENAMED = {"weight_decay_rate": "weight_decay", "use_nesterov": "nesterov"}
"""Arguments of optimizers in the first generation of files, and what they are now."""

PAIRS = {
    "betas": ("beta1", "beta2"),
    "etas": ("eta1", "eta2"),
    "step_sizes": ("step_size_min", "step_size_max"),
}
"""A new argument, which takes a tuple, and the two old ones that it replaces."""

PAIR_DEFAULTS = {"betas": (0.9, 0.999), "etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0)}

ADAFACTOR = {"clip_threshold": "d", "decay_rate": "beta2_decay"}
"""Arguments of Adafactor, and what torch calls them."""

ADAFACTOR_ONLY = {
    "scale_parameter": True,
    "relative_step": False,
    "warmup_init": False,
    "beta1": None,
}
"""Choices that torch's Adafactor does not have, and the one that it makes."""


def convert_optimizer(arguments: Mapping[str, Any], draft: Draft) -> None:
    """Convert ``optimizer``.

    Args:
        arguments: what the section says beyond the keys of the table.
        draft: gets ``init.optimizer`` and ``init.schedulers``.
    """
    rest = dict(arguments)
    name, rate = rest.pop("optimizer_type", None), rest.pop("learning_rate", None)
    resets_disabled = rest.pop("disable_lr_steps_reset", False)
    if not isinstance(name, str):
        text = f"expected the name of an optimizer; got {name!r}."
        draft.problem(("optimizer", "optimizer_type"), text)
        return
    at = (*_OPTIMIZER, name)
    draft.put(at, {}, ("optimizer", "optimizer_type"))
    _put_learning_rate(rate, bool(rest.get("adjust_learning_rate")), at, draft)
    _put_pairs(rest, name, at, draft)
    for key, value in rest.items():
        new = RENAMED.get(key, key)
        if new != key and new in rest:
            draft.problem(("optimizer", key), f"is {new}, which is given too: give {new} alone.")
        draft.put((*at, new), number(value), ("optimizer", key))
    if name.lower() == "adafactor":
        _translate_adafactor(at, draft)
    for key, value in OLD_DEFAULTS.get(name.lower(), {}).items():
        if key not in draft.get(at):
            draft.put((*at, key), value, ("optimizer", "optimizer_type"))
    if draft.get((*at, "weight_decay"), 0.0) and "params" not in draft.get(at):
        draft.put((*at, "params"), [dict(NO_DECAY)], ("optimizer", "optimizer_type"))
    if resets_disabled and isinstance(rate, list) and len(rate) > 1:
        draft.problem(
            ("optimizer", "disable_lr_steps_reset"),
            "let every schedule count from the first step of all; here each counts from its own"
            " first step, as on CPU and GPU it always did. Remove the key if that is meant.",
        )


def _put_learning_rate(rate: Any, scaled: bool, at: Path, draft: Draft) -> None:
    """A number is the optimizer's; schedules are schedulers."""
    old: Path = ("optimizer", "learning_rate")
    constant = number(rate)
    if isinstance(constant, (int, float)) and not isinstance(constant, bool):
        draft.put((*at, "lr"), constant, old)
        if scaled:
            convert_schedules({"scheduler": "Constant", "learning_rate": constant}, draft, scaled)
    elif isinstance(rate, (dict, list)) and rate:
        convert_schedules(rate, draft, scaled)
    elif rate is not None:
        draft.problem(old, f"expected a number, a schedule or a list of schedules; got {rate!r}.")


def _put_pairs(rest: dict[str, Any], name: str, at: Path, draft: Draft) -> None:
    """Put the pairs of arguments that were two keys."""
    for new, keys in PAIRS.items():
        given = [key for key in keys if key in rest]
        if not given or (name.lower() == "adafactor" and new == "betas"):
            continue
        defaults = (0.9, 0.99) if name.lower() == "lion" else PAIR_DEFAULTS[new]
        pair = [number(rest.pop(k, d)) for k, d in zip(keys, defaults, strict=True)]
        draft.put((*at, new), pair, ("optimizer", given[0]))


def _translate_adafactor(at: Path, draft: Draft) -> None:
    """Torch's Adafactor has other words, and fewer choices."""
    arguments = draft.get(at)
    for key in [key for key in arguments if key in ADAFACTOR]:
        draft.put((*at, ADAFACTOR[key]), arguments.pop(key), ("optimizer", key))
    for key in [key for key in arguments if key in ADAFACTOR_ONLY]:
        value, only = arguments.pop(key), ADAFACTOR_ONLY[key]
        if value != only:
            text = f"torch's Adafactor has no such choice: it computes as with {only}."
            draft.problem(("optimizer", key), text)
    eps = [arguments.pop("eps1", 1e-30), arguments.pop("eps2", 1e-3)]
    added, least_scale = arguments.pop("eps", eps)
    # added to squares of gradients there; here it is squared, and the least such square
    draft.put((*at, "eps"), [number(added) ** 0.5, number(least_scale)], ("optimizer", "eps"))
    draft.note(
        ("optimizer", "optimizer_type"),
        "is torch's Adafactor: its learning rate never exceeds 1 / sqrt(step), and weight decay"
        " follows the learning rate alone",
        at,
    )


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

OF_SCHEDULES = {
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
    return OF_SCHEDULES.get(key, key)


def _numbers(value: Any) -> Any:
    return [number(item) for item in value] if isinstance(value, list) else number(value)
