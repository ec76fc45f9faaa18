"""The parameter file itself, as tables of shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from fulgurite.config.document.problems import Path, Problem, listed, nearest, shown
from fulgurite.config.schema.class_shapes import (
    DataShape,
    LoggerShape,
    Removable,
    SchedulerCall,
    SchedulerShape,
)
from fulgurite.config.schema.conflicts import check_conflicts
from fulgurite.config.schema.optimizers import OptimizerShape
from fulgurite.config.schema.sections import AutoRestart, Logging, Loop
from fulgurite.config.types.classes import Classes, Named
from fulgurite.config.types.constructor_checks import backend_error
from fulgurite.config.types.report import Call
from fulgurite.config.types.shapes import (
    Keys,
    OneClass,
    Report,
    Section,
    Several,
    Shape,
    Value,
    is_mapping,
    place_of,
    unknown_key,
)
from fulgurite.config.types.signatures import alternatives, names_of, signature_of
from fulgurite.config.types.values import check_arguments
from fulgurite.mixed_precision import CB16_MIXED, MixedPrecision

if TYPE_CHECKING:
    from fulgurite.callbacks import Checkpoint

# by their paths, for they take long to import
TRAINER_CLASS = "fulgurite.trainer.Trainer"
BACKENDS = {
    "CSX": "fulgurite.backends.csx.config.CSXBackend",
    "CPU": "fulgurite.backends.backend.CPUBackend",
    "GPU": "fulgurite.backends.backend.GPUBackend",
}
CS_CONFIG = "fulgurite.backends.csx.config.CSConfig"
CHECKPOINT = "fulgurite.callbacks.Checkpoint"
DEFAULT_CALLBACKS = "fulgurite.callbacks.DEFAULT_CALLBACKS"
DEFAULT_LOGGERS = "fulgurite.config.types.loggers.DEFAULT_LOGGERS"


@dataclass(frozen=True)
class BackendShape:
    """``backend``: ``backend_type`` and the arguments of that backend. It stays a dict: making one
    claims its type for the process.
    """

    def check(self, value: Any, path: Path, report: Report) -> dict[str, Any] | None:
        """The backend's arguments."""
        if not is_mapping(value, path, report):
            return None
        kind = value.get("backend_type")
        if not isinstance(kind, str) or kind.upper() not in BACKENDS:
            text = f"expected one of CSX, CPU, GPU; got {shown(kind)}."
            report.problem((*path, "backend_type"), text)
            return None
        target = report.classes.library(BACKENDS[kind.upper()])
        given = {
            key: item
            for key, item in value.items()
            if key not in ("backend_type", "cluster_config")
            and not report.note_ignored((*path, key))
        }
        before = len(report.problems)
        arguments = check_arguments(target, given, path, report, frozenset({"cluster_config"}))
        if report.classes.imports and len(report.problems) == before:
            wrong = backend_error(target, arguments)
            if wrong is not None:
                report.problem(place_of(wrong, given, path), wrong)
        if "cluster_config" in value:
            at = (*path, "cluster_config")
            Section(CS_CONFIG).check(value["cluster_config"], at, report)
        return dict(value)


@dataclass(frozen=True)
class EitherTextOr:
    """A string, or another shape."""

    shape: Shape

    def check(self, value: Any, path: Path, report: Report) -> Any:
        """The string, or the other shape's."""
        return value if isinstance(value, str) else self.shape.check(value, path, report)


@dataclass(frozen=True)
class PrecisionShape:
    """``precision``: a name of Lightning's or ours, or the keys of MixedPrecision."""

    section: Section

    def check(self, value: Any, path: Path, report: Report) -> Any:
        """The name, or a MixedPrecision."""
        if value is None or isinstance(value, Mapping):
            return self.section.check(value, path, report)
        names = (*PRECISIONS, CB16_MIXED)
        takes = signature_of(report.classes.library(TRAINER_CLASS)).parameters["precision"]
        if value not in [name for kind in alternatives(takes.kind) for name in get_args(kind)]:
            text = f"expected {listed(names)}, or a mapping with fp16_type; got {shown(value)}."
            report.problem(path, f"{text}{nearest(value, names)}")
        return value


@dataclass(frozen=True)
class Unbuilt:
    """Anything, of a part that checks and does not run yet."""

    note: str

    def check(self, value: Any, path: Path, report: Report) -> Any:
        """The value, noted if there is one."""
        if value:
            report.notes.append(Problem(path, self.note))
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Init:
    """What ``init`` says, key by key; None or empty where it says nothing.

    Args:
        trainer: the call of the Trainer with those arguments that are Lightning's own.
        backend: ``backend_type`` and the arguments of that backend.
        callbacks: calls; and a ``Named`` for each default that is taken away. ``loggers`` too.
    """

    trainer: Call
    model: Call
    device: str | None = None
    backend: dict[str, Any] | None = None
    model_dir: str | None = None
    optimizer: Call | None = None
    schedulers: Sequence[SchedulerCall] = ()
    precision: MixedPrecision | str | int | None = None
    loop: Loop | None = None
    checkpoint: Checkpoint | None = None
    logging: Logging | None = None
    callbacks: Sequence[Call | Named] = ()
    loggers: Sequence[Call | Named] = ()
    seed: int | None = None
    sparsity: Any = None
    autorestart: AutoRestart | None = None

    @property
    def wants_checkpoints(self) -> bool:
        """Whether Lightning's ``enable_checkpointing`` leaves checkpoints on."""
        return self.trainer.arguments.get("enable_checkpointing") is not False

    @property
    def own_callbacks(self) -> list[Call]:
        """The callbacks that are to be made, without the defaults that are taken away."""
        return [one for one in self.callbacks if isinstance(one, Call)]


