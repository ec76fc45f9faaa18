"""``run_config``: fit, validate, validate_all, test or predict what a file describes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fulgurite.config.building import built
from fulgurite.config.checking import Plan, check

MODES = ("fit", "validate", "validate_all", "test", "predict")


def run_config(
    file: str | os.PathLike[str] | Mapping[str, Any],
    mode: str,
    overrides: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Run a parameter file; its trainers in order, if it lists several.

    Args:
        file: its path, or a dict of what it says.
        mode: "fit", "validate", "validate_all", "test" or "predict".
        overrides: dotted keys and the values that they get.

    Returns:
        What each trainer's stage returned.

    Raises:
        ParameterFileError: with all the mistakes of the file, before anything is built.
        ValueError: no such mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}; got {mode!r}.")
    return run_plan(check(file, overrides), mode)


def run_plan(plan: Plan, mode: str) -> list[Any]:
    """Run a checked file in one of the modes."""
    results = []
    for phase in plan.phases:
        trainer, module, data = built(phase)
        results.append(getattr(trainer, mode)(module, datamodule=data))
    return results
