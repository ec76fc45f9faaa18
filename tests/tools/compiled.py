"""The tests of numbers, compiled: what users run. Some five hours on two cores.

    python tests/compiled.py                    all of them
    python tests/compiled.py --sample 80        one in 80; others on another day
    python tests/compiled.py -k idiom -x        pytest's own options

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

TESTS = Path(__file__).parent
FILES = (
    "test_programs.py",
    *(
        f"backends/test_{name}.py"
        for name in (
            *("idioms", "optimizers", "own_optimizers", "first_update", "preinitialize"),
            *("numbers", "schedules", "program_schedules", "step_count", "gradient_norm"),
            *("state", "leftovers", "attributes", "closures", "function", "tracing"),
            *("precision", "cbfloat16_runs", "autocast", "loss_scale"),
            *("containers", "changed_values", "gradients_between_steps", "passed_on", "random"),
        )
    ),
    *("callbacks/test_traced.py", "trainer/test_mixed_precision.py", "trainer/test_checkpoints.py"),
    *("loops/test_parity.py", "loops/test_logging.py"),
    *("optim/test_optimizers.py", "optim/test_schedules_in_programs.py"),
    "test_fuzz.py",
)
"""Everything that compares numbers with stock Lightning's."""


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
    files = [str(TESTS / name) for name in FILES]
    command = [sys.executable, "-m", "pytest", "--compiled", *arguments, *options, *files]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=TESTS.parent, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
