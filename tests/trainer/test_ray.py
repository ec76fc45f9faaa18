"""The example on Ray Train, one of whose workers is killed. Needs the extra "ray"."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray", reason='needs pip install "fulgurite[ray]"')

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.several, pytest.mark.long]


def workers(mark: str) -> list[int]:
    """The processes of Ray's workers of one run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            of_run = mark.encode() in (folder / "environ").read_bytes()
            if of_run and b"RayTrainWorker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def written_down(folder: Path) -> bool:
    """Whether Ray knows of a checkpoint: it asks its workers every second or two, and goes on from
    nothing where one was lost before.
    """
    return any(
        '"latest_checkpoint_result":{' in file.read_text()
        for file in folder.glob("results/ray_train*/checkpoint_manager_snapshot.json")
    )


def test_the_example_goes_on_after_a_worker_was_killed(tmp_path: Path) -> None:
    log, mark = tmp_path / "log.txt", f"FULGURITE_RAY_TEST={tmp_path}"
    arguments = ["--workers", "2", "--epochs", "15", "--storage", str(tmp_path / "results")]
    with log.open("w") as printed:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / "ray_train.py"), *arguments],
            cwd=tmp_path,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                **dict([mark.split("=", 1)]),
                "RAY_USAGE_STATS_ENABLED": "0",
                "PYTHONUNBUFFERED": "1",
            },
        )
    try:
        until = time.monotonic() + 120
        while not written_down(tmp_path):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(0.1)
        os.kill(workers(mark)[0], signal.SIGKILL)
        assert process.wait(timeout=180) == 0, log.read_text()[-4000:]
    finally:
        process.terminate()
        process.wait(timeout=30)
    text = log.read_text()
    assert "Restored all states from the checkpoint" in text
    assert "'epoch': 14, 'step': 300}" in text
    until = time.monotonic() + 30  # Ray's processes end some time after it
    while workers(mark) and time.monotonic() < until:
        time.sleep(0.2)
    assert workers(mark) == []
