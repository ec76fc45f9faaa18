"""Run Lightning's own tests with this project's Trainer, and say which of them fail unwaived.

    git clone --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning
    export FULGURITE_LIGHTNING=$PWD/pytorch-lightning
    python tests/compat/run.py CPU                 every folder of FOLDERS
    python tests/compat/run.py CSX loops           one folder of tests_pytorch
    python tests/compat/run.py CSX loops --stock   what fails there without this project

Lightning's tests need ``tensorboardX`` besides what this project's need. On CSX, programs run
operation by operation, unless ``FULGURITE_POLICY`` says otherwise. ``waivers.txt`` has the tests
that are not static or look inside Lightning, each with the line that is in the way.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDERS = ("loops", "trainer/logging_", "callbacks", "checkpointing", "tuner")
VARIABLE = "FULGURITE_LIGHTNING"
_OUTCOMES = "FAILED|ERROR|PASSED|SKIPPED|XFAIL"
_LINE = re.compile(rf"^({_OUTCOMES}) tests_pytorch/(\S+?\.py(?:::.*?)?)(?: - .*)?$")


def waivers(device: str) -> dict[str, str]:
    """Why each test is waived on a device, by name."""
    found = {}
    for line in (HERE / "waivers.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            devices, name, why = line.split(maxsplit=2)
            if device in devices.split(","):
                found[name] = why
    return found


def is_waived(name: str, waived: dict[str, str]) -> bool:
    """Whether a test is waived, by its name with its parameters or without."""
    return name in waived or name.partition("[")[0] in waived


def run(tests: Path, device: str, folder: str, *, stock: bool) -> dict[str, str]:
    """The outcome of each test of a folder, by name."""
    plugin = () if stock else ("-p", "lightning_suite")
    environment = {
        **os.environ,
        "FULGURITE_DEVICE": device,
        "PYTHONPATH": os.pathsep.join((str(HERE), str(tests), os.environ.get("PYTHONPATH", ""))),
    }
    if device == "CSX":
        environment.setdefault("FULGURITE_POLICY", "disabled")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", *plugin, "-q", "-rA", "--tb=no"),
            "--continue-on-collection-errors",
            *("-c", os.devnull, "--rootdir", str(tests), "-W", "ignore", "-p", "no:cacheprovider"),
            f"tests_pytorch/{folder}",
        ],
        cwd=tests,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = {m[2]: m[1] for line in done.stdout.splitlines() if (m := _LINE.match(line))}
    if not found:
        sys.exit(f"pytest ran no test of {folder}:\n{done.stdout[-2000:]}")
    return found


def main() -> None:
    """Run the folders, and end with 1 where a test fails that is not waived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", choices=("CPU", "CSX"))
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    parser.add_argument("--stock", action="store_true", help="Lightning's Trainer as it is")
    arguments = parser.parse_args()
    where = Path(os.environ.get(VARIABLE, ""))
    tests = where / "tests"
    if not (tests / "tests_pytorch").is_dir():
        parser.error(f"set {VARIABLE} to a checkout of Lightning 2.6.5: {where} has no tests")
    waived, unwaived = waivers(arguments.device), 0
    for folder in arguments.folders:
        found = run(tests, arguments.device, folder, stock=arguments.stock)
        passed = [name for name, outcome in found.items() if outcome == "PASSED"]
        failed = [name for name, outcome in found.items() if outcome in ("FAILED", "ERROR")]
        rest = [name for name in failed if not is_waived(name, waived)]
        needless = [name for name in waived if name.startswith(folder)]
        needless = [one for one in needless if not any(is_waived(n, {one: ""}) for n in failed)]
        static = len(passed) + len(rest)
        print(
            f"{folder}: {len(passed)} passed, {len(failed) - len(rest)} waived,"
            f" {len(rest)} failed: {100 * len(passed) / max(1, static):.1f} % of those not waived"
        )
        for name in rest:
            print(f"  {name}")
        for name in needless:
            print(f"  needs no waiver: {name}")
        unwaived += len(rest)
    sys.exit(1 if unwaived else 0)


if __name__ == "__main__":
    main()
