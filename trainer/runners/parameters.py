"""A script's parameter file with the command line's flags in it, and the plan that it makes.

Scripts read parameters as a dict: the *old* form with ``runconfig``, ``model``, ``optimizer``,
``train_input`` and ``eval_input``, or the *new* form with ``trainer``. They get the form that their
file has; the plan is made of the new one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from fulgurite.config.document.problems import Problem
from fulgurite.config.document.reading import Document, read, with_environment
from fulgurite.config.legacy.converting import convert, is_legacy
from fulgurite.config.run.refusing import refuse_unbuilt
from fulgurite.config.schema.checking import Plan, check_document
from fulgurite.runners.flags import FLAGS, Given, meanings

_MODEL = {"class_path": "torch.nn.Identity"}  # stands in the plan for what model_fn makes
_RUNNERS = ("mode", "checkpoint_path", "is_pretrained_checkpoint")
"""Keys of ``runconfig`` that the runner itself looks at."""


class Parameters(dict[str, Any]):
    """Parameters as a script's functions get them.

    Args:
        data: what the file says, flags included.
        document: the file, for messages.
        own: keys of ``runconfig`` that are the script's own, or flags without a meaning here.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        *,
        document: Document | None = None,
        own: Iterable[str] = (),
    ) -> None:
        super().__init__(data)
        self.document = document or Document(source="<params>", data=data)
        self.own = frozenset(own)

    @property
    def legacy(self) -> bool:
        """Whether they have the old form."""
        return is_legacy(self)

    @property
    def runconfig(self) -> dict[str, Any]:
        """The section ``runconfig``; {} in the new form."""
        return dict(self.get("runconfig") or {})


def read_parameters(given: Given, default_model_dir: str) -> Parameters:
    """A file's parameters, with what the command line says in their place.

    Raises:
        ParameterFileError: it cannot be read.
    """
    document = with_environment(read(given.params))
    if not isinstance(document.data, dict):
        document.refuse([Problem((), "expected keys and values (trainer: ... or runconfig: ...).")])
    data = copy.deepcopy(document.data)
    if is_legacy(data):
        runconfig = data["runconfig"] = data.get("runconfig") or {}
        runconfig.update({**given.values, **given.extra})
        if given.device is not None:
            runconfig["target_device"] = given.device
        runconfig.setdefault("model_dir", default_model_dir)
        without = [f.name for f in FLAGS if not f.means and f.name in given.values]
        return Parameters(data, document=document, own=(*given.extra, *without))
    _put_flags(_init(data, document), given, default_model_dir)
    stage = data["trainer"].setdefault("validate" if given.mode == "eval" else "fit", {})
    if "checkpoint_path" in given.values:
        stage["ckpt_path"] = given.values["checkpoint_path"]
    return Parameters(data, document=document)


def _init(data: dict[str, Any], document: Document) -> dict[str, Any]:
    """``trainer.init`` of the new form."""
    trainer = data.get("trainer")
    if isinstance(trainer, list):
        text = "lists several trainers, and a script has one model. Run it by: fulgurite fit FILE"
        document.refuse([Problem(("trainer",), text)])
    init = trainer.get("init") if isinstance(trainer, dict) else None
    if not isinstance(init, dict):
        document.refuse([Problem(("trainer",), "expected init: {...}, and its keys in it.")])
    assert isinstance(init, dict)
    model = init.get("model")
    if isinstance(model, dict) and "class_path" in model:
        text = "names a model, and the script's model_fn makes another. Leave class_path out."
        document.refuse([Problem(("trainer", "init", "model", "class_path"), text)])
    return init


def _put_flags(init: dict[str, Any], given: Given, default_model_dir: str) -> None:
    """Set what flags stand for, in the new form."""
    init.setdefault("model_dir", default_model_dir)
    backend = "backend" in init or any(".backend." in flag.key for flag, _ in meanings(given))
    if backend:
        kind = init.pop("device", None)
        init["backend"] = {**({"backend_type": kind} if kind else {}), **init.get("backend", {})}
    if given.device is not None:
        place = init["backend"] if backend else init
        place["backend_type" if backend else "device"] = given.device
    for flag, value in meanings(given):
        _, *keys, last = flag.key.split(".")
        if keys[:1] == ["callbacks"]:
            init["callbacks"] = [*(init.get("callbacks") or []), {keys[1]: {last: value}}]
            continue
        section = init
        for key in keys:
            section[key] = section = dict(section.get(key) or {})
        section[last] = value


def plan_of(params: Parameters) -> tuple[Plan, tuple[str, ...]]:
    """What parameters mean, checked, and what is to be said of keys without a meaning.

    The plan has one phase. Its model is a placeholder, and its stages have no loaders, only which
    checkpoint they begin from, for a script makes model and loaders.

    Raises:
        ParameterFileError: with all their mistakes.
    """
    document, notes = params.document, []
    data: dict[str, Any] = copy.deepcopy(dict(params))
    if params.legacy:
        for key in (*_RUNNERS, *params.own):
            data["runconfig"].pop(key, None)
        converted = convert({**data, "model": {**(data.get("model") or {}), **_MODEL}})
        document.refuse(converted.problems)
        notes += [document.told(Problem(note.path, note.text)) for note in converted.notes]
        data, document = converted.params, replace(document, origins=converted.origins)
    trainer = data.get("trainer")
    init = trainer.get("init") if isinstance(trainer, dict) else None
    if isinstance(init, dict):
        data["trainer"] = {"init": {**init, "model": _MODEL}}
    plan = check_document(replace(document, data=data))
    refuse_unbuilt(plan)
    notes += [document.told(note) for note in plan.notes]
    stages = {stage: _checkpoint_of(params, stage) for stage in ("fit", "validate")}
    return replace(plan, phases=(replace(plan.phases[0], stages=stages),)), tuple(notes)


def _checkpoint_of(params: Parameters, stage: str) -> dict[str, Any]:
    """``ckpt_path`` of a stage, if the parameters say anything about it."""
    if params.legacy:
        path = params.runconfig.get("checkpoint_path")
        return {} if path is None else {"ckpt_path": path}
    section = params["trainer"].get(stage) or {}
    return {key: value for key, value in section.items() if key == "ckpt_path"}
