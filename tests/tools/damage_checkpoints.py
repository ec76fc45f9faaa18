"""Flip bits of checkpoints, cut them off, and count what is seen, harmless, or silently other.

    python tests/tools/damage_checkpoints.py --flips 1000

The checkpoints are those of a short training on the CPU, one that Fulgurite wrote and one of stock
Lightning's. Fails where one flip or cut gives other content without an error.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

sys.path.append(str(Path(__file__).parents[1] / "support"))

from models import Classifier, loader, mlp

from fulgurite.backends.checkpoints.damage import CheckpointError, check_lightning
from fulgurite.backends.checkpoints.plugin import CheckpointFiles


def trained(folder: Path) -> Iterator[Path]:
    """Checkpoints of a training, written by us and by stock Lightning."""
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, enable_model_summary=False, **options)
    trainer.fit(Classifier(mlp(), torch.optim.Adam), loader(64))
    for name, plugin in (("ours", CheckpointFiles()), ("stock", TorchCheckpointIO())):
        trainer.strategy.checkpoint_io = plugin
        trainer.save_checkpoint(folder / f"{name}.ckpt")
        yield folder / f"{name}.ckpt"


def equal(one: Any, other: Any) -> bool:
    """Whether two loaded checkpoints are the same, to the bit."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor):
            return False
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and one.numpy().tobytes() == other.numpy().tobytes()
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and list(one) == list(other)
            and all(equal(value, other[key]) for key, value in one.items())
        )
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


def outcome(path: Path, whole: Any, checked: bool = True) -> str:
    """What loading a damaged file does; unchecked, as stock Lightning loads it."""
    plugin = CheckpointFiles() if checked else TorchCheckpointIO()
    try:
        found = plugin.load_checkpoint(path, weights_only=True)
        if checked:
            check_lightning(path, found)
    except CheckpointError as error:
        return "seen" if str(path) in str(error) and "\n" not in str(error) else "told badly"
    except Exception as error:
        return f"another error: {type(error).__name__}"
    return "harmless" if equal(found, whole) else "silently other"


def damaged(path: Path, flips: int, seed: int, checked: bool = True) -> Counter[str]:
    """How often which outcome came, over random flips of a bit each and a tenth as many cuts."""
    content, draw = path.read_bytes(), random.Random(seed)
    whole = CheckpointFiles().load_checkpoint(path, weights_only=True)
    hurt, found = path.with_suffix(".hurt"), Counter[str]()
    for i in range(flips + flips // 10):
        other = bytearray(content)
        if i < flips:
            at = draw.randrange(8 * len(content))
            other[at // 8] ^= 1 << at % 8
        else:
            del other[draw.randrange(len(content)) :]
        hurt.write_bytes(other)
        found[outcome(hurt, whole, checked)] += 1
    return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--flips", type=int, default=1000, help="of each of the two files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stock", action="store_true", help="load as stock Lightning does")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    total = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for path in trained(Path(folder)):
            found = damaged(path, options.flips, options.seed, not options.stock)
            print(f"{path.name} ({path.stat().st_size:,} bytes):", dict(found))
            total += found
    return int(not {*total} <= {"seen", "harmless"})


if __name__ == "__main__":
    sys.exit(main())
