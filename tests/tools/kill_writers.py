"""Kill trainings while they write checkpoints, at random moments, and look at what is left.

    python tests/tools/kill_writers.py --kills 20

Each training saves after every step, by ``Checkpoint``, ``KeepNCheckpoints`` and a ModelCheckpoint
with links, and goes on from the one before. Fails where a file is not whole, where none is there
any more, or where something is left over after the next start.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from fulgurite.backends.checkpoints.damage import check_file

_TRAINING = """
import sys, warnings
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
import fulgurite
from fulgurite.callbacks import Checkpoint, KeepNCheckpoints
from models import Classifier, loader, mlp
from torch import nn
warnings.simplefilter("ignore")
folder = sys.argv[1]
class Big(Classifier):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(8, 60000), nn.ReLU(), nn.Linear(60000, 10)))
each = {"every_n_train_steps": 1, "monitor": "step", "mode": "max"}
best = ModelCheckpoint(folder + "/best", save_top_k=2, save_last="link", **each)
trainer = fulgurite.Trainer(device="CPU", model_dir=folder, max_steps=100_000, logger=False,
    enable_progress_bar=False, enable_model_summary=False,
    callbacks=[Checkpoint(steps=1), KeepNCheckpoints(2), best])
print("begins", flush=True)
trainer.fit(Big(), loader(160), ckpt_path="last")
"""


def killed(folder: Path, after_s: float) -> None:
    """Begin a training, and kill it some seconds after its first checkpoint of this life."""
    (folder / "best").mkdir(exist_ok=True)
    before = {path.name for path in folder.glob("*.ckpt")}
    support = Path(__file__).parents[1] / "support"
    command = [sys.executable, "-c", f"import sys; sys.path.append({str(support)!r}){_TRAINING}"]
    with subprocess.Popen([*command, str(folder)], stdout=subprocess.DEVNULL) as training:
        while {path.name for path in folder.glob("*.ckpt")} <= before:
            if training.poll() is not None:
                raise RuntimeError(f"the training ended, with {training.returncode}")
            time.sleep(0.01)
        time.sleep(after_s)
        training.kill()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw, found, left = random.Random(options.seed), Counter[str](), set[Path]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(options.kills):
            killed(folder, draw.uniform(0, 2))
            found["parts of killed processes that were not swept"] += sum(p.exists() for p in left)
            left = set(folder.rglob(".fulgurite-*"))
            found["kills with a part left"] += bool(left)
            for path in folder.rglob("*.ckpt"):
                check_file(path)  # raises where one is damaged
                found["whole files"] += 1
            found["kills without a checkpoint left"] += not [*folder.glob("*.ckpt")]
            found["links that lead nowhere"] += not (folder / "best" / "last.ckpt").exists()
    print(dict(found))
    return int(any(found[name] for name in found if "swept" in name or "without" in name))


if __name__ == "__main__":
    sys.exit(main())
