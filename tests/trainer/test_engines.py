"""The ways by which several processes are started, each as a user types it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_close
from lightning.fabric.utilities.exceptions import MisconfigurationException

import fulgurite
from fulgurite.placement import systems

SUPPORT = Path(__file__).parents[1] / "support"
SCRIPT = str(SUPPORT / "engines.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1"}
SLURM = {
    **{"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1"},
    **{"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NODEID": "0"},
    **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), "127.0.0.1"),
}

pytestmark = pytest.mark.several


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextlib.contextmanager
def running(commands: list[tuple[list[str], dict[str, str], Path]]) -> Iterator[list[Any]]:
    """Start commands, each with its environment and its folder, which takes ``log.txt``."""
    processes = []
    try:
        for command, environment, folder in commands:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "log.txt").open("w") as log:
                options: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT}
                given = {**ENVIRONMENT, **environment}
                processes.append(
                    subprocess.Popen(
                        command, cwd=folder, env=given, start_new_session=True, **options
                    )
                )
        yield processes
    finally:
        for process in processes:
            for pid in (*descendants(process.pid), process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    with contextlib.suppress(FileNotFoundError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [found for one in children for found in (*descendants(int(one)), int(one))]
    return []


def machines(folder: Path, each: int, *arguments: str) -> Any:
    """Two machines of their own address, folder, home and caches, by torchrun."""
    meet = f"--rdzv_endpoint=127.0.0.1:{free_port()}"
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--rdzv_backend=c10d"]
    commands = []
    for node, home in enumerate(both(folder)):
        own = [f"--node_rank={node}", f"--local_addr=127.0.0.{node + 1}"]
        own.append(f"--rdzv_conf=is_host={1 - node}")  # both addresses are of this machine
        caches = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
        command = [*run, f"--nproc_per_node={each}", meet, *own, SCRIPT, str(folder), *arguments]
        commands.append((command, caches, home))
    return running(commands)


def ended(processes: list[Any], folders: list[Path], seconds: float = 240) -> None:
    """Wait until all have ended well."""
    until = time.monotonic() + seconds
    for process, folder in zip(processes, folders, strict=True):
        status = process.wait(until - time.monotonic())
        assert status == 0, (folder / "log.txt").read_text()[-4000:]


def results(folder: Path, what: str, count: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{what}{rank}.json").read_text()) for rank in range(count)]


def weights(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in found["weights"].items()}


def both(folder: Path) -> list[Path]:
    return [folder / "machine0", folder / "machine1"]


@pytest.mark.long
@pytest.mark.compiler
@pytest.mark.parametrize("background", [False, True])
def test_two_machines_train_as_stock_does_and_one_process_of_each_compiles(
    background: bool, tmp_path: Path
) -> None:
    options = ["autogen_policy='default'", f"background={background}"]
    with machines(tmp_path, 2, "csx", *options) as processes:
        ended(processes, both(tmp_path))
    with machines(tmp_path, 2, "stock") as processes:
        ended(processes, both(tmp_path))
    ours, stock = results(tmp_path, "csx", 4), results(tmp_path, "stock", 4)
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine["processes"] == 4
        assert mine["weights"] == ours[0]["weights"]
        assert_close(weights(mine), weights(theirs), 1e-5)
    if not background:
        hows = [one["how"][0].partition(" in ")[0] for one in ours]
        both_ways = ["compiled", "compiled by another process"]
        assert sorted(hows[:2]) == sorted(hows[2:]) == both_ways
    checkpoints = [len(list(one.glob("checkpoints/*.ckpt"))) for one in both(tmp_path)]
    assert sorted(checkpoints) == [0, 1]


@pytest.mark.long
def test_where_a_machine_is_lost_the_other_ends_and_says_so(tmp_path: Path) -> None:
    with machines(tmp_path, 1, "waits") as (first, second):
        until = time.monotonic() + 120
        while len(list(tmp_path.glob("began*"))) < 2:
            assert time.monotonic() < until
            time.sleep(0.1)
        for pid in (*descendants(second.pid), second.pid):
            os.kill(pid, signal.SIGKILL)
        assert first.wait(30) != 0
    printed = (tmp_path / "machine0" / "log.txt").read_text()
    assert "is gone" in printed or "gave no sign of life" in printed


def tasks(folder: Path, what: str) -> list[tuple[list[str], dict[str, str], Path]]:
    """Two tasks of a job, as srun starts them; ``scontrol`` notes what it is asked for."""
    scontrol = folder / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\necho $* >> {folder}/asked.txt\n")
    scontrol.chmod(0o755)
    path = f"{scontrol.parent}{os.pathsep}{os.environ['PATH']}"
    job = {**SLURM, "MASTER_PORT": str(free_port()), "PATH": path}
    command = [sys.executable, SCRIPT, str(folder), what]
    own = [{"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in (0, 1)]
    return [(command, {**job, **one}, folder / f"task{task}") for task, one in enumerate(own)]


def test_in_a_job_of_slurm_its_variables_are_enough(tmp_path: Path) -> None:
    commands = tasks(tmp_path, "csx")
    with running(commands) as processes:
        ended(processes, [folder for _, _, folder in commands])
    first, second = results(tmp_path, "csx", 2)
    assert first["processes"] == second["processes"] == 2
    assert first["weights"] == second["weights"]


@pytest.mark.long
def test_a_job_that_slurm_requeues_is_saved_once_by_all_its_tasks(tmp_path: Path) -> None:
    with running(tasks(tmp_path, "waits")) as (first, second):
        until = time.monotonic() + 120
        while len(list(tmp_path.glob("began*"))) < 2:
            assert time.monotonic() < until
            time.sleep(0.1)
        second.send_signal(signal.SIGUSR1)
        time.sleep(0.3)  # a step later
        first.send_signal(signal.SIGUSR1)
        while not (tmp_path / "asked.txt").exists():
            assert time.monotonic() < until, (tmp_path / "task0" / "log.txt").read_text()[-4000:]
            time.sleep(0.1)
        time.sleep(2)  # in which it goes on
        assert first.poll() is second.poll() is None
    assert (tmp_path / "asked.txt").read_text() == "requeue 4711\n"
    [saved] = (tmp_path / "task0").glob("hpc_ckpt_*.ckpt")
    assert torch.load(saved, weights_only=True)["global_step"] > 0


def test_other_devices_than_tasks_of_slurm_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MisconfigurationException, match=r"devices=3 .*SLURM_NTASKS=2 of SLURM"):
        fulgurite.Trainer(device="CSX", devices=3)


def test_in_an_interactive_job_of_slurm_the_script_says_how_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "interactive"}
    for name, value in {**SLURM, **alone}.items():
        monkeypatch.setenv(name, value)
    assert systems(None, 2, 1) == (2, 1, None)


@pytest.mark.long
def test_device_cpu_in_two_processes_is_stock_lightning(tmp_path: Path) -> None:
    for what in ("cpu", "stock"):
        command = [sys.executable, SCRIPT, str(tmp_path), what]
        with running([(command, {}, tmp_path / what)]) as processes:
            ended(processes, [tmp_path / what])
    assert results(tmp_path, "cpu", 2) == results(tmp_path, "stock", 2)


@pytest.mark.long
def test_a_stream_that_ends_before_others_in_a_validation_of_all_is_an_error(
    tmp_path: Path,
) -> None:
    command = [sys.executable, SCRIPT, str(tmp_path), "late"]
    with running([(command, {}, tmp_path / "late")]) as [process]:
        assert process.wait(90) != 0
    printed = (tmp_path / "late" / "log.txt").read_text()
    said = "BatchesDiffer: A stream of the validation ends on some ranks before others: rank 0 has"
    assert f"{said} one more batch of loader 0, and rank 1 has no more batch" in printed
    assert "take part in the step: it takes values of theirs.\n" in printed


CLI = """
from lightning.pytorch.cli import LightningCLI
import fulgurite
from engines_net import Net, Rows
LightningCLI(Net, Rows, trainer_class=fulgurite.Trainer)
"""
NET = """
import lightning.pytorch as pl
from models import Classifier, loader, mlp
class Net(Classifier):
    def __init__(self, width: int = 8):
        super().__init__(mlp())
