"""Two processes that Lightning's launcher starts fit for three epochs, and something happens.

python tests/support/meets.py WHAT FOLDER
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once

import lightning.pytorch as pl
from harness import QUIET
from models import Classifier, loader, mlp

import fulgurite


class SignalAtEpochEnd(pl.Callback):
    """On rank 1 alone a signal is noted at the first epoch's end, after its last step."""

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.current_epoch == 0:
            trainer._signal_connector.received_sigterm = True


def main() -> None:
    """Let it happen."""
    what, folder = sys.argv[1], Path(sys.argv[2])
    warnings.simplefilter("ignore")
    backend = fulgurite.backend("CSX", autogen_policy="disabled", cluster_config={"num_csx": 2})
    callbacks: list[pl.Callback] = [SignalAtEpochEnd()] if what == "signal" else []
    trainer = fulgurite.Trainer(backend=backend, **{**QUIET, "max_epochs": 3}, callbacks=callbacks)
    try:
        trainer.fit(Classifier(mlp()), loader(160))
    finally:
        (folder / f"{trainer.global_rank}").write_text(str(trainer.global_step))


if __name__ == "__main__":
    main()
