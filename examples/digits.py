"""A small ConvNet on scikit-learn's handwritten digits, trained as one static program.

    python examples/digits.py [--device CSX|CPU|GPU] [--compare] [--epochs 12] [--out runs/digits]

1797 real pictures, 8 x 8 pixels, ten classes; those that are trained on come shifted too. Ends with
where a picture of the curves lies, the test accuracy, the steps per second, and where the
checkpoint lies. With --compare the same module is trained by stock Lightning too, from the same
seed.

Shapes: B pictures of a batch, C classes; pictures [B, 1, 8, 8], logits [B, C].
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from side_by_side import Record, compare
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from fulgurite import Trainer, backend

BATCH_SIZE = 32
CLASSES = 10


class Digits(pl.LightningModule):
    """Two convolutions with BatchNorm and one hidden layer."""

    def __init__(self, learning_rate: float = 0.05) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(64, CLASSES),
        )
        self.train_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.val_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.test_accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: list[Tensor]) -> Tensor:
        pictures, labels = batch
        logits = self.net(pictures)
        loss = nn.functional.cross_entropy(logits, labels)
        self.train_accuracy(logits, labels)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("accuracy", self.train_accuracy, prog_bar=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        pictures, labels = batch
        logits = self.net(pictures)
        self.val_accuracy.update(logits, labels)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels))
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: list[Tensor]) -> None:
        pictures, labels = batch
        self.test_accuracy.update(self.net(pictures), labels)
        self.log("test_accuracy", self.test_accuracy)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(
            self.parameters(), lr=self.learning_rate, momentum=0.9, weight_decay=1e-4
        )
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


SPLITS = {"train": slice(0, 1280), "val": slice(1280, 1536), "test": slice(1536, 1792)}


def pictures(split: str, shifted: bool = False) -> TensorDataset:
    """Train, validation or test pictures, 1280 / 256 / 256: whole batches, as a program needs.

    With ``shifted`` there are nine of each: as it is, and moved by a pixel in eight directions.
    """
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    part = order[SPLITS[split]]
    images, labels = images[part], labels[part]
    if shifted:
        wide = nn.functional.pad(images, (1, 1, 1, 1))
        moves = [wide[:, :, y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
        images, labels = torch.cat(moves), labels.repeat(len(moves))
    return TensorDataset(images, labels)


def loaders(shifted: bool = False) -> tuple[DataLoader[Any], DataLoader[Any], DataLoader[Any]]:
    """Loaders of the three; ``shifted`` is for the pictures to train on."""
    return (
        DataLoader(pictures("train", shifted), BATCH_SIZE, shuffle=True, drop_last=True),
        DataLoader(pictures("val"), BATCH_SIZE, drop_last=True),
        DataLoader(pictures("test"), BATCH_SIZE, drop_last=True),
    )


class Curves(pl.Callback):
    """Draws loss and accuracy of each epoch when a fit ends; a checkpoint keeps them."""

    def __init__(self) -> None:
        self.points: dict[str, list[tuple[int, float]]] = {}

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name in ("loss_epoch", "val_loss", "accuracy", "val_accuracy"):
            if name in trainer.callback_metrics:
                value = float(trainer.callback_metrics[name])
                self.points.setdefault(name, []).append((trainer.current_epoch + 1, value))

    def state_dict(self) -> dict[str, Any]:
        return {"points": self.points}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.points = state_dict["points"]

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not (self.points and trainer.is_global_zero):
            return  # built but not trained, or another process's to draw
        picture = Path(trainer.default_root_dir) / "curves.png"
        self.draw(picture)
        print(f"curves         {picture}")

    def draw(self, picture: Path) -> None:
        """Write the picture: loss on the left, accuracy on the right."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
        for axis, names in zip(
            axes, (("loss_epoch", "val_loss"), ("accuracy", "val_accuracy")), strict=True
        ):
            for name, label in zip(names, ("training", "validation"), strict=True):
                if name in self.points:
                    epochs, values = zip(*self.points[name], strict=True)
                    axis.plot(epochs, values, marker="o", markersize=3, label=label)
            axis.set_xlabel("epoch")
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.set_ylabel(names[0].removesuffix("_epoch"))
            axis.grid(alpha=0.3)
            axis.legend()
        figure.tight_layout()
        figure.savefig(picture, dpi=120)
        pyplot.close(figure)


def main(arguments: list[str] | None = None) -> float:
    """Train, test, and report; returns the test accuracy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="CSX", help="CSX, CPU or GPU")
    parser.add_argument("--compare", action="store_true", help="train in stock Lightning too")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="folder of results")
    parser.add_argument("--autogen-policy", help="CSX only; 'disabled' compiles nothing")
    options = parser.parse_args(arguments)

    pl.seed_everything(0, verbose=False)
    train, val, test = loaders(shifted=True)
    record = Record()
    checkpoint = ModelCheckpoint(monitor="val_accuracy", mode="max", filename="best")
    where: dict[str, Any] = {"device": options.device}
    if options.autogen_policy:
        where = {"backend": backend(options.device, autogen_policy=options.autogen_policy)}
    trainer = Trainer(
        **where,
        max_epochs=options.epochs,
        default_root_dir=options.out,
        logger=CSVLogger(options.out.parent, name=options.out.name),
        log_every_n_steps=10,
        callbacks=[record, checkpoint, Curves()],
    )
    module = Digits()
    trainer.fit(module, train, val)
    [results] = trainer.test(module, test, ckpt_path="best", verbose=False)

    accuracy = results["test_accuracy"]
    print(f"\ntest accuracy  {accuracy:.1%}")
    print(f"steps per s    {record.steps_per_s:.0f}")
    print(f"checkpoint     {checkpoint.best_model_path}")
    if options.compare:
        compare(record, Digits, *loaders(shifted=True)[:2], epochs=options.epochs)
        print(
            "(rounding noise grows: from weights that differ by 1e-07 stock Lightning differs by"
            " 4e-01\nin the first 100 steps)"
        )
    return accuracy


if __name__ == "__main__":
    main()