class Rows(pl.LightningDataModule):
    def train_dataloader(self):
        return loader(160)
"""
CONFIG = """
seed_everything: 3
trainer: {device: CSX, devices: 2, max_epochs: 1, enable_progress_bar: false, logger: false}
"""


@pytest.mark.long
@pytest.mark.parametrize("given", ["options", "file"])
def test_lightnings_command_line_takes_device_and_devices(given: str, tmp_path: Path) -> None:
    for name, text in (("main.py", CLI), ("engines_net.py", NET), ("run.yaml", CONFIG)):
        (tmp_path / name).write_text(text)
    options = ["--trainer.device", "CSX", "--trainer.devices", "2", "--trainer.max_epochs", "1"]
    more = options if given == "options" else ["--config", "run.yaml"]
    with running([([sys.executable, "main.py", "fit", *more], {}, tmp_path)]) as processes:
        ended(processes, [tmp_path])
    printed = (tmp_path / "log.txt").read_text()
    assert "Starting with 2 processes" in printed
    assert printed.count("CSX: 5 batches in") == 1


CELLS = [
    """
import warnings
warnings.simplefilter("ignore")
import torch, fulgurite
from torch import nn
from harness import QUIET
from models import Classifier, loader, mlp
def trainer(**options):
    csx = fulgurite.backend("CSX", autogen_policy="disabled")
    return fulgurite.Trainer(backend=csx, **{**QUIET, "max_epochs": 1, **options})
class Net(Classifier):
    reads = False
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * loss.item() if self.reads else loss
    def validation_step(self, batch, batch_idx):
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)
torch.set_num_threads(2)
wide = torch.randn(1024, 1024)
(wide @ wide).exp_()  # threads, which are not forked
module = Net(mlp())
trainer().fit(module, loader(160))
before = [one.clone() for one in module.parameters()]
two = trainer(devices=2)
two.fit(module, loader(160))
not any(map(torch.equal, before, module.parameters()))
""",
    """
[found] = two.validate(module, loader(64))
trainer(devices=2).fit(module, loader(160))
found.keys() == {"val"}
""",
    """
module.reads = True
trainer(devices=2).fit(module, loader(160))
""",
]


@pytest.mark.notebook
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:::zmq", "ignore::DeprecationWarning:jupyter_client")
def test_a_notebook_forks_its_processes_after_threads_were_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # in the forked processes, too
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    make: Callable[..., Any] = nbformat.v4.new_code_cell
    notebook = nbformat.v4.new_notebook(cells=[make(cell) for cell in CELLS])
    place = {"metadata": {"path": str(tmp_path)}}
    options: dict[str, Any] = {"timeout": 120, "kernel_name": "python3", "allow_errors": True}
    nbclient.NotebookClient(notebook, resources=place, **options).execute()
    first, second, third = (cell.outputs[-1] for cell in notebook.cells)
    assert first.data["text/plain"] == second.data["text/plain"] == "True"
    assert third.ename == "ProcessRaisedException"
    assert "HostRead: The result of cross_entropy" in third.evalue
    assert "site-packages/lightning" not in third.evalue
