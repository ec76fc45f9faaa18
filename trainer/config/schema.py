"""The parameter file itself, as tables of shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fulgurite.config.arguments import Call, check_arguments, names_of
from fulgurite.config.classes import Named, imported, named
from fulgurite.config.data import DataShape
from fulgurite.config.optimizers import OptimizerShape
from fulgurite.config.problems import Path, Problem, dotted, nearest
from fulgurite.config.schedulers import SchedulerShape, scale_problems
from fulgurite.config.sections import ProgressLogger
from fulgurite.config.shapes import (
    Keys,
    OneClass,
    Report,
    Section,
    Several,
    Shape,
    Value,
    is_mapping,
    unknown_key,
)


@dataclass(frozen=True)
class Backend:
    """``backend``: ``backend_type`` and the arguments of that backend. It stays a dict: making one
    claims its type for the process.
    """

    def check(self, value: Any, path: Path, report: Report) -> dict[str, Any] | None:
        """The backend's arguments."""
        if not is_mapping(value, path, report):
            return None
        kinds = {"CSX": "CSXBackend", "CPU": "CPUBackend", "GPU": "GPUBackend"}
        kind = value.get("backend_type")
        if str(kind).upper() not in kinds:
            report.problem((*path, "backend_type"), f"expected one of CSX, CPU, GPU; got {kind!r}.")
            return None
        target = imported(f"fulgurite.backends.{kinds[str(kind).upper()]}")
        given = {
            key: item
            for key, item in value.items()
            if key not in ("backend_type", "cluster_config") and not report.noted((*path, key))
        }
        report.problems += check_arguments(target, given, path, ["cluster_config"])
        if "cluster_config" in value:
            at = (*path, "cluster_config")
            Section("fulgurite.backends.CSConfig").check(value["cluster_config"], at, report)
        return dict(value)


@dataclass(frozen=True)
class EitherTextOr:
    """A string, or another shape."""

    shape: Shape

    def check(self, value: Any, path: Path, report: Report) -> Any:
        """The string, or the other shape's."""
        return value if isinstance(value, str) else self.shape.check(value, path, report)


DEFAULTS_ELSEWHERE = ("computenorm", "floputilization")
"""Callbacks that are defaults of the system followed, and not here: they cost a step time."""


@dataclass(frozen=True)
class Removable:
    """A class in one of its forms, or ``{Name: null}``, which takes a default away.

    Args:
        shape: of the class.
        defaults: import path of the names that are there by default.
    """

    shape: OneClass
    defaults: str

    def check(self, value: Any, path: Path, report: Report) -> Call | Named | None:
        """A call, or the name of the default that goes."""
        found = named(value, path, self.shape.category)
        if isinstance(found, Problem):
            report.problems.append(found)
            return None
        if not found.removed:
            return self.shape.called(found, report)
        names = list(imported(self.defaults))
        if found.name.lower() in DEFAULTS_ELSEWHERE:
            report.notes.append(Problem(found.name_path, "is no default here: nothing goes away."))
        elif found.name.lower() not in map(str.lower, names) and not report.noted(found.name_path):
            report.problem(
                found.name_path,
                f"null takes a default {self.shape.category} away, and {found.name} is none."
                f"{nearest(found.name, names)} Defaults: {', '.join(names)}.",
            )
            return None
        return found


@dataclass(frozen=True)
class LoggerShape(OneClass):
    """A logger, by Lightning's arguments or their other names; ``ProgressLogger`` is the bar."""

    def called(self, found: Named, report: Report) -> Call | None:
        """The call; ``save_dir`` may be left out: it is ``model_dir`` then."""
        if found.name.lower() == "progresslogger":
            report.problems += check_arguments(
                ProgressLogger, found.arguments, found.arguments_path
            )
            return Call(path=found.path, name=found.name, target=ProgressLogger, arguments={})
        others = LOGGER_NAMES.get(found.name.rpartition(".")[2].lower(), {})
        given = {others.get(key, key): value for key, value in found.arguments.items()}
        shape = self if "save_dir" in given else OneClass(self.category, ("save_dir",))
        return OneClass.called(shape, replace(found, arguments=given), report)


LOGGER_NAMES = {
    "tensorboardlogger": {"summary_dir": "save_dir"},
    "wandblogger": {"run_id": "id", "run_name": "name"},
}
"""What files call the arguments of some loggers -> Lightning's name."""


@dataclass(frozen=True)
class Unbuilt:
    """Anything, of a part that checks and does not run yet."""

    note: str

    def check(self, value: Any, path: Path, report: Report) -> Any:
        """The value, noted if there is one."""
        if value:
            report.notes.append(Problem(path, self.note))
        return value


