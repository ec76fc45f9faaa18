"""The new form of a file in the making: every value with the old key that it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fulgurite.config.document.problems import Path, Problem


@dataclass(frozen=True, slots=True)
class Note:
    """What to know of an old key.

    Args:
        path: the old key.
        text: what became of it.
        near: the new key that it would be, or is.
        value: what it said, where that is in the new form nowhere.
    """

    path: Path
    text: str
    near: Path
    value: Any = None


@dataclass
class Draft:
    """The new form so far. Its callbacks and loggers are by name until it is ``finished``."""

    params: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path, Path] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def get(self, path: Path, default: Any = None) -> Any:
        """The value at a new path."""
        found: Any = self.params
        for part in path:
            if not isinstance(found, dict) or part not in found:
                return default
            found = found[part]
        return found

    def put(self, path: Path, value: Any, old: Path) -> None:
        """Give a new key a value that an old one had."""
        found: Any = self.params
        for part in path[:-1]:
            found = found.setdefault(part, {})
        found[path[-1]] = value
        for end in range(1, len(path)):
            self.origins.setdefault(path[:end], old)
        self._trace(path, value, old)

    def _trace(self, path: Path, value: Any, old: Path) -> None:
        self.origins.setdefault(path, old)
        items = value.items() if isinstance(value, Mapping) else ()
        for part, item in enumerate(value) if isinstance(value, list) else items:
            self._trace((*path, part), item, (*old, part))

    def take(self, path: Path) -> Any:
        """Remove a new key; returns its value, or None."""
        section = self.get(path[:-1], {})
        return section.pop(path[-1], None)

    def note(self, old: Path, text: str, near: Path, value: Any = None) -> None:
        """Add a note about an old key."""
        self.notes.append(Note(old, text, near, value))

    def problem(self, old: Path, text: str) -> None:
        """Add a mistake in an old key."""
        self.problems.append(Problem(old, text))

    def finish(self, order: Mapping[str, tuple[str, ...]]) -> None:
        """Make lists of the callbacks and loggers; order the keys, and leave out what is empty.

        Args:
            order: the keys of ``trainer``, and those of each.
        """
        trainer = self.params.get("trainer", {})
        for section, names in order.items():
            keys = trainer.pop(section, {})
            ordered = {key: keys[key] for key in sorted(keys, key=names.index)}
            kept = {key: item for key, item in ordered.items() if item not in ({}, [])}
            if kept:
                trainer[section] = kept
        for key in ("callbacks", "loggers"):
            by_name = self.get(("trainer", "init", key))
            if by_name is not None:
                self._listed(("trainer", "init", key), by_name)

    def _listed(self, at: Path, by_name: dict[str, Any]) -> None:
        places = {name: i for i, name in enumerate(by_name)}
        self.params["trainer"]["init"][at[-1]] = [{name: by_name[name]} for name in by_name]

        def moved(path: Path) -> Path:
            name = path[len(at)] if path[: len(at)] == at and len(path) > len(at) else None
            return path if name not in places else (*at, places[str(name)], *path[len(at) :])

        self.origins = {moved(path): old for path, old in self.origins.items()}
        for name, i in places.items():
            self.origins[*at, i] = self.origins[*at, i, name]
        self.notes = [Note(n.path, n.text, moved(n.near), n.value) for n in self.notes]
