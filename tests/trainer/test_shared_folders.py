"""Four processes at once, with one compile_dir and one model_dir, train as if each were alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROCESSES = 4
SCRIPT = """
import logging, sys, warnings
import torch
from torch import nn
import lightning.pytorch as pl
import fulgurite
from fulgurite.callbacks import Checkpoint

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

number, cache, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.manual_seed(number)
net = Net()
x = torch.randn(160, 8, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :3].argmax(1)), 16)
trainer = fulgurite.Trainer(
    backend=fulgurite.backend("CSX", compile_dir=cache, background=False),
    model_dir=folder, max_epochs=2, callbacks=[Checkpoint(steps=5)], logger=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(net, loader)
assert all(one.loaded.compiled for one in trainer.strategy.training.executables())
torch.save(net.state_dict(), sys.argv[4])
"""


def start(number: int, cache: Path, folder: Path, result: Path) -> subprocess.Popen[str]:
    """A fit in a process of its own."""
    words = [sys.executable, "-c", SCRIPT, str(number), str(cache), str(folder), str(result)]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> None:
    """Wait for it; it must not fail."""
    _, error = process.communicate()
    assert process.returncode == 0, error


@pytest.mark.long
@pytest.mark.compiler
def test_each_trains_as_if_it_were_alone(tmp_path: Path) -> None:
    cache, shared = tmp_path / "cache", tmp_path / "shared"
    found = [tmp_path / f"{i}.pt" for i in range(PROCESSES)]
    together = [start(i, cache, shared, path) for i, path in enumerate(found)]
    for process in together:
        end(process)
    for i in (0, PROCESSES - 1):
        alone = tmp_path / f"alone_{i}"
        end(start(i, cache, alone, tmp_path / "alone.pt"))
        wanted, got = (torch.load(path) for path in (tmp_path / "alone.pt", found[i]))
        assert all(torch.equal(got[name], value) for name, value in wanted.items())
    files = list(shared.rglob("*.ckpt"))
    assert {torch.load(path, weights_only=True)["global_step"] for path in files} == {5, 10, 15, 20}
    assert not [path for path in shared.rglob("*") if path.suffix == ".part"]
    assert len([path for path in cache.iterdir() if path.is_dir() and len(path.name) == 64]) == 1
