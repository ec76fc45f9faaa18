"""``loggers``: which are there by default, and what files call the arguments of some."""

from __future__ import annotations

from lightning.pytorch.loggers.logger import DummyLogger


class ProgressLogger(DummyLogger):
    """The progress bar, which is there by default: ``- ProgressLogger: null`` takes it away."""


DEFAULT_LOGGERS = ("ProgressLogger", "TensorBoardLogger", "CSVLogger")
"""There by default: the bar, and TensorBoard's where it is installed, else the CSV file."""

LOGGER_NAMES = {
    "tensorboardlogger": {"summary_dir": "save_dir"},
    "wandblogger": {"run_id": "id", "run_name": "name"},
}
"""What files call the arguments of some loggers -> Lightning's name."""
