"""A converted file as YAML text, for ``fulgurite convert``.

Short leaves stand on one line. What had no counterpart is a comment where it would be.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import yaml

from fulgurite.config.document.problems import Path, dotted
from fulgurite.config.legacy.converting import Converted
from fulgurite.config.legacy.draft import Note

WIDTH = 96

# strings that no YAML, 1.1 or 1.2, takes for anything else, in a [flow] or out of it
_PLAIN = re.compile(r"(\.{0,2}/)?[A-Za-z_][A-Za-z0-9_./-]*")
_NOT_STRINGS = re.compile(r"(?i)yes|no|on|off|true|false|null")

_LOADER: Path = ("trainer", "fit", "val_dataloader")
_SAME_LOADER = (
    ("trainer", "validate", "val_dataloader"),
    ("trainer", "validate_all", "val_dataloaders"),
)


def to_yaml(converted: Converted) -> str:
    """A YAML text; read again, it is ``converted.params``."""
    return "\n".join(_Writer(converted).lines()) + "\n"


class _Writer:
    """Writes one converted file.

    Attributes:
        above: comments of a key, over its line.
        within: comments of keys that are not there, under the key that they would be under.
        loader: the validation loader of ``fit``; where it stands again, it is an alias.
    """

    def __init__(self, converted: Converted) -> None:
        self.params = converted.params
        self.above: dict[Path, list[str]] = defaultdict(list)
        self.within: dict[Path, list[str]] = defaultdict(list)
        for note in converted.notes:
            self._place(note)
        trainer = self.params.get("trainer", {})
        # a list of trainers has no such loader
        fit = trainer.get("fit", {}) if isinstance(trainer, dict) else {}
        self.loader = fit.get("val_dataloader")

    def _place(self, note: Note) -> None:
        path: Path = ()
        found: Any = self.params
        for part in note.near:
            inside = isinstance(found, dict) and part in found
            if not (inside or (isinstance(found, list) and isinstance(part, int))):
                break
            path, found = (*path, part), found[part]
        nested = isinstance(found, (dict, list)) and path != note.near
        (self.within if nested else self.above)[path].append(_comment(note))

    def lines(self) -> Iterator[str]:
        """The lines of the file."""
        yield from self._comments(self.within, (), "")
        yield from self._mapping(self.params, (), "")

    def _comments(self, comments: dict[Path, list[str]], path: Path, indent: str) -> Iterator[str]:
        for comment in comments.get(path, []):
            yield from textwrap.wrap(
                comment, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}#   "
            )

    def _mapping(self, value: dict[Any, Any], path: Path, indent: str) -> Iterator[str]:
        for key, item in value.items():
            yield from self._comments(self.above, (*path, key), indent)
            yield from self._entry(f"{indent}{scalar(key)}:", item, (*path, key), f"{indent}  ")

    def _sequence(self, value: list[Any], path: Path, indent: str) -> Iterator[str]:
        for i, item in enumerate(value):
            at = (*path, i)
            for inner in (at, *((*at, key) for key in item)) if isinstance(item, dict) else (at,):
                yield from self._comments(self.above, inner, indent)
                self.above.pop(inner, None)
            if not isinstance(item, dict) or not item or self.within.get(at):
                yield from self._entry(f"{indent}-", item, at, f"{indent}  ")
                continue
            first, *rest = self._mapping(item, at, f"{indent}  ")
            yield f"{indent}- {first.lstrip()}"
            yield from rest

    def _entry(self, prefix: str, value: Any, path: Path, indent: str) -> Iterator[str]:
        """What follows a key or a dash: on its line if short, else below."""
        if path in _SAME_LOADER and value is self.loader:
            yield f"{prefix} *{_LOADER[-1]}"
            return
        anchor = f" &{_LOADER[-1]}" if path == _LOADER and self._loader_again() else ""
        line = f"{prefix}{anchor} {flow(value)}"
        short = len(line) <= WIDTH and not self._has_notes(path)
        if _is_scalar(value) or not value or (_is_leaf(value) and short):
            yield line
        else:
            yield prefix + anchor
            yield from self._comments(self.within, path, indent)
            body = self._mapping if isinstance(value, dict) else self._sequence
            yield from body(value, path, indent)

    def _loader_again(self) -> bool:
        trainer = self.params["trainer"]
        return any(trainer.get(stage, {}).get(key) is self.loader for _, stage, key in _SAME_LOADER)

    def _has_notes(self, path: Path) -> bool:
        inner = (p for p in self.above if len(p) > len(path))
        return any(p[: len(path)] == path for p in (*inner, *self.within))


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, (dict, list))


def _is_leaf(value: dict[Any, Any] | list[Any]) -> bool:
    """Whether it holds scalars, and lists of them, alone."""
    if isinstance(value, list):
        return all(_is_scalar(item) for item in value)
    items = value.values()
    return all(_is_scalar(i) or (isinstance(i, list) and _is_leaf(i)) for i in items)


def _comment(note: Note) -> str:
    value = "" if note.value is None else f" ({_short(flow(note.value))})"
    return f"{dotted(note.path)}{value}: {note.text}"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def flow(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, dict):
        inner = ", ".join(f"{scalar(key)}: {flow(item)}" for key, item in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list):
        return f"[{', '.join(flow(item) for item in value)}]"
    return scalar(value)


def scalar(value: Any) -> str:
    """A scalar as both YAML 1.1 and 1.2 read it.

    Raises:
        TypeError: a parameter file cannot hold such a value.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float(value)
    if not isinstance(value, str):
        raise TypeError(f"A parameter file holds plain values; got {value!r}.")
    if _PLAIN.fullmatch(value) and not _NOT_STRINGS.fullmatch(value):
        return value
    # without a width it breaks long strings over lines
    quoted: str = yaml.safe_dump(value, default_style='"', width=math.inf)
    return quoted.strip()


def _float(value: float) -> str:
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    # YAML 1.1 wants a dot in a number: 1e-05 is a string to it
    text = repr(value)
    return text if "." in text else text.replace("e", ".0e")
