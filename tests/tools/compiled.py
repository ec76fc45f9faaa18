"""The tests of numbers, compiled: what users run. A night on two cores.

    python tests/tools/compiled.py               all of them
    python tests/tools/compiled.py --sample 80   one in 80; others on another day
    python tests/tools/compiled.py -k idiom -x   pytest's own options
    python tests/tools/compiled.py --background  as users run them: compiled while they run
    python tests/tools/compiled.py --cut 9       programs in parts of nine operations each

Elsewhere programs run operation by operation, but where a test says otherwise: compiling one takes
seconds. Here the same tests let the default backend compile (``--compiled``, tests/conftest.py).
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUMBERS = "numbers and not compiler"
"""Compares with stock Lightning, and does not say itself what is compiled."""


def main() -> int:
    """Return pytest's status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sample", type=int, default=1, metavar="N", help="one test in N")
    today = datetime.date.today().isoformat()
    parser.add_argument("--draw", default=today, help="draws the sample; the day by default")
    parser.add_argument("--workers", default="2")
    given, options = parser.parse_known_args()
    print(f"one test in {given.sample}, drawn by {given.draw}", flush=True)
    arguments = [f"--sample={given.sample}", f"--draw={given.draw}", "-n", given.workers]
    command = [sys.executable, "-m", "pytest", "--compiled", "-m", NUMBERS, *arguments, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
