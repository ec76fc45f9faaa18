"""Runs of two processes whose ranks are killed: started again, they end as if nothing had been.

Those that hold parts are killed while they save: every checkpoint is whole, and none is lost.

KILLS=40 in the environment kills so many instead of some.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fulgurite.backends.checkpoints.folder_reader import FolderReader
from fulgurite.backends.checkpoints.folders import check_folder

KILLS = int(os.environ.get("KILLS", "3"))
SUPPORT = Path(__file__).parents[1] / "support"
EVERY = 8
STEPS = EVERY * max(30, KILLS + 10)
FILE = f"""
trainer:
  init:
    backend: {{backend_type: CSX, autogen_policy: disabled}}
    model: {{class_path: killed_net.Net}}
    seed: 1
    model_dir: out
    loop: {{num_steps: {STEPS}}}
    checkpoint: {{steps: {EVERY}}}
  fit:
    train_dataloader: {{data_processor: killed_net.rows, batch_size: 16}}
"""

pytestmark = [pytest.mark.several, pytest.mark.long]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The last checkpoint of a run in which nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    prepare(folder, "")
    command = [*TORCHRUN, "-m", "fulgurite", "fit", "run.yaml"]
    subprocess.run(command, cwd=folder, check=True, timeout=200, env=ENVIRONMENT)
    return last_of(folder)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
MARK = "FULGURITE_KILLED_RUN"
"""In the environment of a run's processes: its folder."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def prepare(folder: Path, more: str) -> None:
    """Write the file, with more lines under init, and its model."""
    shutil.copy(SUPPORT / "killed_net.py", folder)
    (folder / "run.yaml").write_text(FILE.replace("    seed: 1\n", f"    seed: 1\n{more}"))


def last_of(folder: Path) -> dict[str, Any]:
    """The last checkpoint of a run."""
    path = folder / "out" / f"checkpoint_{STEPS}.ckpt"
    found: dict[str, Any] = torch.load(path, weights_only=False)
    return found


def ranks(run: Path) -> Iterator[int]:
    """The processes of the run in a folder that train."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            given = (folder / "environ").read_bytes().split(b"\0")
            is_attempt = b"spawn_main" in (folder / "cmdline").read_bytes()
        except OSError:
            continue
        is_rank = is_attempt or any(one.startswith(b"LOCAL_RANK=") for one in given)
        if is_rank and f"{MARK}={run}".encode() in given:
            yield int(folder.name)


def kill_some(command: list[str], folder: Path) -> str:
    """Run a command, and kill one of its ranks again and again; returns what was printed."""
    chance = random.Random(0)
    log = folder / "log.txt"
    with log.open("w") as printed:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**ENVIRONMENT, MARK: str(folder)},
        )
    try:
        for _ in range(KILLS):
            before, began = progress(folder), time.monotonic()
            while progress(folder) == before and time.monotonic() < began + 90:
                assert process.poll() is None, log.read_text()[-4000:]
                time.sleep(0.02)
            time.sleep(chance.uniform(0.0, 0.4))
            os.kill(chance.choice(list(ranks(folder))), signal.SIGKILL)
        assert process.wait(timeout=200) == 0, log.read_text()[-4000:]
        assert list(ranks(folder)) == []
    finally:
        for pid in ranks(folder):
            os.kill(pid, signal.SIGKILL)
    return log.read_text()


def progress(folder: Path) -> int:
    """The step of the newest checkpoint; each of them can be read."""
    found = [int(path.stem.partition("_")[2]) for path in (folder / "out").glob("*_*.ckpt")]
    return max(found, default=0)


@pytest.mark.parametrize("how", ["autorestart", "torchrun"])
def test_killed_ranks_cost_nothing(how: str, undisturbed: Any, tmp_path: Path) -> None:
    if how == "autorestart":
        restarts = "    autorestart: {max_num_restarts: 9}\n"
        systems = "autogen_policy: disabled, cluster_config: {num_csx: 2}"
        prepare(tmp_path, restarts)
        file = tmp_path / "run.yaml"
        file.write_text(file.read_text().replace("autogen_policy: disabled", systems))
        command = [sys.executable, "-m", "fulgurite", "fit", "run.yaml"]
    else:
        prepare(tmp_path, "")
        command = [*TORCHRUN, f"--max-restarts={KILLS + 9}", "-m", "fulgurite", "fit", "run.yaml"]
    printed = kill_some(command, tmp_path)
    assert printed.count("CSX on host fabric") > 1  # it began anew
    for path in (tmp_path / "out").glob("*.ckpt"):
        torch.load(path, weights_only=False)
    found = last_of(tmp_path)
    for name, value in undisturbed["state_dict"].items():
        assert torch.equal(found["state_dict"][name], value), name
    [ours], [theirs] = found["optimizer_states"], undisturbed["optimizer_states"]
    for index, state in theirs["state"].items():
        assert all(torch.equal(ours["state"][index][key], value) for key, value in state.items())


PARTS = """
trainer:
  init:
    backend: {backend_type: CSX, autogen_policy: disabled, execution: weight_streaming}
    model: {class_path: killed_net.Wide}
    seed: 1
    model_dir: out
    loop: {num_steps: 100000}
    checkpoint: {steps: 4}
    callbacks:
    - KeepNCheckpoints: {n: 2}
    - ModelCheckpoint: {dirpath: out/last, save_last: true, save_top_k: 0, every_n_train_steps: 2}
  fit:
    train_dataloader: {data_processor: killed_net.rows, batch_size: 16}
