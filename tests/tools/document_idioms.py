"""Write docs/idioms.md from the tables of idioms.

python tests/tools/document_idioms.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))
from idioms import IDIOMS
from idioms.refused import refusals

PAGE = Path(__file__).parents[2] / "docs" / "idioms.md"

HEAD = """# Idioms: what works in a step, and what does not

Made from `tests/support/idioms` by `tests/tools/document_idioms.py`. Each idiom under "works"
trains four steps on CSX and in stock Lightning on the CPU, with equal losses, logged values,
weights and optimizer state (relative 1e-5, weights 2e-5, unless it says otherwise). Each under
"does not work" is an error while tracing, before anything was trained.

How a step is traced, and what is frozen in it: [steps.md](steps.md).
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *works(), *does_not_work()]) + "\n"


def works() -> Iterator[str]:
    """A list for each group."""
    yield "## Works\n"
    for group, idioms in IDIOMS.items():
        yield f"### {group}\n"
        for idiom in idioms:
            reason = f" ({idiom.tolerance:g}: {idiom.why})" if idiom.why else ""
            yield f"- {idiom.text}{reason}"
        yield ""


def does_not_work() -> Iterator[str]:
    """A table: what, the error, why, what to write instead."""
    yield "## Does not work\n"
    yield "| written in the step | error | why | write instead |"
    yield "|---|---|---|---|"
    for kind in refusals():
        text = str(kind.__doc__).partition("\n")[0]
        yield f"| {text} | `{kind.error.__name__}` | {kind.why} | {kind.instead} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
