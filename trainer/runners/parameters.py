"""The command line of a runner script, its parameter file, and the plan that they make.

    python run.py [CSX|CPU|GPU] --params params.yaml --mode train [flags]

A flag stands for a key of ``runconfig`` of the same name, and for one of ``trainer``; given, it
counts more than the file.

Scripts read parameters as a dict: the *old* form with ``runconfig``, ``model``, ``optimizer``,
``train_input`` and ``eval_input``, or the *new* form with ``trainer``. They get the form that their
file has; the plan is made of the new one.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fulgurite.config.document.problems import Problem
from fulgurite.config.document.reading import Document, read, with_environment
from fulgurite.config.legacy.converting import convert, is_legacy
from fulgurite.config.run.refusing import refuse_unbuilt
from fulgurite.config.schema.checking import Plan, check_document

DEVICES = ("CSX", "CPU", "GPU")
MODES = {
    "train": "train",
    "eval": "evaluate one checkpoint",
    "train_and_eval": "train, and evaluate every now and then",
    "eval_all": "evaluate every checkpoint of the model_dir",
}

ExtraParsers = (
    argparse.ArgumentParser
    | Iterable[argparse.ArgumentParser]
    | Mapping[str, Iterable[argparse.ArgumentParser]]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag.

    Args:
        name: without its dashes; the key under ``runconfig``.
        does: what it is for; of a flag without a meaning here, why it has none.
        key: the dotted key below ``trainer``; "" where the runner itself looks at the flag.
        means: whether it has a meaning here. The others are taken, with a note.
        short: other ways to write it.
        options: the rest of argparse's arguments.
    """

    name: str
    does: str
    key: str = ""
    means: bool = True
    short: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


_NUMBER: dict[str, Any] = {"type": int, "metavar": "N"}
_SWITCH: dict[str, Any] = {"action": "store_true", "default": None}
_SEVERAL: dict[str, Any] = {"nargs": "+", "metavar": "X"}
_CLUSTER = "there is no cluster to reach"
_CONTAINERS = "there are no containers: the run sees this machine's files"
_PROCESSES = "one process runs on one device"

FLAGS = (
    Flag(name="params", short=("-p",), does="the parameter file", options={"required": True}),
    Flag(
        name="mode",
        short=("-m",),
        does="; ".join(f"{mode}: {does}" for mode, does in MODES.items()),
        options={"required": True, "choices": tuple(MODES)},
    ),
    Flag(
        name="model_dir",
        short=("-o",),
        does="folder of logs and checkpoints; else the file's, else model_dir beside the script",
        key="init.model_dir",
    ),
    Flag(
        name="checkpoint_path",
        does="the checkpoint to go on from, or to evaluate; else the newest in the model_dir",
    ),
    Flag(
        name="is_pretrained_checkpoint",
        does="take only weights from checkpoint_path, and train from step 0",
        options=_SWITCH,
    ),
    Flag(
        name="disable_strict_checkpoint_loading",
        does="let checkpoints load that lack weights of the model, or have others",
        key="init.checkpoint.disable_strict_checkpoint_loading",
        options=_SWITCH,
    ),
    Flag(
        name="load_checkpoint_states",
        does="what to load of a checkpoint, separated by commas; else all",
        key="init.callbacks.LoadCheckpointStates.load_checkpoint_states",
    ),
    Flag(
        name="logging",
        does="level of what is said: DEBUG, INFO, WARNING, ...",
        key="init.logging.log_level",
    ),
    Flag(name="max_steps", does="steps in all", key="init.loop.max_steps", options=_NUMBER),
    Flag(name="num_steps", does="steps of this run", key="init.loop.num_steps", options=_NUMBER),
    Flag(name="num_epochs", does="epochs", key="init.loop.num_epochs", options=_NUMBER),
    Flag(
        name="eval_steps",
        does="batches of an evaluation",
        key="init.loop.eval_steps",
        options=_NUMBER,
    ),
    Flag(
        name="compile_only",
        does="CSX: build the programs; run nothing",
        key="init.backend.compile_only",
        options=_SWITCH,
    ),
    Flag(
        name="validate_only",
        does="CSX: trace the programs; compile and run nothing",
        key="init.backend.validate_only",
        options=_SWITCH,
    ),
    Flag(
        name="compile_dir",
        short=("-c",),
        does="CSX: folder of compiled programs",
        key="init.backend.compile_dir",
    ),
    Flag(
        name="num_csx",
        does="CSX: number of systems",
        key="init.backend.cluster_config.num_csx",
        options=_NUMBER,
    ),
    Flag(name="cpu", short=("-cpu",), does="the same as CPU in front", options=_SWITCH),
    Flag(name="cs_ip", short=("-cs",), does=f"the same as CSX in front; {_CLUSTER}"),
    Flag(
        name="num_workers_per_csx",
        does="CSX: worker processes of each system's loaders that have none",
        key="init.backend.cluster_config.num_workers_per_csx",
        options=_NUMBER,
    ),
    Flag(name="config", does="the file has one set of parameters", means=False),
    Flag(name="wsc_log_level", does=_CLUSTER, means=False, options=_SEVERAL),
    Flag(name="job_labels", does=_CLUSTER, means=False, options=_SEVERAL),
    Flag(name="job_priority", does=_CLUSTER, means=False),
    Flag(name="job_time_sec", does=_CLUSTER, means=False, options=_NUMBER),
    Flag(name="debug_args", does=_CLUSTER, means=False, options=_SEVERAL),
    Flag(name="debug_args_path", does=_CLUSTER, means=False),
    Flag(name="ini", does=_CLUSTER, means=False, options=_SEVERAL),
    Flag(name="credentials_path", does=_CLUSTER, means=False),
    Flag(name="mgmt_address", does=_CLUSTER, means=False),
    Flag(name="mgmt_namespace", does=_CLUSTER, means=False),
    Flag(name="cbcore_image", does=_CONTAINERS, means=False),
    Flag(name="mount_dirs", does=_CONTAINERS, means=False, options=_SEVERAL),
    Flag(name="python_paths", does=_CONTAINERS, means=False, options=_SEVERAL),
    Flag(name="volume_mount_path", does=_CONTAINERS, means=False),
    Flag(name="disable_version_check", does=_CLUSTER, means=False, options=_SWITCH),
    Flag(name="num_wgt_servers", does=_CLUSTER, means=False, options=_NUMBER),
    Flag(name="num_act_servers", does=_CLUSTER, means=False, options=_NUMBER),
    Flag(name="appliance", does=_CLUSTER, means=False, options=_SWITCH),
    Flag(name="multireplica", does=_PROCESSES, means=False, options=_SWITCH),
    Flag(name="fabric_config_file", does=_CLUSTER, means=False),
    Flag(name="dist_addr", short=("-dist_addr",), does=_PROCESSES, means=False),
    Flag(name="dist_backend", short=("-dist_backend",), does=_PROCESSES, means=False),
    Flag(name="init_method", short=("-init_method",), does=_PROCESSES, means=False),
)
"""Every flag, in the order of the help."""

