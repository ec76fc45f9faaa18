"""Which memory a compiled program holds while each of its calls runs. Nothing is computed.

Sizes stand in the program's steps, but for what functions of torch's return, which are asked on
fakes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fulgurite.backends.csx.compile.programs.steps import (
    Alias,
    Alloc,
    Extern,
    Free,
    Item,
    Kernel,
    Name,
    Program,
    Step,
    View,
    computes,
    function_of,
    given_by,
    replaced,
)
from fulgurite.backends.csx.graph.graph import Graph, storage_of


class Liveness:
    """A program's memory.

    Args:
        graph: what it computes.
        program: the program.

    Attributes:
        kept_bytes: of what is allocated when it is loaded.
        alive: bytes of intermediates while each of its calls runs, those that are kept among them.
    """

    def __init__(self, graph: Graph, program: Program) -> None:
        inputs = [item.example for item in graph.inputs]
        self._values: dict[Name, Any] = dict(zip(program.inputs, inputs, strict=True))
        self._held = Counter[int]()  # names that hold a storage
        self._foreign = {storage_of(tensor) for tensor in inputs}
        self._total, self.live_bytes = 0, list[int]()
        nodes = list(graph.operations())
        # on fakes: functions are asked for the layout of what they return, and compute nothing
        with graph.mode, torch.no_grad():
            for step in program.once:
                self._take(step, None)
            self.kept_bytes = self._total
            for step in program.steps:
                at = step.at if isinstance(step, (Kernel, Extern)) else ()
                self._take(step, nodes[at[-1]].meta["val"] if at else None)
                if computes(step):
                    self.live_bytes.append(self._total)
                elif isinstance(step, Extern) and self.live_bytes:  # a copy for the next part
                    self.live_bytes[-1] = max(self.live_bytes[-1], self._total)

    def _take(self, step: Step, computed: Any) -> None:
        """Let names hold what they hold after a step; ``computed`` is what its last operation is.

        Constants are not here: what a call makes of one is what the graph says.
        """
        if isinstance(step, Free):
            self._forget(step.name)
            return
        name = given_by(step)
        if name is not None:
            try:
                value = self._value_of(step)
            # a constant lies with the compiled code; the graph knows the size of what it goes into
            except KeyError:
                value = computed
            self._forget(name)
            self._values[name] = value
            for storage, size in _storages(value).items():
                if storage not in self._foreign:
                    if not self._held[storage]:
                        self._total += size
                    self._held[storage] += 1

    def _value_of(self, step: Step) -> Any:
        """What a step gives a name to.

        Raises:
            KeyError: it reads a constant.
        """
        match step:
            case Alloc(_, shape, strides, dtype):
                return torch.empty_strided(shape, strides, dtype=dtype)
            case Alias(_, of):
                return self._operand(of)
            case Item(_, of, path):
                value = self._values[of]
                for key in path:
                    value = value[key]
                return value
            case Extern():
                args, kwargs = replaced((step.args, dict(step.kwargs)), self._operand)
                return function_of(step.function)(*args, **kwargs)
        raise AssertionError(step)

    def _operand(self, operand: Name | View) -> Any:
        if isinstance(operand, Name):
            return self._values[operand]
        value = self._values[operand.of]
        if operand.layout is not None:
            value = torch.as_strided(value, *operand.layout)
        return value if operand.dtype is None else value.view(operand.dtype)

    def _forget(self, name: Name) -> None:
        for storage, size in _storages(self._values.pop(name, None)).items():
            if storage not in self._foreign:
                self._held[storage] -= 1
                if not self._held[storage]:
                    self._total -= size


def _storages(value: Any) -> dict[int, int]:
    """The storages of tensors in a value, with the bytes of each."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return {storage_of(leaf): leaf.untyped_storage().nbytes() for leaf in leaves}
