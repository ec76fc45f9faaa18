"""The heap while programs run: pages of a step are there in the next one."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc alone"),
]

FIT = """
import itertools, resource, statistics, lightning.pytorch as pl, torch, fulgurite
from torch import nn

torch.set_num_threads(1)
faults = []

class Wide(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 1024), *[nn.Tanh() for _ in range(24)])

    def training_step(self, x):
        return self.net(x).square().mean()

    def on_train_batch_end(self, *args):
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
backend = fulgurite.backend("CSX", autogen_policy="disabled", audit=False)
trainer = fulgurite.Trainer(backend=backend, max_epochs=1, **dict.fromkeys(off, False))
batches = torch.utils.data.DataLoader(torch.randn(30 * 1024, 8), 1024)
trainer.fit(Wide(), batches)  # 24 intermediates of 4 MB
print(statistics.median(b - a for a, b in itertools.pairwise(faults[5:])))
"""


def faults_of_a_step(**environment: str) -> float:
    """Page faults of most steps of a fit in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FIT],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_a_step_finds_the_pages_of_the_one_before() -> None:
    assert faults_of_a_step() < 50


@pytest.mark.long
def test_the_users_own_limits_stay() -> None:
    assert faults_of_a_step(MALLOC_TRIM_THRESHOLD_=str(2**20)) > 5000
    assert faults_of_a_step(GLIBC_TUNABLES="glibc.malloc.trim_threshold=1048576") > 5000
