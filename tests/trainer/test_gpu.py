"""Device "GPU" beside stock Lightning there, and CSX on a machine with a GPU.

Skipped where there is none: none of the machines of this project's own checks has one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_close

SCRIPT = Path(__file__).parents[1] / "support" / "on_gpu.py"

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU of NVIDIA's here"),
]


def run(folder: Path, *arguments: str) -> Any:
    """What the script prints."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("optimizer", ["AdamW", "fulgurite.AdamW"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_the_numbers_on_a_gpu_are_stocks(tmp_path: Path, precision: str, optimizer: str) -> None:
    ours, stocks = run(tmp_path, "numbers", precision, optimizer)
    assert ours["device"] == stocks["device"] == "cuda"
    assert len(ours["losses"]) == 16
    assert_close(ours, stocks, 1e-6)


@pytest.mark.parametrize("pinned", ["pinned", "pageable"])
@pytest.mark.parametrize("moved", ["moved", "made"])
def test_a_program_beside_a_gpu_stays_on_the_host(tmp_path: Path, pinned: str, moved: str) -> None:
    ours, stocks = run(tmp_path, "beside", pinned, moved)
    assert ours["device"] == "cpu"
    assert_close(ours, stocks, 1e-5)


@pytest.mark.parametrize(("first", "then"), [("GPU", "CSX"), ("CSX", "GPU"), ("GPU", "CPU")])
def test_a_checkpoint_goes_on_on_another_device(tmp_path: Path, first: str, then: str) -> None:
    run(tmp_path, "saved", first)
    ours, whole = run(tmp_path, "resumed", first, then)
    assert len(ours["losses"]) == 8
    assert_close(ours["losses"], whole["losses"][8:], 1e-4)
    assert_close(ours["weights"], whole["weights"], 1e-3)


def test_a_loop_of_ones_own_gives_the_same_losses_on_each_device(tmp_path: Path) -> None:
    on_gpu, on_csx = run(tmp_path, "loop", "GPU"), run(tmp_path, "loop", "CSX")
    assert on_gpu["device"] == "cuda"
    assert len(on_gpu["losses"]) == 12
    assert_close(on_gpu["losses"], on_csx["losses"], 1e-4)
