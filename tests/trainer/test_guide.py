"""The example of the static-graph guide runs as written, names aside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = """
import torch
import fulgurite
from fulgurite.utils.data import DataExecutor

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 4)
    def forward(self, x):
        return self.fc(x)

backend = fulgurite.backend("CSX", autogen_policy="disabled")
model = Net()
compiled_model = fulgurite.compile(model, backend)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-1)

loss_fn = torch.nn.CrossEntropyLoss()

@fulgurite.trace
def training_step(inputs, targets):
    outputs = compiled_model(inputs)
    loss = loss_fn(outputs, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("traced")
    return loss

@fulgurite.step_closure
def print_loss(loss):
    print(f"{loss.item():.3f}")

@fulgurite.checkpoint_closure
def save(step):
    print("checkpoint", step)

x = torch.randn(32, 8)
data = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
loader = torch.utils.data.DataLoader(data, batch_size=8)
executor = DataExecutor(loader, num_steps=10, checkpoint_steps=5)
for batch in executor:
    loss = training_step(*batch)
    print_loss(loss)
    save(executor.step)
assert fulgurite.current_backend() is backend
"""


@pytest.mark.long
@pytest.mark.process
def test_the_guides_example_runs_as_written(tmp_path: Path) -> None:
    script = tmp_path / "guide.py"
    script.write_text(GUIDE)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")[:-1]
    assert lines[0] == "traced"
    assert lines.count("traced") == 1
    losses = [float(line) for line in lines if line[0].isdigit()]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert [i for i, line in enumerate(lines) if line.startswith("checkpoint")] == [6, 12]
    assert "training_step program" in done.stderr
