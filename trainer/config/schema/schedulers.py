"""``schedulers``: checked against their signatures, and made for an optimizer.

Those of ``fulgurite.optim`` and torch's. All are stepped after each optimizer step; beside the
arguments of one of torch's, Lightning's ``interval``, ``frequency``, ``monitor`` and ``strict`` say
otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fulgurite.backends.schedules import ProgramScheduler
from fulgurite.config.types.calls import Call
from fulgurite.config.types.classes import Named
from fulgurite.config.types.shapes import OneClass, Report, Several, Shape, Value
from fulgurite.config.types.signatures import names_of
from fulgurite.optim.lr_scheduler import ScalePerParamLR

_TAGS = "param_group_tags"
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
        if is_program_scheduler(target):
            for key in when:
                report.problem(
                    (*path, key), f"{found.name} counts optimizer steps, and takes no {key}."
                )
            return {}
        if issubclass(target, ReduceLROnPlateau):
            if "monitor" not in when:
                report.problem(
                    path, "monitor: required, and not given: the metric that it follows."
                )
            return {"interval": "epoch", **when}
        return when


def scheduler_configs(
    calls: Sequence[SchedulerCall], optimizer: Optimizer, scaled: bool
) -> list[dict[str, Any]]:
    """What ``configure_optimizers`` returns for the schedulers of a file.

    Args:
        calls: the file's.
        optimizer: whose numbers they set.
        scaled: whether its groups have factors: schedulers of the learning rate then follow them,
            as under ``ScalePerParamLR``.
    """
    return [
        {
            "scheduler": _follow(_made(call, optimizer), call, scaled),
            "interval": "step",
            **call.when,
        }
        for call in calls
    ]


def _made(call: Call, optimizer: Optimizer) -> Any:
    assert call.target is not None

    def make(inner: Call) -> Any:
        return _made(_tagged(inner, call), optimizer)

    nested = {
        name: [make(one) for one in inner] if isinstance(inner, list) else make(inner)
        for name, inner in call.nested.items()
    }
    # a chain takes no optimizer: its schedulers have one
    takes = "optimizer" in inspect.signature(call.target).parameters
    return call(**nested, **({"optimizer": optimizer} if takes else {}))


def _tagged(inner: Call, outer: Call) -> Call:
    """An inner scheduler sets the same groups as the outer one."""
    tags = outer.arguments.get(_TAGS)
    if tags is None or inner.target is None or _TAGS not in names_of(inner.target):
        return inner
    return replace(inner, arguments={_TAGS: tags, **inner.arguments})


def _follow(scheduler: Any, call: Call, scaled: bool) -> Any:
    follows = isinstance(scheduler, ProgramScheduler) and scheduler.key == "lr"
    if not scaled or not follows or isinstance(scheduler, ScalePerParamLR):
        return scheduler
    return ScalePerParamLR(scheduler.optimizer, scheduler, call.arguments.get(_TAGS))


def is_program_scheduler(target: Any) -> bool:
    """Whether a class is one whose numbers a program computes."""
    return inspect.isclass(target) and issubclass(target, ProgramScheduler)
