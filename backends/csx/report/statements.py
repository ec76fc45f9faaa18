"""The statements of a compiled program, walked: which memory is held after each.

The Python of a program (``Made.program``) allocates, calls kernels, and lets go; sizes stand in it,
but for what operations of torch's give, which are asked on fakes. Nothing is computed.
"""

from __future__ import annotations

import ast
from collections import Counter
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fulgurite.backends.csx.compile.made import Made
from fulgurite.backends.csx.graph.graph import Graph, storage_of

_MADE_ONCE = ("empty_strided_cpu", "reinterpret_tensor")
_NO_KERNEL = (*_MADE_ONCE, "args.clear", "assert_size_stride", "assert_alignment")

_NO_STATEMENT = ("MultiOutput",)  # one of the results of the call before


class Walk:
    """A program's memory.

    Args:
        graph: what it computes.
        made: the program.

    Attributes:
        kept_bytes: of what is allocated when it is loaded.
        alive: bytes of intermediates while each of its calls runs, those that are kept among them.
    """

    def __init__(self, graph: Graph, made: Made) -> None:
        inputs, nodes = [item.example for item in graph.inputs], list(graph.operations())
        self._names: dict[str, Any] = {
            "aten": torch.ops.aten,
            "args": inputs,
            "empty_strided_cpu": _allocated,
            "reinterpret_tensor": torch.as_strided,
        }
        self._held = Counter[int]()  # names that hold a storage
        self._foreign = {storage_of(tensor) for tensor in inputs}
        self._total, self.alive = 0, list[int]()
        self._kernels = [call.kernel for call in made.calls]
        self._results = [
            nodes[call.operations[-1]].meta["val"] if call.operations else None
            for call in made.calls
        ]
        body = ast.parse(made.program).body
        [function] = [one for one in body if isinstance(one, ast.FunctionDef)]
        with graph.mode, torch.no_grad():
            for statement in body[: body.index(function)]:
                if _function(statement) in _MADE_ONCE or _imports(statement):
                    self._run(statement)
            self.kept_bytes = self._total
            for statement in function.body:
                self._run(statement)
                self._note(_function(statement))
        self.alive += [self._total] * (len(self._kernels) - len(self.alive))

    def _note(self, function: str) -> None:
        """Note what is alive while a call runs: a statement that calls a function.

        What is no call of a kernel (a copy between parts) counts with the call before.
        """
        if not function or function in _NO_KERNEL:
            return
        while self._next in _NO_STATEMENT:
            self.alive.append(self._total)
        if _same(function, self._next):
            self.alive.append(self._total)
        elif self.alive:
            self.alive[-1] = max(self.alive[-1], self._total)

    @property
    def _next(self) -> str:
        """The kernel that is called next; empty after the last one."""
        return "".join(self._kernels[len(self.alive) :][:1])

    def _run(self, statement: ast.stmt) -> None:
        """Let the names of a statement hold what they then hold."""
        if isinstance(statement, ast.Assign):
            self._store(statement.targets[0], self._value(statement.value))
        elif isinstance(statement, ast.Delete):
            for target in statement.targets:
                self._forget(ast.unparse(target))
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            exec(ast.unparse(statement), self._names)

    def _value(self, expression: ast.expr) -> Any:
        """What an expression gives; of a constant, which is not here, what its call computes."""
        names = {one.id for one in ast.walk(expression) if isinstance(one, ast.Name)}
        if names <= self._names.keys():
            return eval(ast.unparse(expression), self._names)
        at = len(self.alive)
        return self._results[at] if at < len(self._results) else None

    def _store(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for one, part in zip(target.elts, value, strict=True):
                self._store(one, part)
            return
        name = ast.unparse(target)
        self._forget(name)
        self._names[name] = value
        for storage, size in _storages(value).items():
            if storage not in self._foreign:
                if not self._held[storage]:
                    self._total += size
                self._held[storage] += 1

    def _forget(self, name: str) -> None:
        for storage, size in _storages(self._names.pop(name, None)).items():
            if storage not in self._foreign:
                self._held[storage] -= 1
                if not self._held[storage]:
                    self._total -= size


def _allocated(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


def _storages(value: Any) -> dict[int, int]:
    """The storages of tensors in a value, with the bytes of each."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return {storage_of(leaf): leaf.untyped_storage().nbytes() for leaf in leaves}


def _imports(statement: ast.stmt) -> bool:
    """Whether a statement imports of torch itself, or numbers."""
    if isinstance(statement, ast.Import):
        return all(one.name == "torch" for one in statement.names)
    return isinstance(statement, ast.ImportFrom) and statement.module in ("torch", "math")


def _function(statement: ast.stmt) -> str:
    """The function that a statement calls; empty where it calls none."""
    call = getattr(statement, "value", None)
    return ast.unparse(call.func) if isinstance(call, ast.Call) else ""


def _same(function: str, kernel: str) -> bool:
    """Whether a function of the program (``torch.mm``) is a kernel (``aten.mm.out``)."""
    return function == kernel or _operation(function) == _operation(kernel)


def _operation(name: str) -> str:
    """``mm`` of ``torch.mm``, ``torch.ops.aten.mm.default`` and ``aten.mm.out``."""
    parts = name.removeprefix("torch.ops.").split(".")
    return parts[min(1, len(parts) - 1)].removesuffix("_")
