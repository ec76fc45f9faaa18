"""Several processes train as stock Lightning's DDP does, on the same ranks."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_close

SUPPORT = Path(__file__).parents[1] / "support"
CASES = (
    *("mlp", "convnet", "transformer", "gan", "metrics", "logged", "gathers", "unused"),
    "bf16-mixed",
)
NOISE = {  # gradients that are zero but for rounding, and what follows them
    "convnet": ("net.0.bias", "net.1.running_mean"),  # see models.CONV_NOISE
    "transformer": tuple(f"encoder.layers.{i}.self_attn.in_proj_bias" for i in (0, 1)),  # of keys
}
BUFFERS = {"convnet": ("net.1.running_var",)}
"""Which stock's other ranks take over from the first in the next forward pass."""

pytestmark = pytest.mark.several


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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank's fits gave, by case: all of a number of processes and a policy at once."""

    @functools.cache
    def fit(count: int, policy: str) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("ranks")
        torchrun(count, SUPPORT / "several.py", str(folder), policy, *CASES)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]

    return fit


def agree(ranks: list[dict[str, Any]], name: str) -> None:
    """Each rank has what stock's has; buffers of the others than the first are its own here."""
    for rank, found in enumerate(ranks):
        ours, stock = (dict(found[name][who]) for who in ("ours", "stock"))
        assert stock["losses"]
        ignored = NOISE.get(name, ()) + (BUFFERS.get(name, ()) if rank else ())
        for one in (ours, stock):
            weights: dict[str, Any] = one["weights"]
            one["weights"] = {k: torch.tensor(v) for k, v in weights.items() if k not in ignored}
        assert_close(ours, stock, 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_give_the_numbers_of_stock(trained: Any, name: str) -> None:
    agree(trained(2, "disabled"), name)


@pytest.mark.parametrize("name", CASES)
def test_weights_and_buffers_are_the_same_in_all_processes(trained: Any, name: str) -> None:
    first, second = (rank[name]["ours"]["weights"] for rank in trained(2, "disabled"))
    assert first == second


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_four_processes_give_the_numbers_of_stock(trained: Any, name: str) -> None:
    agree(trained(4, "disabled"), name)


@pytest.mark.compiler
@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_compiled_they_give_the_numbers_of_stock(trained: Any, name: str) -> None:
    ranks = trained(2, "default")
    agree(ranks, name)
    assert ranks[0][name]["ours"]["weights"] == ranks[1][name]["ours"]["weights"]


def run_script(what: str, rank: int, folder: Path, seconds: float = 120) -> tuple[int, str]:
    """Run ``several_ends.py``, which Lightning starts again as rank 1: its status, what it said."""
    script = SUPPORT / "several_ends.py"
    with subprocess.Popen(
        [sys.executable, str(script), what, str(rank), str(folder)],
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=seconds)
        finally:
            until = time.monotonic() + 5
            while (left := _session(process.pid)) and time.monotonic() < until:
                time.sleep(0.1)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
    assert left == []
    return process.returncode, printed


def _session(leader: int) -> list[int]:
    """The processes of a session that still are there."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (folder / "stat").read_text().rpartition(") ")[2].split()[:4]
        except OSError:
            continue
        if int(session) == leader and state not in "ZX":
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize(
    ("what", "rank", "said"),
    [
        ("raises", 1, "rank 1 ended: ValueError: a hook of the user's"),
        ("raises", 0, "rank 0 ended: ValueError: a hook of the user's"),
        ("killed", 1, "rank 1 gave no sign of life"),
        pytest.param("killed", 0, "rank 0 is gone", marks=pytest.mark.long),
        pytest.param("stopped", 1, "rank 1 gave no sign of life", marks=pytest.mark.long),
    ],
)
def test_where_one_process_ends_all_do_and_say_why(
    what: str, rank: int, said: str, tmp_path: Path
) -> None:
    status, printed = run_script(what, rank, tmp_path, seconds=60)
    assert status != 0
    assert said in printed
    assert not list(tmp_path.glob("done*"))


@pytest.mark.long
def test_a_long_hook_of_one_process_ends_nothing(tmp_path: Path) -> None:
    status, printed = run_script("sleeps", 1, tmp_path)
    assert status == 0, printed
    assert len(list(tmp_path.glob("done*"))) == 2


def test_another_step_on_one_process_is_an_error_on_all_that_names_both_lines(
    tmp_path: Path,
) -> None:
    status, printed = run_script("differs", 1, tmp_path)
    assert status != 0
    for rank in (0, 1):
        text = f"[rank{rank}]: fulgurite.errors.GraphsDiffer: The training step is another one on"
        assert f"{text} rank 1 than on rank 0." in printed
    assert "return loss * 2 if self.global_rank" in printed


def test_a_run_goes_on_in_each_process_where_that_one_was(tmp_path: Path) -> None:
    status, printed = run_script("resumed", 0, tmp_path)
    assert status == 0, printed
    assert len(list(tmp_path.glob("same*"))) == 2
