"""The compiler's Python wrapper, made static.

Inductor's output is a Python function that allocates each intermediate, calls kernels and matrix
products on them, and frees them: on a small model that is a third of the step. A program runs the
same operations on the same shapes forever, so here small intermediates and views of them are made
once, when the program is loaded; random numbers are drawn into them. On an MLP 64-128-128-10 under
AdamW: 87 against 106 µs a step, the same bits (measured, torch 2.13).

Only the text changes: which values are computed, and in which order, stays Inductor's.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch

from fulgurite.backends.csx.compile.translation_unit import Kernel

RESIDENT_BYTES = 4 << 20  # of all intermediates that are made once
_ALLOCATE, VIEW = "empty_strided_cpu", "reinterpret_tensor"
_DRAW = "torch.ops.fulgurite."


class UnknownWrapper(RuntimeError):
    """The wrapper is not of the form that is known (checked against torch 2.13)."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the compiler wrote a program of a form that is not known: {what[:200]}")


@dataclass(slots=True)
class Wrapper:
    """A wrapper's parts: its function ``call(args)``, its kernels, and the statements before it."""

    before: list[ast.stmt]
    function: ast.FunctionDef
    kernels: list[Kernel]


def parsed(source: str) -> Wrapper:
    """Take the source of a wrapper apart.

    Raises:
        UnknownWrapper: a part of it is not of the form that is known.
    """
    kernels, before, runner = [], [], None
    for statement in ast.parse(source).body:
        text = ast.unparse(statement)
        if isinstance(statement, ast.ClassDef):
            runner = statement
        elif runner is not None:
            break  # how the compiler itself calls and times it
        elif isinstance(statement, ast.Assign) and "async_compile.cpp_pybinding(" in text:
            kernels.append(_kernel(statement))
        elif "async_compile" in text or "AsyncCompile" in text:
            if not text.endswith(("AsyncCompile", "AsyncCompile()", "wait(globals())", "compile")):
                raise UnknownWrapper(text)
        else:
            before.append(statement)
    if runner is None:
        raise UnknownWrapper("no class Runner")
    functions = [f for f in runner.body if isinstance(f, ast.FunctionDef) and f.name == "call"]
    if len(functions) != 1 or len(functions[0].args.args) != 2:
        raise UnknownWrapper("no method call(self, args)")
    function = functions[0]
    function.args.args = function.args.args[1:]
    return Wrapper(before, function, kernels)


def make_static(wrapper: Wrapper) -> str:
    """A wrapper in static form: source that defines ``call(args)``, given its kernels by name."""
    made_once, call = _Call(wrapper.function).rewrite()
    module = ast.Module([*wrapper.before, *made_once, call], [])
    return ast.unparse(ast.fix_missing_locations(module))


def _kernel(statement: ast.Assign) -> Kernel:
    """Of ``name = async_compile.cpp_pybinding(types, source)``."""
    call = statement.value
    if not isinstance(call, ast.Call) or len(call.args) != 2:
        raise UnknownWrapper(ast.unparse(statement))
    return Kernel(_only_name(statement), ast.literal_eval(call.args[1]))


