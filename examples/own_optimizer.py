"""An optimizer of one's own, in ten lines: cautious AdamW, on scikit-learn's digits.

    python examples/own_optimizer.py [--device CSX|CPU|GPU] [--epochs 10] [--out runs/own_optimizer]

Trains an MLP as one static program and again in stock Lightning, both with the optimizer below, and
prints how far the losses differ, the times and the test accuracy.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from digits import Digits, loaders
from side_by_side import Record, compare
from torch import Tensor, nn

from fulgurite import Trainer, backend
from fulgurite.optim import AdamBase


class CautiousAdamW(AdamBase):
    """AdamW that moves no weight against its gradient (Liang et al. 2024, arXiv:2411.16085).

    Momentum may still point the old way after the gradient has turned. Such weights wait a step,
    and the others move that much further.
    """

    def update(self, p: Tensor, first: Tensor, second: Tensor, group: dict[str, Any]) -> Tensor:
        update = first / (second.sqrt() + group["eps"])
        agrees = (update * p.grad > 0).to(update.dtype)
        return update * agrees / (agrees.mean() + 1e-8) + group["weight_decay"] * p


class CautiousDigits(Digits):
    """An MLP 64-256-10 under the optimizer above."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10)
        )

    def configure_optimizers(self) -> Any:
        optimizer = CautiousAdamW(self.parameters(), lr=3e-3, weight_decay=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(arguments: list[str] | None = None) -> float:
    """Train twice, test, and report; returns the test accuracy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="CSX", help="CSX, CPU or GPU")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/own_optimizer"), help="of checkpoints"
    )
    parser.add_argument("--autogen-policy", help="CSX only; 'disabled' compiles nothing")
    options = parser.parse_args(arguments)
    policy = {"autogen_policy": options.autogen_policy} if options.autogen_policy else {}

    pl.seed_everything(0, verbose=False)
    train, val, test = loaders()
    record = Record()
    trainer = Trainer(
        backend=backend(options.device, **policy),
        max_epochs=options.epochs,
        default_root_dir=options.out,
        logger=False,
        callbacks=[record],
    )
    module = CautiousDigits()
    trainer.fit(module, train, val)
    [results] = trainer.test(module, test, verbose=False)
    compare(record, CautiousDigits, *loaders()[:2], epochs=options.epochs)
    accuracy: float = results["test_accuracy"]
    print(f"\ncheckpoint     {trainer.checkpoint_callback.best_model_path}")
    print(f"test accuracy  {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
