"""``schedulers``: checked against their signatures.

Those of ``fulgurite.optim`` and torch's. All are stepped after each optimizer step; beside the
arguments of one of torch's, Lightning's ``interval``, ``frequency``, ``monitor`` and ``strict`` say
otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fulgurite.config.types.classes import Named
from fulgurite.config.types.report import Call
from fulgurite.config.types.shapes import OneClass, Report, Several, Shape, Value

PROGRAM_SCHEDULER = "fulgurite.backends.schedules.ProgramScheduler"
"""The base of those whose numbers a program computes."""

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
        if issubclass(target, library("torch.optim.lr_scheduler.ReduceLROnPlateau")):
            if "monitor" not in when:
                report.problem(
                    path, "monitor: required, and not given: the metric that it follows."
                )
            return {"interval": "epoch", **when}
        return when
