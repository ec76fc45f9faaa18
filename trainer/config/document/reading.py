"""A parameter file as a document: what it says, and where.

``nodes`` reads the text; here are files, dicts, overrides and the environment.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fulgurite.config.document.nodes import MOST_LEVELS, MOST_VALUES, values_of
from fulgurite.config.document.problems import (
    ParameterFileError,
    Path,
    Place,
    Problem,
    described,
    dotted,
    nearest,
    refusal,
    shown,
)
from fulgurite.config.document.variables import Variables

MOST_BYTES = 500_000
"""Of a file. Some 10,000 lines, which are read in two seconds."""

MOST_BITS = 1400
"""Of a whole number in a dict; in a file it is bounded by digits."""

_NOT_YAML = (
    "the variable's value is not YAML: no number, word, list or mapping. If it is a text,"
    " put quotes around it in the variable itself: NAME=\"'the text'\"."
)
"""What is wrong with the value, without quoting it."""

_VARIABLE = re.compile(r"\$(?:\$|\{([A-Za-z_][A-Za-z0-9_]*)\})")
_ENDINGS = (".yaml", ".yml", ".json")


@dataclass(frozen=True, kw_only=True)
class Document:
    """What a file says, and where.

    Args:
        source: the file's name, or ``<dict>``.
        data: what it says.
        places: the place of each key and list item.
        origins: where each key of a converted file stood before (``fulgurite.config.legacy``).
        notes: what its conversion left out or changed.
        problems: mistakes in old keys, which the conversion found.
        variables: what in it came from the environment.
    """

    source: str
    data: Any
    places: dict[Path, Place] = field(default_factory=dict)
    origins: dict[Path, Path] = field(default_factory=dict)
    notes: tuple[Problem, ...] = ()
    problems: tuple[Problem, ...] = ()
    variables: Variables = field(default_factory=Variables)

    def place(self, path: Path) -> Place:
        """Where a path stands, or the nearest key above it that stands somewhere."""
        for end in range(len(path), -1, -1):
            for found in (path[:end], self.origins.get(path[:end])):
                if found is not None and found in self.places:
                    return self.places[found]
        return Place(self.source)

    def origin(self, path: Path) -> Path:
        """Where a path of a converted file, or the nearest one above it, stood before."""
        ends = range(len(path), -1, -1)
        return next((self.origins[path[:end]] for end in ends if path[:end] in self.origins), path)

    def told(self, problem: Problem) -> str:
        """A problem of this file as a line of text, with its place."""
        return described(self.place(problem.path), self._hidden(problem))

    def _hidden(self, problem: Problem) -> Problem:
        return Problem(problem.path, self.variables.hidden(problem.text))

    def refuse(self, problems: Iterable[Problem]) -> None:
        """Raise a ParameterFileError if there are any problems."""
        problems = map(self._hidden, problems)
        # what several aliases stand for is told once
        told = {(self.place(problem.path), problem.text): problem for problem in problems}
        placed = [(place, problem) for (place, _), problem in told.items()]
        if placed:
            placed.sort(key=lambda item: (item[0].line or 0, item[0].column or 0))
            raise ParameterFileError(placed)


def read(file: str | os.PathLike[str] | Mapping[str, Any]) -> Document:
    """Read a parameter file, or take a dict as one.

    Raises:
        ParameterFileError: it cannot be read, or is not YAML as ``nodes`` describes it.
    """
    if isinstance(file, Mapping):
        return Document(source="<dict>", data=_plain(file, "<dict>"))
    source = os.fspath(file)
    try:
        if os.path.exists(source) and not os.path.isfile(source) and not os.path.isdir(source):
            raise ValueError("it is a pipe or a device, no file, and might never end")
        with open(source, "rb") as stream:
            content = stream.read(MOST_BYTES + 1)
        return parse(_text(content), source)
    except (OSError, UnicodeDecodeError) as error:
        wrong = f"cannot be read: {error.strerror}." if isinstance(error, OSError) else _told(error)
        wrong += _others_beside(source) if isinstance(error, FileNotFoundError) else ""
    except ValueError as error:
        if isinstance(error, ParameterFileError):
            raise
        wrong = f"cannot be read: {error}."
    raise refusal(Place(source), wrong)


def _text(content: bytes) -> str:
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes, which no parameter file has")
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16")
    # some editors begin a file with a mark of its encoding
    return content.decode("utf-8-sig")


def _told(error: UnicodeDecodeError) -> str:
    line = error.object[: error.start].count(b"\n") + 1
    return (
        f"is not UTF-8 text: byte 0x{error.object[error.start]:02x} in line {line}."
        " Save it as UTF-8."
    )


def _others_beside(source: str) -> str:
    """The name most like it of the parameter files in its folder."""
    folder, name = os.path.split(source)
    try:
        names = [other for other in os.listdir(folder or ".") if other.endswith(_ENDINGS)]
    except OSError:
        return ""
    return nearest(name, names)


def parse(text: str, source: str) -> Document:
    """A document from YAML text; the same errors as ``read``."""
    data, places, problems = values_of(text, source)
    document = Document(source=source, data=data, places=places)
    document.refuse(problems)
    return document


def _plain(value: Any, source: str) -> Any:
    """A copy of a dict's mappings and lists, so that overrides never change the caller's.

    A ``Path`` is its text.

    Raises:
        ParameterFileError: a key is no word, or it has more values or levels than a file may have:
            it contains itself.
    """
    left, place = iter(range(MOST_VALUES)), Place(source)

    def copied(value: Any, path: Path) -> Any:
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise refusal(place, f"is a number of more than {MOST_BITS} bits.", path)
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if not isinstance(value, (Mapping, list, tuple)):
            return value
        if len(path) > MOST_LEVELS or next(left, None) is None:
            wrong = f"holds more than {MOST_VALUES} values, or {MOST_LEVELS} levels of them."
            raise refusal(place, wrong, path[:5])
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, (str, int)) or isinstance(key, bool):
                    raise refusal(place, f"a key must be a word; got {shown(key)}.", path)
            return {key: copied(item, (*path, key)) for key, item in value.items()}
        return [copied(item, (*path, i)) for i, item in enumerate(value)]

    return copied(value, ())


def scalar(text: str) -> Any:
    """What a value of the command line means: YAML, as in a file."""
    return parse(text, "--set").data if text.strip() else ""


def with_overrides(document: Document, overrides: Mapping[str, Any]) -> Document:
    """The document with some keys set.

    Args:
        overrides: dotted keys (``trainer.init.loop.max_steps``; items of a list by number) and
            their values. A key that itself has dots is written as it is where the file has it
            already, else in quotes: ``trainer.init.callbacks.0.GlobalFlags."a.b"``.

    Raises:
        ParameterFileError: a key leads through a value that is no mapping, or past a list's end.
    """
    problems = []
    data, places = _plain(document.data, document.source), dict(document.places)
    variables = document.variables
    for key, value in overrides.items():
        path, problem = _set(data, _parts(key), value)
        variables = variables.without(path)
        # what stood under the key went with it
        places = {k: v for k, v in places.items() if k[: len(path)] != path}
        places[path] = Place("override")
        if problem:
            problems.append(Problem(path, f"{problem} (set as {key!r})"))
    changed = replace(document, data=data, places=places, variables=variables)
    changed.refuse(problems)
    return changed


_PART = re.compile(r"""(?:"([^"]*)"|'([^']*)'|([^."']+))(?:\.|$)""")


