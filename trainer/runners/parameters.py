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


@dataclass(frozen=True, slots=True)
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
    Flag("params", "the parameter file", options={"required": True}, short=("-p",)),
    Flag(
        "mode",
        "; ".join(f"{mode}: {does}" for mode, does in MODES.items()),
        options={"required": True, "choices": tuple(MODES)},
        short=("-m",),
    ),
    Flag(
        "model_dir",
        "folder of logs and checkpoints; else the file's, else model_dir beside the script",
        "init.model_dir",
        short=("-o",),
    ),
    Flag(
        "checkpoint_path",
        "the checkpoint to go on from, or to evaluate; else the newest in the model_dir",
    ),
    Flag(
        "is_pretrained_checkpoint",
        "take only weights from checkpoint_path, and train from step 0",
        options=_SWITCH,
    ),
    Flag(
        "disable_strict_checkpoint_loading",
        "let checkpoints load that lack weights of the model, or have others",
        "init.checkpoint.disable_strict_checkpoint_loading",
        options=_SWITCH,
    ),
    Flag(
        "load_checkpoint_states",
        "what to load of a checkpoint, separated by commas; else all",
        "init.callbacks.LoadCheckpointStates.load_checkpoint_states",
    ),
    Flag("logging", "level of what is said: DEBUG, INFO, WARNING, ...", "init.logging.log_level"),
    Flag("max_steps", "steps in all", "init.loop.max_steps", options=_NUMBER),
    Flag("num_steps", "steps of this run", "init.loop.num_steps", options=_NUMBER),
    Flag("num_epochs", "epochs", "init.loop.num_epochs", options=_NUMBER),
    Flag("eval_steps", "batches of an evaluation", "init.loop.eval_steps", options=_NUMBER),
    Flag(
        "compile_only",
        "CSX: build the programs; run nothing",
        "init.backend.compile_only",
        options=_SWITCH,
    ),
    Flag(
        "validate_only",
        "CSX: trace the programs; compile and run nothing",
        "init.backend.validate_only",
        options=_SWITCH,
    ),
    Flag(
        "compile_dir", "CSX: folder of compiled programs", "init.backend.compile_dir", short=("-c",)
    ),
    Flag(
        "num_csx", "CSX: number of systems", "init.backend.cluster_config.num_csx", options=_NUMBER
    ),
    Flag("cpu", "the same as CPU in front", options=_SWITCH, short=("-cpu",)),
    Flag("cs_ip", f"the same as CSX in front; {_CLUSTER}", short=("-cs",)),
    Flag(
        "num_workers_per_csx",
        "CSX: worker processes of each system's loaders that have none",
        "init.backend.cluster_config.num_workers_per_csx",
        options=_NUMBER,
    ),
    Flag("config", "the file has one set of parameters", means=False),
    Flag("wsc_log_level", _CLUSTER, means=False, options=_SEVERAL),
    Flag("job_labels", _CLUSTER, means=False, options=_SEVERAL),
    Flag("job_priority", _CLUSTER, means=False),
    Flag("job_time_sec", _CLUSTER, means=False, options=_NUMBER),
    Flag("debug_args", _CLUSTER, means=False, options=_SEVERAL),
    Flag("debug_args_path", _CLUSTER, means=False),
    Flag("ini", _CLUSTER, means=False, options=_SEVERAL),
    Flag("credentials_path", _CLUSTER, means=False),
    Flag("mgmt_address", _CLUSTER, means=False),
    Flag("mgmt_namespace", _CLUSTER, means=False),
    Flag("cbcore_image", _CONTAINERS, means=False),
    Flag("mount_dirs", _CONTAINERS, means=False, options=_SEVERAL),
    Flag("python_paths", _CONTAINERS, means=False, options=_SEVERAL),
    Flag("volume_mount_path", _CONTAINERS, means=False),
    Flag("disable_version_check", _CLUSTER, means=False, options=_SWITCH),
    Flag("num_wgt_servers", _CLUSTER, means=False, options=_NUMBER),
    Flag("num_act_servers", _CLUSTER, means=False, options=_NUMBER),
    Flag("appliance", _CLUSTER, means=False, options=_SWITCH),
    Flag("multireplica", _PROCESSES, means=False, options=_SWITCH),
    Flag("fabric_config_file", _CLUSTER, means=False),
    Flag("dist_addr", _PROCESSES, means=False, short=("-dist_addr",)),
    Flag("dist_backend", _PROCESSES, means=False, short=("-dist_backend",)),
    Flag("init_method", _PROCESSES, means=False, short=("-init_method",)),
)
"""Every flag, in the order of the help."""

_EXCLUSIVE = ("compile_only", "validate_only")


@dataclass(frozen=True, kw_only=True)
class CommandLine:
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


def parse_command_line(
    arguments: list[str] | None, extra: ExtraParsers | None = None
) -> CommandLine:
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
    # a flag that was not given is None, switches too: only what was given counts more than the file
    values = {name: found[name] for name in found if name in ours and found[name] is not None}
    device = _device(values, parser)
    if "is_pretrained_checkpoint" in values and "checkpoint_path" not in values:
        parser.error("--is_pretrained_checkpoint says what to take from --checkpoint_path: give it")
    return CommandLine(
        params=values.pop("params"),
        device=device,
        values=values,
        extra={name: value for name, value in found.items() if name not in ours},
        error=parser.error,
    )


def notes(given: CommandLine) -> list[str]:
    """What to say of each flag that was given and has no meaning here."""
    return [
        f"--{flag.name} has no effect here: {flag.does}."
        for flag in FLAGS
        if not flag.means and flag.name in given.values
    ]


def meanings(given: CommandLine) -> Iterator[tuple[Flag, Any]]:
    """Each flag that was given and stands for a key, and its value."""
    yield from ((flag, given.values[flag.name]) for flag in FLAGS if _stands(flag, given))


def _stands(flag: Flag, given: CommandLine) -> bool:
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


def read_parameters(given: CommandLine, default_model_dir: str) -> Parameters:
    """A file's parameters, with what the command line says in their place.

    Raises:
        ParameterFileError: it cannot be read.
    """
    document = with_environment(read(given.params))
    document.refuse(document.variables.with_missing(()))
    if not isinstance(document.data, dict):
        document.refuse([Problem((), "expected keys and values (trainer: ... or runconfig: ...).")])
    data = copy.deepcopy(document.data)
    if is_legacy(data):
        runconfig = data["runconfig"] = data.get("runconfig") or {}
        runconfig.update({**given.values, **given.extra})
        if given.device is not None:
            runconfig["target_device"] = given.device
        runconfig.setdefault("model_dir", default_model_dir)
        # the script's functions see these in runconfig too, and the file's schema has no such keys
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


def _put_flags(init: dict[str, Any], given: CommandLine, default_model_dir: str) -> None:
    """Set what flags stand for, in the new form."""
    init.setdefault("model_dir", default_model_dir)
    # a file has device or backend: where a flag is of the backend, the device goes in there
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
        # the file's stages may name loaders, which the script makes
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
