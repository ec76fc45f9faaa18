"""Every test, those of the zoo with its packages, then the tests of numbers again, compiled:
`make test-all`. A night on two cores.

    python tests/tools/everything.py               go on where the last run at this commit ended
    python tests/tools/everything.py --fresh       all of it again
    python tests/tools/everything.py --passed F    keep what passed in F (runs/test-all.jsonl)

What passed goes into the file as soon as it has, a line of JSON with its commit; a run that was
interrupted, or failed, goes on with the others. The status is 0 when all has passed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).parent
ROOT = TOOLS.parents[1]
PASSED = "runs/test-all.jsonl"
NOTHING_LEFT = 5
"""pytest's status where no test is to be run: all have passed before."""


def main() -> int:
    """Return 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--passed", default=PASSED, metavar="F")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--workers", default="2")
    given, options = parser.parse_known_args()
    if given.fresh:
        (ROOT / given.passed).unlink(missing_ok=True)
    kept = (f"--passed={given.passed}", *options)  # with "=": a path by itself is one of tests
    runs = {
        "as written": (sys.executable, "-m", "pytest", "-n", given.workers, *kept),
        "zoo": ("make", "zoo"),
        "compiled": (sys.executable, TOOLS / "compiled.py", "--workers", given.workers, *kept),
    }
    failed = []
    for name, command in runs.items():
        print(f"make test-all: {name}", flush=True)
        if subprocess.run(command, cwd=ROOT, check=False).returncode not in (0, NOTHING_LEFT):
            failed.append(name)
    print(
        f"make test-all: failed: {', '.join(failed) or 'nothing'}; what passed is in {given.passed}"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
