"""What a run writes of its file: the file as YAML again, and no value of the environment.

With overrides and defaults in, the YAML loads back to the same run.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path as FilePath
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info

from fulgurite.callbacks import DEFAULT_CALLBACKS, Checkpoint
from fulgurite.config.document.problems import Path
from fulgurite.config.document.variables import Variables
from fulgurite.config.legacy.converting import Converted
from fulgurite.config.legacy.yaml_text import to_yaml
from fulgurite.config.run.refusing import only_builds
from fulgurite.config.schema.checking import Phase, Plan
from fulgurite.config.schema.conflicts import SAME
from fulgurite.config.schema.sections import Logging

PARAMS = "params"


def as_yaml(plan: Plan) -> str:
    """The text of a file that means the same, with overrides and defaults in.

    What came from the environment is ``${NAME}`` again.

    Raises:
        TypeError: a dict was loaded that has other than plain values; or a value of the environment
            would have to be written out.
    """
    document, stood = plan.document, plan.document.variables.stood
    for text, meant in stood.values() if document.origins else ():
        if isinstance(meant, (dict, list)):
            raise TypeError(f"{text} stands for several keys of a file of the old form.")
    data = document.variables.restored(document.data, (), document.origins)
    for phase in plan.phases:
        path: Path = (*phase.path, "init")
        if not any(path[:end] in stood for end in range(len(path) + 1)):
            place = data
            for part in phase.path:
                place = place[part]
            # a section that the environment gives as a whole is written as ${NAME} again, with
            # nothing in it
            whole = [key for key in place["init"] if (*path, key) in stood]
            place["init"] = _with_defaults(place["init"], phase, whole)
    return to_yaml(Converted(params=data, origins={}, notes=(), problems=()))


def _with_defaults(said: dict[str, Any], phase: Phase, whole: Collection[str]) -> dict[str, Any]:
    """What ``init`` says, with the defaults of its sections.

    Args:
        said: what it says.
        phase: of the trainer.
        whole: keys that the environment gives; no default is put into them.
    """
    init, full = phase.init, {**said}
    if not {"model_dir", "default_root_dir"} & full.keys():
        full["model_dir"] = "model_dir"
    if init.loop is None and not {"max_epochs", "max_steps", "max_time"} & full.keys():
        full["max_epochs"] = 1
    elif init.loop is not None and "loop" not in whole:
        full["loop"] = {**_apart(asdict(init.loop), "loop", said), **said["loop"]}
    if "logging" not in whole:
        logging = _apart(asdict(init.logging or Logging()), "logging", said)
        full["logging"] = {**logging, **(said.get("logging") or {})}
    if isinstance(said.get("checkpoint"), Mapping):
        parameters = inspect.signature(Checkpoint).parameters.values()
        defaults = {one.name: one.default for one in parameters}
        full["checkpoint"] = {**defaults, **said["checkpoint"]}
    own = said.get("callbacks") or []
    own = own if isinstance(own, list) else [own]
    listed = {one.name.rpartition(".")[2].lower() for one in init.callbacks}
    if "callbacks" not in whole and not init.trainer.arguments.get("barebones"):
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
        dry = any(map(only_builds, self._plan.phases))
        if stage == "fit" and trainer.is_global_zero and not (dry or trainer.fast_dev_run):  # type: ignore[attr-defined]
            save(self._plan, FilePath(trainer.default_root_dir))


def save(plan: Plan, folder: FilePath) -> None:
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


@contextlib.contextmanager
def hiding(variables: Variables) -> Iterator[None]:
    """Write ``${NAME}`` for values of the environment in the errors of a block."""
    try:
        yield
    except Exception as error:
        variables.hide_in(error)
        raise


class HideVariables(pl.Callback):
    """Writes ``${NAME}`` for values of the environment in hyperparameters that a model saves.

    In checkpoints and in what loggers get: ``self.hparams`` of the model itself keeps them. Only
    strings are changed, so ``load_from_checkpoint`` needs those that hold one as an argument.

    Args:
        variables: of the file.
    """

    def __init__(self, variables: Variables) -> None:
        self._variables = variables

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Hide them in what loggers get (``_hparams_initial``, checked against Lightning 2.6.6)."""
        logged = getattr(pl_module, "_hparams_initial", None)
        if logged is not None:
            pl_module._hparams_initial = type(logged)(self._variables.hidden_in(dict(logged)))

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Hide them in what a checkpoint gets."""
        key = pl_module.CHECKPOINT_HYPER_PARAMS_KEY
        if key in checkpoint:
            checkpoint[key] = self._variables.hidden_in(checkpoint[key])
