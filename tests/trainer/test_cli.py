"""The command ``fulgurite``: what is typed, what is printed, which status it ends with."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import fulgurite
from fulgurite import cli
from fulgurite.config.document.reading import Document
from fulgurite.config.run import restarting

PARTS = """\
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

class Net(LightningModule):
    def __init__(self, reads: bool = False):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.reads = reads
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        if self.reads:
            loss.item()
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).square().mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def loader():
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(16, 4, generator=generator)), batch_size=4)
"""

FILE = """\
trainer:
  init:
    backend: {{backend_type: CSX, autogen_policy: disabled}}
    model_dir: {folder}/out
    model: {{class_path: {parts}.Net}}
    enable_progress_bar: false
    enable_model_summary: false
    num_sanity_val_steps: 0
    loop: {{max_steps: 4}}
  fit:
    train_dataloader: {{data_processor: {parts}.loader}}
    val_dataloader: {{data_processor: {parts}.loader}}
  validate:
    val_dataloader: {{data_processor: {parts}.loader}}
"""


@pytest.fixture
def params(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A parameter file with its classes beside it, under a name that no other test has."""
    parts = f"parts_of_{request.node.originalname}"
    (tmp_path / f"{parts}.py").write_text(PARTS)
    file = tmp_path / "run.yaml"
    file.write_text(FILE.format(folder=tmp_path, parts=parts))
    return str(file)


@pytest.mark.process
def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from fulgurite import cli; cli.parser().format_help();"
        " sys.exit(any(name in sys.modules for name in ('torch', 'lightning', 'yaml')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


VERSION = """
import sys
from fulgurite import cli

try:
    cli.main(["--version"])
finally:
    print(sorted({"torch", "lightning", "yaml", "numpy"} & {*sys.modules}))
"""


@pytest.mark.process
def test_version_names_what_decides_what_runs_and_imports_none_of_it() -> None:
    command = [sys.executable, "-c", VERSION]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told, imported = done.stdout.splitlines()
    packages = [f"{name} {metadata.version(name)}" for name in ("torch", "lightning")]
    for part in (f"fulgurite {fulgurite.__version__}", *packages, platform.python_version()):
        assert part in told
    assert imported == "[]"


def test_version_says_which_package_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fulgurite.commands.options.PACKAGES", ("torch", "no-such-package"))
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.endswith("no-such-package not installed\n")


@pytest.mark.fits
def test_fit_trains_and_ends_with_0(params: str, tmp_path: Path) -> None:
    assert cli.main(["fit", params]) == 0
    assert (tmp_path / "out").is_dir()


