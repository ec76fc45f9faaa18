"""The digits on workers of Ray Train: Ray starts them, and starts them again where one is lost.

    pip install fulgurite[ray]
    python examples/ray_train.py --workers 2 --storage results

Each worker is one CSX system, with its part of the data. After each epoch metrics and a checkpoint
go to Ray, from which it goes on.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray
import ray.train
from digits import Digits, pictures
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader

from fulgurite import Trainer


def train(config: dict[str, Any]) -> None:
    """What each of Ray's workers does."""
    trainer = Trainer(
        device="CSX",
        plugins=[RayLightningEnvironment()],  # how many there are, and which one this is
        callbacks=[RayTrainReportCallback()],
        max_epochs=config["epochs"],
        default_root_dir=config["folder"],
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    loaders = [
        DataLoader(pictures(split), batch_size=32, shuffle=split == "train", drop_last=True)
        for split in ("train", "val")
    ]
    known = ray.train.get_checkpoint()
    if known is None:
        trainer.fit(Digits(), *loaders)
        return
    with known.as_directory() as folder:
        ckpt_path = Path(folder, RayTrainReportCallback.CHECKPOINT_NAME)
        trainer.fit(Digits(), *loaders, ckpt_path=ckpt_path)


def main() -> None:
    """Train, and print what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--storage", type=Path, default=Path("ray_results"))
    options = parser.parse_args()
    storage = options.storage.absolute()
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": options.epochs, "folder": str(storage / "logs")},
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    print({name: round(value, 4) for name, value in result.metrics.items()})


if __name__ == "__main__":
    main()
