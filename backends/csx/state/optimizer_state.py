"""The state of optimizers before the first step, found by a step of each on trial.

A program's state must exist before it is traced, and most optimizers make theirs in their first
``step``. So that step is run on trial, with made-up gradients, each state tensor is kept with its
*initial value*, that of the moment it was made, and everything else is put back. (Running the step
and zeroing the state instead gives wrong weights: NAdam 2 %, Adagrad 8 %, Rprop 36 %; measured,
torch 2.13.)

An initial value that differs between two trials comes from the *first gradient*. Where the first
update does the same from zeros (SGD's momentum), it is zeros; else only that update itself can tell
it: none is made, and the first step is a program of its own (``capture/births``).
"""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fulgurite.backends.csx.diagnostics.user_lines import UserLine
from fulgurite.backends.csx.graph.dtypes import wide
from fulgurite.backends.csx.state.optimizer_checks import check_state
from fulgurite.backends.csx.state.python_objects import remember
from fulgurite.backends.csx.state.sharded import (
    ShardedTensor,
    makes_for_each,
    parts_in_place,
    refuse_of_wholes,
    sharded_as,
)
from fulgurite.backends.csx.state.storage import StateTensor
from fulgurite.backends.step_context import running


def before_steps(optimizer: Optimizer, hook: Callable[..., Any]) -> RemovableHandle:
    """Call a hook before every step, also of an optimizer whose ``__init__`` left torch's out.

    Without it there may be no place for hooks, or a dict that has no weak references, and ``step``
    does not call them.
    """
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        hooks = vars(optimizer).get(name)
        if type(hooks) is not OrderedDict:
            setattr(optimizer, name, OrderedDict(hooks or {}))
    if not hasattr(optimizer.step, "hooked"):  # which torch would set on the class, for all of it
        step: Any = Optimizer.profile_hook_step(type(optimizer).step)
        step.hooked = True
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer.register_step_pre_hook(hook)


