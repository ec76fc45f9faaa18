"""What the parameter files of tests name, by import path: ``parts.Net``."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fulgurite.callbacks import DEFAULT_CALLBACKS

SIZE = 64


def rows(count: int = SIZE, seed: int = 1) -> TensorDataset:
    """``count`` samples (x [8], y []) of 4 classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(1))


def row_list(count: int = SIZE) -> list[Any]:
    """The same as a list of samples."""
    return list(rows(count))


def batches(count: int = SIZE, size: int = 8) -> DataLoader[Any]:
    """The same in a loader, shuffled."""
    return DataLoader(rows(count), batch_size=size, shuffle=True)


def odd(texts: list[str]) -> list[Any]:
    """Data of texts that YAML might take for something else."""
    return list(texts)


def number() -> Any:
    """No data, and nothing that says so."""
    return SIZE


def stream(count: int = SIZE) -> Dataset[Any]:
    """The same without a length."""

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(rows(count))

    return Stream()


class Rows(Dataset[Any]):
    """The same as a class."""

    def __init__(self, count: int = SIZE, seed: int = 1) -> None:
        self.rows = rows(count, seed)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class WholeBatches(Rows):
    """Samples that are batches: it takes ``batch_size`` itself."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def __len__(self) -> int:
        return SIZE // self.batch_size

    def __getitem__(self, index: int) -> Any:
        return self.rows[index * self.batch_size : (index + 1) * self.batch_size]


class Loader(DataLoader[Any]):
    """A loader by class."""

    def __init__(self, count: int = SIZE, batch_size: int = 8) -> None:
        super().__init__(rows(count), batch_size=batch_size)


class Processor:
    """A class with ``create_dataloader``."""

    def __init__(self, batch_size: int = 8) -> None:
        self.batch_size = batch_size

    def create_dataloader(self) -> DataLoader[Any]:
        """The loader."""
        return DataLoader(rows(), batch_size=self.batch_size)


class Module(pl.LightningDataModule):
    """A LightningDataModule that notes what is called."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append("setup " + stage)

    def teardown(self, stage: str) -> None:
        self.calls.append("teardown " + stage)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls.append(f"load {state_dict['calls']}")

    def train_dataloader(self) -> Any:
        return DataLoader(rows(), batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(rows(32, seed=2), batch_size=self.batch_size)


class Plain(nn.Module):
    """A plain module whose forward returns the loss; ``form`` says in which way."""

    def __init__(self, form: str = "loss", dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.dropout, self.form = nn.Dropout(dropout), form

    def forward(self, batch: Any) -> Any:
        logits = self.second(self.dropout(self.norm(self.first(batch[0])).relu()))
        loss = nn.functional.cross_entropy(logits, batch[1])
        forms = {"loss": loss, "dict": {"loss": loss, "logits": logits}, "pair": (loss, logits)}
        return forms.get(self.form, logits)


def plain(form: str = "loss") -> nn.Module:
    """A function that makes a model."""
    return Plain(form)


class Net(pl.LightningModule):
    """A LightningModule with an optimizer of its own."""

    def __init__(self, lr: float = 0.1, dropout: float = 0.0) -> None:
        super().__init__()
        self.lr = lr
        self.net = Plain(dropout=dropout)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.net(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Manual(Net):
    """The same under manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(batch))
        optimizer.step()


class Broken(Net):
    """A model that cannot be made."""

    def __init__(self) -> None:
        raise ZeroDivisionError("no such width")


class Steps(pl.Callback):
    """Notes losses, and at which steps validation ran."""

    seen: list[Steps] = []

    def __init__(self) -> None:
        Steps.seen.append(self)
        self.losses: list[float] = []
        self.validated: list[int] = []
        self.groups: list[dict[str, Any]] = []
        self.lrs: list[list[float]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.groups = trainer.optimizers[0].param_groups

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.lrs.append([float(group["lr"]) for group in self.groups])

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any
    ) -> None:
        if outputs:
            self.losses.append(float(outputs["loss"]))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validated.append(trainer.global_step)


QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
DEVICES: dict[str, dict[str, Any]] = {
    "CSX": {"backend": {"backend_type": "CSX", "autogen_policy": "disabled"}},
    "CPU": {"device": "CPU"},
}
NO_CALLBACKS = [{name: None} for name in DEFAULT_CALLBACKS]


def described(folder: Any, device: str = "CPU", **init: Any) -> dict[str, Any]:
    """A parameter file that trains ``Net`` for an epoch of 8 batches; ``fit`` is beside ``init``.

    Args:
        folder: its ``model_dir``.
        device: "CSX", which compiles nothing here, or "CPU".
        init: more keys, or others.
    """
    own = {"model": {"parts.Net": {}}, "model_dir": str(folder), "seed": 0, **DEVICES[device]}
    data = {"data_processor": "parts.Rows", "batch_size": 8}
    callbacks = [*NO_CALLBACKS, *init.pop("callbacks", [{"parts.Steps": {}}])]
    return {
        "trainer": {
            "init": {**QUIET, **own, "callbacks": callbacks, **init},
            "fit": {
                "train_dataloader": {**data, "shuffle": True},
                "val_dataloader": {**data, "count": 16, "seed": 2},
            },
            "validate": {"val_dataloader": {**data, "count": 16, "seed": 2}},
            "test": {"test_dataloader": {**data, "count": 16, "seed": 2}},
            "predict": {"predict_dataloader": {**data, "count": 16, "seed": 2}},
        }
    }