class _Call:
    """The function ``call`` of a wrapper while it is rewritten."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self._function = function
        self._function.body = [
            step for statement in self._function.body for step in _drawn_in_place(statement)
        ]
        # what branches do to names is not followed
        self._branches = any(hasattr(statement, "body") for statement in self._function.body)
        self._aliases: dict[str, str] = {}  # bufB = bufA: the same memory under another name
        self._allocations: dict[str, ast.Call] = {}
        for statement in self._function.body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                name = statement.targets[0].id
                if isinstance(statement.value, ast.Name):
                    self._aliases[name] = statement.value.id
                elif _calls(statement.value, _ALLOCATE):
                    assert isinstance(statement.value, ast.Call)
                    self._allocations[name] = statement.value
        self._resident = self._choose()

    def rewrite(self) -> tuple[list[ast.stmt], ast.FunctionDef]:
        """The statements that run once, and the function that runs every time."""
        once: list[ast.stmt] = [_assign(n, self._allocations[n]) for n in self._resident]
        views = _Views(self._root, set(self._resident), self._views_of_inputs())
        body: list[ast.stmt] = []
        for statement in self._function.body:
            if not self._is_settled(statement):
                seen = views.visit(statement)
                body += [*(_assign(name, view) for name, view in views.first), seen]
                views.first.clear()
        once += [_assign(name, view) for name, view in views.found.values()]
        self._function.body = body
        return once, self._function

    def _views_of_inputs(self) -> dict[str, str]:
        """Views of inputs that are made more than once, with a name for each.

        Others keep the inputs' memory anyway.
        """
        if self._branches:
            return {}
        inputs = {
            name
            for statement in self._function.body
            if isinstance(statement, ast.Assign) and ast.unparse(statement.value) == "args"
            for name in _names(statement.targets[0])
        }
        views = Counter(
            ast.unparse(node)
            for statement in self._function.body
            for node in ast.walk(statement)
            if is_view(node) and set(_names(node)) - {VIEW} <= inputs
        )
        repeated = [text for text, count in views.items() if count > 1]
        return {text: f"seen{i}" for i, text in enumerate(repeated)}

    def _choose(self) -> list[str]:
        """Intermediates to make once: the smallest, and none that may be returned."""
        if self._branches:
            return []
        escaping = self._escaping()
        sizes = {
            name: _bytes(allocation)
            for name, allocation in self._allocations.items()
            if name not in escaping
        }
        chosen, total = [], 0
        for name in sorted(sizes, key=lambda name: sizes[name]):
            total += sizes[name]
            if total <= RESIDENT_BYTES:
                chosen.append(name)
        return [name for name in self._allocations if name in chosen]

    def _escaping(self) -> set[str]:
        """Every name that a returned value was, or may have been, made from without a copy."""
        escaping: set[str] = set()
        for statement in reversed(self._function.body):
            if isinstance(statement, ast.Return):
                escaping |= set(_names(statement))
            elif isinstance(statement, ast.Assign):
                target = statement.targets[0]
                if isinstance(target, ast.Name) and target.id in escaping:
                    escaping |= set(_names(statement.value))
        return escaping

    def _root(self, name: str) -> str:
        while name in self._aliases:
            name = self._aliases[name]
        return name

    def _is_settled(self, statement: ast.stmt) -> bool:
        """Whether nothing is left of a statement; ``del`` loses the names that stay alive."""
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            return self._root(statement.targets[0].id) in self._resident
        if isinstance(statement, ast.Delete):
            statement.targets = [
                target
                for target in statement.targets
                if isinstance(target, ast.Name) and self._root(target.id) not in self._resident
            ]
            return not statement.targets
        return False


class _Views(ast.NodeTransformer):
    """Replaces resident intermediates by their one name, and views of them by one made once.

    Args:
        root: the one name of an intermediate.
        resident: intermediates that are made once.
        repeated: views that are made once a step, with their names.

    Attributes:
        found: views of resident intermediates.
        first: of the repeated ones those that are met for the first time.
    """

    def __init__(
        self, root: Callable[[str], str], resident: set[str], repeated: dict[str, str]
    ) -> None:
        self._root, self._resident, self._repeated = root, resident, repeated
        self.found: dict[str, tuple[str, ast.expr]] = {}
        self.first: list[tuple[str, ast.expr]] = []
        self._met: set[str] = set()

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A view of a resident intermediate becomes a name."""
        name = self._repeated.get(ast.unparse(node)) if is_view(node) else None
        if name is not None:
            if name not in self._met:
                self._met.add(name)
                self.first.append((name, node))
            return _load(name)
        self.generic_visit(node)
        first = node.args[0] if node.args else None
        if _calls(node, VIEW) and isinstance(first, ast.Name) and first.id in self._resident:
            name = f"view{len(self.found)}"
            return _load(self.found.setdefault(ast.unparse(node), (name, node))[0])
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """An alias of a resident intermediate becomes that intermediate."""
        root = self._root(node.id)
        return _load(root) if root in self._resident else node


def _drawn_in_place(statement: ast.stmt) -> Iterator[ast.stmt]:
    """Allocate what a draw returns here, and let aten's operation draw into it.

    Instead of a call of the operation of ``passes/draws.py``, which is Python's and does the same.
    """
    call = getattr(statement, "value", None)
    function = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
    if isinstance(statement, ast.Assign) and function.startswith(_DRAW):
        assert isinstance(call, ast.Call)
        buffer = _only_name(statement)
        name, _, overload = function.removeprefix(_DRAW).partition(".")
        size, stride, dtype, *numbers = map(ast.unparse, call.args)
        yield from ast.parse(
            f"{buffer} = {_ALLOCATE}({_tuple(size)}, {_tuple(stride)}, {dtype})\n"
            f"torch.ops.aten.{name}_.{overload}({', '.join([buffer, *numbers])})"
        ).body
    elif function != "assert_alignment" or _DRAW not in ast.unparse(statement):
        yield statement


def _tuple(numbers: str) -> str:
    return repr(tuple(ast.literal_eval(numbers)))


def _calls(node: ast.AST, function: str) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function
    )


def is_view(node: ast.AST) -> bool:
    """Whether an expression makes a view of its first argument."""
    return _calls(node, VIEW)


def _names(node: ast.AST) -> Iterator[str]:
    return (n.id for n in ast.walk(node) if isinstance(n, ast.Name))


def _only_name(statement: ast.Assign) -> str:
    target = statement.targets[0]
    assert isinstance(target, ast.Name)
    return target.id


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _assign(name: str, value: ast.expr) -> ast.Assign:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def _bytes(allocation: ast.Call) -> int:
    """Of ``empty_strided_cpu(shape, stride, torch.<dtype>)``."""
    shape, stride = map(ast.literal_eval, allocation.args[:2])
    dtype: torch.dtype = getattr(torch, ast.unparse(allocation.args[2]).removeprefix("torch."))
    last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    return (1 + last) * dtype.itemsize if prod(shape) else 0
