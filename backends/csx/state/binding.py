"""The state of a program while it runs: the tensors that are in its places now.

A program takes tensors from the dicts of ``optimizer.state``. Host code may put other dicts in
their place (``load_state_dict`` does) or clear them. Then the programs have to be built anew:
``OptimizerStates`` says whether that is so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fulgurite.backends.csx.diagnostics.trace_errors import StateChanged
from fulgurite.backends.csx.state.storage import (
    Layout,
    StateInput,
    StateTensor,
    copying_remedy,
    parameter_replaced,
    storage_key,
    tensor_at,
)
from fulgurite.backends.csx.streaming.residency import residency


class OptimizerStates:
    """The state dicts of optimizers as they are now: a later look compares those with these.

    It holds the dicts themselves: a new dict at the address of a freed one would look the same.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._held: list[tuple[Optimizer, Any, list[Any]]] = [
            (optimizer, optimizer.state, list(optimizer.state.values())) for optimizer in optimizers
        ]

    def are_replaced(self) -> bool:
        """Whether one is gone or another one; state of further parameters comes after them.

        Asked whenever host code ran: keys are not looked up, for a tensor's hash is slow.
        """
        return any(
            optimizer.state is not state
            or len(state) < len(values)
            or not all(map(is_, values, state.values()))
            for optimizer, state, values in self._held
        )


class Binding:
    """A program's state and the tensors that are in their places now.

    Host code may put another tensor of the same layout into a place (``Metric.reset`` does); the
    program then works on that one.

    ``trained`` is the identity of parameters that an optimizer holds too: they must stay.
    """

    def __init__(
        self, state: tuple[StateInput, ...], trained: frozenset[int] = frozenset()
    ) -> None:
        self._state, self._trained = state, trained
        self._layouts = [[Layout.of(held.tensor) for held in item.tensors] for item in state]
        self._places = [
            (place.container, place.key)
            for item in state
            for held in item.tensors
            for place in held.places
        ]
        self._input_of_place = [
            i for i, item in enumerate(state) for held in item.tensors for _ in held.places
        ]
        self._seen: list[Tensor] = []
        self._moves = residency.moves
        self._over: list[tuple[Tensor, Any]] = []  # tensors that share memory, and which
        self._inputs: list[Tensor] = []
        self._pointers: list[Any] = []
        self.storages: frozenset[Any] = frozenset()

    def inputs(self) -> list[Tensor]:
        """The program's state inputs, in order."""
        try:
            now = [container[key] for container, key in self._places]
        except KeyError:  # a place is empty: ``check`` says which
            now = []
        if len(now) != len(self._seen):
            self.check()
        elif not all(map(is_, now, self._seen)):
            pairs = zip(self._input_of_place, now, self._seen, strict=True)
            self._rebind({i for i, tensor, seen in pairs if tensor is not seen})
        elif self._moves != residency.moves:
            self.check()
        elif self._over and any(storage_key(tensor) != memory for tensor, memory in self._over):
            self.check()  # tensor.data = ..., which leaves the tensor in its place
        return self._inputs.copy()

    def check(self) -> None:
        """Verify every place and bind anew.

        Raises:
            StateChanged: a place is empty, another layout is in it, or tensors are tied otherwise.
        """
        self._moves = residency.moves
        self._inputs = [item.tensors[0].tensor for item in self._state]
        self._pointers = [None] * len(self._state)
        self._rebind(range(len(self._state)))

    def _rebind(self, changed: Iterable[int]) -> None:
        for i in changed:
            item = self._state[i]
            for held, layout in zip(item.tensors, self._layouts[i], strict=True):
                self._check_held(held, layout)
                # the optimizer goes on with the parameter that it holds, and so would the program
                if id(held.tensor) in self._trained and held.places[0].get() is not held.tensor:
                    name = held.places[0].name
                    raise StateChanged(
                        parameter_replaced(name, "after the program was built"),
                        remedy=copying_remedy(name),
                    )
            self._inputs[i] = item.base()
            self._pointers[i] = storage_key(self._inputs[i])
            _check_shared(item, self._pointers[i])
        self.storages = frozenset(self._pointers)
        # a program whose inputs overlap computes something else (measured: 38 for 64)
        if len(self.storages) != len(self._pointers):
            pairs = zip(self._state, self._pointers, strict=True)
            raise _tied([one.name for one, memory in pairs if self._pointers.count(memory) > 1])
        self._seen = [container[key] for container, key in self._places]
        self._over = [
            (tensor_at(held.places[0]), memory)
            for item, memory in zip(self._state, self._pointers, strict=True)
            for held in (item.tensors if item.whole else ())
        ]

    def _check_held(self, held: StateTensor, layout: Layout) -> None:
        tensor = _tensor_of(held)
        now = Layout.of(tensor)
        if now != layout and _may_be_laid_out(tensor, layout):
            # self.queue = torch.cat([self.queue, x])[-n:] does not begin where its memory does
            places = (one.places[0] for item in self._state for one in item.tensors)
            values = [(place.name, place.get()) for place in places]
            shared = [name for name, one in values if _is_over(one, storage_key(tensor))]
            if len(shared) > 1:
                raise _tied(shared)
            copied = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype)
            held.put(copied.copy_(tensor))
        elif now != layout:
            raise StateChanged(
                f"{held.places[0].name} was {layout} with strides {layout.stride} when the program"
                f" was built, and now is {now} with strides {now.stride}.",
                remedy="change values in place (tensor.copy_(...))",
            )


def _is_over(value: Any, memory: Any) -> bool:
    return isinstance(value, Tensor) and storage_key(value) == memory


def _tied(names: list[str]) -> StateChanged:
    return StateChanged(
        f"{' and '.join(names)} share memory, which they did not when the program was built.",
        remedy="tie them before fit, or give each its own memory (.clone())",
    )


def _check_shared(item: StateInput, memory: Any) -> None:
    """Verify that tensors over one memory still are: the program works on all of it at once."""
    for held in item.tensors[1:]:
        if storage_key(tensor_at(held.places[0])) != memory:
            raise StateChanged(
                f"{item.name} and {held.places[0].name} shared memory when the program was built,"
                " and no longer do.",
                remedy="change values in place (tensor.copy_(...)), or give each its own memory"
                " before fit (.clone())",
            )


def _tensor_of(held: StateTensor) -> Tensor:
    """The one tensor that all places of a state tensor hold now; an error where they differ."""
    tensor = tensor_at(held.places[0])
    # torch writes a tensor of inference mode nowhere else, and programs write state in place
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        tensor = tensor.clone()
        held.put(tensor)
    if any(tensor_at(place) is not tensor for place in held.places):
        names = " and ".join(place.name for place in held.places)
        raise StateChanged(
            f"{names} were one tensor when the program was built, and no longer are.",
            remedy="tie them before fit, or leave them untied",
        )
    return tensor


def _may_be_laid_out(tensor: Tensor, layout: Layout) -> bool:
    """Whether a copy of a tensor can stand in its place, laid out as the program expects."""
    same = (tensor.shape, tensor.dtype) == (layout.shape, layout.dtype)
    return same and not layout.offset and not tensor.requires_grad
