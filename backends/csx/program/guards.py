"""Guards: what makes a step need another program (a recompilation), and why, in words.

A program fits as long as the conditions that it was built on hold, the batch has its shapes, and
all that its Python read on the host is as it was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fulgurite.backends.csx.capture import Captured, NumberCall, Scope, hold
from fulgurite.backends.csx.contract import Access, FrozenScalars
from fulgurite.backends.csx.diagnostics.errors import InputChanged, StateChanged
from fulgurite.backends.csx.graph.graph import used_numbers
from fulgurite.backends.csx.hyperparams.schedules import of_computed
from fulgurite.backends.csx.hyperparams.slots import read_numbers, unused_guards
from fulgurite.backends.csx.program.param_groups import NumberGuards, ParamGroups
from fulgurite.backends.csx.state import broken_gradient

_SETTINGS = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
settings_of = attrgetter(*_SETTINGS)
"""The attributes of a Trainer that a training program is built on."""


class Conditions(NamedTuple):
    """What every step compares first: where it differs, another program is needed."""

    requires_grad: tuple[bool, ...]
    training: tuple[bool, ...]
    tracking: tuple[bool, ...]  # of normalizations: whether they keep running statistics
    group_sizes: tuple[int, ...]
    options: tuple[Any, ...]  # of param groups, that are no numbers
    states: tuple[int, ...]  # identity of each optimizer's state
    settings: tuple[Any, ...]  # accumulation window, gradient clipping

    def difference(self, now: Conditions, modules: list[nn.Module], parameters: list[str]) -> str:
        """In words, what no longer is as it was.

        Args:
            now: the conditions now.
            modules: all of the model's, in the order of ``training``.
            parameters: their names, in the order of ``requires_grad``.

        Raises:
            StateChanged: an optimizer's state was lost, which no other program may answer.
        """
        if self.states != now.states:
            raise _lost_state()
        if self.training != now.training:
            first, *others = now.in_other_modes(self, modules)
            more = f", as are {len(others)} more modules" if others else ""
            return f"{type(first).__name__} is in {mode_of(first)} mode now{more}"
        if self.tracking != now.tracking:
            return "track_running_stats of a normalization changed"
        if self.requires_grad != now.requires_grad:
            triples = zip(parameters, self.requires_grad, now.requires_grad, strict=True)
            names = [name for name, was, is_now in triples if was != is_now]
            return f"requires_grad of {names[0]} changed ({len(names)} parameters in all)"
        if self.group_sizes != now.group_sizes:
            return (
                f"the param groups had {list(self.group_sizes)} parameters, and now have"
                f" {list(now.group_sizes)}"
            )
        if self.options != now.options:
            return f"the param groups' options were {self.options}, and now are {now.options}"
        settings = [
            f"{name} was {was!r}, and now is {is_now!r}"
            for name, was, is_now in zip(_SETTINGS, self.settings, now.settings, strict=True)
            if was != is_now
        ]
        return "; ".join(settings)

    def in_other_modes(self, before: Conditions, modules: list[nn.Module]) -> list[nn.Module]:
        """Those of all the model's modules that were in another mode before."""
        triples = zip(modules, before.training, self.training, strict=True)
        return [module for module, was, is_now in triples if was != is_now]


def mode_of(module: nn.Module) -> str:
    """The mode of a module, in a word."""
    return "train" if module.training else "eval"


class Misfit(NamedTuple):
    """Why a program does not fit, in words; ``error`` is what to raise where no other may be built.

    Another *phase* is a state of model and trainer that the user asked for, as a callback does that
    unfreezes layers or ends weight decay; what a program does not fit else was not to be foreseen.
    """

    error: type[InputChanged | StateChanged]
    why: str
    is_phase: bool = False


class Guards:
    """What one program relies on; ``captured`` are its entry points."""

    def __init__(
        self,
        captured: Sequence[Captured],
        conditions: Conditions,
        scope: Scope,
        groups: ParamGroups,
    ) -> None:
        self._scope, self._groups = scope, groups
        self._conditions = conditions
        self._modules = list(scope.module.modules())
        self.batch = captured[0].sources.batch  # all entry points take the same
        for one in captured:
            self.batch.read |= one.sources.batch.read
        read = [one.assumptions for one in captured]
        self._answers = {place: value for one in read for place, value in one.answers.items()}
        reads = (access for one in read for access in one.scalars)
        self._scalars = FrozenScalars(one for one in reads if not _is_condition(one))
        handovers = [one.sources.gradients for one in captured]
        self._gradients = [one for one in handovers if one.decided_by]
        self.numbers = _number_guards(captured, scope)

    def accept(self, now: Conditions, batch: Any) -> list[Tensor] | Misfit | None:
        """The tensors of a batch as the program takes them, or why it does not fit.

        None if the program was built for another state of the Trainer (sanity check, validation).

        Raises:
            TraceError: no other program may be built for this reason either.
        """
        if self._answers and not hold(self._answers, self._scope.trainer):
            return None
        if self._conditions != now:
            names = [name for name, _ in self._scope.module.named_parameters()]
            why = self._conditions.difference(now, self._modules, names)
            return Misfit(StateChanged, why, is_phase=True)
        tensors = self.batch.accept(batch)
        if tensors is None:
            return Misfit(InputChanged, self.batch.difference(batch))
        broken = self._gradients and broken_gradient(self._gradients)
        if broken:
            return Misfit(StateChanged, broken)
        answer = self._groups.update(self.numbers)
        return tensors if answer is None else Misfit(StateChanged, *answer)

    def check(self) -> None:
        """Verify what only code on the host changes.

        Raises:
            FrozenValueChanged: a scalar that the step read is another.
        """
        self._scalars.check()


def _is_condition(read: Access) -> bool:
    """Whether a scalar that the step read is one of the ``Conditions``."""
    return read.name == "track_running_stats" and isinstance(read.module, _NormBase)


def _number_guards(captured: Sequence[Captured], scope: Scope) -> NumberGuards:
    slots = captured[0].sources.numbers
    now = read_numbers(slots, scope.optimizers)
    used = frozenset().union(*(used_numbers(one.graph) for one in captured))
    guards = [guard for one in captured for guard in one.assumptions.numbers]
    calls = [call for one in captured for call in one.outputs.calls]
    by_step = [call.sets for call in calls if isinstance(call, NumberCall)]
    return NumberGuards(
        slots=slots,
        guards=(*guards, *unused_guards(slots, used, now, scope.optimizers, by_step)),
        computed=tuple(guard for guard in guards if of_computed(guard, now)),
    )


def _lost_state() -> StateChanged:
    return StateChanged(
        "The state of an optimizer was replaced (load_state_dict) or cleared while the program"
        " works on it.",
        remedy="load it before the first step, or by fit(ckpt_path=...)",
    )