def test_a_mistake_in_the_file_ends_with_1_and_its_place(
    params: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fit", params, "--set", "trainer.init.loop.max_stepz=3"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("override: trainer.init.loop.max_stepz: loop takes no")
    assert "Did you mean 'max_steps'?" in told
    assert "Traceback" not in told


@pytest.mark.fits
def test_a_mistake_in_the_model_ends_with_1_and_the_users_line(
    params: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reads = ["--set", "trainer.init.model.init_args.reads=true"]
    assert cli.main(["fit", params, *reads]) == 1
    told = capsys.readouterr().err
    assert "was read by .item()" in told
    assert ".py:13 in training_step" in told
    assert "Traceback" not in told


@pytest.mark.fits
def test_debug_shows_the_traceback(params: str) -> None:
    from fulgurite.errors import HostRead

    with pytest.raises(HostRead):
        cli.main(["fit", params, "--debug", "--set", "trainer.init.model.init_args.reads=true"])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fitt"],
        ["fit"],
        ["fit", "run.yaml", "--unknown"],
        ["fit", "run.yaml", "--set", "novalue"],
        ["fit", "run.yaml", "--set", "a..b=1"],
        ["fit", "run.yaml", "--compile_only", "--validate_only"],
        ["check"],
        ["cache"],
        ["cache", "show"],
        ["cache", "prune", "--days", "-1"],
        ["cache", "prune", "--size", "much"],
        ["cache", "clear", "--size", "1G"],
        ["doctor", "now"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_ends_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: fulgurite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("fitt run.yaml", "fulgurite: error: there is no command 'fitt'. Did you mean 'fit'?"),
        ("run.yaml", "fulgurite: error: there is no command 'run.yaml'. A parameter file comes"),
        ("train", "There are fit, validate, validate_all,"),
        (
            "fit run.yaml --epochs 3",
            "fulgurite fit: error: there is no option --epochs. Write --set",
        ),
        ("fit --max-epochs=3 run.yaml", "Write --set trainer.init.loop.num_epochs=N."),
        (
            "fit run.yaml --lr 1 --resume a",
            "optimizer.NAME.lr=X.\nthere is no option --resume. Write --ckpt_path FILE.",
        ),
        ("fit run.yaml --compile-only", "no option --compile-only. Did you mean '--compile_only'?"),
        ("fit run.yaml --foo 3", "A key of the file is set by --set a.b.c=value."),
        ("compile run.yaml --epochs 3", "fulgurite compile: error: there is no option --epochs."),
        ("compile run.yaml --set x", "fulgurite compile: error: argument --set: expected a.b.c"),
        ("fit run.yaml more", "fulgurite fit: error: it takes no 'more'."),
        (
            "cache list --compiledir a",
            "fulgurite cache list: error: there is no option --compiledir",
        ),
    ],
)
def test_what_is_mistyped_is_told_with_what_to_type(
    arguments: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments.split())
    assert told in capsys.readouterr().err


def test_a_device_of_the_command_line_replaces_a_backend_with_arguments_of_its_own(
    params: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fit", params, "--device", "CPU", "--print_config"]) == 0
    told = capsys.readouterr().out
    assert "device: CPU" in told
    assert "autogen_policy" not in told


@pytest.mark.long
@pytest.mark.process
def test_a_params_file_in_its_model_dir_finds_classes_in_the_working_directory(
    params: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model_dir"
    folder.mkdir()
    moved = Path(params).rename(folder / "params.yaml")
    command = [str(Path(sys.executable).with_name("fulgurite")), "check", str(moved)]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.long
@pytest.mark.process
def test_a_reader_that_has_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "fulgurite", "schema"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


@pytest.mark.fits
def test_programs_that_do_not_run_leave_no_params_file(params: str, tmp_path: Path) -> None:
    assert cli.main(["fit", params, "--validate_only"]) == 0
    assert not (tmp_path / "out").exists()


def test_ctrl_c_ends_with_130(
    params: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(options: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli._COMMANDS, "fit", interrupted)
    assert cli.main(["fit", params]) == 130
    assert "interrupted" in capsys.readouterr().err


def flagged(init: dict[str, Any], *flags: str) -> dict[str, Any]:
    """What flags set in a file with this ``init``."""
    options = cli.parser().parse_args(["fit", "run.yaml", *flags])
    document = Document(source="run.yaml", data={"trainer": {"init": init, "fit": {}}})
    return cli.flags_as_overrides(document, options)


def test_flags_set_keys_of_the_file() -> None:
    at = "trainer.init"
    assert flagged({"device": "CSX"}) == {}
    assert flagged({"device": "CSX"}, "--device", "CPU") == {f"{at}.device": "CPU"}
    backend = {"backend": {"backend_type": "CSX"}}
    assert flagged(backend, "--device", "CPU") == {f"{at}.device": "CPU", f"{at}.backend": None}
    assert flagged(backend, "--device", "CSX") == {}
    assert flagged(backend, "--validate_only") == {f"{at}.backend.validate_only": True}
    only = {f"{at}.backend": {"backend_type": "CSX", "compile_only": True}, f"{at}.device": None}
    assert flagged({"device": "CSX"}, "--compile_only") == only
    on_cpu = {"backend": {"backend_type": "CPU"}}
    assert flagged(on_cpu, "--compile_only", "--device", "CSX") == only
    assert flagged({}, "--model_dir", "out") == {f"{at}.model_dir": "out"}
    assert flagged({}, "--ckpt_path", "a.ckpt") == {"trainer.fit.ckpt_path": "a.ckpt"}
    assert flagged({}, "--ckpt_path", "null") == {"trainer.fit.ckpt_path": None}


def test_flags_hold_for_each_trainer_of_a_list() -> None:
    options = cli.parser().parse_args(["fit", "run.yaml", "--model_dir", "out"])
    data = {"trainer": [{"trainer": {"init": {}}}, {"init": {}}]}
    assert cli.flags_as_overrides(Document(source="", data=data), options) == {
        "trainer.0.trainer.init.model_dir": "out",
        "trainer.1.init.model_dir": "out",
    }


def test_a_checkpoint_is_for_the_first_of_a_list_of_trainers_to_fit() -> None:
    data = {"trainer": [{"trainer": {"init": {}}}, {"init": {}}]}
    document, flag = Document(source="", data=data), ["--ckpt_path", "a.ckpt"]
    options = cli.parser().parse_args(["fit", "run.yaml", *flag])
    assert cli.flags_as_overrides(document, options) == {
        "trainer.0.trainer.fit.ckpt_path": "a.ckpt"
    }
    options = cli.parser().parse_args(["validate_all", "run.yaml", *flag])
    assert cli.flags_as_overrides(document, options) == {
        "trainer.0.trainer.validate_all.ckpt_paths": "a.ckpt",
        "trainer.1.validate_all.ckpt_paths": "a.ckpt",
    }


@pytest.mark.long
@pytest.mark.process
def test_a_closed_pipe_is_no_error_to_tell() -> None:
    command = f"{sys.executable} -m fulgurite.cli schema | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("{", "")


def test_check_says_a_line_per_problem_and_ends_with_1(
    params: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", params]) == 0
    assert capsys.readouterr().out == f"{params}: no problems\n"
    broken = tmp_path / "broken.yaml"
    broken.write_text(Path(params).read_text().replace("max_steps", "max_step"))
    assert cli.main(["check", params, str(broken)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{params}: no problems"
    assert lines[1].startswith(f"{broken}:9:12: trainer.init.loop.max_step: ")
    assert len(lines) == 2


def test_check_without_imports_only_names_the_users_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(FILE.format(folder=tmp_path, parts="nowhere"))
    assert cli.main(["check", str(file)]) == 1
    assert "No module named 'nowhere'" in capsys.readouterr().out
    assert cli.main(["check", "--no-imports", str(file)]) == 0


IMPORTING = """\
imports: [users.models]
trainer:
  init:
    device: CSX
    model:
      class_path: users.nets.Net
      init_args:
        loss: {class_path: users.losses.Focal}
        activation: users.gelu
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
    callbacks: [{users.callbacks.Mine: {}}, LambdaCallback: {on_fit_start: users.begin}]
    schedulers: [LambdaLR: {lr_lambda: users.rate}]
  fit:
    train_dataloader: {data_processor: users.data, collate_fn: users.collate}
"""


def test_check_without_imports_says_what_a_run_imports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(IMPORTING)
    (tmp_path / "users.py").write_text("1 / 0\n")
    assert cli.main(["check", "--no-imports", str(file)]) == 0
    init, fit = "trainer.init", "trainer.fit.train_dataloader"
    assert capsys.readouterr().out.replace(f"{file}:", "").splitlines() == [
        "1:11: imports.0: imports users.models",
        f"6:7: {init}.model.class_path: imports users.nets.Net",
        f"8:16: {init}.model.init_args.loss.class_path: imports users.losses.Focal",
        f"9:9: {init}.model.init_args.activation: imports users.gelu, if that is taken for a path",
        f"10:17: {init}.optimizer.class_path: imports torch.optim.SGD",
        f"11:18: {init}.callbacks.0.users.callbacks.Mine: imports users.callbacks.Mine",
        f"11:62: {init}.callbacks.1.LambdaCallback.on_fit_start: imports users.begin",
        f"12:29: {init}.schedulers.0.LambdaLR.lr_lambda: imports users.rate",
        f"14:24: {fit}.data_processor: imports users.data",
        f"14:52: {fit}.collate_fn: imports users.collate, if that is taken for a path",
        " no problems",
        cli.UNCHECKED,
    ]
    assert "users" not in sys.modules


@pytest.mark.fits
def test_the_command_that_goes_on_loads_a_checkpoint_whole(
    params: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    def stopped(trainer: Any, *args: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("fulgurite.callbacks.CheckLoss.on_train_batch_end", stopped)
    partly = "{LoadCheckpointStates: {load_checkpoint_states: model}}, {RateProfiler: null}"
    assert cli.main(["fit", params, "--set", f"trainer.init.callbacks=[{partly}]"]) == 143
    *_, command = capsys.readouterr().err.strip().splitlines()
    assert command.endswith("--set 'trainer.init.callbacks.0={LoadCheckpointStates: {}}'")


SLOW = """
import time
from lightning.pytorch import Callback

class Slow(Callback):
    def on_train_batch_start(self, *args):
        time.sleep(0.1)
"""


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("to", ["group", "killed watcher"])
def test_signals_end_a_run_that_is_watched_with_a_checkpoint(
    to: str, params: str, tmp_path: Path
) -> None:
    [parts] = tmp_path.glob("parts_of_*.py")
    parts.write_text(parts.read_text() + SLOW)
    keys = {
        "autorestart": "{max_num_restarts: 3}",
        "loop": "{max_steps: 100000}",
        "callbacks": f"[{{class_path: {parts.stem}.Slow}}]",
    }
    sets = [
        word for key, value in keys.items() for word in ("--set", f"trainer.init.{key}={value}")
    ]
    command = [sys.executable, "-m", "fulgurite", "fit", params, *sets]
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            summary = tmp_path / "out" / "summary.json"
            wait_for((tmp_path / "out" / "params.yaml").exists)
            [attempt] = json.loads(summary.read_text())["runs"][0]["attempts"]
            time.sleep(2.0)
            if to == "group":  # what Ctrl-C in a terminal does
                os.killpg(process.pid, signal.SIGINT)
            else:
                process.kill()
            told = process.communicate(timeout=60)[1]
        finally:
            process.kill()  # else whatever failed here would wait for it
    assert process.returncode == (-signal.SIGKILL if to == "killed watcher" else 130)
    assert f"Stopped by {'SIGTERM' if to == 'killed watcher' else 'SIGINT'}." in told
    assert list((tmp_path / "out").glob("checkpoint_*.ckpt"))
    wait_for(lambda: not Path("/proc", str(attempt["pid"])).exists())
    run = json.loads(summary.read_text())["runs"][0]
    assert len(run["attempts"]) == 1
    assert run["outcome"] == ("running" if to == "killed watcher" else "stopped")


def wait_for(happened: Callable[[], bool]) -> None:
    """Wait until something happened, a minute at most."""
    until = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.process
def test_a_run_that_is_killed_too_often_ends_with_1(
    params: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(restarting, "START_METHOD", "fork")
    monkeypatch.setattr(restarting, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(cli, "_attempt", lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    restarts = "trainer.init.autorestart.max_num_restarts=1"
    assert cli.main(["fit", params, "--set", restarts]) == 1
    assert "RestartsUsedUp: autorestart: attempt 2 ended: killed by" in capsys.readouterr().err


@pytest.mark.fits
def test_programs_that_do_not_run_are_not_watched(params: str, tmp_path: Path) -> None:
    restarts = "trainer.init.autorestart.max_num_restarts=1"
    assert cli.main(["fit", params, "--validate_only", "--set", restarts]) == 0
    assert not (tmp_path / "out").exists()