_EXCLUSIVE = ("compile_only", "validate_only")


@dataclass(frozen=True, kw_only=True)
class Given:
    """A command line, read.

    Args:
        device: in capitals; None where the file says it.
        values: the flags that were given, by name, ``params`` left out.
        extra: the arguments of the script's own parsers, with their defaults.
        error: ends the process as a wrong command line does, with status 2.
    """

    params: str
    device: str | None
    values: dict[str, Any]
    extra: dict[str, Any]
    error: Callable[[str], None]

    @property
    def mode(self) -> str:
        """One of ``MODES``."""
        return str(self.values["mode"])


def parsed(arguments: list[str] | None, extra: ExtraParsers | None = None) -> Given:
    """Read a command line; None is the process's own.

    Args:
        arguments: without the script's name.
        extra: parsers of the script's own arguments, made with ``add_help=False``.
    """
    parents = list(_parsers(extra))
    parser = argparse.ArgumentParser(parents=parents, allow_abbrev=False)
    parser.add_argument(
        "device", nargs="?", type=str.upper, choices=DEVICES, help="in place of the file's"
    )
    exclusive = parser.add_mutually_exclusive_group()
    for flag in FLAGS:
        group = exclusive if flag.name in _EXCLUSIVE else parser
        text = flag.does if flag.means else f"taken, without effect: {flag.does}"
        group.add_argument(*flag.short, f"--{flag.name}", help=text, **flag.options)
    found = vars(parser.parse_args(arguments))
    ours = {"device", *(flag.name for flag in FLAGS)}
    values = {name: found[name] for name in found if name in ours and found[name] is not None}
    device = _device(values, parser)
    if "is_pretrained_checkpoint" in values and "checkpoint_path" not in values:
        parser.error("--is_pretrained_checkpoint says what to take from --checkpoint_path: give it")
    return Given(
        params=values.pop("params"),
        device=device,
        values=values,
        extra={name: value for name, value in found.items() if name not in ours},
        error=parser.error,
    )


def notes(given: Given) -> list[str]:
    """What to say of each flag that was given and has no meaning here."""
    return [
        f"--{flag.name} has no effect here: {flag.does}."
        for flag in FLAGS
        if not flag.means and flag.name in given.values
    ]


def meanings(given: Given) -> Iterator[tuple[Flag, Any]]:
    """Each flag that was given and stands for a key, and its value."""
    yield from ((flag, given.values[flag.name]) for flag in FLAGS if _stands(flag, given))


def _stands(flag: Flag, given: Given) -> bool:
    return bool(flag.key) and flag.name in given.values


def _device(values: dict[str, Any], parser: argparse.ArgumentParser) -> str | None:
    """The device of the command line, in the new way to say it or in the old ones."""
    ways = {
        "CPU": values.pop("cpu", None),
        "CSX": values.pop("cs_ip", None),
        values.pop("device", None): True,
    }
    said = [device for device, way in ways.items() if device and way]
    if len(said) > 1:
        parser.error(f"one device, please: the command line says {' and '.join(said)}")
    return said[0] if said else None


def _parsers(extra: ExtraParsers | None) -> Iterator[argparse.ArgumentParser]:
    if isinstance(extra, argparse.ArgumentParser):
        yield extra
    elif isinstance(extra, Mapping):
        for parsers in extra.values():
            yield from parsers
    elif extra is not None:
        yield from extra


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
