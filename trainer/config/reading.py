"""YAML, read safely, with the place of every key.

Read are YAML's plain values: mappings, lists, strings, numbers, true/false, null. ``1e-3`` is a
number, as in YAML 1.2; a time of day or a date is a string. Anchors, aliases and merges (``<<``)
work. A duplicate key, a tag that would make an object, and aliases nested into billions of values
are errors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

import yaml

from fulgurite.config.problems import ParameterFileError, Path, Place, Problem, described, dotted

MOST_VALUES = 100_000
"""More than any file that a person wrote; a few nested aliases stand for billions."""

_VARIABLE = re.compile(r"\$(?:\$|\{([A-Za-z_][A-Za-z0-9_]*)\})")


class _Loader(yaml.SafeLoader):
    """SafeLoader without its surprises: no sexagesimal numbers, no dates, ``1e-3`` a number."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0o[0-7_]+|[0-9][0-9_]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first)
    )


@dataclass(frozen=True, kw_only=True)
class Document:
    """What a file says, and where.

    Args:
        source: the file's name, or ``<dict>``.
        data: what it says.
        places: the place of each key and list item.
        origins: where each key of a converted file stood before (``fulgurite.config.legacy``).
        notes: what its conversion left out or changed.
    """

    source: str
    data: Any
    places: dict[Path, Place] = field(default_factory=dict)
    origins: dict[Path, Path] = field(default_factory=dict)
    notes: tuple[Problem, ...] = ()

    def place(self, path: Path) -> Place:
        """Where a path stands, or the nearest key above it that stands somewhere."""
        for end in range(len(path), -1, -1):
            for found in (path[:end], self.origins.get(path[:end])):
                if found is not None and found in self.places:
                    return self.places[found]
        return Place(self.source)

    def told(self, problem: Problem) -> str:
        """A problem or note as people read it."""
        return described(self.place(problem.path), problem)

    def refuse(self, problems: Iterable[Problem]) -> None:
        """Raise a ParameterFileError if there are any problems."""
        placed = [(self.place(problem.path), problem) for problem in problems]
        if placed:
            placed.sort(key=lambda item: (item[0].line or 0, item[0].column or 0))
            raise ParameterFileError(placed)


