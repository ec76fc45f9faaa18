"""Gradients between steps.

``p.grad`` starts as an input of its own, zero before the first step. Where the step clears it first
(``zero_grad``) nobody reads that input and it is dropped; where gradients accumulate over steps, it
is state. Eagerly the gradient of a parameter that no backward reaches is None, and its optimizer
leaves it alone, so such a zero is hidden from the optimizer; where it turns out that the step
leaves a gradient there for the next one, it is traced again, and the optimizer sees it (carried).
In manual optimization the step's own code sees ``p.grad`` too: where a step began with None and
leaves None, it is traced again with None in the place of a zero (``StageGradients.none``).

A function of a hand-written loop finds gradients in ``p.grad`` and leaves them there, so that the
loop may clear them, or another function may use them; only those that an optimizer has used and
nobody reads again are not worth writing down. ``kept_gradients`` says where they are between steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedState
from fulgurite.backends.csx.graph.graph import Input, Kind
from fulgurite.backends.csx.graph.recorder import Nodes
from fulgurite.backends.csx.state.conditional_updates import (
    IS_THERE,
    GradientFlag,
    skipping_without_gradient,
)
from fulgurite.backends.csx.state.fake_swap import on_gradient, same_to_graph
from fulgurite.backends.csx.state.sharded import ShardedTensor


@dataclass(slots=True, kw_only=True)
class GradientHandover:
    """What one trace found in ``p.grad`` and what it leaves there, by the parameters' names.

    The program that is built of the trace does the same with the gradients of each step.
    """

    parameters: dict[str, nn.Parameter]
    on_host: bool  # it is a function's: the host sees it
    shown: bool = False  # it is Lightning's, and the host sees what is state
    all_kept: bool = False  # and what is not
    was_none: frozenset[str] = frozenset()  # before the trace
    none_matters: set[str] = field(default_factory=set)  # the trace depends on which were None
    tensor_after: dict[str, bool] = field(default_factory=dict)  # False: None; absent: as found
    unused: set[str] = field(default_factory=set)  # computed, and not used by an optimizer since
    carried: dict[str, GradientFlag] = field(default_factory=dict)  # from one step to the next
    computed: set[str] = field(default_factory=set)  # by this step
    fresh: set[str] = field(default_factory=set)  # in a tensor of their own

    def mismatch(self) -> str | None:
        """A text where a gradient that must be None no longer is, or the other way round."""
        for name in self.none_matters:
            is_none, was_none = self.parameters[name].grad is None, name in self.was_none
            if is_none != was_none:
                words = {True: "None", False: "a tensor"}
                return f"{name}.grad was {words[was_none]}, and now is {words[is_none]}"
        return None


def gradient_mismatch(handovers: list[GradientHandover]) -> str | None:
    """The first text of ``GradientHandover.mismatch``; None where all gradients are as traced."""
    return next((why for why in (one.mismatch() for one in handovers) if why), None)


@dataclass(slots=True)
class StageGradients:
    """What is known of gradients from all programs of a stage, by the parameters' names.

    One program may leave a gradient that the optimizer of another one uses.

    Attributes:
        left: some step leaves them in ``p.grad``.
        hidden: some step hides them from its optimizer.
        kept: buffers of those that programs keep to themselves, as ``{parameter}.grad``.
    """

    left: set[str] = field(default_factory=set)
    hidden: set[str] = field(default_factory=set)
    none: set[str] = field(default_factory=set)  # None whenever a step begins
    may_be_none: set[str] = field(default_factory=set)  # as the last trace found them
    kept: dict[str, Tensor] = field(default_factory=dict)

    def suppose_none(self) -> bool:
        """Suppose that whatever may be None at the start is; False where that was supposed."""
        more = self.may_be_none - self.left - self.none
        self.none |= more
        return bool(more)


class GradientScope(Protocol):
    """What gradients ask of a step's ``Scope``."""

    gradients_on_host: ClassVar[bool]
    carried: dict[str, GradientFlag]
    stage_gradients: StageGradients
    trains: bool

    @property
    def backward_is_lightnings(self) -> bool: ...

    @property
    def shows_gradients(self) -> bool: ...

    @property
    def keeps_gradients(self) -> bool: ...


