"""``fulgurite cache``: what is compiled already, and removing it by the cache's own rules.

Only what bears one of the cache's names is removed, no link is followed, and what another process
builds or loads at this moment stays.
"""

from __future__ import annotations

import math
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

from fulgurite.backends.csx.compile.background.compilation import FOR
from fulgurite.backends.csx.compile.inductor.earlier_code import FOLDER as PARTS
from fulgurite.backends.csx.compile.inductor.earlier_code import SHARE as PARTS_SHARE
from fulgurite.backends.csx.compile.inductor.headers import FOLDER as HEADERS
from fulgurite.backends.csx.compile.inductor.headers import SHARE as HEADERS_SHARE
from fulgurite.backends.csx.compile.store.cache import REPORTS, CompileCache, limit_bytes
from fulgurite.backends.csx.compile.store.cache_folder import users_folder
from fulgurite.backends.csx.compile.store.fingerprint import environment_digest
from fulgurite.backends.csx.compile.store.upkeep import Entry, begun_in, entries_in
from fulgurite.callbacks.count_params import human

_DAY_S = 86400
_KEY_SHOWN = 12
_COLUMNS, _INDENT = 80, " " * 14
_SHARES = {"": 1, PARTS: PARTS_SHARE, HEADERS: HEADERS_SHARE}
"""The folders of a cache, by their names in it; each may take one in so many bytes of the limit."""


class NoCache(ValueError):
    """The folder that was given holds no compile cache; the text says what is there."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a cache holds: programs, the generated code of their parts, and torch's header, read."""

    programs: list[Entry]
    parts: list[Entry]
    headers: list[Entry]

    def without(self, others: Contents) -> Contents:
        """What is in this one alone."""
        keys = {entry.key for entry in (*others.programs, *others.parts, *others.headers)}
        mine = (self.programs, self.parts, self.headers)
        return Contents(*([entry for entry in held if entry.key not in keys] for held in mine))

    def __bool__(self) -> bool:
        return bool(self.programs or self.parts or self.headers)

    def __str__(self) -> str:
        told = [_counted(self.programs, "program")]
        told += [f"the code of {_counted(self.parts, 'part')}"] * bool(self.parts)
        told += [_counted(self.headers, "header")] * bool(self.headers)
        return ", and ".join(told)


def contents(folder: Path) -> Contents:
    """What the cache in a folder holds."""
    inside = _folders(folder)
    return Contents(*(entries_in(inside[name]) if name in inside else [] for name in _SHARES))


def show(given: str | None) -> int:
    """Print a table of the programs in a folder: with whose they are, which runs begin compiled.

    Args:
        given: the folder; None is the user's.

    Returns:
        The exit status.

    Raises:
        NoCache: it is none.
    """
    folder = cache_at(given)
    if folder is None:
        return 0
    held, now, limit = contents(folder), time.time(), limit_bytes()
    print(folder)
    rows = [("program", "size", "built", "last used", "")] if held.programs else []
    for entry in reversed(held.programs):
        when = ago(now - entry.built), ago(now - entry.used)
        whose = _whose(folder / entry.key)
        rows.append((entry.key[:_KEY_SHOWN], human(entry.size_bytes), *when, whose))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for *row, whose in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        print(whose, end="")
    print(f"{held}; programs may take {human(limit)}")
    return 0


def _whose(entry: Path) -> str:
    """Whose program an entry is, as lines: that run begins compiled, unless the environment is
    another.
    """
    try:
        digest, whose = (entry / FOR).read_text().splitlines()
    except (OSError, ValueError):  # damaged: it will be built again
        return ""
    if digest != environment_digest():
        whose = f"compiled in another environment: {whose}"
    # a script may be a text on the command line (`python -c`), and as long as one
    lines = textwrap.wrap(whose, _COLUMNS - len(_INDENT), max_lines=2, placeholder=" ...")
    return textwrap.indent("\n".join(lines), _INDENT) + "\n"


def prune(given: str | None, size_bytes: int | None, days: float | None) -> int:
    """Remove what was used longest ago, past a limit, and say what that was.

    Args:
        given: the folder; None is the user's.
        size_bytes: what programs may take; None is the cache's own limit.
        days: what was not used for so long goes too.

    Returns:
        The exit status.

    Raises:
        NoCache: the folder is none.
        PermissionError: it cannot be written, or others can write it.
    """
    folder = cache_at(given)
    if folder is None:
        return 0
    before = -math.inf if days is None else time.time() - days * _DAY_S
    failed = _evict(folder, size_bytes, before)
    print(f"{contents(folder)} stay.")
    return failed


def clear(given: str | None) -> int:
    """Remove all that a cache made, and say what that was; as ``prune``."""
    folder = cache_at(given)
    if folder is None:
        return 0
    failed = _evict(folder, 0, math.inf)
    left = contents(folder)
    if not failed and (left or any(map(begun_in, _folders(folder).values()))):
        print("What other processes build or load at this moment stays.")
    reports = folder / REPORTS
    if reports.is_dir():
        print(f"Reports of programs that gave wrong numbers stay in {reports}: they are yours.")
    return failed


def _evict(folder: Path, limit: int | None, before: float) -> int:
    """Remove what a cache holds, and say what; returns the exit status."""
    held, failed = contents(folder), []
    for name, one in _folders(folder).items():
        share = _SHARES[name]
        cache = CompileCache(one, share=share)
        try:
            # what was given is for programs; code of parts and headers have their share of it
            cache.evict(None if limit is None else limit // share, before)
        except OSError as error:
            failed.append(f"fulgurite cache: not everything could be removed: {error}")
    print(f"Removed {held.without(contents(folder))} from {folder}.")
    for line in failed:
        print(line, file=sys.stderr)
    return int(bool(failed))


def _folders(folder: Path) -> dict[str, Path]:
    """A cache's folders by name: of programs, and others that are there; none by a link."""
    found = {name: folder / name for name in _SHARES}
    return {n: one for n, one in found.items() if not n or (one.is_dir() and not one.is_symlink())}


def cache_at(given: str | None) -> Path | None:
    """The folder of a cache, with its links resolved; None, said, where the user has none yet.

    Raises:
        NoCache: what was given is none.
    """
    folder = (users_folder() if given is None else Path(given).expanduser()).resolve()
    told = f"--compile-dir {given!r}" if given is not None else str(folder)
    if not folder.exists():
        if given is None:
            print(f"Nothing was compiled yet: {folder} is not there.")
            return None
        raise NoCache(f"{told} is not there. Give the folder that runs have as compile_dir.")
    if not folder.is_dir():
        raise NoCache(f"{told} is a file. Give the folder that runs have as compile_dir.")
    held = contents(folder)
    # a folder of something else, a home say, is no cache; an empty one may become one
    others = {path.name for path in folder.iterdir()} - {*_SHARES, REPORTS}
    if others and not (held or begun_in(folder)):
        raise NoCache(
            f"{told} is no compile cache: no program is in it, but {min(others)!r} is. Nothing was"
            " touched. Give the folder that runs have as compile_dir."
        )
    return folder


def _counted(entries: list[Entry], name: str) -> str:
    size = human(sum(entry.size_bytes for entry in entries))
    return f"{len(entries) or 'no'} {name}{'s' * (len(entries) != 1)}" + f" ({size})" * bool(
        entries
    )


def ago(seconds: float) -> str:
    """``3 days ago``."""
    for unit, unit_s in (("day", _DAY_S), ("hour", 3600), ("minute", 60)):
        if (number := int(seconds // unit_s)) > 0:
            return f"{number} {unit}{'s' * (number != 1)} ago"
    return "just now"