"""


def check_all(folder: Path) -> int:
    """Read every checkpoint; returns how many there are."""
    found = list((folder / "out").rglob("*.ckpt"))
    for path in found:
        try:
            check_folder(path)
            weights = FolderReader(path).checkpoint()["state_dict"]
        except OSError:
            assert not path.exists(), f"{path} is not whole"  # KeepNCheckpoints removed it
        else:
            assert all(bool(value.isfinite().all()) for value in weights.values())
    return len(found)


def test_processes_that_are_killed_while_they_save_lose_nothing(tmp_path: Path) -> None:
    (tmp_path / "killed_net.py").write_text((SUPPORT / "killed_net.py").read_text())
    (tmp_path / "run.yaml").write_text(PARTS)
    chance, caught = random.Random(0), 0
    log = tmp_path / "log.txt"
    command = [*TORCHRUN, f"--max-restarts={KILLS + 9}", "-m", "fulgurite", "fit", "run.yaml"]
    with log.open("w") as printed:
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**ENVIRONMENT, MARK: str(tmp_path)},
        )
    try:
        for _ in range(KILLS):
            before, began = progress(tmp_path), time.monotonic()
            while progress(tmp_path) <= before and time.monotonic() < began + 120:
                assert process.poll() is None, log.read_text()[-4000:]
                time.sleep(0.02)
            assert progress(tmp_path) > before, log.read_text()[-4000:]
            victim = chance.choice(list(ranks(tmp_path)))
            while not (parts := list((tmp_path / "out").rglob(".fulgurite-*.part"))):
                time.sleep(0.001)
            time.sleep(chance.uniform(0.0, 0.02))
            caught += any(part.exists() for part in parts)
            saved = progress(tmp_path)
            os.kill(victim, signal.SIGKILL)
            time.sleep(0.5)
            assert progress(tmp_path) >= saved
            assert check_all(tmp_path) >= 2
    finally:
        process.terminate()
        process.wait(60)
        for pid in ranks(tmp_path):
            os.kill(pid, signal.SIGKILL)
    check_all(tmp_path)
    print(f"{KILLS} kills, {caught} of them while a folder was written; the last step {saved}")
    assert caught
    last = FolderReader(tmp_path / "out" / f"checkpoint_{progress(tmp_path)}.ckpt").checkpoint()
    assert last["global_step"] == progress(tmp_path)
    assert torch.isfinite(last["state_dict"]["net.0.weight"]).all()
