"""A secret of the environment: in nothing that a run writes, and in nothing that it says."""

from __future__ import annotations

import pickle
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import fulgurite
from fulgurite import cli

SECRET = "hunter22-of-the-environment"
MODULE = "named_by_files_with_secrets"
PARTS = """\
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

class Net(LightningModule):
    def __init__(self, token: str, url: str = "", tokens: list[str] = (), rate: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 1)
    def setup(self, stage):
        assert self.hparams.token == "hunter22-of-the-environment"
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()
    def validation_step(self, batch, batch_idx):
        pass
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.rate)

class Wrong(Net):
    def __init__(self, token: str):
        try:
            int(token)
        except ValueError as error:
            raise RuntimeError(f"{token} is no token") from error

def loader(token: str = ""):
    if token:
        raise OSError(2, f"nothing at {token}")
    return DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=4)
"""
FILE = """\
trainer:
  init:
    device: CPU
    model_dir: out
    model:
      class_path: {module}.{name}
      init_args: {arguments}
    logger: {{CSVLogger: {{save_dir: out}}}}
    enable_progress_bar: false
    enable_model_summary: false
    loop: {{max_steps: 1}}
    log_every_n_steps: 1
  fit:
    train_dataloader: {{data_processor: {module}.loader{more}}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the classes of the file in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setenv("TOKEN", SECRET)
    monkeypatch.setenv("RATE", "0.125")
    (tmp_path / f"{MODULE}.py").write_text(PARTS)
    return tmp_path


def write(name: str, arguments: str, more: str = "") -> None:
    Path("run.yaml").write_text(
        FILE.format(module=MODULE, name=name, arguments=arguments, more=more)
    )


WHOLE = "{token: '${TOKEN}', url: 'x://me:${TOKEN}@h', tokens: ['${TOKEN}'], rate: '${RATE}'}"


@pytest.mark.fits
def test_nothing_that_a_run_leaves_has_the_secret_in_it(folder: Path) -> None:
    write("Net", WHOLE)
    assert cli.main(["fit", "run.yaml"]) == 0
    files = [path for path in folder.glob("out/**/*") if path.is_file()]
    assert {"params.yaml", "hparams.yaml", "checkpoint_1.ckpt"} <= {path.name for path in files}
    for path in files:
        contents = [path.read_bytes()]
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                contents += [archive.read(name) for name in archive.namelist()]
        assert not any(SECRET.encode() in content for content in contents), path
    hparams = torch.load("out/checkpoint_1.ckpt", weights_only=True)["hyper_parameters"]
    assert hparams == {
        "token": "${TOKEN}",
        "url": "x://me:${TOKEN}@h",
        "tokens": ["${TOKEN}"],
        "rate": 0.125,
    }
    assert "${TOKEN}" in next(folder.glob("out/**/hparams.yaml")).read_text()


@pytest.mark.fits
def test_the_file_that_is_kept_runs_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("Net", WHOLE)
    assert cli.main(["fit", "run.yaml"]) == 0
    kept = (folder / "out/params.yaml").read_text()
    assert "${RATE}" in kept
    assert cli.main(["fit", "run.yaml", "--print_config"]) == 0
    printed = capsys.readouterr().out
    assert printed == kept
    module = fulgurite.load("out/params.yaml").module
    assert (module.hparams["token"], module.hparams["rate"]) == (SECRET, 0.125)


@pytest.mark.fits
@pytest.mark.parametrize(
    ("name", "arguments", "more"),
    [
        ("Wrong", "{token: '${TOKEN}'}", ""),
        ("Net", "{token: '${TOKEN}', rate: '${TOKEN}'}", ""),
        ("Net", "{token: '${TOKEN}', no_such: 1}", ""),
        ("Net", "'${TOKEN}'", ""),
        ("Net", "{token: '${TOKEN}'}", ", token: '${TOKEN}'"),
        ("Net", "{token: a}", ", batch_size: '${TOKEN}'"),
        ("${TOKEN}", "{token: a}", ""),
    ],
)
@pytest.mark.parametrize("command", [["check"], ["check", "--no-imports"], ["fit"]])
def test_nothing_that_is_told_has_the_secret_in_it(
    name: str, arguments: str, more: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(name, arguments, more)
    status = cli.main([*command, "run.yaml"])
    told = "".join(capsys.readouterr())
    assert SECRET not in told
    assert status == 1 or command[0] == "check"
    assert "${TOKEN}" in told or command[0] == "check" or "no_such" in arguments


def test_an_error_in_python_has_no_secret_in_what_it_came_from() -> None:
    write("Wrong", "{token: '${TOKEN}'}")
    with pytest.raises(RuntimeError, match=r"\$\{TOKEN\} is no token") as caught:
        fulgurite.load("run.yaml")
    assert SECRET not in str(caught.value.__cause__)
    assert SECRET not in str(pickle.dumps(caught.value.args))


OLD = """\
model: {name: parts.Net, dropout: '${RATE}'}
optimizer: {optimizer_type: AdamW, learning_rate: '${RATE}'}
runconfig: {max_steps: 1, model_dir: 'out/${TOKEN}'}
train_input: {data_processor: parts.Rows}
"""


def test_a_file_of_the_old_form_keeps_its_variables(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(OLD)
    assert cli.main(["fit", "run.yaml", "--device", "CPU", "--print_config"]) == 0
    printed = capsys.readouterr().out
    assert SECRET not in printed
    for key in ("model_dir: out/", "dropout: ", "lr: "):
        assert "${" in printed.replace('"', "").partition(key)[2].partition("\n")[0]
