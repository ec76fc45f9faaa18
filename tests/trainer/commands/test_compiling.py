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
    ("device", "last", "said"),
    [
        ("CPU", "pass", "RuntimeError: Nothing is compiled on CPU: the run would train."),
        ("CSX", "trainer.callback_metrics['loss']", "What is compiled stays."),
    ],
)
@pytest.mark.fits
@pytest.mark.compiler
def test_what_cannot_go_on_is_told(
    device: str, last: str, said: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(SCRIPT.replace("{last}", last))
    assert cli.main(["compile", str(script), "--device", device]) == 1
    told = capsys.readouterr()
    assert said in told.err
    assert "trained" not in told.out.replace("was trained", "")


@pytest.mark.parametrize(
    ("name", "why"), [("a.yaml", "is a parameter file"), ("b.py", "not there")]
)
def test_what_is_no_script_is_refused(
    name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").touch()
    assert cli.main(["compile", str(tmp_path / name)]) == 1
    said = capsys.readouterr().err
    assert why in said
    assert "fulgurite fit FILE --compile_only" in said
