"""Classes that take more than their own arguments: schedulers, loggers, and what makes batches.

All schedulers, those of ``fulgurite.optim`` and torch's, are stepped after each optimizer step;
beside the arguments of one of torch's, Lightning's ``interval``, ``frequency``, ``monitor`` and
``strict`` say otherwise.

    train_dataloader: {data_processor: my.data.Pictures, split: train, batch_size: 32}

Data are a LightningDataModule, a DataLoader, a Dataset, or a function that returns one of them.
Around a Dataset a DataLoader is made: its arguments stand beside those of the dataset. An argument
that both have is the dataset's.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

from fulgurite.config.document.problems import Path, Problem, nearest
from fulgurite.config.types.classes import CATEGORIES, Named, named
from fulgurite.config.types.report import Call, Report
from fulgurite.config.types.shapes import OneClass, Several, Shape, Value
from fulgurite.config.types.signatures import names_of
from fulgurite.config.types.values import check_arguments

PROGRAM_SCHEDULER = "fulgurite.backends.program_scheduler.ProgramScheduler"
"""The base of those whose numbers a program computes."""

_PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"

WHEN = {"interval": str, "frequency": int, "monitor": str, "strict": bool}
"""What Lightning takes beside a scheduler, and of which type."""


@dataclass(frozen=True, kw_only=True)
class SchedulerCall(Call):
    """A scheduler to be made for an optimizer.

    Args:
        when: Lightning's ``interval`` and so on.
    """

    when: dict[str, Any]


@dataclass(frozen=True)
class SchedulerShape(OneClass):
    """A class of scheduler; ``scheduler`` and ``schedulers`` among its arguments are such again."""

    inner: bool = False

    def called(self, found: Named, report: Report) -> Call | None:
        """The call, with those of the schedulers that it combines."""
        given, path = dict(found.arguments), found.arguments_path
        if self.inner and self._follows_metric(found, report):
            text = "follows a metric, which no scheduler around it hands on. Let it stand alone."
            report.problem(found.name_path, text)
            return None
        inner = replace(self, inner=True)
        nested: dict[str, Any] = {}
        kinds: dict[str, Shape] = {"schedulers": Several(inner), "scheduler": inner}
        for key in kinds.keys() & given.keys():
            nested[key] = kinds[key].check(given.pop(key), (*path, key), report)
        when = {} if self.inner else {key: given.pop(key) for key in WHEN if key in given}
        shape = OneClass(self.category, (*self.skip, *nested), self.key)
        call = shape.called(replace(found, arguments=given), report)
        if call is None:
            return None
        when = self._checked_when(call.target, when, found, report)
        return SchedulerCall(**{**vars(call), "nested": nested}, when=when)

    def _follows_metric(self, found: Named, report: Report) -> bool:
        try:
            target = report.classes.find(self.category, found.name)
        except LookupError:  # said by the base
            return False
        plateau = report.classes.library(_PLATEAU)
        return inspect.isclass(target) and issubclass(target, plateau)

    def _checked_when(
        self, target: Any, when: dict[str, Any], found: Named, report: Report
    ) -> dict[str, Any]:
        path = found.arguments_path
        for key, value in when.items():
            Value(WHEN[key]).check(value, (*path, key), report)
        if when.get("interval", "step") not in ("step", "epoch"):
            report.problem(
                (*path, "interval"), f"expected step or epoch; got {when['interval']!r}."
            )
        if target is None:
            return when
        library = report.classes.library
        if issubclass(target, library(PROGRAM_SCHEDULER)):
            for key in when:
                report.problem(
                    (*path, key), f"{found.name} counts optimizer steps, and takes no {key}."
                )
            return {}
        if issubclass(target, library(_PLATEAU)):
            if "monitor" not in when:
                report.problem(
                    path, "monitor: required, and not given: the metric that it follows."
                )
            # its metric is there when an epoch is over
            return {"interval": "epoch", **when}
        return when


_DATASET = frozenset({"dataset"})
_LOADER = "torch.utils.data.DataLoader"


@dataclass(frozen=True, kw_only=True)
class DataCall(Call):
    """What makes a loader.

    Args:
        loader: arguments of the DataLoader around a dataset; None if none are given.
    """

    loader: Call | None


@dataclass(frozen=True)
class DataShape(OneClass):
    """A class or function that makes data, with the arguments of a DataLoader beside its own."""

    def called(self, found: Named, report: Report) -> Call | None:
        """The call, its loader's arguments apart."""
        loader, path = report.classes.library(_LOADER), found.arguments_path
        own, beside, around = dict(found.arguments), dict[str, Any](), None
        try:
            target = report.classes.find(self.category, found.name)
        except LookupError:  # said by the base
            target = None
        # these have their own arguments, and no loader is made around them
        whole = (loader, report.classes.library("lightning.pytorch.LightningDataModule"))
        if target is not None and not (inspect.isclass(target) and issubclass(target, whole)):
            takes, loaders = list(names_of(target)), list(names_of(loader, _DATASET))
            for key in [one for one in own if one not in takes]:
                # a mistyped one too: where the loader refuses it, it names the nearest
                of_loader = nearest(key, [*takes, *loaders]) not in ("", nearest(key, takes))
                if key in loaders or of_loader:
                    beside[key] = own.pop(key)
        call = super().called(replace(found, arguments=own), report)
        if call is None:
            return None
        if beside:
            given = check_arguments(loader, beside, path, report, _DATASET)
            around = Call(
                path=path, name="DataLoader", target=loader, arguments=given, skip=_DATASET
            )
        return DataCall(**vars(call), loader=around)


_LOGGER_NAMES = "fulgurite.config.types.loggers.LOGGER_NAMES"

DEFAULTS_ELSEWHERE = ("computenorm", "floputilization")
"""Callbacks that are defaults of the system followed, and not here: they cost a step time."""


@dataclass(frozen=True)
class Removable:
    """A class in one of its forms, or ``{Name: null}``, which takes a default away.

    Args:
        shape: of the class.
        defaults: the path of the names that are there by default.
    """

    shape: OneClass
    defaults: str

    def check(self, value: Any, path: Path, report: Report) -> Call | Named | None:
        """A call, or the name of the default that goes."""
        found = named(value, path, CATEGORIES[self.shape.category].title)
        if isinstance(found, Problem):
            report.problems.append(found)
            return None
        if not found.removed:
            return self.shape.called(found, report)
        defaults = list(report.classes.library(self.defaults))
        names = map(str.lower, defaults)
        if found.name.lower() in DEFAULTS_ELSEWHERE:
            report.notes.append(Problem(found.name_path, "is no default here: nothing goes away."))
        elif found.name.lower() not in names and not report.note_ignored(found.name_path):
            report.problem(
                found.name_path,
                f"null takes a default {self.shape.category} away, and {found.name} is none."
                f"{nearest(found.name, defaults)} Defaults: {', '.join(defaults)}.",
            )
            return None
        return found


@dataclass(frozen=True)
class LoggerShape(OneClass):
    """A logger, by Lightning's names of its arguments or those of files."""

    def called(self, found: Named, report: Report) -> Call | None:
        """The call; ``save_dir`` may be left out: it is ``model_dir`` then."""
        names = report.classes.library(_LOGGER_NAMES)
        others = names.get(found.name.rpartition(".")[2].lower(), {})
        given = {others.get(key, key): value for key, value in found.arguments.items()}
        shape = self if "save_dir" in given else OneClass(self.category, ("save_dir",))
        return OneClass.called(shape, replace(found, arguments=given), report)
