"""The names in a function's source, and their lines: what a function may read, set or call.

They come from the syntax tree of the file that the function's code says it is from. Bytecode would
say the same, in other words in each version of Python. Code without a source (of ``exec``, or of a
package that ships none) has the names of its code object, each of which may be anything.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

_EXPRESSIONS: dict[type[ast.AST], str] = {
    ast.Lambda: "<lambda>",
    ast.ListComp: "<listcomp>",
    ast.SetComp: "<setcomp>",
    ast.DictComp: "<dictcomp>",
    ast.GeneratorExp: "<genexpr>",
}
"""Expressions that may have a code object of their own, and what that is called. Comprehensions
have none since Python 3.12 (PEP 709): their names are those of the function around them, too."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


TYPE = "type()"
"""The owner of a name that a function asks for the type of: ``type(batch_idx)``."""


@dataclass(frozen=True, slots=True)
class Mention:
    """A name in a function's source, or a string: ``getattr(self, "net")`` names ``net``.

    Args:
        owner: of an attribute the name before its dot: ``trainer`` of ``self.trainer.seen``. Empty
            where an expression stands there, and of what is no attribute; None where there is no
            source, and it may be any name.
        is_global: whether a global variable of that name is read, or may be.
        is_set: whether an attribute of that name is set or deleted, or may be.
    """

    name: str
    line: int
    owner: str | None = ""
    is_global: bool = False
    is_set: bool = False


def mentions(code: CodeType) -> tuple[Mention, ...]:
    """What a function's code names, in the order of lines; without the functions inside it."""
    return _mentions(code, code.co_filename)


def returns_value(code: CodeType) -> bool:
    """Whether there is a ``return`` with something in a function's source, or no source at all."""
    scopes = _scopes_of(code, code.co_filename)
    found = [one for scope in scopes for one in _nodes_of(scope) if isinstance(one, ast.Return)]
    values = [getattr(one.value, "value", one.value) for one in found]  # of a constant, itself
    return not scopes or any(value is not None for value in values)


@functools.lru_cache(maxsize=4096)  # with the file, which code objects of two files may differ in
def _mentions(code: CodeType, file: str) -> tuple[Mention, ...]:
    found = _scopes_of(code, file)
    if not found:
        first = code.co_firstlineno
        return tuple(Mention(name, first, None, True, True) for name in code.co_names)
    every = (mention for node in found for mention in _mentions_in(node, code))
    return tuple(sorted(every, key=lambda one: one.line))


def _scopes_of(code: CodeType, file: str) -> list[ast.AST]:
    """What of a file may be a code's: several, where lambdas begin in one line."""
    found = _scopes("".join(linecache.getlines(file)))
    return found.get((code.co_name, code.co_firstlineno), [])


@functools.lru_cache(maxsize=64)
def _scopes(text: str) -> dict[tuple[str, int], list[ast.AST]]:
    """What of a source has a code object, by the name and the first line of that."""
    found: dict[tuple[str, int], list[ast.AST]] = defaultdict(list)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # no Python, for all its name; a null byte
        return {}
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITIONS):
            first = min(one.lineno for one in (node, *node.decorator_list))
            found[node.name, first].append(node)
        elif isinstance(node, ast.expr) and type(node) in _EXPRESSIONS:
            found[_EXPRESSIONS[type(node)], node.lineno].append(node)
    return found


def _mentions_in(scope: ast.AST, code: CodeType) -> Iterator[Mention]:
    nodes = list(_nodes_of(scope))
    targets = (one.target for one in nodes if isinstance(one, ast.comprehension))
    # since Python 3.12 a variable of a comprehension counts as the function's, in which it may be
    # the name of a global one too
    inside = {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars} - inside
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=context):
                is_read = isinstance(context, ast.Load) and name in code.co_names
                yield Mention(name, node.lineno, is_global=is_read and name not in own)
            case ast.Attribute(value=value, attr=name, ctx=context):
                owner = getattr(value, "id", getattr(value, "attr", ""))
                is_set = not isinstance(context, ast.Load)
                # the line of the name itself, where the expression is written over several
                line = node.end_lineno or node.lineno
                yield Mention(_compiled(name, code), line, owner, is_set=is_set)
            case ast.Call(func=ast.Name(id="type"), args=[ast.Name() | ast.Attribute() as of]):
                yield Mention(getattr(of, "id", getattr(of, "attr", "")), node.lineno, TYPE)
            case ast.Constant(value=str(name)):
                yield Mention(name, node.lineno)


def _compiled(name: str, code: CodeType) -> str:
    """An attribute's name as it is at run time: ``__net`` in a class ``Net`` is ``_Net__net``."""
    if not name.startswith("__") or name.endswith("__"):
        return name
    return next((one for one in code.co_names if one.endswith(name)), name)


def _nodes_of(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function's body, without the bodies of functions and classes inside it."""
    todo = _body(scope)
    while todo:
        node = todo.pop()
        yield node
        apart = _body(node) if isinstance(node, (*_DEFINITIONS, ast.Lambda)) else ()
        todo += [one for one in ast.iter_child_nodes(node) if one not in apart]


def _body(scope: ast.AST) -> list[ast.AST]:
    match scope:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [*scope.body]
        case ast.Lambda():
            return [scope.body]
    return [scope]
