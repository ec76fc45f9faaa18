"""Files that Lightning's loggers write on CSX, read back: the rows that a stock run writes.

CSVLogger always; TensorBoard, W&B (offline) and MLflow (a local store) where they are installed.
Wall-clock columns are left out.
"""

from __future__ import annotations

import csv
import json
import struct
import time
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from harness import assert_close, make_trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from models import CLASSES, loader, mlp
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

pytestmark = pytest.mark.numbers

Rows = dict[str, list[tuple[int, float]]]
"""What was logged: for each name, (step, value) in the order of writing."""


class Talks(pl.LightningModule):
    """Logs in training and validation, on steps, epochs and both; by hand too."""

    def __init__(self, lr: float = 0.05, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.zeros(2, 8)
        self.net = mlp()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("loss", loss)
        self.log("epoch", loss, on_step=False, on_epoch=True)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict({"a": loss * 2, "unwritten": loss}, logger=False)
        self.log("number", 2.5, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("val", loss)
        self.log("val_both", loss, on_step=True, on_epoch=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            for logger in self.loggers:
                logger.log_metrics({"by_hand": float(outputs["loss"])}, step=self.global_step)

    def on_train_epoch_end(self) -> None:
        self.log("weight", self.net[0].weight.norm())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(
            [
                {"params": self.net[0].parameters(), "lr": 0.01},
                {"params": self.net[3].parameters()},
            ],
            lr=self.hparams["lr"],
            momentum=0.9,
            weight_decay=1e-4,
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "name": "cosine"}]


class Csv:
    """CSVLogger: ``metrics.csv`` and ``hparams.yaml``."""

    @staticmethod
    def make(folder: Path) -> Logger:
        return CSVLogger(folder, name="", version="", flush_logs_every_n_steps=4)

    @staticmethod
    def read(folder: Path) -> tuple[Rows, Any]:
        found: Rows = {}
        with (folder / "metrics.csv").open() as file:
            for row in csv.DictReader(file):
                for name, text in row.items():
                    if name != "step" and text:
                        found.setdefault(name, []).append((int(row["step"]), float(text)))
        return found, yaml.safe_load((folder / "hparams.yaml").read_text())


class TensorBoard:
    """TensorBoardLogger: event files, the graph too, and ``hparams.yaml``."""

    @staticmethod
    def make(folder: Path) -> Logger:
        return TensorBoardLogger(folder, name="", version="", log_graph=True)

    @staticmethod
    def read(folder: Path) -> tuple[Rows, Any]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        tags = events.Tags()
        found = {
            tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in tags["scalars"]
        }
        nodes = [(node.name, node.op) for node in events.Graph().node]
        start = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        session = HParamsPluginData.FromString(start).session_start_info
        hparams = yaml.safe_load((folder / "hparams.yaml").read_text())
        return found, [hparams, nodes, str(sorted(session.hparams.items()))]


class Wandb:
    """WandbLogger(offline=True): the transaction log that ``wandb sync`` reads."""

    @staticmethod
    def make(folder: Path) -> Logger:
        return WandbLogger(project="files", save_dir=folder, offline=True, reinit="finish_previous")

    @staticmethod
    def read(folder: Path) -> tuple[Rows, Any]:
        import wandb
        from wandb.proto.wandb_internal_pb2 import Record

        wandb.finish()
        [path] = folder.glob("wandb/offline-run-*/run-*.wandb")
        records: list[Any] = []
        while not any(record.HasField("exit") for record in records):  # its service still writes
            time.sleep(0.05)
            records = [Record.FromString(data) for data in wandb_records(path.read_bytes())]
        found: Rows = {}
        config = {}
        for record in records:
            items = {name_of(item): json.loads(item.value_json) for item in record.history.item}
            step = items.pop("trainer/global_step", None)
            for name, value in items.items():
                if not name.startswith("_"):
                    found.setdefault(name, []).append((step, value))
            config |= {name_of(one): one.value_json for one in record.config.update}
        config.pop("_wandb", None)
        return dict(sorted(found.items())), config  # W&B's order of names is random


def name_of(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Records of a ``.wandb`` file: LevelDB's log, blocks of 32 KiB, after a header of 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # what is left of a block holds no header
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)  # after a checksum
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


class Mlflow:
    """MLFlowLogger with a local store, read back by MLflow's client."""

    @staticmethod
    def make(folder: Path) -> Logger:
        folder.mkdir(parents=True, exist_ok=True)
        return MLFlowLogger("files", tracking_uri=f"sqlite:///{folder}/ml.db")

    @staticmethod
    def read(folder: Path) -> tuple[Rows, Any]:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(f"sqlite:///{folder}/ml.db")
        experiment = client.get_experiment_by_name("files")
        [run] = client.search_runs([experiment.experiment_id])
        found = {
            name: [
                (one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)
            ]
            for name in sorted(run.data.metrics)
        }
        return found, [run.data.params, run.info.status]


LOGGERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "csv": (Csv, ()),
    "tensorboard": (TensorBoard, ("tensorboard",)),
    "wandb": (Wandb, ("wandb",)),
    "mlflow": (Mlflow, ("mlflow", "sqlalchemy")),
}


def fitted(
    kinds: list[Any], folder: Path, static: bool, policy: str | None, **options: Any
) -> list[tuple[Rows, Any]]:
    """What loggers wrote in a fit with a test after it."""
    torch.manual_seed(0)
    module, loggers = Talks(), [kind.make(folder / kind.__name__) for kind in kinds]
    monitor = LearningRateMonitor(**options.pop("monitor", {}))
    trainer = make_trainer(static, policy, logger=loggers, callbacks=[monitor], **options)
    trainer.fit(module, loader(16 * 10), loader(16 * 3, seed=5))
    trainer.test(module, loader(16 * 2, seed=6), verbose=False)
    for logger in loggers:
        logger.finalize("success")
    return [kind.read(folder / kind.__name__) for kind in kinds]


def same(
    kinds: list[Any], folder: Path, policy: str | None = None, **options: Any
) -> list[tuple[Rows, Any]]:
    """Compare what both runs wrote; returns what CSX wrote."""
    ours = fitted(kinds, folder / "ours", True, policy, **options)
    stock = fitted(kinds, folder / "stock", False, None, **options)
    for (mine, said), (theirs, wanted) in zip(ours, stock, strict=True):
        assert list(mine) == list(theirs)
        for name, values in theirs.items():
            assert [step for step, _ in mine[name]] == [step for step, _ in values], name
            assert_close([v for _, v in mine[name]], [v for _, v in values], 1e-5, name)
        assert said == wanted
    return ours


EVERY = {"max_epochs": 3, "log_every_n_steps": 3, "val_check_interval": 0.5}
CASES: dict[str, dict[str, Any]] = {
    "every_third": EVERY,
    "every_step": {"max_epochs": 2, "log_every_n_steps": 1, "monitor": {"log_momentum": True}},
    "never": {"max_epochs": 2, "log_every_n_steps": 50, "monitor": {"logging_interval": "epoch"}},
    "accumulated": {
        "max_epochs": 2,
        "log_every_n_steps": 2,
        "accumulate_grad_batches": 3,
        "monitor": {"logging_interval": "step", "log_weight_decay": True},
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", LOGGERS)
def test_a_logger_writes_the_rows_of_stock(
    kind: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, packages = LOGGERS[kind]
    for package in packages:
        pytest.importorskip(package, reason=f"needs {package}")
    monkeypatch.setenv("WANDB_SILENT", "true")
    if packages:
        warnings.simplefilter("ignore", DeprecationWarning)  # of those packages
    [(rows, hparams)] = same([reader], tmp_path, **CASES[case])
    assert {"epoch", "both_epoch", "val", "val_both_epoch", "by_hand", "weight", "test"} <= set(
        rows
    )
    assert ("loss" in rows) == (case != "never")
    assert not {"a", "unwritten"} & set(rows)
    assert "0.05" in str(hparams)


@pytest.mark.long
@pytest.mark.compiler
def test_several_loggers_at_once_write_the_rows_of_stock_compiled(tmp_path: Path) -> None:
    kinds: list[Any] = [Csv]
    if find_spec("tensorboard"):
        kinds.append(TensorBoard)
        warnings.simplefilter("ignore", DeprecationWarning)  # log_graph=True
    ours = same(kinds, tmp_path, "default", **EVERY)
    assert all(len(rows["loss"]) == 10 for rows, _ in ours)


class Fails(pl.Callback):
    """Ends a fit with an error in its second epoch, between two rows."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == 14:
            raise KeyError("ended")


def test_after_an_error_the_file_has_the_rows_of_stock(tmp_path: Path) -> None:
    found = []
    for static in (True, False):
        folder = tmp_path / str(static)
        torch.manual_seed(0)
        trainer = make_trainer(static, logger=Csv.make(folder), callbacks=[Fails()], **EVERY)
        with pytest.raises(KeyError):
            trainer.fit(Talks(), loader(16 * 10), loader(16 * 3, seed=5))
        found.append(Csv.read(folder)[0])
    assert_close(*found)
    assert found[0]["loss"][-1][0] == 11


@pytest.mark.parametrize("log", ["gradients", "parameters"])
def test_what_wandb_watch_would_leave_out_in_silence_is_refused(log: str, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    warnings.simplefilter("ignore", DeprecationWarning)
    module, logger = Talks(), Wandb.make(tmp_path)
    try:
        logger.watch(module, log=log, log_freq=2)
        with pytest.raises(MisconfigurationException, match=f"wandb.watch .it writes {log}/"):
            make_trainer(True, logger=logger, max_epochs=1).fit(module, loader(32))
        logger.experiment.unwatch(module)
        make_trainer(True, logger=logger, max_epochs=1).fit(module, loader(32))
    finally:
        wandb.finish()
