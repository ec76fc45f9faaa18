"""The tests of numbers, compiled: what users run. Some five hours on two cores.

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

TESTS = Path(__file__).parents[1]
ROOMS = {
    "backends": ("step_count", "gradient_norm", "closures"),
    "backends/csx/graph": ("draws",),
    "backends/csx/state": ("storage", "optimizer_init", "first_update", "gradients"),
    "backends/csx/hyperparams": (
        *("torch_optim", "own_optimizers", "traced_float", "slots", "schedules"),
    ),
    "backends/csx/contract": ("idioms", "attributes"),
    "backends/csx/capture": ("trace", "leaves", "side_effects", "passed_on"),
    "backends/csx/program": ("changed_values",),
    "backends/csx/plugins": (
        *("precision", "cbfloat16_runs", "autocast", "loss_scale", "function"),
    ),
    "callbacks": ("traced",),
    "loops": ("parity", "logging", "lightning_parts"),
    "trainer": ("mixed_precision", "checkpoints"),
    "trainer/nn": ("losses", "nonlinearities"),
    "trainer/optim": ("optimizers", "schedules_in_programs"),
    ".": ("programs", "pages", "fuzz", "zoo"),
}
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
    files = [
        str(TESTS / room / f"test_{name}.py") for room, names in ROOMS.items() for name in names
    ]
    command = [sys.executable, "-m", "pytest", "--compiled", *arguments, *options, *files]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=TESTS.parent, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
