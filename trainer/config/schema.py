"""The parameter file itself, as tables of shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fulgurite.config.arguments import Call, names_of
from fulgurite.config.classes import CATEGORIES, Named, imported, named
from fulgurite.config.conflicts import check_conflicts
from fulgurite.config.problems import Path, Problem, listed, nearest, shown
from fulgurite.config.shapes import (
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
from fulgurite.config.trials import backend_complaint
from fulgurite.config.values import taken
from fulgurite.precision import CB16_MIXED, known_name


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
        if not isinstance(kind, str) or kind.upper() not in kinds:
            text = f"expected one of CSX, CPU, GPU; got {shown(kind)}."
            report.problem((*path, "backend_type"), text)
            return None
        target = imported(f"fulgurite.backends.{kinds[kind.upper()]}")
        given = {
            key: item
            for key, item in value.items()
            if key not in ("backend_type", "cluster_config") and not report.noted((*path, key))
        }
        tried = report.apart()
        arguments = taken(target, given, path, tried, frozenset({"cluster_config"}))
        report.add(tried)
        wrong = None if tried.problems else backend_complaint(target, arguments)
        if wrong is not None:
            report.problem(place_of(wrong, given, path), wrong)
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
class Precision:
    """``precision``: a name of Lightning's or ours, or the keys of MixedPrecision."""

    section: Section

    def check(self, value: Any, path: Path, report: Report) -> Any:
        """The name, or a MixedPrecision."""
        if value is None or isinstance(value, Mapping):
            return self.section.check(value, path, report)
        names = (*PRECISIONS, CB16_MIXED)
        try:
            known = value == CB16_MIXED or bool(known_name(value))
        except (ValueError, TypeError):
            known = False
        if not known:
            text = f"expected {listed(names)}, or a mapping with fp16_type; got {shown(value)}."
            report.problem(path, f"{text}{nearest(value, names)}")
        return value


@dataclass(frozen=True)
class Removable:
    """A class in one of its forms, or ``{Name: null}``, which takes a default away."""

    shape: OneClass

    def check(self, value: Any, path: Path, report: Report) -> Call | Named | None:
        """A call, or the name of the default that goes."""
        found = named(value, path, CATEGORIES[self.shape.category].title)
        if isinstance(found, Problem):
            report.problems.append(found)
            return None
        if not found.removed:
            return self.shape.called(found, report)
        try:
            report.classes.find(self.shape.category, found.name)
        except LookupError as error:
            if not report.noted(found.name_path):
                report.problem(found.name_path, str(error))
        return found


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
        takes = names_of(trainer, skip)
        lightnings = {key: value[key] for key in value if key in takes}
        arguments = taken(trainer, lightnings, path, report, skip)
        ours = {key: item for key, item in value.items() if key not in lightnings}
        for key in [key for key in ours if key not in self.shapes]:
            if not report.noted((*path, key)):
                known = {**self.shapes, **dict.fromkeys(takes)}
                text = self.belonging(key) or unknown_key(key, path, known)
                report.problem((*path, key), text)
            del ours[key]
        found = Keys(self.shapes, required=("model",)).check(ours, path, report)
        check_conflicts(value, {**found, **arguments}, path, report)
        call = Call(path=path, name="Trainer", target=trainer, arguments=arguments, skip=skip)
        return {**found, "trainer": call}

    def belonging(self, key: object) -> str:
        """The section that a misplaced key belongs to."""
        for name, shape in self.shapes.items():
            section = shape.section if isinstance(shape, Precision) else shape
            if isinstance(section, Section) and key in section.names():
                return f"no such key of init: it belongs under {name}:."
        return "no such key of init: it belongs under trainer:." if key in STAGES else ""


@dataclass(frozen=True)
class Device:
    """``device``."""

    def check(self, value: Any, path: Path, report: Report) -> str | None:
        """One of the three, in capitals."""
        if isinstance(value, str) and value.upper() in ("CSX", "CPU", "GPU"):
            return value.upper()
        report.problem(path, f"expected one of CSX, CPU, GPU; got {shown(value)}.")
        return None


PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true")
"""Of Lightning's many spellings, those that its documentation uses."""

DATA = OneClass("data", key="data_processor")
CKPT_PATH = Value(str | None)

INIT: dict[str, Shape] = {
    "device": Device(),
    "backend": Backend(),
    "model": OneClass("model"),
    "model_dir": Value(str),
    "optimizer": OneClass("optimizer", skip=("params",)),
    "schedulers": Several(Scheduler("scheduler", skip=("optimizer",))),
    "precision": Precision(Section("fulgurite.MixedPrecision")),
    "loop": Section("fulgurite.config.sections.Loop"),
    "checkpoint": Section("fulgurite.callbacks.Checkpoint"),
    "logging": Section("fulgurite.config.sections.Logging"),
    "callbacks": Several(Removable(OneClass("callback"))),
    "loggers": Several(Removable(OneClass("logger"))),
    "seed": Value(int | None, bounds=(0, 2**32 - 1)),
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
