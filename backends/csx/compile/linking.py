"""The wrappers of parts, linked to one: a part's statements stand wherever it is called.

So a part costs no call when the program runs, and what is made once is chosen over the whole
program (``static_wrapper``). Kernels get names that are theirs in all programs.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fulgurite.backends.csx.compile.parts import Call, Division
from fulgurite.backends.csx.compile.static_wrapper import VIEW, UnknownWrapper, Wrapper, is_view
from fulgurite.backends.csx.compile.translation_unit import Kernel

Constants = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A part as the compiler wrote it."""

    wrapper: Wrapper
    constants: Constants


def linked(
    parts: Sequence[Compiled], division: Division | None, name_of: Callable[[Kernel], str]
) -> Compiled:
    """One wrapper of those of all parts.

    Args:
        parts: those of the division; one, where there is no division.
        division: in which order they are called.
        name_of: the name of a kernel.

    Raises:
        UnknownWrapper: a wrapper is not of the form that is known.
    """
    names = [
        {kernel.name: name_of(kernel) for kernel in part.wrapper.kernels}
        | {name: f"{name}_of_{i}" for name in part.constants}
        for i, part in enumerate(parts)
    ]
    kernels = {name_of(one): one.source for part in parts for one in part.wrapper.kernels}
    before = {ast.unparse(one): one for part in parts for one in part.wrapper.before}
    function = copy.deepcopy(parts[0].wrapper.function)
    if division is None:
        function = _Renamed(names[0]).visit(function)
    else:
        function.body = list(_statements(parts, names, division))
    return Compiled(
        Wrapper(
            list(before.values()),
            ast.fix_missing_locations(function),
            [Kernel(name, source) for name, source in kernels.items()],
        ),
        {
            names[i][name]: one
            for i, part in enumerate(parts)
            for name, one in part.constants.items()
        },
    )


def _statements(
    parts: Sequence[Compiled], names: Sequence[dict[str, str]], division: Division
) -> Iterator[ast.stmt]:
    """The body of the function: a value is let go of where it is read last."""
    last = {number: i for i, call in enumerate(division.calls) for number in call.reads}
    last |= dict.fromkeys(division.outputs, len(division.calls))
    yield from _python(f"{_values(division.inputs)} = args\nargs.clear()")
    for i, call in enumerate(division.calls):
        over = {_value(number) for number in call.reads if last[number] == i}
        if isinstance(call, Call):
            body, gone = _inlined(parts[call.part].wrapper, names[call.part], call, i, over)
            yield from body
            over -= gone
        else:
            view = f"{VIEW}({_value(call.reads[0])}, {call.view})"
            yield from _python(f"{_value(call.gives[0])} = {view}")
        over |= {_value(number) for number in call.gives if number not in last}
        for name in sorted(over):
            yield from _python(f"del {name}")
    yield ast.Return(ast.parse(f"[{_values(division.outputs)}]", mode="eval").body)


def _inlined(
    wrapper: Wrapper, names: Mapping[str, str], call: Call, number: int, over: Collection[str]
) -> tuple[list[ast.stmt], set[str]]:
    """The statements of a call, and which of the values in ``over`` they let go of."""
    *body, end = copy.deepcopy(wrapper.function.body)
    if not isinstance(end, ast.Return) or not isinstance(end.value, ast.Tuple):
        raise UnknownWrapper("its last statement does not return a tuple")
    arguments: list[str] = []
    kept: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.value) == "args":
            arguments = [n.id for n in ast.walk(statement.targets[0]) if isinstance(n, ast.Name)]
        elif ast.unparse(statement) != "args.clear()":
            kept.append(statement)
    if len(arguments) != len(call.reads) or len(end.value.elts) != len(call.gives):
        raise UnknownWrapper("it has other arguments or results than its part")
    own = {name for one in kept for name in _stored(one)}
    values = dict(zip(arguments, map(_value, call.reads), strict=True))
    renamed = _Renamed({**names, **{name: f"{name}_{number}" for name in own}, **values})
    memory, alive = _memory(kept), _alive(kept)
    gone: set[str] = set()
    statements: list[ast.stmt] = []
    for statement in kept:
        if isinstance(statement, ast.Delete):
            deleted = {ast.unparse(one) for one in statement.targets}
            staying = {name for name in deleted if values.get(name, "") not in ("", *over)}
            statement.targets = [
                one for one in statement.targets if ast.unparse(one) not in staying
            ]
            gone |= {values[name] for name in deleted - staying if name in values}
            if not statement.targets:
                continue
        statements.append(renamed.visit(copy.deepcopy(statement)))
    results: list[ast.stmt] = []
    for given, value in zip(call.gives, end.value.elts, strict=True):
        result = renamed.visit(copy.deepcopy(value))
        if memory(value) in values:  # which may be overwritten before others read it
            function = ast.parse("torch.clone", mode="eval").body
            result = ast.Call(function, [result], [])
        results.append(ast.Assign([ast.Name(_value(given), ast.Store())], result))
    for name in alive:  # else what is returned would live as long as the step
        results += _python(f"del {name}_{number}")
    return [*statements, *results], gone


def _memory(body: Sequence[ast.stmt]) -> Callable[[ast.expr], str | None]:
    """A function that says whose memory a value is: the name that it was first under."""
    same = {
        statement.targets[0].id: statement.value
        for statement in body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
        if isinstance(statement.value, ast.Name) or is_view(statement.value)
    }

    def root(value: ast.expr) -> str | None:
        while True:
            if isinstance(value, ast.Call) and is_view(value):
                value = value.args[0]
            elif isinstance(value, ast.Name) and value.id in same:
                value = same[value.id]
            else:
                return value.id if isinstance(value, ast.Name) else None

    return root


def _alive(body: Sequence[ast.stmt]) -> list[str]:
    """The names that statements make and do not delete."""
    alive: dict[str, None] = {}
    for statement in body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            alive[statement.targets[0].id] = None
        elif isinstance(statement, ast.Delete):
            for target in statement.targets:
                alive.pop(ast.unparse(target), None)
    return list(alive)


def _stored(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


class _Renamed(ast.NodeTransformer):
    """Gives names other names."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """A name."""
        return ast.Name(self._names.get(node.id, node.id), node.ctx)


def _python(source: str) -> list[ast.stmt]:
    return ast.parse(source).body


def _value(number: int) -> str:
    return f"v{number}"


def _values(numbers: Sequence[int]) -> str:
    return "".join(f"{_value(number)}, " for number in numbers)
