"""The state of optimizers before the first step.

A program's state must exist before it is traced, and most optimizers make theirs in their first
``step``: ``preinitialize`` of those that have it and torch's own ``_init_group`` make it without
one. (Running a step and zeroing the state instead gives wrong weights: NAdam 2 %, Adagrad 8 %,
Rprop 36 %; measured, torch 2.13.) What only a step can make, other optimizers' state and what comes
from the first gradient, has a first step of its own (``capture/births``).
"""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from fulgurite.backends.csx.diagnostics.user_lines import UserLine
from fulgurite.backends.csx.graph.dtypes import wide
from fulgurite.backends.csx.state.optimizer_checks import check_state
from fulgurite.backends.csx.state.sharded import (
    ShardedTensor,
    makes_for_each,
    parts_in_place,
    refuse_of_wholes,
    sharded_as,
)
from fulgurite.backends.csx.state.storage import StateTensor


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


def with_inner(named: Mapping[str, Optimizer]) -> dict[str, Optimizer]:
    """Optimizers by name, then those that they keep as attributes: SAM's, Lookahead's."""
    found, every = dict(named), [*named.items()]
    for name, optimizer in every:  # which becomes longer
        for key, value in vars(optimizer).items():
            if isinstance(value, Optimizer) and all(value is not one for one in found.values()):
                found[f"{name}.{key}"] = value
                every.append((f"{name}.{key}", value))
    return found


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
    """Make the state of every parameter that has none.

    Args:
        optimizer: whose.
        line: the user's, for errors.
        made: called now and then, where parameters can be looked at one by one.

    Returns:
        What was made; None where there is no such parameter, or only a step can tell.

    Raises:
        UnsupportedState: the optimizer keeps its state in a form that no program can hold.
    """
    everyone = [p for group in optimizer.param_groups for p in group["params"]]
    missing = [p for p in everyone if p.requires_grad and not optimizer.state.get(p)]
    if any(isinstance(p, ShardedTensor) for p in missing):
        refuse_of_wholes(optimizer, line)
    make, where = _torchs, line
    if callable(getattr(optimizer, "preinitialize", None)):
        make, where = _preinitialized, UserLine.of_method(type(optimizer), "preinitialize") or line
    elif not _is_torchs(optimizer):
        return None
    if not missing:
        return None
    new = NewState(optimizer, [])
    in_turns = made is not None and makes_for_each(optimizer)
    for turn in _in_turns(missing) if in_turns else [missing]:
        with _alone(optimizer, turn if in_turns else everyone), parts_in_place(optimizer):
            initial = make(optimizer)
        for key, values in initial.items():
            if isinstance(key, ShardedTensor) and isinstance(values, dict):
                initial[key] = {k: sharded_as(key, v, optimizer) for k, v in values.items()}
        check_new_state(optimizer, initial.values(), where)
        optimizer.state.update(initial)
        new.keys.extend(initial)
        if in_turns and made is not None:
            made()
    return new


def check_new_state(optimizer: Optimizer, entries: Iterable[Any], line: UserLine | None) -> None:
    """Refuse new entries of an optimizer's state that no program can hold (see ``check_state``)."""
    everyone = [p for group in optimizer.param_groups for p in group["params"]]
    with_double = any(wide(p.dtype) for p in everyone)
    for values in entries:
        check_state(optimizer, values, line, everyone[0].device, with_double)


_TURN_BYTES = 16 << 20  # of parameters


def _in_turns(parameters: list[Any]) -> Iterator[list[Any]]:
    """The parameters in turns of at most so many bytes, or of one that has more."""
    turn: list[Any] = []
    nbytes = 0
    for p in parameters:
        if turn and nbytes + p.nbytes > _TURN_BYTES:
            yield turn
            turn, nbytes = [], 0
        turn.append(p)
        nbytes += p.nbytes
    yield turn


@contextlib.contextmanager
def _alone(optimizer: Optimizer, parameters: list[Any]) -> Iterator[None]:
    """Let an optimizer have these parameters alone."""
    groups, wanted = optimizer.param_groups, {*map(id, parameters)}
    every = [group["params"] for group in groups]
    try:
        for group, own in zip(groups, every, strict=True):
            group["params"] = [p for p in own if id(p) in wanted]
        yield
    finally:
        for group, own in zip(groups, every, strict=True):
            group["params"] = own


def _preinitialized(optimizer: Any) -> dict[Any, Any]:
    """What the optimizer's own ``preinitialize`` makes, beside the state that there is.

    It sees no state: many a one begins with zeros for every parameter, whatever was loaded.
    """
    state = optimizer.state
    known = {key for key, values in state.items() if not isinstance(values, dict) or values}
    optimizer.state = defaultdict(dict)
    try:
        with torch.no_grad():
            optimizer.preinitialize()
        made = dict(optimizer.state)
    finally:
        optimizer.state = state
    return {key: values for key, values in made.items() if key not in known}


def _is_torchs(optimizer: Optimizer) -> bool:
    """Whether an optimizer's steps are torch's own, whose state ``_init_group`` makes."""
    methods = type(optimizer).step, getattr(type(optimizer), "_init_group", None)
    return all(
        one is not None and inspect.unwrap(one).__module__.startswith("torch.optim.")
        for one in methods
    )


def _torchs(optimizer: Any) -> dict[Any, Any]:
    """What torch's optimizers make in their first step, before they update anything.

    ``_init_group(group, params, grads, ...)`` fills lists with what an update takes, and makes what
    there is not yet, of the gradients' layout. State of the first gradient is made later: SGD's.
    """
    lists = len(inspect.signature(optimizer._init_group).parameters) - 1
    state, optimizer.state = optimizer.state, defaultdict(dict)
    try:
        with torch.no_grad(), plain_options([optimizer]):
            for group in optimizer.param_groups:
                # where an update from zeros does the same
                zeros = isinstance(optimizer, SGD) and group["momentum"] and not group["dampening"]
                for p in group["params"]:
                    if not p.requires_grad or state.get(p):
                        continue
                    if zeros:
                        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
                        continue
                    gradient, p.grad = p.grad, torch.empty_like(p)
                    try:
                        filled: list[list[Any]] = [[] for _ in range(lists)]
                        optimizer._init_group({**group, "params": [p]}, *filled)
                    finally:
                        p.grad = gradient
        return {key: values for key, values in optimizer.state.items() if values}
    finally:
        optimizer.state = state
