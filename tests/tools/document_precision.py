"""Draw docs/precision.png: a GPT trained in float32, bfloat16 and cbfloat16 from one seed.

    python tests/tools/document_precision.py [--steps 500]

The model and the data of ``examples/gpt_bytes.py``. Prints what each run ended with.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import matplotlib
import torch
from torch import Tensor

import fulgurite

sys.path.append(str(Path(__file__).parents[2] / "examples"))
sys.path.append(str(Path(__file__).parents[1] / "support"))
from gpt_bytes import GPT, loaders  # examples/ is no package
from harness import QUIET

PICTURE = Path(__file__).parents[2] / "docs" / "precision.png"
SMOOTHED_OVER = 20  # steps
SHOWN_DIFFERENCE = 0.05  # bits per byte; the first steps of cbfloat16, which are skipped, are more


PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"precision": "bf16-mixed"},
    "cbfloat16": {"precision": "cb16-mixed"},
}


class Losses(pl.Callback):
    """The bits per byte of every step."""

    def __init__(self) -> None:
        self.bits: list[Tensor] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *rest: Any
    ) -> None:
        self.bits.append(outputs["loss"] / math.log(2))


def train(options: dict[str, Any], steps: int) -> tuple[Tensor, float, int]:
    """The bits per byte of every step, those of the validation at the end, and steps skipped."""
    pl.seed_everything(0, verbose=False)
    train_loader, val_loader = loaders(steps)
    losses = Losses()
    trainer = fulgurite.Trainer(
        device="CSX", max_steps=steps, gradient_clip_val=1.0, callbacks=[losses], **options, **QUIET
    )
    trainer.fit(GPT(), train_loader, val_loader)
    skipped = trainer.scaler.skipped_steps if trainer.scaler is not None else 0
    bits = float(trainer.callback_metrics["val_bits_per_byte"])
    return torch.stack(losses.bits), bits, skipped


def smoothed(curve: Tensor) -> Tensor:
    """The mean of each ``SMOOTHED_OVER`` steps in a row."""
    return curve.unfold(0, SMOOTHED_OVER, 1).mean(1)


def draw(curves: dict[str, Tensor]) -> None:
    """The curves above, what the 16-bit ones differ from float32's below."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(7, 5), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    colors = {"float32": "black", "bfloat16": "tab:orange", "cbfloat16": "tab:blue"}
    for name, curve in curves.items():
        line = smoothed(curve)
        steps = torch.arange(len(line)) + SMOOTHED_OVER
        above.plot(steps, line, color=colors[name], label=name, linewidth=1)
        if name != "float32":
            difference = smoothed(curve - curves["float32"])
            below.plot(steps, difference, color=colors[name], label=name, linewidth=1)
    below.axhline(0, color="black", linewidth=0.5)
    below.set_ylim(-SHOWN_DIFFERENCE, SHOWN_DIFFERENCE)
    above.set_ylabel("bits per byte")
    above.set_title(f"GPT of 0.86 million weights, means of {SMOOTHED_OVER} steps")
    below.set_ylabel("minus float32")
    below.set_xlabel("step")
    above.legend(frameon=False)
    figure.savefig(PICTURE, dpi=100)


def main() -> None:
    """Train, print, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    steps = parser.parse_args().steps
    curves: dict[str, Tensor] = {}
    for name, options in PRECISIONS.items():
        curves[name], validation, skipped = train(options, steps)
        last = float(curves[name][-50:].mean())
        apart = float((curves[name] - curves["float32"])[-400:].abs().max())
        print(
            f"{name:10} last 50 steps {last:.4f}  validation {validation:.4f}"
            f"  apart in the last 400 {apart:.4f}  skipped {skipped}"
        )
    draw(curves)


if __name__ == "__main__":
    main()
