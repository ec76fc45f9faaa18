"""Which tests run: those that need nothing, a core of the others, and a part drawn by the day.

``make test`` is ``pytest --core --sample N --draw DAY``: what carries no marker of ``needs`` and is
not ``long``; the core; and one in N of what is left. The core has something of each mechanism: of
every test function that trains, compiles or starts a process the first row, but for those that are
``long``, and what is marked ``core``. Without ``--core`` the sample is of all tests.
``--passed=FILE`` is for a run that may be interrupted: what passed goes into the file with the
commit, and what passed at this commit is not run again.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from needs import MARKERS

ROOT = Path(__file__).parents[2]
RARER = 5
"""How much rarer a test that is ``long`` is drawn beside the core."""
LONG = {"browser", "packaging", "notebook"}
"""Needs that take long."""
MARKS = {
    "long": "takes more than two seconds of CPU, four where it compiles, or is one of many rows"
    " that are alike: not in the core",
    "core": "in the core, whatever it takes",
    "failing_compiler": "a program that cannot be compiled is what it is about",
}


def is_drawn(name: str, one_in: int, word: str) -> bool:
    """Whether a test is in a sample; in a sample of one in 0 there is none."""
    digest = hashlib.sha256(f"{name} {word}".encode()).digest()
    return one_in > 0 and int.from_bytes(digest[:8]) % one_in == 0


def needs_of(item: pytest.Item) -> set[str]:
    """The markers of an item that say what it needs."""
    return {mark.name for mark in item.iter_markers()} & MARKERS.keys()


def function_of(item: pytest.Item) -> str:
    """The test function that an item is a row of."""
    return item.nodeid.partition("[")[0]


@dataclass
class Selection:
    """What of the tests that were found runs.

    Args:
        core: whether what needs nothing and the named core always run.
        one_in: how many of the others there are for each that is drawn.
        word: every word draws others.
        passed: tests that need not run again.
    """

    core: bool
    one_in: int
    word: str
    passed: frozenset[str] = frozenset()
    counts: dict[str, int] = field(default_factory=dict)

    def of(self, items: Iterable[pytest.Item]) -> list[pytest.Item]:
        """The items that run; counts them by why they do."""
        self.counts = dict.fromkeys(("plain", "core", "drawn", "left", "passed"), 0)
        everything = list(items)
        first = {function_of(item): item for item in reversed(everything)}
        chosen = []
        for item in everything:
            why = self._why(item, item is first[function_of(item)])
            self.counts[why] += 1
            if why not in ("left", "passed"):
                chosen.append(item)
        return chosen

    def _why(self, item: pytest.Item, first: bool) -> str:
        needed = needs_of(item)
        if item.nodeid in self.passed:
            return "passed"
        long = item.get_closest_marker("long")
        if self.core and not (needed or long):
            return "plain"
        stands = first and not (needed & LONG or long)
        if self.core and (stands or item.get_closest_marker("core")):
            return "core"
        one_in = self.one_in * (RARER if self.core and long else 1)
        return "drawn" if is_drawn(item.nodeid, one_in, self.word) else "left"

    def summary(self) -> str:
        """What ran, what was drawn, what is left."""
        plain, core, drawn, left = (self.counts[why] for why in ("plain", "core", "drawn", "left"))
        by = f" by {self.word!r}" if self.word and self.one_in else ""
        return (
            f"chosen: {plain:,} tests that need nothing, {core:,} of the core, {drawn:,} drawn{by};"
            f" {left:,} are left to make test-all, which compiles those of numbers too"
        )


class Passed:
    """What passed at this commit, in a file that outlasts a run: a line of JSON a test.

    Args:
        file: the file, which is there.
        mode: how the tests run: what passed compiled did not pass otherwise.
    """

    def __init__(self, file: Path, mode: str) -> None:
        self._file, self._key = file, {"commit": commit(), "mode": mode}

    def read(self) -> frozenset[str]:
        """The tests that passed at this commit in this mode."""
        with self._file.open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        return frozenset(row["test"] for row in rows if self._key.items() <= row.items())

    def add(self, test: str) -> None:
        with self._file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"test": test, **self._key}) + "\n")


def commit() -> str:
    """The commit that is checked out, with a digest of what was changed since."""
    head = _git("rev-parse", "HEAD").decode().strip()
    changed = _git("diff", "HEAD") + b"".join(
        (ROOT / name).read_bytes()
        for name in _git("ls-files", "-o", "--exclude-standard", "-z").decode().split("\0")[:-1]
    )
    return f"{head} changed {hashlib.sha256(changed).hexdigest()[:12]}" if changed else head


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout
