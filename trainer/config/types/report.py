"""What a check found so far."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fulgurite.config.document.ignored import note_for
from fulgurite.config.document.problems import Path, Problem
from fulgurite.config.types.classes import Classes


@dataclass
class Report:
    """What a check found so far.

    Args:
        classes: where names are looked up.
        problems: mistakes.
        notes: what the file says that has no effect here.
        imports: what a run of it imports: modules, classes and functions by their paths.
    """

    classes: Classes
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    imports: list[Problem] = field(default_factory=list)

    def problem(self, path: Path, text: str) -> None:
        """Add a mistake."""
        self.problems.append(Problem(path, text))

    def note_ignored(self, path: Path) -> bool:
        """Note a key that is ignored here; returns whether it is one."""
        note = note_for(path)
        if note is not None:
            self.notes.append(Problem(path, note))
        return note is not None

    def fork(self) -> Report:
        """An empty report of the same file, for one of several ways to read a value."""
        return replace(self, problems=[], notes=[], imports=[])

    def merge(self, other: Report) -> None:
        """Add what another report has found."""
        self.problems += other.problems
        self.notes += other.notes
        self.imports += other.imports

    def names_code(self, path: Path, name: str) -> None:
        """Remember that a name in the file is imported when it runs."""
        if "." in name:
            self.imports.append(Problem(path, f"imports {name}"))
