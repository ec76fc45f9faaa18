"""What runs on a GPU, and beside one, each in a process of its own: prints one JSON object.

python tests/support/on_gpu.py numbers 16-mixed
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fulgurite
from fulgurite import Trainer
from fulgurite.utils.data import DataExecutor

QUIET: dict[str, Any] = {
    "max_epochs": 2,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Net(pl.LightningModule):
    """BatchNorm, a logged metric, validation; no bias whose gradient is rounding noise."""

    def __init__(self, optimizer: str = "AdamW") -> None:
        super().__init__()
        self.optimizer = optimizer
        self.net = nn.Sequential(
            nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)
        )
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train", loss, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach().cpu())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        ours = self.optimizer.startswith("fulgurite.")
        kinds = fulgurite.optim if ours else torch.optim
        return getattr(kinds, self.optimizer.rpartition(".")[2])(self.parameters(), lr=1e-2)


def loader(pin_memory: bool = False) -> DataLoader[Any]:
    """Eight batches of eight numbers and a class."""
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=16, pin_memory=pin_memory)


def fitted(trainer: pl.Trainer, pin_memory: bool = False, **options: Any) -> dict[str, Any]:
    """Losses, metrics and weights of a fit, and where the weights were while it ran."""
    torch.manual_seed(0)
    module = Net(options.pop("optimizer", "AdamW"))
    seen = Where()
    trainer.callbacks.append(seen)
    if options.pop("moved", False):
        module.cuda()
    trainer.fit(module, loader(pin_memory), loader(pin_memory), **options)
    return {
        "losses": [float(loss) for loss in module.losses],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "weights": {name: value.cpu().tolist() for name, value in module.state_dict().items()},
        "device": seen.device,
    }


class Where(pl.Callback):
    """Notes on which device a module's weights are when its training begins."""

    device = ""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.device = next(pl_module.parameters()).device.type


def stock(accelerator: str = "gpu", **options: Any) -> pl.Trainer:
    """Lightning's own Trainer."""
    return pl.Trainer(accelerator=accelerator, devices=1, **{**QUIET, **options})


def numbers(precision: str, optimizer: str) -> Any:
    """``device="GPU"`` and stock Lightning on the GPU."""
    ours = fitted(Trainer(device="GPU", precision=precision, **QUIET), optimizer=optimizer)
    return ours, fitted(stock(precision=precision), optimizer=optimizer)


def beside(pinned: str, moved: str) -> Any:
    """CSX on a machine with a GPU, and stock Lightning on the CPU of it."""
    options = {"pin_memory": pinned == "pinned", "moved": moved == "moved"}
    return fitted(Trainer(device="CSX", **QUIET), **options), fitted(stock("cpu"), **options)


def resumed(first: str, then: str) -> Any:
    """A fit of two epochs by stock Lightning, and one whose second epoch is on another device.

    The first epoch is a process of its own: ``saved`` writes it.
    """
    path = Path(tempfile.gettempdir()) / f"on_gpu_{first}.ckpt"
    return fitted(Trainer(device=then, **QUIET), ckpt_path=str(path)), fitted(stock("cpu"))


def saved(device: str) -> Any:
    """A checkpoint after one epoch."""
    trainer = Trainer(device=device, **{**QUIET, "max_epochs": 1})
    fitted(trainer)
    trainer.save_checkpoint(Path(tempfile.gettempdir()) / f"on_gpu_{device}.ckpt")
    return {}


def loop(device: str) -> Any:
    """The loop of docs/loops.md."""
    backend = fulgurite.backend(device)
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    compiled = fulgurite.compile(model, backend)
    optimizer = fulgurite.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []

    @fulgurite.trace
    def step(x: Tensor, y: Tensor) -> Tensor:
        place = next(model.parameters()).device
        loss = nn.functional.cross_entropy(compiled(x.to(place)), y.to(place))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    @fulgurite.step_closure
    def note(loss: Tensor) -> None:
        losses.append(float(loss))

    for x, y in DataExecutor(loader(), num_steps=12):
        note(step(x, y))
    return {"losses": losses, "device": next(model.parameters()).device.type}


if __name__ == "__main__":
    result = globals()[sys.argv[1]](*sys.argv[2:])
    print("\n" + json.dumps(result))
