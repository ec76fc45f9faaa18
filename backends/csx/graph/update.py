"""An optimizer's update of many tensors as one operation: ``fulgurite::update``.

Captured operation by operation it takes some thirty for each parameter, half of a step's trace. As
one it is torch's own code when it runs operation by operation, on lists of tensors and Python's
numbers; for the compiler it becomes the operations of its formula again
(``passes.update_formulas``).
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

FORMULAS = "formulas"
"""In the ``meta`` of an update's node: the ``Formula`` of each of its parameters."""


_PORTION = 1 << 20  # bytes of gradients: of 2^16 to 2^40 the fastest (48 tensors of 64 K, measured)


@dataclass(frozen=True, slots=True)
class Formula:
    """The operations of one parameter's update.

    Args:
        graph: its placeholders are the parameter, its gradient, its state and the numbers.
    """

    graph: fx.Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSpec:
    """What an update does, as text in its operation.

    Args:
        module, name: of torch's optimizer: ``torch.optim.adam``, ``adam``.
        lists: the names of the lists of tensors, as torch's function takes them; the parameters
            and the state. The gradients are the second of its arguments.
        options: its other arguments; ``[i]`` stands for the i-th number.
    """

    module: str
    name: str
    lists: Sequence[str]
    options: Mapping[str, Any]

    @property
    def text(self) -> str:
        """As the operation's argument."""
        fields = [self.module, self.name, list(self.lists), dict(self.options)]
        return json.dumps(fields, sort_keys=True)

    @staticmethod
    @functools.cache
    def parsed(text: str) -> UpdateSpec:
        """What a text says."""
        module, name, lists, options = json.loads(text)
        return UpdateSpec(module=module, name=name, lists=lists, options=options)


def run(
    state: Sequence[Tensor], gradients: Sequence[Tensor], numbers: Sequence[Tensor], how: str
) -> None:
    """Update by torch's own code.

    Args:
        state: the parameters, then each list of their state.
        gradients: of the parameters.
        numbers: what ``how`` refers to, float64 [] each.
        how: the text of an ``UpdateSpec``.
    """
    said, count = UpdateSpec.parsed(how), len(gradients)
    # torch's code gets Python's numbers, as eagerly: then its results are stock's to the bit
    values, update = [number.item() for number in numbers], _function(said)
    lists = {"grads": gradients} | {
        name: state[i * count : (i + 1) * count] for i, name in enumerate(said.lists)
    }
    for some in portions(gradients):
        options = {name: _meant(value, values) for name, value in said.options.items()}
        update(**{name: list(tensors[some]) for name, tensors in lists.items()}, **options)


def portions(tensors: Sequence[Tensor], most_bytes: int = _PORTION) -> Iterator[slice]:
    """Stretches of tensors that are small together: what is made of them at once stays in a cache,
    and takes little memory.
    """
    first, size = 0, 0
    for i, tensor in enumerate(tensors):
        size += tensor.nbytes
        if size > most_bytes and i > first:
            yield slice(first, i)
            first, size = i, tensor.nbytes
    yield slice(first, len(tensors))


def is_used(number: fx.Node, reader: fx.Node) -> bool:
    """Whether an operation that takes a number uses it: a formula was traced with its value.

    ``if weight_decay != 0`` of a formula that was traced with 0 uses none.
    """
    if reader.target is not UPDATE:
        return True
    numbers: Any = reader.args[2]
    places = [i - len(numbers) for i, one in enumerate(numbers) if one is number]
    operands = [[*one.graph.find_nodes(op="placeholder")] for one in reader.meta[FORMULAS]]
    return any(given[i].users for given in operands for i in places)


def _meant(value: Any, numbers: list[float]) -> Any:
    """An option as torch's function takes it: ``[i]`` is the i-th number, ``[]`` a list without
    tensors, as of a state that the options leave out (``amsgrad``).
    """
    if not isinstance(value, list):
        return value
    return numbers[value[0]] if value else []


def _function(how: UpdateSpec) -> Callable[..., None]:
    """torch's formula: on lists where it has the same numbers, for it takes half the time.

    With ``nesterov`` that on lists changes the gradients.
    """
    module = importlib.import_module(how.module)
    alone = how.name == "nadam" or how.options.get("nesterov")
    single = getattr(module, f"_single_tensor_{how.name}")
    return single if alone else getattr(module, f"_multi_tensor_{how.name}", single)  # type: ignore[no-any-return]


_LIBRARY: Any = torch.library.Library("fulgurite", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("update(Tensor(a!)[] state, Tensor[] gradients, Tensor[] numbers, str how) -> ()")
_LIBRARY.impl("update", run, "CompositeExplicitAutograd")
torch.library.register_fake("fulgurite::update", lambda *given: None, lib=_LIBRARY)

UPDATE: Any = torch.ops.fulgurite.update.default
