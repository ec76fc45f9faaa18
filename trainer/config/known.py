"""Keys that files have and that mean nothing here, with a note each."""

from __future__ import annotations

from fulgurite.config.problems import Path


def note_for(path: Path) -> str | None:
    """What to say of a key without a meaning here; None for all others."""
    return None
