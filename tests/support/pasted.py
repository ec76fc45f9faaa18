"""The programs that README.md and the pages of docs/ show, run as somebody would who pastes them.

A page's Python is one program: its blocks, one after the other. A block whose first line is the
name of a file in a comment, ``# net.py`` or ``# params.yaml``, is that file instead, beside the
program. Other YAML is part of a file, and a change to a program is a ``diff``. Lines that are
indented are what one types in a terminal, and what a screen shows.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.(?:py|yaml))\n")
OPERATIONS = re.compile(r"(\w+ program, [\d,]+ operations)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page.

    Args:
        language: the word behind the fence.
        text: what is between the fences.
        line: the line of the page that its first one is on.
    """

    language: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The name of the file that it is, if it is one."""
        named = FILE.match(self.text)
        return named[1] if named else None


def source(page: str) -> Path:
    """The file of a page: README, or one of docs/."""
    return ROOT / "README.md" if page == "README" else ROOT / f"docs/{page}.md"


def blocks(page: str, language: str) -> Iterator[Block]:
    """The blocks of a page in one language, from top to bottom."""
    text = source(page).read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        if found[1] == language:
            line = text.count("\n", 0, found.start(2)) + 1
            yield Block(language=language, text=found[2], line=line)


def program(page: str, count: int | None = None) -> str:
    """The Python of a page, or of its first ``count`` blocks, on the lines of the page."""
    text = ""
    for block in [block for block in blocks(page, "python") if block.file is None][:count]:
        text += "\n" * (block.line - 1 - text.count("\n")) + block.text
    return text


def files(page: str) -> dict[str, str]:
    """Name -> text of each file that a page shows."""
    shown = [block for kind in ("python", "yaml") for block in blocks(page, kind)]
    return {block.file: block.text for block in shown if block.file is not None}


def changes(page: str) -> list[list[tuple[str, str]]]:
    """For each ``diff`` of a page its changes: the lines that go, and those in their place."""
    found = []
    for block in blocks(page, "diff"):
        hunks = [hunk.splitlines(keepends=True) for hunk in block.text.split("\n\n")]
        signs = [
            ["".join(line[1:] for line in hunk if line[0] == sign) for sign in "-+"]
            for hunk in hunks
        ]
        found.append([(old.rstrip("\n"), new.rstrip("\n")) for old, new in signs])
    return found


def save(page: str, folder: Path) -> None:
    """Write the files of a page, and its program as ``page.py``."""
    for name, text in {**files(page), "page.py": program(page)}.items():
        (folder / name).write_text(text, encoding="utf-8")


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """The status of ``python arguments`` in a folder, and what it prints."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def paste(page: str, folder: Path) -> str:
    """What the program of a page prints in a process of its own; it must end well."""
    save(page, folder)
    status, said = run(folder, "page.py")
    assert status == 0, f"{source(page)}\n{said}"
    return said


def quoted(page: str) -> set[str]:
    """The programs with their counts of operations that the page shows on a screen."""
    return set(OPERATIONS.findall("\n".join(screen(page))))


def screen(page: str) -> list[str]:
    """The lines that a page shows on a screen: those that are indented."""
    text = source(page).read_text(encoding="utf-8")
    return re.findall(r"^    (.*)$", FENCE.sub("", text), re.MULTILINE)
