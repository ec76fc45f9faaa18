"""``optimizer`` of old files in the words of new ones, with equal numbers.

Where a default of the old optimizers is another than ours, the new file says the old one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fulgurite.config.document.problems import Path
from fulgurite.config.legacy.draft import Draft
from fulgurite.config.legacy.schedules import convert_schedules, number

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
