"""``fulgurite compile``: a script's next run finds its programs, and nothing was trained."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fulgurite import cli
from fulgurite.backends.csx.compile.store.cache_folder import users_folder
from fulgurite.backends.csx.compile.store.upkeep import entries_in

SCRIPT = """
import argparse
import lightning.pytorch as pl
import torch
from fulgurite import Trainer
from widths import WIDTH  # beside it

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(WIDTH, 3)
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--device")
    given = options.parse_args()
    data = torch.utils.data.TensorDataset(torch.randn(8, WIDTH), torch.arange(8) % 3)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    net = Net()
    before = net.net.weight.clone()
    trainer = Trainer(device=given.device, max_epochs=2, **quiet)
    trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=4))
    print("trained" if (net.net.weight - before).any() else "as it was")
    {last}
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "widths.py").write_text("WIDTH = 5")
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.replace("{last}", "pass"))
    return file


@pytest.mark.fits
@pytest.mark.compiler
def test_programs_are_compiled_and_nothing_is_trained(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compile", str(script), "--device", "CSX"]) == 0
    said = capsys.readouterr().out
    assert "as it was" in said
    assert len(entries_in(users_folder())) == 1


@pytest.mark.parametrize(
    "save", ["torch.save(net.state_dict(), {path})", "trainer.save_checkpoint({path})"]
)
@pytest.mark.fits
@pytest.mark.compiler
def test_what_was_trained_is_not_saved_over(
    save: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, cached = script.parent / "net.pt", script.parent / "data.pt"
    trained.write_text("trained")
    save, before = save.format(path=repr(str(trained))), f"torch.save([], {str(cached)!r})"
    text = SCRIPT.replace("{last}", f"{save}\n    print('went on')")
    script.write_text(text.replace("net = Net()", f"net = Net(); {before}"))
    assert cli.main(["compile", str(script), "--device", "CSX"]) == 0
    said = capsys.readouterr().out
    assert f"trained nothing; it ends at line 28, which saves: {save}" in said
    assert "went on" not in said
    assert trained.read_text() == "trained"
    assert cached.is_file()  # before any fit a script saves as ever
    assert len(entries_in(users_folder())) == 1


@pytest.mark.parametrize(
    ("device", "last", "said", "went_on"),
    [
        ("CPU", "pass", "RuntimeError: Nothing is compiled on CPU: the run would train.", False),
        ("CSX", "trainer.callback_metrics['loss']", "What is compiled stays.", True),
    ],
)
@pytest.mark.fits
@pytest.mark.compiler
def test_what_cannot_go_on_is_told(
    device: str,
    last: str,
    said: str,
    went_on: bool,
    script: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script.write_text(SCRIPT.replace("{last}", last))
    assert cli.main(["compile", str(script), "--device", device]) == 1
    told = capsys.readouterr()
    assert said in told.err
    assert ("and it went on after them" in told.err) is went_on
    assert "trained" not in told.out.replace("was trained", "")


def test_what_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", str(tmp_path / "b.py")]) == 1
    assert "no such file; give a Python script or a parameter file" in capsys.readouterr().err


FILE = """
trainer:
  init:
    device: CSX
    model: {class_path: net.Net}
    loop: {num_epochs: 2}
    model_dir: .
    checkpoint: {save_initial_checkpoint: false, steps: null}
  fit:
    train_dataloader: {data_processor: net.rows}
    val_dataloader: {data_processor: net.rows}
"""
NET = """
import lightning.pytorch as pl
import torch

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(5, 3)
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def validation_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def rows():
    data = torch.utils.data.TensorDataset(torch.randn(8, 5), torch.arange(8) % 3)
    return torch.utils.data.DataLoader(data, batch_size=4)
"""


@pytest.mark.fits
@pytest.mark.compiler
def test_a_parameter_file_is_compiled_too(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = script.parent
    monkeypatch.chdir(folder)
    (folder / "net.py").write_text(NET)
    (folder / "run.yaml").write_text(FILE)
    assert cli.main(["compile", "run.yaml"]) == 0, capsys.readouterr().err
    assert len(entries_in(users_folder())) == 2  # the training's and the validation's
    assert not list(folder.glob("**/*.ckpt"))
