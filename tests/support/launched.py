"""Scripts of several processes, started as users start them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

SUPPORT = Path(__file__).parent


def torchrun(count: int, script: Path, *arguments: str, seconds: float = 300) -> str:
    """Run a script in processes that meet on the loopback; returns what they printed."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*run, f"--nproc_per_node={count}", str(script), *arguments],
        # a process that crashes tells where
        env={
            **os.environ,
            **{"PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        },
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, _told(printed)
    return printed


def torchrun_once(
    factory: pytest.TempPathFactory,
    count: int,
    script: Path,
    *arguments: str,
    seconds: float = 300,
) -> Path:
    """The folder in which a script's processes leave what they found, its first argument.

    The workers of one test run share it: what takes minutes of all cores runs once.
    """
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    name = hashlib.sha256(repr((count, script.name, arguments)).encode()).hexdigest()[:12]
    folder = shared / f"once-{name}"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            folder.mkdir(exist_ok=True)
            torchrun(count, script, str(folder), *arguments, seconds=seconds)
            (folder / "done").touch()
    return folder


def _told(printed: str) -> str:
    """The end of what processes printed, from where one of them crashed on."""
    crashed = printed.find("Fatal Python error")
    return printed[-4000:] if crashed < 0 else printed[crashed : crashed + 6000]
