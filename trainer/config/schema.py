"""The parameter file itself, as tables of shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fulgurite.config.arguments import Call, check_arguments, names_of
from fulgurite.config.classes import Named, imported, named
from fulgurite.config.problems import Path, Problem
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


@dataclass(frozen=True)
class Removable:
    """A class in one of its forms, or ``{Name: null}``, which takes a default away."""

    shape: OneClass

    def check(self, value: Any, path: Path, report: Report) -> Call | Named | None:
        """A call, or the name of the default that goes."""
        found = named(value, path, self.shape.category)
        if isinstance(found, Problem):
            report.problems.append(found)
            return None
        return found if found.removed else self.shape.called(found, report)


@dataclass(frozen=True)
class Scheduler(OneClass):
    """A scheduler; the schedulers of one that combines others are calls too."""

    def called(self, found: Named, report: Report) -> Call | None:
        """The call; ``schedulers`` among its arguments are checked as schedulers."""
        inner = found.arguments.pop("schedulers", None)
        if inner is None:
            return super().called(found, report)
        shape = Scheduler(self.category, (*self.skip, "schedulers"))
        call = OneClass.called(shape, found, report)
        at = (*found.arguments_path, "schedulers")
        nested = Several(Scheduler(self.category, self.skip)).check(inner, at, report)
        if call is not None:
            call.nested["schedulers"] = nested
        return call


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
        found = Keys(self.shapes, required=("model",)).check(ours, path, report)
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


DATA = OneClass("data", key="data_processor")
CKPT_PATH = Value(str | None)

INIT: dict[str, Shape] = {
    "device": Device(),
    "backend": Backend(),
    "model": OneClass("model"),
    "model_dir": Value(str),
    "optimizer": OneClass("optimizer", skip=("params",)),
    "schedulers": Several(Scheduler("scheduler", skip=("optimizer",))),
    "precision": EitherTextOr(Section("fulgurite.MixedPrecision")),
    "loop": Section("fulgurite.config.sections.Loop"),
    "checkpoint": Section("fulgurite.callbacks.Checkpoint"),
    "logging": Section("fulgurite.config.sections.Logging"),
    "callbacks": Several(Removable(OneClass("callback"))),
    "loggers": Several(Removable(OneClass("logger"))),
    "seed": Value(int | None),
    "autorestart": Section("fulgurite.config.sections.AutoRestart"),
}

STAGES: dict[str, Shape] = {
    "fit": Keys(
        {"train_dataloader": DATA, "val_dataloader": Several(DATA), "ckpt_path": CKPT_PATH},
        required=("train_dataloader",),
    ),
    "validate": Keys({"val_dataloader": DATA, "ckpt_path": CKPT_PATH}),
    "validate_all": Keys(
        {"val_dataloaders": Several(DATA), "ckpt_paths": EitherTextOr(Several(Value(str)))}
    ),
    "test": Keys({"test_dataloader": Several(DATA), "ckpt_path": CKPT_PATH}),
    "predict": Keys({"predict_dataloader": Several(DATA), "ckpt_path": CKPT_PATH}),
}

TRAINER = Keys({"init": Init(INIT), **STAGES}, required=("init",))
TOP = ("imports", "trainer")
