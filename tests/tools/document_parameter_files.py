"""Write the tables of docs/parameter_files.md: keys without a meaning here, and keys of old files.

python tests/tools/document_parameter_files.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from fulgurite.config.document.ignored import IGNORED_KEYS
from fulgurite.config.legacy.old_keys import BY_FUNCTION, ROWS, WITHOUT_MEANING, Row
from fulgurite.config.legacy.old_optimizers import OLD_DEFAULTS

PAGE = Path(__file__).parents[2] / "docs" / "parameter_files.md"


def known_keys() -> list[str]:
    """A line for each note, with the keys that have it."""
    keys: dict[str, list[str]] = {}
    for key, note in IGNORED_KEYS.items():
        keys.setdefault(note, []).append(key.removeprefix("trainer."))
    rows = ((", ".join(f"`{key}`" for key in same), note) for note, same in keys.items())
    return table(("key", "it"), rows)


def old_keys() -> list[str]:
    """A line for each key of an old file, or for several with the same note."""
    rows = [(f"`{row.old}`", becomes(row)) for row in (*BY_FUNCTION, *ROWS)]
    rows += [(f"`{key}`", f"nothing: it {note}") for key, note in WITHOUT_MEANING.items()]
    same: dict[str, list[str]] = {}
    for key, text in rows:
        same.setdefault(text, []).append(key)
    return table(("old key", "becomes"), ((", ".join(keys), text) for text, keys in same.items()))


def becomes(row: Row) -> str:
    """What becomes of an old key, in words."""
    if row.harmless is not None:
        harmless = " or ".join(f"`{json.dumps(value)}`" for value in row.harmless)
        return f"nothing where it is {harmless}, else an error: it {row.note}"
    if row.without_effect:
        return f"nothing: it {row.without_effect}"
    new = ", ".join(f"`{key}`" for key in row.new)
    return f"{new}. {row.note}".removesuffix(". ")


def old_defaults() -> list[str]:
    """A line for each optimizer whose defaults were others."""
    return table(
        ("optimizer", "written out where the old file does not say"),
        (
            (f"`{name}`", ", ".join(f"`{key}: {value}`" for key, value in defaults.items()))
            for name, defaults in OLD_DEFAULTS.items()
        ),
    )


def table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> list[str]:
    """A table of two columns."""
    return [f"| {a} | {b} |" for a, b in (head, ("---", "---"), *rows)]


TABLES = {"known keys": known_keys, "old keys": old_keys, "old defaults": old_defaults}


def with_tables(text: str) -> str:
    """The page with its tables as they should be."""
    for name, lines in TABLES.items():
        before, begin, rest = text.partition(f"<!-- {name} -->")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        if not end:
            raise ValueError(f"{PAGE.name} has no place for the table of {name}.")
        text = "\n".join((before + begin, "", *lines(), "", end + after))
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
