"""A hand-written training loop on scikit-learn's digits: no LightningModule, no Trainer.

    python examples/custom_loop.py [--device CSX|CPU|GPU] [--epochs 10] [--out runs/custom_loop]

Training and evaluation are two functions under ``fulgurite.trace``: on CSX each becomes one static
program. Closures print and write checkpoints between steps. Ends with the test accuracy, computed
with the weights of the last checkpoint.

Shapes: B pictures of a batch; pictures [B, 1, 8, 8], scores [B, 10].
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fulgurite
from fulgurite.utils.data import DataExecutor

BATCH_SIZE = 32


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.conv1(pictures).relu()
        x = nn.functional.max_pool2d(self.conv2(x).relu(), 2)
        x = nn.functional.dropout(self.fc1(x.flatten(1)).relu(), 0.2, self.training)
        return self.fc2(x)


def loaders() -> tuple[DataLoader[list[Tensor]], DataLoader[list[Tensor]]]:
    """Training and test pictures, 1504 / 288: whole batches, as a program needs."""
    data = load_digits()
    pictures = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = (
        TensorDataset(pictures[part], labels[part]) for part in (order[:1504], order[1504:1792])
    )
    return (
        DataLoader(train, BATCH_SIZE, shuffle=True, drop_last=True),
        DataLoader(test, BATCH_SIZE, drop_last=True),
    )


def main(arguments: list[str] | None = None) -> float:
    """Train, evaluate, and report; returns the test accuracy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="CSX", help="CSX, CPU or GPU")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/custom_loop"), help="of checkpoints")
    parser.add_argument("--autogen-policy", help="CSX only; 'disabled' compiles nothing")
    given = parser.parse_args(arguments)
    options = {"autogen_policy": given.autogen_policy} if given.autogen_policy else {}

    torch.manual_seed(0)
    backend = fulgurite.backend(given.device, **options)
    train, test = loaders()
    model = Net()
    compiled_model = fulgurite.compile(model, backend)
    loss_fn = nn.CrossEntropyLoss()
    steps = given.epochs * len(train)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    checkpoint = given.out / "last.pt"

    @fulgurite.trace
    def training_step(pictures: Tensor, labels: Tensor) -> Tensor:
        loss = loss_fn(compiled_model(pictures), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return loss

    @fulgurite.trace
    def evaluation_step(pictures: Tensor, labels: Tensor) -> Tensor:
        return (compiled_model(pictures).argmax(1) == labels).float().mean()

    @fulgurite.step_closure
    def show(loss: Tensor, step: int) -> None:
        print(f"step {step:4d}  loss {loss.item():.4f}  lr {schedule.get_last_lr()[0]:.2e}")

    @fulgurite.checkpoint_closure
    def save(step: int) -> None:
        given.out.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "schedule": schedule.state_dict(), "step": step}, checkpoint)

    def evaluate() -> float:
        model.eval()
        with torch.no_grad():
            parts = [evaluation_step(*batch) for batch in DataExecutor(test)]
        model.train()
        return torch.stack(parts).mean().item()

    began = time.perf_counter()
    executor = DataExecutor(train, num_steps=steps, checkpoint_steps=100, activation_steps=50)
    for pictures, labels in executor:
        loss = training_step(pictures, labels)
        show(loss, executor.step)
        save(executor.step)
        if executor.step % (2 * len(train)) == 0:
            print(f"step {executor.step:4d}  test accuracy {evaluate():.3f}")
    seconds = time.perf_counter() - began

    saved = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    accuracy = evaluate()
    print(f"{steps} steps in {seconds:.1f} s on {backend.backend_type}, building included")
    print(f"checkpoint of step {saved['step']} {checkpoint}")
    print(f"test accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
