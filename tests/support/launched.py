"""Scripts of several processes, started as users start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parent


def torchrun(count: int, script: Path, *arguments: str, seconds: float = 300) -> str:
    """Run a script in processes that meet on the loopback; returns what they printed."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*run, f"--nproc_per_node={count}", str(script), *arguments],
        env={**os.environ, "PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-4000:]
    return printed