class Gradients:
    """The gradients of one trace.

    Args:
        parameters: all parameters by name; those that require no gradient are left out.
        scope: says which of them the host sees between steps.

    Attributes:
        missed: gradients that were hidden from an optimizer although an earlier step may have
            left them: the step has to be traced again, and see them.
        arrived: called with a parameter whose gradient a backward pass has just computed.
        reduce: makes the gradient of a sharded parameter the mean of all processes', before it is
            added to what is there: no process holds all of the sum.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], scope: GradientScope) -> None:
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        on_host = scope.gradients_on_host
        self.handover = GradientHandover(
            parameters=self.parameters,
            on_host=on_host,
            shown=scope.shows_gradients,
            all_kept=scope.keeps_gradients,
            carried=scope.carried,
        )
        self.missed: set[str] = set()
        self.arrived: Callable[[Tensor], None] | None = None
        self.reduce: Callable[[Tensor], Tensor] | None = None
        self.sharded: set[int] = set()  # the identity of sharded parameters
        self._leaves: set[str] = set()
        self._cleared: set[str] = set()  # for the window's others, if this step reads it or not
        self._others = scope.stage_gradients
        none = {name for name, p in self.parameters.items() if p.grad is None}
        by_hand = scope.trains and not scope.backward_is_lightnings
        may_be = none - scope.carried.keys() if by_hand and not on_host else set[str]()
        self._others.may_be_none = may_be
        if not on_host:
            none = none & self._others.none
            self.handover.none_matters |= none
        self.handover.was_none = frozenset(none)
        self._names = {id(p): name for name, p in self.parameters.items()}
        self._inputs: dict[str, Tensor] = {}
        self._reached: set[str] = set()
        self._hidden: set[str] = set()  # from the step of an optimizer
        self._as_found: set[str] = set()  # those of an optimizer, when its step begins
        self.stepped: list[Optimizer] = []  # by hand
        self.counts: dict[int, Tensor] = {}  # whether a parameter's update does, by its identity

    def watch(self, parameter: Tensor, fake: Tensor) -> None:
        """Note when a backward pass reaches a parameter, by the fake in its place."""
        name = self._names.get(id(parameter))
        is_sharded = isinstance(parameter, ShardedTensor) and parameter.requires_grad
        reduce = _reducing(self, parameter, fake) if is_sharded else None

        def note(p: Tensor) -> None:
            assert name is not None
            self._reached.add(name)
            self.handover.unused.add(name)
            if reduce is not None:
                reduce(p)
            if self.arrived is not None:
                self.arrived(p)

        if name is not None:
            on_gradient(fake, note)

    def put(self, inputs: list[Tensor], nodes: Nodes) -> None:
        """Make the inputs, whose ``nodes`` these are, the parameters' gradients, in order."""
        self._nodes = nodes
        with DisableTorchFunction():  # these are no calls of the step
            for (name, p), gradient in zip(self.parameters.items(), inputs, strict=True):
                self._inputs[name] = p.grad = same_to_graph(gradient, nodes)
                # the input stays, for the program writes the gradient of this step there
                if not self.handover.on_host and name in self.handover.was_none:
                    p.grad = None

    def hide_unreached(self, among: list[Any] | None = None) -> None:
        """Make ``p.grad`` None where no backward has reached the parameter, and none was there."""
        wanted = None if among is None else {id(p) for p in among}
        known, on_host = self.handover, self.handover.on_host
        for name, gradient in self._inputs.items():
            p = self.parameters[name]
            # an optimizer leaves None alone; for a zero Adam counts a step, and weights decay
            if (wanted is None or id(p) in wanted) and p.grad is gradient:
                # whether a carried one is there is known in each step alone: its flag says so
                if name in self._reached or name in known.carried:
                    continue
                if on_host:
                    known.none_matters.add(name)
                if not on_host or name in known.was_none:
                    p.grad = None
                    # of sharded ones each process holds a part of a window's sum, and no flag
                    if among is not None or id(p) not in self.sharded:
                        self._hidden.add(name)

    @contextlib.contextmanager
    def hidden_from_steps(self, automatic: bool, optimizers: list[Optimizer]) -> Iterator[None]:
        """Hide unreached gradients from each optimizer's step.

        Under automatic optimization the backward pass is inside the step: there they are hidden
        right after it (``CSXPrecision.backward``).
        """
        carried = self.handover.carried

        def hide(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            own = [p for group in optimizer.param_groups for p in group["params"]]
            names = {self._names.get(id(p), "") for p in own}
            self._as_found = {name for name in names if self._is_as_found(name)}
            if not automatic:
                self.stepped.append(optimizer)
                self.hide_unreached(own)
                self.handover.unused -= names

        def waiting(optimizer: Optimizer) -> dict[nn.Parameter, Tensor]:
            found = self._as_found & carried.keys() - self._reached
            return {self.parameters[name]: carried[name].flag[IS_THERE] for name in sorted(found)}

        handle = register_optimizer_step_pre_hook(hide)
        carrying = optimizers if carried else []
        try:
            with skipping_without_gradient(carrying, self.counts, waiting):
                yield
        finally:
            handle.remove()

    def _is_as_found(self, name: str) -> bool:
        """Whether a parameter's gradient is still the one that the step found."""
        gradient = self.parameters[name].grad if name in self._inputs else None
        return gradient is not None and gradient is self._inputs[name]

    def keep(self, cleared: bool) -> None:
        """Write each final gradient into its input; inputs that nobody reads are pruned later."""
        known, left = self.handover, self.handover.tensor_after
        for name, gradient in self._inputs.items():
            p = self.parameters[name]
            seen = known.on_host or known.all_kept or name in known.carried
            matters = seen or self._nodes[gradient].users  # else nobody has it after the step
            if p.grad is not None and p.grad is not gradient:
                known.fresh.add(name)
            if name in known.fresh or (p.grad is gradient and name in self._reached):
                self.handover.computed.add(name)
            untouched = name in self.handover.none_matters and name not in self._reached
            if cleared or p.grad is None:
                if not (untouched and name in self.handover.was_none):
                    left[name] = False
                # a program has no None: it holds a zero, and ``tensor_after`` says what that means
                if matters:
                    self._cleared |= {name} if cleared else set()
                    gradient.copy_(torch.zeros(gradient.shape, dtype=gradient.dtype))
            elif p.grad is not gradient:
                left[name] = True
                if matters:
                    gradient.copy_(p.grad)
            elif name in self._reached:
                left[name] = True
            p.grad = None
            if name in self.handover.carried and name in left:
                self.handover.carried[name].flag[IS_THERE].fill_(left[name])
        self._inputs.clear()  # or they would be searched for as tensors that leaked: 1 s each trace
        if not self.handover.on_host:
            # a program of the stage may need what another one leaves: batches of two sizes, of
            # which one computes gradients and the other uses them
            others, leaves = self._others, {name for name, there in left.items() if there}
            missed = self._hidden & (leaves | others.left) | leaves & others.hidden
            self.missed = missed - self.handover.carried.keys()
            self._leaves = leaves
            if not self.missed:
                others.left |= leaves
                others.hidden |= self._hidden

    def begins_otherwise(self) -> bool:
        """Whether the trace was wrong about which gradients are None when a step begins.

        Which ones are is noted in ``StageGradients.none``; the caller then traces the step again.
        """
        others, wrong = self._others, self._others.none & self._leaves
        others.left |= self._leaves
        others.none -= wrong
        return others.suppose_none() or bool(wrong)

    def mark_inputs(self, inputs: list[Input]) -> list[Input]:
        """A trace's inputs, with what was learned of the gradients among them."""
        handover, names = self.handover, list(self.parameters)
        kept, stay_none = handover.unused, set[str]()
        if handover.on_host:
            stay_none = {
                name for name in handover.was_none if handover.tensor_after.get(name) is False
            }
            handover.none_matters |= stay_none
        else:
            kept = {
                name for name, there in handover.tensor_after.items() if there and handover.all_kept
            }
            kept |= handover.carried.keys() | self._cleared

        def mark(item: Input) -> Input:
            name = names[item.index]
            return replace(item, kept=name in kept, zero=name in stay_none)

        return [mark(item) if item.kind is Kind.GRADIENT else item for item in inputs]


def _reducing(
    gradients: Gradients, parameter: Tensor, fake: Tensor
) -> Callable[[Tensor], None] | None:
    """Let the gradients of a sharded parameter be reduced as they come.

    Returns what does it after the user's hooks, where there are some: each gets this process's own
    gradient, as in DistributedDataParallel.
    """
    hooks = list(getattr(fake, "_post_accumulate_grad_hooks", None) or ())
    gradients.sharded.add(id(parameter))

    def reduce(gradient: Tensor) -> Tensor:
        if hooks and parameter.grad is not None:
            raise UnsupportedState(
                "register_post_accumulate_grad_hook of a parameter whose gradients add up: each"
                " process holds a part of their sum, and the hook would need all of it.",
                remedy="register_hook, which gets each backward pass's gradient; or"
                " execution='pipeline'",
            )
        return gradient if gradients.reduce is None or hooks else gradients.reduce(gradient)

    @torch.no_grad()
    def reduce_later(p: Tensor) -> None:
        if gradients.reduce is not None:
            assert p.grad is not None
            p.grad.copy_(gradients.reduce(p.grad))

    fake.register_hook(reduce)  # type: ignore[no-untyped-call]
    return reduce_later if hooks else None
