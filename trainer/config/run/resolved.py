"""A checked file as YAML again: with overrides and defaults in, it loads back to the same run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info

from fulgurite.callbacks import DEFAULT_CALLBACKS, Checkpoint
from fulgurite.config.legacy.converting import Converted
from fulgurite.config.legacy.yaml_text import to_yaml
from fulgurite.config.schema.checking import Phase, Plan
from fulgurite.config.schema.conflicts import SAME
from fulgurite.config.schema.sections import Logging

PARAMS = "params"


def as_yaml(plan: Plan) -> str:
    """The text of a file that means the same, with overrides and defaults in.

    Raises:
        TypeError: a dict was loaded that has other than plain values.
    """
    data = _escaped(plan.document.data)
    for phase in plan.phases:
        place: Any = data
        for part in phase.path:
            place = place[part]
        place["init"] = _with_defaults(place["init"], phase)
    return to_yaml(Converted(params=data, origins={}, notes=(), problems=()))


def _escaped(value: Any) -> Any:
    """A copy in which a dollar sign stands for itself when it is read again."""
    if isinstance(value, Mapping):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("$", "$$") if isinstance(value, str) else value


def _with_defaults(said: dict[str, Any], phase: Phase) -> dict[str, Any]:
    init = phase.init
    full = {**said}
    if not {"model_dir", "default_root_dir"} & full.keys():
        full["model_dir"] = "model_dir"
    if init.loop is not None:
        full["loop"] = {**_apart(asdict(init.loop), "loop", said), **said["loop"]}
    elif not {"max_epochs", "max_steps", "max_time"} & full.keys():
        full["max_epochs"] = 1
    logging = _apart(asdict(init.logging or Logging()), "logging", said)
    full["logging"] = {**logging, **(said.get("logging") or {})}
    if "checkpoint" in said and isinstance(said["checkpoint"], Mapping):
        parameters = inspect.signature(Checkpoint).parameters.values()
        defaults = {one.name: one.default for one in parameters}
        full["checkpoint"] = {**defaults, **said["checkpoint"]}
    own = said.get("callbacks") or []
    own = own if isinstance(own, list) else [own]
    listed = {one.name.rpartition(".")[2].lower() for one in init.callbacks}
    if not said.get("barebones"):
        default = [{k: v} for k, v in DEFAULT_CALLBACKS.items() if k.lower() not in listed]
        full["callbacks"] = [*default, *own]
    return full


def _apart(section: dict[str, Any], name: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """A section's values, without those that the file gives by Lightning's own argument."""
    return {
        key: value
        for key, value in section.items()
        if value is not None
        and not any(other in said for ours, other in SAME if ours == (name, key))
    }


class SaveParams(pl.Callback):
    """Writes the file of a training into its folder, as ``params.yaml``.

    Nothing is overwritten: a file that says something else stays, and the new one is
    ``params_1.yaml``, ``params_2.yaml`` and so on.

    Args:
        plan: the file.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write the file when a fit begins."""
        backends = [phase.init.backend or {} for phase in self._plan.phases]
        dry = any(one.get("compile_only") or one.get("validate_only") for one in backends)
        if stage == "fit" and trainer.is_global_zero and not (dry or trainer.fast_dev_run):  # type: ignore[attr-defined]
            save(self._plan, Path(trainer.default_root_dir))


def save(plan: Plan, folder: Path) -> None:
    """Write a file into a folder, unless its newest one there says the same."""
    try:
        text = as_yaml(plan)
    except TypeError as error:
        rank_zero_info(f"{PARAMS}.yaml is not written. {error}")
        return
    count = 0
    while (path := folder / (f"{PARAMS}_{count}.yaml" if count else f"{PARAMS}.yaml")).exists():
        count += 1
        last = path
    if count and last.read_text(encoding="utf-8") == text:
        return
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
