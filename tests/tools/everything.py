"""Every test, those of the zoo with its packages, then the tests of numbers again, compiled, then
`make test` with each other Python that is installed: `make test-all`. A night on two cores.

    python tests/tools/everything.py               go on where the last run at this commit ended
    python tests/tools/everything.py --fresh       all of it again
    python tests/tools/everything.py --passed F    keep what passed in F (runs/test-all.jsonl)
    python tests/tools/everything.py --python P    the other Pythons: P, and none of PATH
    python tests/tools/everything.py --python      no other Python

What passed goes into the file as soon as it has, a line of JSON with its commit; a run that was
interrupted, or failed, goes on with the others. The status is 0 when all has passed. Another Python
has its environment in `.venv-3.13`, and runs what passed before again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.specifiers import SpecifierSet

TOOLS = Path(__file__).parent
ROOT = TOOLS.parents[1]
PASSED = "runs/test-all.jsonl"
NOTHING_LEFT = 5
"""pytest's status where no test is to be run: all have passed before."""
VERSION = "import sys; print('.'.join(map(str, sys.version_info[:2])))"


def version_of(python: str) -> str | None:
    """``3.13``; None where there is no such command, or it is a shim of a Python that is not."""
    try:
        done = subprocess.run([python, "-c", VERSION], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def other_pythons(commands: list[str] | None) -> dict[str, str]:
    """The supported Pythons besides this one, by version.

    Args:
        commands: where they are; None for those on PATH.
    """
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    supported = SpecifierSet(tomllib.loads(text)["project"]["requires-python"])
    every = [f"python3.{minor}" for minor in range(20) if f"3.{minor}" in supported]
    found = {version_of(one): one for one in (every if commands is None else commands)}
    here = version_of(sys.executable)
    return {of: one for of, one in found.items() if of and of in supported and of != here}


def main() -> int:
    """Return 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--passed", default=PASSED, metavar="F")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--workers", default="2")
    parser.add_argument("--python", nargs="*", metavar="P")
    given, options = parser.parse_known_args()
    if given.fresh:
        (ROOT / given.passed).unlink(missing_ok=True)
    kept = (f"--passed={given.passed}", *options)  # with "=": a path by itself is one of tests
    runs = {
        "as written": (sys.executable, "-m", "pytest", "-n", given.workers, *kept),
        "zoo": ("make", "zoo"),
        "compiled": (sys.executable, TOOLS / "compiled.py", "--workers", given.workers, *kept),
    }
    for version, python in other_pythons(given.python).items():
        where = (f"PYTHON={python}", f"VENV=.venv-{version}")
        runs[f"Python {version}"] = ("make", "test", *where, f"WORKERS={given.workers}")
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