@dataclass(frozen=True)
class InitShape:
    """``init``: our keys, and any argument of the Trainer."""

    shapes: Mapping[str, Shape]

    def check(self, value: Any, path: Path, report: Report) -> Init | None:
        """Ours as their shapes make them; the Trainer's own as one call."""
        if not is_mapping(value, path, report):
            return None
        trainer = report.classes.library(TRAINER_CLASS)
        skip = frozenset(self.shapes)
        takes = names_of(trainer, skip)
        lightnings = {key: value[key] for key in value if key in takes}
        arguments = check_arguments(trainer, lightnings, path, report, skip)
        ours = {key: item for key, item in value.items() if key not in lightnings}
        # null is: not given. Flags of the command line take a key away so (cli._place)
        for key in ("device", "backend", "model_dir", "optimizer"):
            if key in ours and ours[key] is None:
                del ours[key]
        for key in [key for key in ours if key not in self.shapes]:
            if not report.note_ignored((*path, key)):
                known = {**self.shapes, **dict.fromkeys(takes)}
                text = self.belonging(key, report.classes) or unknown_key(key, path, known)
                report.problem((*path, key), text)
            del ours[key]
        found = Keys(self.shapes, required=("model",)).check(ours, path, report)
        check_conflicts(value, {**found, **arguments}, path, report)
        call = Call(path=path, name="Trainer", target=trainer, arguments=arguments, skip=skip)
        return Init(trainer=call, **found) if "model" in found else None

    def belonging(self, key: object, classes: Classes) -> str:
        """The section that a misplaced key belongs to."""
        for name, shape in self.shapes.items():
            section = shape.section if isinstance(shape, PrecisionShape) else shape
            if isinstance(section, Section) and key in section.names(classes):
                return f"no such key of init: it belongs under {name}:."
        return "no such key of init: it belongs under trainer:." if key in STAGES else ""


@dataclass(frozen=True)
class DeviceShape:
    """``device``."""

    def check(self, value: Any, path: Path, report: Report) -> str | None:
        """One of the three, in capitals."""
        if isinstance(value, str) and value.upper() in ("CSX", "CPU", "GPU"):
            return value.upper()
        report.problem(path, f"expected one of CSX, CPU, GPU; got {shown(value)}.")
        return None


PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true")
"""Of Lightning's many spellings, those that its documentation uses."""

DATA = DataShape("data", key="data_processor")
CKPT_PATH = Value(str | None)

INIT: dict[str, Shape] = {
    "device": DeviceShape(),
    "backend": BackendShape(),
    "model": OneClass("model"),
    "model_dir": Value(str),
    "optimizer": OptimizerShape("optimizer", skip=("params",)),
    "schedulers": Several(SchedulerShape("scheduler", skip=("optimizer",))),
    "precision": PrecisionShape(Section(MixedPrecision)),
    "loop": Section(Loop),
    "checkpoint": Section(CHECKPOINT),
    "logging": Section(Logging),
    "callbacks": Several(Removable(OneClass("callback"), DEFAULT_CALLBACKS)),
    "loggers": Several(Removable(LoggerShape("logger"), DEFAULT_LOGGERS)),
    "seed": Value(int | None, bounds=(0, 2**32 - 1)),
    "sparsity": Unbuilt("sparse training is not built: a run is refused."),
    "autorestart": Section(AutoRestart),
}

STAGES = {
    "fit": Keys(
        {"train_dataloader": DATA, "val_dataloader": Several(DATA), "ckpt_path": CKPT_PATH},
        required=("train_dataloader",),
    ),
    "validate": Keys(
        {"val_dataloader": Several(DATA), "ckpt_path": CKPT_PATH}, required=("val_dataloader",)
    ),
    "validate_all": Keys(
        {"val_dataloaders": Several(DATA), "ckpt_paths": EitherTextOr(Several(Value(str)))},
        required=("val_dataloaders",),
    ),
    "test": Keys(
        {"test_dataloader": Several(DATA), "ckpt_path": CKPT_PATH}, required=("test_dataloader",)
    ),
    "predict": Keys(
        {"predict_dataloader": Several(DATA), "ckpt_path": CKPT_PATH},
        required=("predict_dataloader",),
    ),
}

TRAINER = Keys({"init": InitShape(INIT), **STAGES}, required=("init",))
TOP = ("imports", "trainer")
