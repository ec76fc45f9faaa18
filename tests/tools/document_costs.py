"""Write where the time of `make test` goes into docs/contributing.md.

    make test ARGS=--costs=runs/costs.jsonl
    python tests/tools/document_costs.py runs/costs.jsonl

A test that carries several markers is counted under the first of the table's rows that it has.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "contributing.md"
BEGIN, END = "<!-- costs: tests/tools/document_costs.py -->\n", "<!-- costs end -->"
KINDS = {
    "compiler": "compile C++ kernels",
    "several": "train in several processes at once",
    "process": "start a process",
    "numbers": "train on CSX and in stock Lightning: tracing, and steps operation by operation",
    "fits": "train on CSX: the same",
    "": "need nothing",
}
"""Markers of ``needs``, the dearest first, and what such tests do."""
FILES = 8
"""How many of the dearest files are named."""


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The table of what was written by ``--costs``."""
    tests, kinds, files = Counter[str](), Counter[str](), Counter[str]()
    for row in rows:
        kind = next((one for one in KINDS if one in row["markers"]), "")
        tests[kind] += 1
        kinds[kind] += row["cpu_s"]
        files[row["test"].partition("::")[0].removeprefix("tests/")] += row["cpu_s"]
    lines = ["| tests that | tests | CPU seconds |", "|---|---|---|"]
    lines += [f"| {what} | {tests[kind]:,} | {kinds[kind]:,.0f} |" for kind, what in KINDS.items()]
    lines += [f"| all | {tests.total():,} | {sum(kinds.values()):,.0f} |"]
    dearest = ", ".join(f"`{name}` {cpu_s:.0f}" for name, cpu_s in files.most_common(FILES))
    return "\n".join([*lines, "", f"The dearest files: {dearest}.", ""])


def write(text: str) -> None:
    """Put the table into its page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    with Path(sys.argv[1]).open(encoding="utf-8") as found:
        write(table(json.loads(line) for line in found))
