"""The inputs of a traced step: fakes of its state, gradients, numbers and batch, put in place.

The tensors of module, optimizers and metrics are swapped for fakes behind the same Python objects,
so optimizers, ties and the user's references hold; when the step has run, they are swapped back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer

from fulgurite.backends.csx.capture.host_calls import NumberCall
from fulgurite.backends.csx.capture.recording import Recording
from fulgurite.backends.csx.capture.scope import HostState, Scope
from fulgurite.backends.csx.contract import Access, Attributes, is_scalar
from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedState
from fulgurite.backends.csx.graph.fakes import new_fake
from fulgurite.backends.csx.graph.graph import Input, Kind, Placement, Role, like, storage_of
from fulgurite.backends.csx.graph.recorder import Nodes
from fulgurite.backends.csx.hyperparams.counts import CountSlot, KeptNumber, TracedCounts, keep
from fulgurite.backends.csx.hyperparams.run_numbers import COUNTERS
from fulgurite.backends.csx.hyperparams.scheduled_numbers import TracedSchedulers, scheduler_places
from fulgurite.backends.csx.hyperparams.slots import (
    TracedGroup,
    as_vector,
    install,
    is_known,
    number_slots,
    read_numbers,
    refuse_set_numbers,
    set_numbers,
    traced_groups,
)
from fulgurite.backends.csx.hyperparams.traced_float import NumberGuard, TracedNumber
from fulgurite.backends.csx.objects import BatchSpec, Trees
from fulgurite.backends.csx.state import (
    Gradients,
    Place,
    ReplacedData,
    ShardedTensor,
    StateFakeTensor,
    StateInput,
    StateTensor,
    begin_handover,
    fake_for,
    module_places,
    optimizer_places,
    state_inputs,
    swap,
)
from fulgurite.backends.patches import MISSING
from fulgurite.backends.program_scheduler import program_schedulers
from fulgurite.backends.step_context import running


class StepInputs:
    """What the graph of one trace takes, in order.

    Args:
        scope: what the step works on.
        batch: the batch to trace with; only its structure, shapes and dtypes matter.
        trees: what lists, dicts and objects hold.
        first: the trace that this one is compared with: its state is this one's.

    Attributes:
        items: the graph's inputs.
        state: what the inputs of kind STATE stand for, by ``Input.index``.
        guards: what Python saw of numbers that may change; run_guards: of those of every step.
        groups: the optimizers' param groups while the step ran; counts: their other numbers.
        nodes: the input of each state tensor, by its identity; values: its real tensor.
        memory: the identity of each input's memory, while the step runs.
        replaced_data: the inputs whose ``.data`` the step has replaced.
    """

    def __init__(self, scope: Scope, batch: Any, trees: Trees, first: Recording | None) -> None:
        self._scope, self.batch = scope, BatchSpec(batch, scope.leaf_name)
        self.parameters = scope.parameters()
        self._schedulers = program_schedulers(scope.schedulers)
        places = self._places(trees)
        compared = first if scope.python_runs_once else None
        if compared is not None:  # what the host put elsewhere since is no state of the program
            places = (place for place in places if place.name in compared.places)
        self.state = state_inputs(places)
        known = {id(held.tensor) for held in self.state_tensors()} if scope.trains else set[int]()
        trained = {name: p for name, p in self.parameters.items() if id(p) in known}
        # whatever the host has put there since, the program was built for this
        was_none = None if compared is None else compared.was_none
        self.gradients = Gradients(begin_handover(trained, scope, was_none))
        scope.counts.find_kept(scope.module.modules())
        self.number_slots = number_slots(scope.named_optimizers, self._schedulers, scope.counts)
        # real tensors, which no module holds, become constants of the graph
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.mode.cache_enabled = False  # of torch's own: ``results_of`` keeps what comes again
        self.items = list(self._make_items())
        self.guards, self.run_guards = list[NumberGuard](), list[NumberGuard]()
        self.groups: list[TracedGroup] = []
        self.counts = TracedCounts([])
        self.nodes: dict[int, fx.Node] = {}
        self.values: dict[int, Tensor] = {}
        self.memory: set[int] = set()
        self.replaced_data = ReplacedData()

    def _places(self, trees: Trees) -> Iterator[Place]:
        """All places of state."""
        yield from module_places(self._scope.module, self._scope.root)
        known = {id(p) for p in self._scope.module.parameters()}
        for name, p in self.parameters.items():
            if id(p) not in known:
                yield Place({0: p}, 0, name)
        names = {id(p): name for name, p in self.parameters.items()}
        yield from optimizer_places(self._scope.named_optimizers, names)
        yield from scheduler_places(self._schedulers)
        yield from self._scope.outside_state()
        yield from trees.places

    def state_tensors(self) -> list[StateTensor]:
        """The tensors of the program's state."""
        return [held for item in self.state for held in item.tensors]

    def _fake(self, tensor: Tensor) -> Tensor:
        """A fake of it; never one of inference mode, which torch's functions treat otherwise."""
        with torch.inference_mode(False):
            if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
                return self._like(tensor)  # at a thirtieth of what the next line takes
            real = like(tensor) if tensor.is_inference() else tensor
            return self.mode.from_tensor(real.detach(), static_shapes=True)

    def _make_items(self) -> Iterator[Input]:
        fake, role = self._fake, _roles(self._scope, self.parameters.values())
        for i, item in enumerate(self.state):
            # the step sees all of what is sharded; ``shard_state`` makes it a part
            held = item.tensors[0].tensor if item.processes else item.base()
            yield Input(
                kind=Kind.STATE,
                index=i,
                name=item.name,
                example=fake(_empty_like(held) if item.processes else held),
                role=role(item),
                placement=Placement.SHARDED if item.processes else Placement.REPLICATED,
            )
        for i, (name, p) in enumerate(self.gradients.parameters.items()):
            sharded = isinstance(p, ShardedTensor)
            yield Input(
                kind=Kind.GRADIENT,
                index=i,
                name=f"{name}.grad",
                example=fake(_empty_like(p)),
                placement=Placement.SHARDED if sharded else Placement.REPLICATED,
            )
        if self.number_slots:
            self.numbers = as_vector(read_numbers(self.number_slots, self._scope.optimizers))
            yield Input(kind=Kind.NUMBERS, index=0, name="numbers", example=fake(self.numbers))
        for i, name in enumerate(COUNTERS):
            count = fake(torch.zeros((), dtype=torch.int64))
            yield Input(kind=Kind.COUNTER, index=i, name=name, example=count)
        for i, leaf in enumerate(self.batch.tensor_leaves()):
            assert leaf.shape is not None
            laid_out = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype)
            example = fake(laid_out)
            yield Input(kind=Kind.BATCH, index=i, name=leaf.name, example=example, role=Role.BATCH)

    def begin(self, tensors: tuple[Tensor, ...]) -> None:
        """The step begins, with these tensors as the graph's inputs."""
        self.memory = {storage_of(tensor) for tensor in tensors}

    def set_data(self, tensor: Tensor, value: Tensor) -> None:
        """``tensor.data = value``, as the step sets it."""
        if storage_of(tensor) in self.memory or self.replaced_data.holds(tensor):
            self.replaced_data.replace(tensor, value)
        else:
            tensor.detach().copy_(value)

    def of_kind(self, kind: Kind, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """Those of the graph's tensors that are inputs of a kind."""
        pairs = zip(self.items, tensors, strict=True)
        return [tensor for item, tensor in pairs if item.kind is kind]

    @contextlib.contextmanager
    def in_place(
        self,
        tensors: tuple[Tensor, ...],
        tracker: Nodes,
        in_double: Callable[[], AbstractContextManager[None]],
        of_module: Callable[[CountSlot, float, Tensor, int], TracedNumber],
    ) -> Iterator[None]:
        """Put the inputs where state, gradients and numbers are, and take them out again.

        ``tracker`` tells the node of each tensor; schedules compute under ``in_double``; numbers of
        modules are as ``of_module`` makes them.
        """
        before = [dict(group) for group in self._scope.groups()]
        swapped = self._fakes_of_state(self.of_kind(Kind.STATE, tensors), tracker)
        try:
            for tensor, fake in swapped:
                fake.__class__ = StateFakeTensor
                swap(tensor, fake)
                tracker[tensor] = tracker[fake]  # by the object, which stayed
                self.nodes[id(tensor)] = tracker[fake]
                self.values[id(tensor)] = fake  # they were swapped
            found = [dict(vars(tensor)) for tensor, _ in swapped]
            self.gradients.put(self.of_kind(Kind.GRADIENT, tensors), tracker)
            for vector in self.of_kind(Kind.NUMBERS, tensors):
                slots, optimizers = self.number_slots, self._scope.optimizers
                installed = install(slots, vector, optimizers, of_module)
                self.guards, self.counts = installed
            self.scheduled = TracedSchedulers(self.guards, in_double)
            with running(schedules=self.scheduled):
                for scheduler in self._schedulers:
                    scheduler.show()
                with traced_groups(self._scope.asked_optimizers) as self.groups:
                    yield
            _check_attributes(self.state_tensors(), found)
        finally:
            self.counts.restore()
            # in the same dicts, which schedulers and the user hold
            for group, numbers in zip(self._scope.groups(), before, strict=True):
                group.clear()
                group.update(numbers)
            for tensor, fake in swapped:
                if isinstance(tensor, FakeTensor):  # it was reached before something failed
                    swap(tensor, fake)

    def _fakes_of_state(self, bases: list[Tensor], tracker: Nodes) -> list[tuple[Tensor, Tensor]]:
        """Each tensor of the state, and its fake, which the graph takes for what it is made of."""
        fakes = []
        for item, base in zip(self.state, bases, strict=True):
            for i, held in enumerate(item.tensors):
                value = item.view(base, i)
                fake = fake_for(held.tensor, value, tracker)
                self.gradients.watch(held.tensor, fake)
                fakes.append((held.tensor, fake))
        return fakes

    def drop_batch(self) -> None:
        """Put other fakes in place of the batch that the step saw: the user may have kept it."""
        self.items = [
            replace(item, example=self._like(item.example)) if item.kind is Kind.BATCH else item
            for item in self.items
        ]

    def _like(self, seen: Tensor) -> Tensor:
        return new_fake(self.mode, seen.shape, seen.stride(), seen.dtype, seen.device)

    def position_of_batch(self) -> int:
        """How many inputs there are before the batch's."""
        return sum(item.kind is not Kind.BATCH for item in self.items)

    def add_constants(self, constants: list[Tensor]) -> None:
        """Put constants among the inputs, before the batch."""
        position = self.position_of_batch()
        self.items[position:position] = [
            Input(kind=Kind.CONSTANT, index=i, name=f"constant {i}", example=self._fake(constant))
            for i, constant in enumerate(constants)
        ]


def _check_attributes(state: list[StateTensor], found: list[dict[str, Any]]) -> None:
    """Verify that the step has set no attribute of a tensor: what it set is a fake's.

    Args:
        state: the tensors.
        found: their attributes when the step began.

    Raises:
        UnsupportedState: it has.
    """
    for held, before in zip(state, found, strict=True):
        for key, value in vars(held.tensor).items():
            own = not key.startswith("_") or isinstance(value, Tensor)
            if own and before.get(key, MISSING) is not value:
                raise UnsupportedState(
                    f"The step set {held.places[0].name}.{key}, an attribute of a tensor, where the"
                    " next step would not find it.",
                    named=frozenset({key}),
                    remedy=f'in an optimizer self.state[p]["{key}"]; in a module an attribute of'
                    " its own, or a buffer",
                )


def idle_numbers(inputs: StepInputs, scope: Scope) -> Iterator[tuple[int, int, str]]:
    """The numbers that a step asks no group for, of known optimizers and those it does not step.

    Each by the optimizer's place, the group's, and its key.
    """
    if not scope.trains:
        return
    stepped = set(map(id, inputs.gradients.stepped))
    pairs = enumerate(scope.optimizers)
    places = {id(one): i for i, one in pairs if id(one) not in stepped or is_known(one)}
    for group in inputs.groups:
        if (i := places.get(id(group.optimizer))) is not None:
            yield from ((i, group.index, key) for key in group if key not in group.read)


def numbers_of_others(inputs: StepInputs, scope: Scope) -> Iterator[Access]:
    """What an evaluation asked param groups for: it has no such inputs."""
    for group in inputs.groups if not scope.trains else ():
        for key in sorted(group.read):
            value, where = group.own.get(key), f"{group.place}[{key!r}]"
            if is_scalar(value):
                yield Access(module=group.own, name=key, where=where, before=value, line=None)


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _roles(scope: Scope, parameters: Iterable[Tensor]) -> Callable[[StateInput], Role]:
    """A function that says whose tensor the first of a state input's is."""
    trained = {id(p) for p in parameters}
    buffers = {id(module._buffers) for module in scope.module.modules()}
    optimizers = tuple(f"{owner}." for owner in scope.named_optimizers)

    def role(item: StateInput) -> Role:
        held = item.tensors[0]
        if id(held.tensor) in trained:
            return Role.PARAMETER
        if id(held.places[0].container) in buffers:
            return Role.BUFFER
        return Role.OPTIMIZER if item.name.startswith(optimizers) else Role.OTHER

    return role


class CountFound(Exception):
    """A step changed a number that an optimizer or a module keeps: traced again, it is an input."""


def numbers_set(inputs: StepInputs, host: HostState, attributes: Attributes) -> list[NumberCall]:
    """What is set on the host for numbers that the step changed; CountFound: one was no input."""
    scope = host.scope
    if not scope.trains:
        refuse_set_numbers(inputs.groups, scope.line_of("validation_step"))
    calls = [
        NumberCall(f"param_groups['{key}']", (group.optimizer, group.index, key), [], number)
        for group, key, number in set_numbers(inputs.groups, scope.line_of("training_step"))
    ]
    calls += [
        NumberCall(str(one.slot), one.slot, one.held, one.number) for one in inputs.counts.changed()
    ]
    inputs.counts.restore()
    groups = {id(group.own) for group in inputs.groups}
    made, is_first = list[KeptNumber](), host.first is None
    followed = is_first and scope.python_runs_once  # else what changes stays, or is a difference
    others = (
        one
        for one in host.snapshot.containers()
        if id(one[0]) not in groups and (followed or isinstance(one[3], Optimizer))
    )
    found = scope.counts.find_changed(others, scope.optimizers, made)
    for number in made:
        calls.append(_call_of_made(number, inputs, attributes))
    for write, now, is_asked in attributes.numbers.settle() if scope.python_runs_once else ():
        number = KeptNumber(write.module, write.where, write.container, write.name)
        if inputs.counts.hold(number.container, number.key):
            continue
        write.undo()
        if is_asked and is_first:
            scope.counts.add(None, number.name, number.container, number.key)
            found = True
        if isinstance(now, TracedNumber) or is_asked:
            keep(number)
        calls.append(NumberCall(number.name, None, [(number.container, number.key)], now))
    if found:
        raise CountFound
    return calls


def _call_of_made(number: KeptNumber, inputs: StepInputs, attributes: Attributes) -> NumberCall:
    """What puts a number into a dict of a module that had none there: another program finds it."""
    container, key = number.container, number.key
    value = dict.pop(container, key)
    text = f"whether {number.name} is there"
    inputs.run_guards.append(NumberGuard(text, lambda _: key in container, False))
    left = value.value if isinstance(value, TracedNumber) else value
    attributes.numbers.made.append((Place(container, key, number.name), MISSING, left))
    keep(number)
    return NumberCall(number.name, None, [(container, key)], value)