def read(file: str | os.PathLike[str] | Mapping[str, Any]) -> Document:
    """Read a parameter file, or take a dict as one.

    Raises:
        ParameterFileError: it cannot be read, or is not YAML as described above.
    """
    if isinstance(file, Mapping):
        return Document(source="<dict>", data=_plain(file))
    source = os.fspath(file)
    try:
        text = FilePath(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"is not UTF-8 text: {error}"
        raise ParameterFileError([(Place(source), Problem((), f"cannot be read: {why}"))]) from None
    return parse(text, source)


def parse(text: str, source: str) -> Document:
    """A document from YAML text; the same errors as ``read``."""
    try:
        node = yaml.compose(text, _Loader)
        if node is None:
            raise ParameterFileError([(Place(source), Problem((), "is empty."))])
        builder = _Builder(source)
        data = builder.build(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(source, mark.line + 1, mark.column + 1) if mark else Place(source)
        text = "; ".join(part for part in (error.problem, error.note) if part)
        raise ParameterFileError([(place, Problem((), f"is not YAML: {text}."))]) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, ParameterFileError):
            raise
        why = "nested too deep" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise ParameterFileError([(Place(source), Problem((), f"is not YAML: {why}."))]) from None
    document = Document(source=source, data=data, places=builder.places)
    document.refuse(builder.problems)
    return document


class _Builder:
    """Makes plain data of YAML's nodes, and notes where each stands."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.places: dict[Path, Place] = {}
        self.problems: list[Problem] = []
        self._values = 0
        self._open: set[int] = set()
        self._scalars = yaml.constructor.SafeConstructor()

    def build(self, node: yaml.Node, path: Path) -> Any:
        self._values += 1
        if self._values > MOST_VALUES:
            raise yaml.YAMLError(
                f"it stands for more than {MOST_VALUES} values: aliases (*name) within aliases"
            )
        self.places.setdefault(path, self._place(node))
        if id(node) in self._open:
            raise yaml.YAMLError(f"{dotted(path)} contains itself through an alias")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return self._sequence(node, path)
            return self._scalar(node, path)
        finally:
            self._open.discard(id(node))

    def _place(self, node: yaml.Node) -> Place:
        return Place(self.source, node.start_mark.line + 1, node.start_mark.column + 1)

    def _problem(self, node: yaml.Node, path: Path, text: str) -> None:
        self.places[path] = self._place(node)
        self.problems.append(Problem(path, text))

    def _sequence(self, node: yaml.SequenceNode, path: Path) -> list[Any]:
        if not node.tag.endswith(":seq"):
            self._problem(node, path, _tag_text(node))
        return [self.build(item, (*path, i)) for i, item in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[Any, Any]:
        if not node.tag.endswith(":map"):
            self._problem(node, path, _tag_text(node))
        data: dict[Any, Any] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                merged += (
                    value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                )
                continue
            key = self._key(key_node, path)
            if key is None:
                continue
            if key in data:
                first = self.places[*path, key]
                text = f"is given twice, first at line {first.line}. Remove one."
                self._problem(key_node, (*path, key), text)
                continue
            self.places[*path, key] = self._place(key_node)
            data[key] = self.build(value_node, (*path, key))
        for other in merged:
            self._merge(other, data, path)
        return data

    def _merge(self, node: yaml.Node, data: dict[Any, Any], path: Path) -> None:
        if not isinstance(node, yaml.MappingNode):
            self._problem(node, (*path, "<<"), "merges only mappings (<<: *name).")
            return
        before = dict(self.places)
        for key, value in self.build(node, path).items():
            if key not in data:
                data[key] = value
        # keys of the mapping itself stay where they stand
        self.places.update({k: v for k, v in before.items() if k[: len(path)] == path})

    def _key(self, node: yaml.Node, path: Path) -> str | int | None:
        key = self._scalar(node, path) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(key, (str, int)) and not isinstance(key, bool):
            return key
        shown = node.value if isinstance(node, yaml.ScalarNode) else "a list or mapping"
        self._problem(node, (*path, "?"), f"a key must be a word; got {shown!r}.")
        return None

    def _scalar(self, node: yaml.Node, path: Path) -> Any:
        kind = node.tag.rpartition(":")[2]
        if not node.tag.startswith("tag:yaml.org,2002:") or kind not in _SCALARS:
            self._problem(node, path, _tag_text(node))
            return None
        if kind == "float" and node.value.lower().lstrip("+-") not in (".inf", ".nan"):
            return float(node.value.replace("_", ""))
        if kind == "int":
            # a leading zero is no octal number, as in YAML 1.2
            plain = node.value.replace("_", "")
            return int(plain, 10) if plain.lstrip("+-").isdigit() else int(plain, 0)
        value: Hashable = self._scalars.construct_object(node)
        return value


_SCALARS = ("str", "int", "float", "bool", "null")


def _tag_text(node: yaml.Node) -> str:
    return f"has the tag {node.tag!r}: only plain values are read. Leave the tag out."


def _plain(value: Any) -> Any:
    """A copy of a dict's mappings and lists, so that overrides never change the caller's."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def scalar(text: str) -> Any:
    """What a value of the command line means: YAML, as in a file."""
    return parse(text, "--set").data if text.strip() else ""


def with_overrides(document: Document, overrides: Mapping[str, Any]) -> Document:
    """The document with some keys set.

    Args:
        overrides: dotted keys (``trainer.init.loop.max_steps``; items of a list by number) and
            their values.

    Raises:
        ParameterFileError: a key leads through a value that is no mapping, or past a list's end.
    """
    problems = []
    data, places = _plain(document.data), dict(document.places)
    for key, value in overrides.items():
        path: Path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
        places = {k: v for k, v in places.items() if k[: len(path)] != path}
        places[path] = Place(f"--set {key}")
        problem = _set(data, path, value)
        if problem:
            problems.append(Problem(path, problem))
    changed = replace(document, data=data, places=places)
    changed.refuse(problems)
    return changed


def _set(data: Any, path: Path, value: Any) -> str:
    """Set one value in place; what is wrong, or nothing."""
    for i, part in enumerate(path):
        last = i == len(path) - 1
        where = dotted(path[:i]) or "the file"
        if isinstance(data, list):
            if not isinstance(part, int) or part >= len(data):
                return f"{where} is a list of {len(data)}; got item {part!r}."
            if last:
                data[part] = value
        elif isinstance(data, dict):
            if last:
                data[part] = value
            elif data.get(part) is None:
                data[part] = {}
        else:
            return f"{where} is {data!r}, which has no keys."
        data = data[part]
    return ""


def with_environment(document: Document) -> Document:
    """The document with ``${NAME}`` replaced by the environment's value; ``$$`` is a dollar sign.

    A string that is nothing but ``${NAME}`` becomes what the value means in YAML: a number, say.

    Raises:
        ParameterFileError: a variable is not set.
    """
    problems: list[Problem] = []

    def replaced(value: Any, path: Path) -> Any:
        if isinstance(value, dict):
            return {key: replaced(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [replaced(item, (*path, i)) for i, item in enumerate(value)]
        if not isinstance(value, str) or "$" not in value:
            return value
        for name in _VARIABLE.findall(value):
            if name and name not in os.environ:
                problems.append(
                    Problem(path, f"the environment has no {name}. Set it, or write $${{{name}}}.")
                )
                return value
        text = _VARIABLE.sub(lambda m: os.environ[m[1]] if m[1] else "$", value)
        whole = _VARIABLE.fullmatch(value)
        return scalar(text) if whole and whole[1] else text

    data = replaced(document.data, ())
    document.refuse(problems)
    return replace(document, data=data)