TWICE = {
    ("loop", "max_steps"): ("max_steps",),
    ("loop", "num_steps"): ("max_steps",),
    ("loop", "num_epochs"): ("max_epochs",),
    ("loop", "steps_per_epoch"): ("limit_train_batches",),
    ("loop", "eval_frequency"): ("val_check_interval", "check_val_every_n_epoch"),
    ("loop", "eval_steps"): ("limit_val_batches",),
    ("loop", "grad_accum_steps"): ("accumulate_grad_batches",),
    ("logging", "log_steps"): ("log_every_n_steps",),
    ("precision", "max_gradient_norm"): ("gradient_clip_val", "gradient_clip_algorithm"),
    ("precision", "max_gradient_value"): ("gradient_clip_val", "gradient_clip_algorithm"),
    ("model_dir",): ("default_root_dir",),
    ("loggers",): ("logger",),
}
"""Keys of ``init`` -> Lightning's arguments that say the same thing."""


def said_twice(init: Mapping[str, Any], path: Path, report: Report) -> None:
    """Take down what ``init`` says in our words and in Lightning's too."""
    for ours, lightnings in TWICE.items():
        value: Any = init
        for key in ours:
            value = value.get(key) if isinstance(value, Mapping) else None
        for other in lightnings:
            if value is not None and init.get(other) is not None:
                report.problem(
                    (*path, other),
                    f"{other} and {dotted(ours)} say the same thing. Give one of them.",
                )
    if init.get("checkpoint") is not None and init.get("enable_checkpointing") is False:
        report.problem(
            (*path, "enable_checkpointing"),
            "enable_checkpointing: false contradicts checkpoint. Leave one of them out.",
        )


@dataclass(frozen=True)
class Init:
    """``init``: our keys, and any argument of the Trainer."""

    shapes: Mapping[str, Shape]

    def check(self, value: Any, path: Path, report: Report) -> dict[str, Any]:
        """Ours as their shapes make them; the Trainer's own as one call, under ``trainer``."""
        if not is_mapping(value, path, report):
            return {}
        trainer = imported("fulgurite.trainer.Trainer")
        skip = frozenset(self.shapes)
        lightnings = {key: value[key] for key in value if key in names_of(trainer, skip)}
        report.problems += check_arguments(trainer, lightnings, path, skip)
        ours = {key: item for key, item in value.items() if key not in lightnings}
        for key in ("device", "backend"):
            if key in ours and ours[key] is None:
                del ours[key]
        for key in [key for key in ours if key not in self.shapes]:
            if not report.noted((*path, key)):
                known = {**self.shapes, **dict.fromkeys(names_of(trainer, skip))}
                report.problem((*path, key), unknown_key(key, path, known))
            del ours[key]
        if "device" in ours and "backend" in ours:
            report.problem(
                (*path, "device"),
                "backend and device are mutually exclusive arguments of Trainer. Please only"
                " provide one or the other",
            )
        if "device" not in ours and "backend" not in ours:
            report.problem(path, "device (CSX, CPU or GPU) or backend: required, and not given.")
        said_twice(value, path, report)
        found = Keys(self.shapes, required=("model",)).check(ours, path, report)
        schedulers = found.get("schedulers") or []
        if schedulers and found.get("optimizer") is None and ours.get("optimizer") is None:
            report.problem(
                (*path, "schedulers"),
                "optimizer: required beside schedulers, and not given: they set its numbers. (A"
                " LightningModule's own optimizer has the schedulers of configure_optimizers.)",
            )
        scale_problems(found.get("optimizer"), schedulers, (*path, "optimizer"), report)
        call = Call(path=path, name="Trainer", target=trainer, arguments=lightnings, skip=skip)
        return {**found, "trainer": call}


@dataclass(frozen=True)
class Device:
    """``device``."""

    def check(self, value: Any, path: Path, report: Report) -> str | None:
        """One of the three, in capitals."""
        if isinstance(value, str) and value.upper() in ("CSX", "CPU", "GPU"):
            return value.upper()
        report.problem(path, f"expected one of CSX, CPU, GPU; got {value!r}.")
        return None


DATA = DataShape("data", key="data_processor")
CKPT_PATH = Value(str | None)
CALLBACKS = "fulgurite.callbacks.DEFAULT_CALLBACKS"
LOGGERS = "fulgurite.config.sections.DEFAULT_LOGGERS"

INIT: dict[str, Shape] = {
    "device": Device(),
    "backend": Backend(),
    "model": OneClass("model"),
    "model_dir": Value(str),
    "optimizer": OptimizerShape("optimizer", skip=("params",)),
    "schedulers": Several(SchedulerShape("scheduler", skip=("optimizer",))),
    "precision": EitherTextOr(Section("fulgurite.MixedPrecision")),
    "loop": Section("fulgurite.config.sections.Loop"),
    "checkpoint": Section("fulgurite.callbacks.Checkpoint"),
    "logging": Section("fulgurite.config.sections.Logging"),
    "callbacks": Several(Removable(OneClass("callback"), CALLBACKS)),
    "loggers": Several(Removable(LoggerShape("logger"), LOGGERS)),
    "seed": Value(int | None),
    "sparsity": Unbuilt("sparse training is not built: a run is refused."),
    "autorestart": Section("fulgurite.config.sections.AutoRestart"),
}

STAGES: dict[str, Shape] = {
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

TRAINER = Keys({"init": Init(INIT), **STAGES}, required=("init",))
TOP = ("imports", "trainer")