@contextlib.contextmanager
def around_steps(
    optimizer: Optimizer, before: Callable[..., Any], after: Callable[..., None]
) -> Iterator[None]:
    """Call these around every step of an optimizer, within the hooks of users."""
    depth = 0  # a step may call its parent class's, which has hooks too

    def begin(optimizer: Any, args: Any, kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        return before(optimizer, args, kwargs) if depth == 1 else None

    def end(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal depth
        depth -= 1
        if not depth:
            after(optimizer, args, kwargs)

    first, last = before_steps(optimizer, begin), optimizer.register_step_post_hook(end)
    hooks: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict
    hooks.move_to_end(last.id, last=False)  # a user's hook finds the state as the step leaves it
    try:
        yield
    finally:
        first.remove()
        last.remove()


class _InitialValues(dict[Any, Any]):
    """A state dict that remembers each value as it was when its key was first set."""

    def __init__(self, state: dict[Any, Any] | None = None) -> None:
        super().__init__()
        self.initial: dict[Any, Any] = {}
        self.update(state or {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self.initial.setdefault(key, copy_tensors(value))
        super().__setitem__(key, value)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        # dict's own, and its update, would go past ``__setitem__``
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **values: Any) -> None:
        for key, value in dict(*others, **values).items():
            self[key] = value


class _States(defaultdict[Any, Any]):
    """``optimizer.state`` during a trial: it remembers each new value as it was when it was set."""

    def __init__(self, states: dict[Any, Any]) -> None:
        super().__init__(_InitialValues)
        self.update(states)  # dict's own, past ``__setitem__``: these are not new
        self.given: dict[Any, Any] = {}

    def __setitem__(self, key: Any, value: Any) -> None:
        self.given.setdefault(key, copy_tensors(value))
        super().__setitem__(key, value)

    def initial(self, known: dict[Any, Any]) -> tuple[dict[Any, Any], bool]:
        """The initial values of states that are not in ``known``, and whether all were seen.

        One that was not seen, for it was set past ``__setitem__``, is given as it is now.
        """
        values: dict[Any, Any] = {}
        seen = True
        for key, now in self.items():
            if key in known:
                continue
            initial = now.initial if isinstance(now, _InitialValues) else self.given[key]
            if isinstance(now, dict):
                seen = seen and initial.keys() >= now.keys()
                initial = {name: initial.get(name, value) for name, value in now.items()}
            values[key] = initial
        return values, seen


def copy_tensors(value: Any) -> Any:
    """A copy of a tensor, or of dicts of them; another value itself."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    plain = type(value) in (dict, _InitialValues)
    return {key: copy_tensors(item) for key, item in value.items()} if plain else value


class Trial(NamedTuple):
    """What a step of an optimizer did."""

    initial: dict[Any, Any]  # new states as they were when the step made them
    seen: bool  # whether all of them were (``_States.initial``)
    groups: list[dict[str, Any]]
    after: list[Any]  # where that was asked for: the parameters, all state, and the groups


def begin_counts(optimizer: Optimizer, known: dict[Any, Any], first: Trial) -> Trial:
    """Give counts that the first step puts into param groups the value before that step.

    Published optimizers have ``group["step"] = 1`` on the first step and ``+= 1`` on later ones: a
    program has one of the two, and that is right for all steps if the count begins at 0. Where a
    trial shows that a step does something else with the count there, the groups stay without it.
    """
    groups = optimizer.param_groups
    born = [
        (group, key, value - 1)
        for group, after in zip(groups, first.groups, strict=True)
        for key, value in after.items()
        if key not in group and type(value) is int
    ]
    for group, key, value in born:
        group[key] = value
    if born:
        with_counts = trial(optimizer, known, seed=1, to_end=True)
        for group, key, _ in born:
            del group[key]
        if equal([*trial(optimizer, known, seed=1, to_end=True)], [*with_counts]):
            for group, key, value in born:
                group[key] = value
    return first


def trial(optimizer: Optimizer, known: dict[Any, Any], seed: int, *, to_end: bool = False) -> Trial:
    """A step of an optimizer whose state is ``known``; everything is put back.

    With ``to_end`` its result is kept too: as much memory again as parameters and state take.
    """
    everyone = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in everyone]
    restore = remember(optimizer)
    generator = torch.Generator().manual_seed(seed)
    try:
        for p in everyone:
            made_up = torch.randn(p.shape, generator=generator)
            p.grad = torch.empty_like(p).copy_(made_up).detach() if p.requires_grad else None
        optimizer.state = states = _States(known)
        step = inspect.unwrap(type(optimizer).step)  # without hooks and the schedulers' counter
        alone = torch.random.fork_rng(devices=[])  # a step that draws moves no number of the run
        with alone, running(steps_optimizer=True), torch.no_grad(), plain_options([optimizer]):
            # some steps demand a closure; on trial the user's code must not run
            step(optimizer, closure=lambda: torch.zeros(()))
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        after = [*everyone, dict(states), groups] if to_end else []
        return Trial(*states.initial(known), groups, list(map(copy_tensors, after)))
    finally:
        restore()
        for p, gradient in zip(everyone, gradients, strict=True):
            p.grad = gradient


def equal(a: Any, b: Any) -> bool:
    """Whether two states hold the same: tensors bit by bit, NaN equal to NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype
        return same and bool(torch.eq(a, b).logical_or(a.ne(a) & b.ne(b)).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and bool(a == b)


@contextlib.contextmanager
def plain_options(optimizers: list[Optimizer]) -> Iterator[None]:
    """Let torch's optimizers take their plain loop over parameters, on any device.

    The fused and foreach variants compute the same, and do not trace; capturable ones insist on a
    device that CSX does not look at.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    flags = ("foreach", "fused", "capturable")
    before = [(group, key, group[key]) for group in groups for key in flags if key in group]
    try:
        for group, key, value in before:
            group[key] = False if value else value
            if key == "foreach":
                group[key] = False  # None chooses by device
        yield
    finally:
        for group, key, value in before:
            group[key] = value


@dataclass(frozen=True, slots=True)
class NewState:
    """What ``init_state`` made.

    Args:
        optimizer: whose state it is.
        keys: of their state in ``optimizer.state``.
    """

    optimizer: Optimizer
    keys: list[Any]

    def forget_unused(self, live: list[StateTensor]) -> None:
        """Delete the state of what no program updates; ``live`` are the tensors of one.

        Eagerly an optimizer makes none for a parameter that never gets a gradient, and a checkpoint
        has none of it.
        """
        places = {id(place.container) for held in live for place in held.places}
        tensors = {id(held.tensor) for held in live}
        for key in self.keys:
            values = self.optimizer.state.get(key)
            if isinstance(values, dict):
                inner = [values, *(value for value in values.values() if isinstance(value, dict))]
                used = any(id(c) in places for c in inner) if values else id(key) in tensors
                if not used:
                    del self.optimizer.state[key]


Made = Callable[[], None]


def init_state(
    optimizer: Optimizer, line: UserLine | None = None, made: Made | None = None
) -> NewState | None:
    """Make the state of every parameter that has none; None where there is no such parameter.

    Args:
        optimizer: whose.
        line: the user's, for errors.
        made: called now and then, where parameters can be looked at one by one.

    Raises:
        UnsupportedState: the optimizer keeps its state in a form that no program can hold.
    """
    parameters = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and not optimizer.state.get(p)
    ]
    if not parameters:
        return None
    everyone = [p for group in optimizer.param_groups for p in group["params"]]
    in_parts = any(isinstance(p, ShardedTensor) for p in everyone)
    if in_parts:
        refuse_of_wholes(optimizer, line)
    if not makes_for_each(optimizer):
        return _init_together(optimizer, line)
    # a trial takes several times the memory of its parameters, and here there may be none for it
    scarce = in_parts or made is not None
    turns = list(_in_turns(parameters, 0 if scarce else _TOGETHER_BYTES))
    if len(turns) == 1:
        return _init_together(optimizer, line)
    return _init_in_turns(optimizer, turns, line, made)


def _init_together(optimizer: Optimizer, line: UserLine | None) -> NewState:
    with parts_in_place(optimizer):
        initial, line = _initial(optimizer, line)
    for key, values in initial.items():
        if isinstance(key, ShardedTensor) and isinstance(values, dict):
            initial[key] = {k: sharded_as(key, v, optimizer) for k, v in values.items()}
    everyone = [p for group in optimizer.param_groups for p in group["params"]]
    with_double = any(wide(p.dtype) for p in everyone)
    for values in initial.values():
        check_state(optimizer, values, line, everyone[0].device, with_double)
    optimizer.state.update(initial)
    return NewState(optimizer, list(initial))


_OFTEN_BYTES = _TOGETHER_BYTES = 16 << 20  # of parameters


def _in_turns(parameters: list[Any], most: int) -> Iterator[list[Any]]:
    """The parameters in turns of at most so many bytes, or of one that has more."""
    turn: list[Any] = []
    nbytes = 0
    for p in parameters:
        if turn and nbytes + p.nbytes > most:
            yield turn
            turn, nbytes = [], 0
        turn.append(p)
        nbytes += p.nbytes
    yield turn


def _init_in_turns(
    optimizer: Optimizer, turns: list[list[Any]], line: UserLine | None, made: Made | None
) -> NewState:
    """Do as ``init_state``, with one turn's trials in memory at a time."""
    groups, whole = optimizer.param_groups, optimizer.state
    every = [group["params"] for group in groups]
    keys: list[Any] = []
    new_bytes = 0
    for turn in turns:
        optimizer.state, now = defaultdict(dict), {*map(id, turn)}
        try:
            for group, own in zip(groups, every, strict=True):
                group["params"] = [p for p in own if id(p) in now]
            new = _init_together(optimizer, line)
        finally:
            state, optimizer.state = optimizer.state, whole
            for group, own in zip(groups, every, strict=True):
                group["params"] = own
        whole.update(state)
        keys += new.keys
        new_bytes += sum(p.nbytes for p in turn)
        if made is not None and new_bytes >= _OFTEN_BYTES:
            new_bytes = 0
            made()
    return NewState(optimizer, keys)


def _initial(optimizer: Optimizer, line: UserLine | None) -> tuple[dict[Any, Any], UserLine | None]:
    """Initial values, none where they come from the first gradient; and the line to blame."""
    if callable(getattr(optimizer, "preinitialize", None)):
        initial = _preinitialized(optimizer)
        line = UserLine.of_method(type(optimizer), "preinitialize") or line
    else:
        known = _known(optimizer)
        first = begin_counts(optimizer, known, trial(optimizer, known, seed=1))
        # state that is the same whatever the gradients were does not come from them
        second = trial(optimizer, known, seed=2)
        initial = first.initial
        if not first.seen or not equal(initial, second.initial):
            zeros = _zeros_like(initial)
            # a buffer that begins as the gradient is often the same as one that begins as zeros
            # and has the gradient added (SGD's momentum): then no first update is special
            same = all(
                equal(
                    trial(optimizer, known, seed, to_end=True).after,
                    trial(optimizer, {**known, **copy_tensors(zeros)}, seed, to_end=True).after,
                )
                for seed in (1, 2)
            )
            initial = zeros if same else {}
    return initial, line


def _known(optimizer: Optimizer) -> dict[Any, Any]:
    """The state that there is, without empty dicts: a look at ``state[p]`` makes one."""
    states = optimizer.state.items()
    return {key: values for key, values in states if not isinstance(values, dict) or values}


def _preinitialized(optimizer: Any) -> dict[Any, Any]:
    """What the optimizer's own ``preinitialize`` makes, beside the state that there is.

    It sees no state: many a one begins with zeros for every parameter, whatever was loaded.
    """
    known, state = _known(optimizer), optimizer.state
    optimizer.state = defaultdict(dict)
    try:
        with torch.no_grad():
            optimizer.preinitialize()
        made = dict(optimizer.state)
    finally:
        optimizer.state = state
    return {key: values for key, values in made.items() if key not in known}


def _zeros_like(value: Any) -> Any:
    """States with zeros in the place of every tensor."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    return {key: _zeros_like(item) for key, item in value.items()} if type(value) is dict else value