def _parts(key: str) -> list[str]:
    """The parts of a dotted key; none if it is not one."""
    parts, at = [], 0
    while at < len(key):
        found = _PART.match(key, at)
        if found is None:
            return []
        parts.append(next(group for group in found.groups() if group is not None).strip())
        at = found.end()
    return [] if key.endswith(".") else parts


def _set(data: Any, parts: list[str], value: Any) -> tuple[Path, str]:
    """Set one value in place. Returns where that is, and what is wrong, or nothing."""
    path: Path = ()
    if not parts or not all(parts):
        return path, "expected a dotted key, as trainer.init.loop.max_steps."
    while True:
        where = dotted(path) or "the file"
        if isinstance(data, list):
            name, rest = parts[0], parts[1:]
            if not name.isdigit() or int(name) >= len(data):
                items = f": items 0 to {len(data) - 1}" if data else ""
                return (*path, name), f"{where} is a list of {len(data)}{items}; got {name!r}."
            key: str | int = int(name)
        elif isinstance(data, dict):
            key, rest = _longest_key(data, parts)
        else:
            return path, f"{where} is {shown(data)}, which has no keys."
        path = (*path, key)
        if not rest:
            data[key] = value
            return path, ""
        # a section that is not there, or is empty (``loop:``), is begun
        if isinstance(data, dict) and data.get(key) is None:
            data[key] = {}
        data, parts = data[key], rest


def _longest_key(data: dict[Any, Any], parts: list[str]) -> tuple[Any, list[str]]:
    """The longest key of a mapping that the parts begin with, else the first part as a new one."""
    known = {str(key): key for key in data}
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if name in known:
            return known[name], parts[end:]
    return parts[0], parts[1:]


def with_environment(document: Document) -> Document:
    """The document with ``${NAME}`` replaced by the environment's value; ``$$`` is a dollar sign.

    A string that is nothing but ``${NAME}`` becomes what the value means in YAML: a number, say.
    Where that is none, or the variable is not set, it is in ``variables.missing``: it is told with
    the file's other mistakes.
    """
    missing: dict[tuple[Path, str], str] = {}
    stood: dict[Path, tuple[str, Any]] = {}
    values: dict[str, tuple[str, Any]] = {}

    def replaced(value: Any, path: Path) -> Any:
        if isinstance(value, dict):
            return {key: replaced(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [replaced(item, (*path, i)) for i, item in enumerate(value)]
        if not isinstance(value, str) or "$" not in value:
            return value
        missing.update(_unset(value, path))
        names = [name for name in _VARIABLE.findall(value) if name in os.environ]
        if not names:
            return value.replace("$$", "$")
        whole = _VARIABLE.fullmatch(value)
        text = _VARIABLE.sub(lambda m: os.environ.get(m[1], m[0]) if m[1] else "$", value)
        try:
            found = _meant(text) if whole else text
        except ParameterFileError:
            missing[path, value] = _NOT_YAML
            return value
        stood[path] = (value, found)
        for name in names:
            # of a whole value it is known what it means, and that is hidden as well
            if whole or name not in values:
                values[name] = (os.environ[name], found if whole else None)
        return found

    data = replaced(document.data, ())
    variables = Variables(stood=stood, values=values, missing=missing)
    return replace(document, data=data, variables=variables)


def _unset(value: str, path: Path) -> Iterator[tuple[tuple[Path, str], str]]:
    for name in dict.fromkeys(_VARIABLE.findall(value)):
        if name and name not in os.environ:
            near = nearest(name, os.environ)
            text = f"the environment has no {name}.{near} Set it, or write $${{{name}}}."
            yield (path, f"${{{name}}}"), text


def _meant(text: str) -> Any:
    return parse(text, "").data if text.strip() else ""
