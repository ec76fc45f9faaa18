"""What a step left behind on the host while it was traced, and what becomes of it.

A tensor in a place that held one before is state. A tensor in another attribute of a
module is an output, set after every step; tensors appended to a list are appended after every step.
``trees`` says the same of what attributes hold. Anything else that holds a traced tensor, or a
Python value that an optimizer changed, would be frozen: an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torchmetrics import Metric

from fulgurite.backends.csx.capture.host_calls import Accumulator, LogCall
from fulgurite.backends.csx.capture.metrics import metric_calls
from fulgurite.backends.csx.capture.recording import Outputs, make_outputs
from fulgurite.backends.csx.capture.scope import HostState, Scope
from fulgurite.backends.csx.capture.step_inputs import StepInputs, numbers_set
from fulgurite.backends.csx.contract import Observers, holds_traced, misuse
from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedState
from fulgurite.backends.csx.diagnostics.user_lines import UserLine
from fulgurite.backends.csx.graph.graph import storage_of
from fulgurite.backends.csx.hyperparams.slots import (
    is_number,
    new_numbers,
)
from fulgurite.backends.csx.hyperparams.traced_float import (
    plain,
    tensor_or_value,
)
from fulgurite.backends.csx.objects import (
    AttributeTree,
    TreeChanges,
    check_gradients,
    check_ties,
    order_of,
)
from fulgurite.backends.csx.state import (
    NewPlace,
    OptimizerEntry,
    Place,
    SideEffects,
    Snapshot,
    StateInput,
    StateTensor,
    brief,
    check_new_state,
    dotted_name,
    entry_name,
    own_attributes,
)
from fulgurite.backends.patches import MISSING

_IN_A_MODULE = (
    'self.register_buffer("kept", torch.zeros(4)) in __init__, and self.kept.copy_(x) in the step'
)
_IN_AN_OPTIMIZER = (
    'self.state[p]["kept"] = torch.zeros_like(p) in preinitialize(), and'
    ' self.state[p]["kept"].copy_(x) in step()'
)
EARLY = (
    "parametrizations (weight_norm, spectral_norm, prune) in __init__() or configure_model(),"
    " before the optimizer is made"
)
ON_HOST = "None in a host hook, such as on_train_epoch_start; or another value in its place"
IN_PLACE = "change it in place (tensor.copy_(...)), or untie it before fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedEffects:
    """What becomes of what a step left on the host.

    Args:
        outputs: where the graph's results go.
        new_places: where the step left tensors, and none were.
        rebound: state whose places get a new tensor after every step.
        replaced: state that is written in place, where the step put a new tensor.
        tables: where the step left tables of constants, and none were.
        accumulators: tensors of logged results that the step adds to.
    """

    outputs: Outputs
    new_places: list[NewPlace]
    rebound: list[StateTensor]
    replaced: list[StateTensor]
    tables: list[Place]
    accumulators: dict[int, Accumulator]


def collect(
    inputs: StepInputs,
    host: HostState,
    observers: Observers,
    result: Any,
    calls: list[Any],
    reset_ids: Collection[int],
) -> tuple[CollectedEffects, list[Tensor]]:
    """Find what a step left behind when its code has run, and undo it.

    Each kind has its turn. Returns what becomes of it, and the graph's results.

    Args:
        inputs: those of the trace.
        host: what was there before.
        observers: what looked at the step's code.
        result: what the step returned.
        calls: what is done on the host after every step.
        reset_ids: the identities of metrics that the step has reset.
    """
    scope, module, state = host.scope, host.scope.module, inputs.state
    effects, accumulators = SideEffects(), dict[int, Accumulator]()
    observers.frozen_buffers.check()
    with observers.mode.in_double():
        numbers = numbers_set(inputs, host, observers.attributes)
    observers.attributes.settle(effects, observers.is_constant)
    if host.first is None:  # a second trace finds them untied
        check_ties(state)
    check_gradients(state)
    order = host.trees.order()  # before they are as they were
    known = TreeChanges(
        host.trees, state, effects, observers.is_constant, observers.line, host.rebuilt_lists()
    ).collect()
    known |= sort_state(inputs, module, inputs.memory, effects, observers.line_of_change)
    collect_outputs(scope, host.snapshot, known, effects)
    collect_optimizer_state(inputs, host, effects)
    counted = metric_calls(module, host.snapshot, reset_ids)
    calls = [*numbers, *counted, *calls]
    for call in calls:
        if isinstance(call, LogCall):
            accumulators |= call.reduce()
    _refuse_lasting(effects, inputs.gradients.lasting, observers.line_of_change)
    owners = {id(vars(one)): path for path, one in module.named_modules()}
    # two traces are compared output by output, and may have found theirs in another order
    effects.writes.sort(key=lambda write: order_of(write[0][0], owners, order))
    outputs, tensors = make_outputs(result, effects, calls, inputs.memory)
    inputs.replaced_data.write_back()  # the program's memory does not move
    observers.frozen_buffers.check()  # again, for what was written back
    collected = CollectedEffects(
        outputs=outputs,
        new_places=effects.new_places,
        rebound=effects.rebound,
        replaced=effects.replaced,
        tables=effects.tables,
        accumulators=accumulators,
    )
    return collected, tensors


def _refuse_lasting(
    effects: SideEffects, lasting: Mapping[int, str], line: Callable[[Place, Any], UserLine | None]
) -> None:
    """Refuse to keep a gradient that is added to: a program keeps a copy of what it is now."""
    kept = [(place, value) for several, value in effects.writes for place in several]
    for place, value in [*kept, *zip(effects.lists, effects.list_values, strict=True)]:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, FakeTensor) and (name := lasting.get(storage_of(leaf))):
                found = {"attribute": place.name, "other": f"{name}.grad"}
                raise misuse("born_shared", line(place, value), **found)


def sort_state(
    inputs: StepInputs,
    module: nn.Module,
    shared: set[int],
    effects: SideEffects,
    line: Callable[[Place, Any], UserLine | None],
) -> set[Place]:
    """Deal with places of state that the step put another tensor into; returns all of them.

    The places of modules get a new tensor after every step, as eagerly, for host code may keep the
    old one. Those of metrics and optimizers are written in place. What nobody read may change its
    shape.

    Args:
        inputs: of the program, with the state.
        module: its modules' attributes may be rebound.
        shared: memory that belongs to inputs of the program.
        effects: receives the places that are set after every step.
        line: the user's line that put a value into a place.
    """
    own = {
        id(c) for m in module.modules() if not isinstance(m, Metric) for c in (vars(m), m._buffers)
    }
    known: set[Place] = set()
    writes: list[tuple[Tensor, Tensor]] = []
    for held in [held for item in inputs.state for held in item.tensors]:
        known.update(held.places)
        now: list[Any] = [tensor_or_value(place.get()) for place in held.places]
        if all(value is held.tensor for value in now):
            continue
        is_modules = all(
            id(p.container) in own or isinstance(p.container, AttributeTree) for p in held.places
        )
        _check_replacement(held, now, line, is_modules and not inputs.nodes[id(held.tensor)].users)
        if is_modules:
            effects.rebound.append(held)
            effects.set_after(held.places, now[0])
        else:
            aliased = storage_of(now[0]) in shared  # another state: read it before it is written
            writes.append((held.tensor, now[0].clone() if aliased else now[0]))
            effects.replaced.append(held)
        held.put(held.tensor)  # the host is left as it was; the program does the rest
    for tensor, value in writes:  # after the loop: states may change places with one another
        tensor.copy_(value)
    return known


def _check_replacement(
    held: StateTensor,
    now: list[Any],
    line: Callable[[Place, Any], UserLine | None],
    is_output: bool,
) -> None:
    value, name = now[0], held.places[0].name
    if any(other is not value for other in now):
        names = " and ".join(place.name for place in held.places)
        changed = next(i for i, other in enumerate(now) if other is not held.tensor)
        raise UnsupportedState(
            f"The step changed only some of {names}, which are one tensor.",
            line=line(held.places[changed], now[changed]),
            remedy=IN_PLACE,
        )
    if value is None:
        raise UnsupportedState(
            f"The step took {name}, {brief(held.tensor)}, away.",
            line=line(held.places[0], value),
            remedy=EARLY if isinstance(held.tensor, nn.Parameter) else ON_HOST,
        )
    if not isinstance(value, Tensor) or (
        (value.shape, value.dtype) != (held.tensor.shape, held.tensor.dtype) and not is_output
    ):
        raise UnsupportedState(
            f"The step replaced {name}, {brief(held.tensor)}, by {brief(value)}. State keeps its"
            " shape and dtype.",
            line=line(held.places[0], value),
            remedy=_its_final_shape(held.places[0].key, held.tensor, value),
        )


def _its_final_shape(key: Any, before: Tensor, now: Any) -> str:
    if not isinstance(now, Tensor) or now.dtype != before.dtype or now.ndim != before.ndim:
        return "a tensor of its final shape and dtype from the start, changed in place"
    return (
        "its final shape from the start. The last n elements:\n"
        f"      self.{key} = torch.cat([self.{key}, new])[-n:]  # from zeros of n elements\n"
        f"      All of them: a list, self.{key} = [] in __init__ and self.{key}.append(new)"
    )


def release_rebound(
    rebound: list[StateTensor], state: tuple[StateInput, ...], nodes: dict[int, fx.Node]
) -> tuple[StateInput, ...]:
    """Take places that get a new tensor after every step out of the memory they shared.

    Returns the state without these tensors, ``rebound``, where they shared memory; ``nodes`` are
    those of each state tensor, by its identity.

    Raises:
        UnsupportedState: the step reads such a tensor before it replaces it.
    """
    for held in rebound:
        [item] = [item for item in state if held in item.tensors]
        if len(item.tensors) == 1:
            continue
        # after the first step the place holds another tensor: the program would read the old one
        if any(user.op != "output" for user in nodes[id(held.tensor)].users):
            others = [other.places[0].name for other in item.tensors if other is not held]
            raise UnsupportedState(
                f"The step reads {held.places[0].name}, which shares memory with"
                f" {' and '.join(others)}, and then replaces it.",
                remedy="give it memory of its own before fit (.clone())",
            )
        rest = StateInput(tuple(other for other in item.tensors if other is not held), item.whole)
        state = tuple(rest if one is item else one for one in state)
    return state


def collect_outputs(
    scope: Scope, snapshot: Snapshot, known: set[Place], effects: SideEffects
) -> None:
    """Find traced tensors in attributes of modules and at the ends of lists; undo their setting.

    ``snapshot`` is of them before the step; places in ``known`` are dealt with already.
    """
    owners = [
        (path, one, owner)
        for path, one in scope.module.named_modules()
        for owner in (vars(one), one._buffers)
    ]
    for path, one, owner in owners:
        is_metric = isinstance(one, Metric)  # forward() makes lists anew
        before = snapshot.before(owner) or {}
        for key, value in list(owner.items()):
            place = Place(owner, key, dotted_name(scope.root, path, key))
            if place in known or not holds_traced(value):
                continue
            old: Any = before.get(key)
            content = snapshot.before(old) if type(old) is list else None
            grows = value is old or (is_metric and type(value) is list)
            if grows and content is not None:
                if len(value) <= len(content) or not all(map(is_, value, content)):
                    continue  # an element was replaced: refused with the other effects
                effects.append_after(place, value[len(content) :])
                old[:] = content
                place.put(old)
            elif value is not old:
                effects.set_after([place], value)
                place.put(before.get(key, MISSING))


def collect_optimizer_state(inputs: StepInputs, host: HostState, effects: SideEffects) -> None:
    """Find tensors that updates of optimizers made for themselves; take them away again.

    Raises:
        UnsupportedState: no program can hold one.
    """
    names = {id(p): name for name, p in inputs.parameters.items()}
    known = {id(held.tensor) for held in inputs.state_tensors()}
    states = zip(host.scope.named_optimizers.items(), host.states, strict=True)
    for (owner, optimizer), (_, before) in states:
        found: list[tuple[Any, str, list[tuple[Place, Any]]]] = []
        for key in optimizer.state:
            name = entry_name(owner, key, names)
            if new := [*_new_in(optimizer.state, key, name, before, host, known)]:
                found.append((key, name, new))
        entries = [optimizer.state[key] for key, _, _ in found]
        check_new_state(optimizer, entries, host.scope.line_of("configure_optimizers"))
        others = _new_elsewhere(optimizer, inputs, host, known)
        found += [(None, place.name, [(place, was)]) for place, was in others]
        if not found:
            continue
        parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
        of_all = [one for key, one in inputs.gradients.counts.items() if key in parameters]
        for key, name, new in found:
            counts, told = inputs.gradients.counts.get(id(key)), None
            if id(key) not in parameters and of_all:  # it counts where that of one parameter does
                counts = torch.stack(of_all).any()
            if counts is not None:
                told = Place({}, "counts", f"whether {name} was updated")
                effects.set_after([told], counts)
            for place, was in new:
                value = pytree.tree_map(plain, place.get())
                effects.set_after([place], value)
                of = {"key": key, "counts": told, "before": was, "is_state": holds_traced(value)}
                effects.new_places.append(NewPlace(place=place, is_optimizers=True, **of))
                place.put(was)


def _new_elsewhere(
    optimizer: Optimizer, inputs: StepInputs, host: HostState, known: set[int]
) -> Iterator[tuple[Place, Any]]:
    """The places of what is new in param groups and attributes, and what was there."""
    counts, index = host.scope.counts, host.scope.optimizers.index(optimizer)
    for group, key in new_numbers(inputs.groups):
        if group.optimizer is optimizer:
            place = Place(group.own, key, f"{group.place}[{key!r}]")
            place.put(group[key])
            yield place, MISSING
            counts.add(index, place.name, group.own, key)
    held, before = vars(optimizer), host.snapshot.before(vars(optimizer))
    for name in own_attributes(optimizer, host.scope.optimizers):
        outer = f"{type(optimizer).__name__}.{name}"
        value, places, was = held[name], [Place(held, name, outer)], before
        if isinstance(value, dict) and name in before:
            places = [Place(value, key, f"{outer}[{brief(key)}]") for key in value]
            was = host.snapshot.before(value) or {}
        for place in places:
            now, then = place.get(), was.get(place.key, MISSING)
            if _refilled(now, then, known):
                place.put(then)
            elif (then is None or then is MISSING) and (is_number(now) or type(now) is bool):
                yield place, then
                counts.add(index, place.name, place.container, place.key)
            elif (then is None or then is MISSING) and holds_traced(now):
                yield place, then


def _new_in(
    holder: Any, key: Any, name: str, before: dict[Any, Any], host: HostState, known: set[int]
) -> Iterator[tuple[Place, Any]]:
    """The places of what is new in an entry of an optimizer's state, and what was there.

    ``before`` is what was in ``holder``; ``known`` are the identities of tensors that are state.
    """
    value = holder.get(key)
    if isinstance(value, dict):
        content = host.snapshot.before(value) or {}
        entry = OptimizerEntry(holder, key, host.scope.entries)
        for inner in [*value]:
            yield from _new_in(entry, inner, f"{name}[{inner!r}]", content, host, known)
    elif _refilled(value, before.get(key), known):
        holder[key] = before[key]  # it holds them as before
    elif key not in before or (holds_traced(value) and id(value) not in known):
        yield Place(holder, key, name), before.get(key, MISSING)


def _refilled(value: Any, before: Any, known: set[int]) -> bool:
    """Whether a list or tuple of known tensors is in the place of one of the same."""
    if type(value) is not type(before) or not isinstance(value, (list, tuple)):
        return False
    (now, tree), (then, tree_then) = pytree.tree_flatten(value), pytree.tree_flatten(before)
    tensors = [one for one in now if isinstance(one, Tensor)]
    return tree == tree_then and all(id(one) in known for one in tensors) and len(now) == len(then)


def refuse_other_effects(
    snapshot: Snapshot, modules: list[nn.Module], module: nn.Module, changed_at: UserLine | None
) -> None:
    """Raise where a traced tensor is kept elsewhere, or Python state of an optimizer changed.

    Args:
        snapshot: what was there before.
        modules: those of ``module`` before.
        module: what the step works on.
        changed_at: the user's line that put a module into another one, or took it out.

    Raises:
        UnsupportedState: it names the place.
    """
    if list(map(id, module.modules())) != list(map(id, modules)):
        raise UnsupportedState(
            "The step added, removed or replaced a module; its parameters would be no state.",
            line=changed_at,
            remedy="make modules in __init__(), setup() or configure_model()",
        )
    for container, copy, name, root in snapshot.containers():
        items = list(container.items() if isinstance(container, dict) else enumerate(container))
        for key, value in items:
            where = f"{name}.{key}" if container is vars(root) else f"{name}[{brief(key)}]"
            replaced = _before(copy, key)
            belongs = isinstance(root, Optimizer) or key in getattr(root, "_parameters", ())
            begins = type(replaced) in (int, float) or isinstance(replaced, Tensor)
            frozen = value is not replaced and (belongs or begins)
            if frozen and holds_traced(value):
                raise UnsupportedState(
                    f"The step put a traced tensor into {where}, where the next step would not"
                    " find it.",
                    remedy="state has its place from the start, and changes there:\n      "
                    + (_IN_AN_OPTIMIZER if isinstance(root, Optimizer) else _IN_A_MODULE),
                )
            simple = type(value) in _SIMPLE and type(replaced) in _SIMPLE and value != replaced
            if isinstance(root, Optimizer) and simple:
                raise UnsupportedState(
                    f"{type(root).__name__} changed a Python value in its step ({where}, from"
                    f" {replaced!r} to {value!r}), which the program would freeze.",
                    line=UserLine.of_method(type(root), "step"),
                    remedy="an attribute, or an item of a dict, that is a number or a flag (bool)",
                )


_SIMPLE = (int, float, bool, str, type(None))


def _before(copy: Any, key: Any) -> Any:
    """What was in a place of a container, by the container's copy."""
    if isinstance(copy, dict):
        return copy.get(key, MISSING)
    return copy[key] if isinstance(copy, list) and key < len(copy) else MISSING
