"""Examples and benchmarks run, with few steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*arguments: str, **environment: str) -> str:
    """What ``python arguments`` prints; it must succeed."""
    result = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},  # tiny steps, busy machines
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("device", ["CSX", "CPU"])
def test_digits(device: str, tmp_path: Path) -> None:
    policy = ["--autogen-policy", "disabled", "--compare"] if device == "CSX" else []
    text = run(
        str(ROOT / "examples/digits.py"),
        f"--device={device}",
        "--epochs=2",
        f"--out={tmp_path / 'digits'}",
        *policy,
    )
    assert "test accuracy" in text
    picture = Path(text.partition("curves ")[2].split()[0])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert Path(text.partition("checkpoint ")[2].split()[0]).exists()
    if device == "CSX":
        assert "training program" in text
        assert "validation program" in text
        assert "test program" in text
        assert "largest difference in loss" in text
    else:
        assert "program" not in text


@pytest.mark.parametrize("device", ["CSX", "CPU"])
def test_gpt_bytes(device: str, tmp_path: Path) -> None:
    policy = ["--autogen-policy", "disabled", "--compare"] if device == "CSX" else []
    text = run(
        str(ROOT / "examples/gpt_bytes.py"),
        f"--device={device}",
        "--epochs=1",
        "--steps=10",
        f"--out={tmp_path / 'gpt'}",
        *policy,
    )
    after, before = text.partition("bits per byte ")[2].split(", from ")
    assert float(after) < float(before.split()[0]) - 1
    assert Path(text.partition("checkpoint ")[2].split()[0]).exists()
    assert len(text.partition("\ndef read(")[2]) >= 400
    assert ("training program" in text) == (device == "CSX")


@pytest.mark.compiler
def test_the_step_benchmark(tmp_path: Path) -> None:
    text = run(str(ROOT / "tests/benchmarks/step.py"), "--steps=5", "--rounds=1")
    assert "Fulgurite bare program" in text
