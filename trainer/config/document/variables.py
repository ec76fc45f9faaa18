"""What came from the environment: where ``${NAME}`` stood, and its value, which may be a secret.

Whatever is written or told afterwards has ``${NAME}`` again: the file with everything set, what is
wrong with it, what constructors complain of, the hyperparameters that a model saves.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fulgurite.config.document.problems import Path, Problem, dotted

LEAST = 4
"""Characters of a value that is looked for in texts; a shorter one is found in every text."""

LONG = 8
"""Characters of a number that is looked for inside words too: a shorter one comes by chance."""


@dataclass(frozen=True, kw_only=True)
class Variables:
    """The variables of a file.

    Args:
        stood: where variables stood -> the text there, and what it became.
        values: NAME -> its value in the environment, and what that means in YAML.
        missing: where a variable has no value, and its ``${NAME}``, which stays there -> why.
    """

    stood: Mapping[Path, tuple[str, Any]] = field(default_factory=dict)
    values: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    missing: Mapping[tuple[Path, str], str] = field(default_factory=dict)

    def without(self, path: Path) -> Variables:
        """The variables that are left when a key gets another value."""
        stood = {at: found for at, found in self.stood.items() if at[: len(path)] != path}
        missing = {one: why for one, why in self.missing.items() if one[0][: len(path)] != path}
        return Variables(stood=stood, values=self.values, missing=missing)

    def with_missing(self, problems: Iterable[Problem]) -> list[Problem]:
        """The variables without a value, and those of a file's problems that quote none of them."""
        found = [Problem(path, why) for (path, _), why in self.missing.items()]
        quoted = {name for _, name in self.missing}
        return found + [one for one in problems if not any(name in one.text for name in quoted)]

    def hidden(self, text: str) -> str:
        """A text with ``${NAME}`` wherever it quotes a value."""
        return self._quotes.sub(lambda found: self._names[found.lastgroup or ""], text)

    def hidden_in(self, value: Any) -> Any:
        """A copy of plain data with the values hidden in its strings; other objects stay."""
        if isinstance(value, str):
            return self.hidden(value)
        if isinstance(value, dict):
            return {self.hidden_in(key): self.hidden_in(item) for key, item in value.items()}
        if type(value) in (list, tuple, set):
            return type(value)(self.hidden_in(item) for item in value)
        return value

    def hide_in(self, error: BaseException | None) -> None:
        """Hide the values in what an error and its notes say, and in what it came from."""
        seen: list[BaseException] = []
        while self.values and error is not None and error not in seen:
            seen.append(error)
            error.args = tuple(map(self.hidden_in, error.args))
            if hasattr(error, "__notes__"):
                error.__notes__ = self.hidden_in(error.__notes__)
            if isinstance(error, OSError):  # which tells its attributes, not its arguments
                for name in ("strerror", "filename", "filename2"):
                    if isinstance(said := getattr(error, name), str):
                        setattr(error, name, self.hidden(said))
            error = error.__cause__ or error.__context__

    def restored(self, value: Any, path: Path, origins: Mapping[Path, Path]) -> Any:
        """What a file says at a path, as it is written: with its variables, other dollars doubled.

        Args:
            value: what is there now.
            path: where.
            origins: where keys stood when the variables were read, if that is elsewhere.

        Raises:
            TypeError: a key was set inside of what one variable stands for.
        """
        text, meant = self.stood.get(_origin(path, origins), (None, None))
        # unless an override has set another value since
        if text is not None and value == meant:
            return text
        if path in self.stood and isinstance(meant, (dict, list)):
            raise TypeError(
                f"{dotted(path)}: a key was set inside of what {text} stands for, and its value is"
                " not written out. Set the whole of it."
            )
        if isinstance(value, Mapping):
            return {key: self.restored(one, (*path, key), origins) for key, one in value.items()}
        if isinstance(value, list):
            return [self.restored(one, (*path, i), origins) for i, one in enumerate(value)]
        return value.replace("$", "$$") if isinstance(value, str) else value

    @functools.cached_property
    def _names(self) -> dict[str, str]:
        """What stands for the value of each group of ``_quotes``."""
        return {f"g{i}": f"${{{name}}}" for i, name in enumerate(self.values)}

    @functools.cached_property
    def _quotes(self) -> re.Pattern[str]:
        """Finds each value however a text writes it, whole or cut off by dots."""
        groups = []
        for i, (text, meant) in enumerate(self.values.values()):
            forms = {form for leaf in (text, *_leaves(meant)) for form in _forms(leaf)}
            longest = sorted(forms, key=len, reverse=True)
            groups.append(f"(?P<g{i}>{'|'.join(map(_pattern, longest)) or '(?!)'})")
        order = sorted(groups, key=len, reverse=True)  # a value may be a part of another
        return re.compile("|".join(order) or "(?!)")


def _origin(path: Path, origins: Mapping[Path, Path]) -> Path:
    """Where a key stood before a file was converted."""
    for end in range(len(path), 0, -1):
        if path[:end] in origins:
            return (*origins[path[:end]], *path[end:])
    return path


def _leaves(value: Any) -> Iterator[Any]:
    """The values in a value; true, false and null are no secrets."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif value is not None and not isinstance(value, bool):
        yield value


def _forms(value: Any) -> Iterator[str]:
    """How texts write a value."""
    text = str(value)
    if text.lower() in ("true", "false", "null"):
        return
    joined = " ".join(text.split())
    for form in (text, joined, repr(text)[1:-1], json.dumps(text)[1:-1]):
        if len(form) >= LEAST:
            yield form


def _pattern(form: str) -> str:
    """Finds a form; a number only where it is not part of a longer one, a short one of a word."""
    if re.fullmatch(r"[-+\d._eE]+", form):
        inside = r"\w" if len(form) < LONG else r"\d"
        return rf"(?<![{inside}.]){re.escape(form)}(?![{inside}]|\.\d)"
    cut = "".join(f"(?:{re.escape(character)}" for character in form[LEAST:60])
    return f"{re.escape(form)}|{re.escape(form[:LEAST])}{cut}{')?' * len(form[LEAST:60])}\\.\\.\\."
