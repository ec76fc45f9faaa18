"""The fit that ``tests/tools/kills.py`` kills, and the lines by which it says what it did."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
import sys
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from models import WithTotals
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fulgurite
from fulgurite.callbacks import Checkpoint

STEPS_PER_EPOCH, EPOCHS, EVERY = 12, 3, 4


class Net(WithTotals):
    """All whose state a run carries over; 0.6 M parameters, so that writing takes time."""

    def __init__(self) -> None:
        wide = nn.Linear(768, 768)
        layers = nn.Linear(16, 768), nn.ReLU(), nn.Dropout(0.2), wide, nn.Linear(768, 4)
        super().__init__(nn.Sequential(*layers))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
        }


def loader(batches: int, seed: int, shuffle: bool) -> DataLoader[Any]:
    """Batches of 16 rows of noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16 * batches, 16, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=16, shuffle=shuffle)


class Witness(pl.Callback):
    """Says which phase begins, and writes down each result at once: a line is whole or none."""

    def __init__(self, folder: Path, phases: Connection) -> None:
        self._lines = os.open(folder / "lines", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self.phases = phases

    def line(self, *words: Any) -> None:
        """Write one."""
        os.write(self._lines, (" ".join(map(str, words)) + "\n").encode())

    def on_train_batch_start(self, *args: Any) -> None:
        self.phases.send("step")

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        batch_sum = float(batch[0].double().sum()).hex()
        self.line("step", trainer.global_step, outputs["loss"].item().hex(), batch_sum)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.phases.send("validation")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            values = (
                trainer.callback_metrics["val_loss"],
                trainer.optimizers[0].param_groups[0]["lr"],
            )
            self.line("validation", trainer.global_step, *(float(v).hex() for v in values))

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        metrics = {k: float(v).hex() for k, v in sorted(trainer.callback_metrics.items())}
        if trainer.current_epoch:
            self.line("epoch", trainer.current_epoch, *metrics.values())


def digest(trainer: Any, module: pl.LightningModule) -> str:
    """Of weights, optimizer, scheduler, metrics and random state."""
    state = (
        {k: v.numpy().tobytes() for k, v in module.state_dict().items()},
        [
            {k: v.numpy().tobytes() for k, v in values.items()}
            for values in trainer.optimizers[0].state_dict()["state"].values()
        ],
        trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        {k: float(v) for k, v in sorted(trainer.callback_metrics.items())},
        torch.get_rng_state().numpy().tobytes(),
    )
    return hashlib.sha256(pickle.dumps(state)).hexdigest()


def newest(folder: Path) -> Path | None:
    """The checkpoint of the latest step; of two, the one written last."""
    found = [(step_of(path), path.stat().st_mtime_ns, path) for path in folder.glob("*.ckpt")]
    return max(found)[2] if found else None


def step_of(path: Path) -> int:
    """The optimizer step in a file's name."""
    match = re.search(r"(?:step=|checkpoint_)(\d+)", path.name)
    assert match is not None, path
    return int(match[1])


def fit(callback: str, folder: Path, cache: Path, phases: Connection) -> None:
    """What a process does until it is killed."""
    quiet()
    witness = Witness(folder, phases)
    saver: Any = Checkpoint(steps=EVERY)
    if callback == "ModelCheckpoint":
        saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=EVERY, save_top_k=-1)
    torch.manual_seed(5)
    trainer = fulgurite.Trainer(
        backend={"backend_type": "CSX", "compile_dir": str(cache)},
        model_dir=str(folder),
        deterministic=True,
        max_epochs=EPOCHS,
        val_check_interval=5,
        limit_val_batches=2,
        callbacks=[witness, saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    save = trainer.save_checkpoint

    def announced(path: Any, *args: Any, **kwargs: Any) -> None:
        phases.send("writing")
        save(path, *args, **kwargs)

    trainer.save_checkpoint = announced  # type: ignore[method-assign]
    replace = os.replace

    def noted(part: Any, path: Any, **kwargs: Any) -> None:
        replace(part, path, **kwargs)
        if str(path).endswith(".ckpt"):  # written beside the steps: it counts once it has its name
            witness.line("saved", step_of(Path(path)))

    os.replace = noted
    module = Net()
    phases.send("compiling")
    loaders = loader(STEPS_PER_EPOCH, 1, True), loader(4, 2, True)
    trainer.fit(module, *loaders, ckpt_path=newest(folder))
    witness.line("end", digest(trainer, module))


def quiet() -> None:
    """Nothing but the figures."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
