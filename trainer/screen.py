"""What Lightning prints around a run, without what nobody can act on.

Dropped while a Trainer is made and while it runs, and at no other time: Lightning's tips for other
packages, warnings of its own code, and on CSX which machines of other kinds there are. Warnings and
lines that say something of the user's code stay, as does the table of the model.

The progress bar and that table are Lightning's own. ``Bar`` shows no version number of the logger
among the metrics, keeps to one line in a narrow terminal, and has below it the metrics that do not
fit beside it; ``Summary`` has FLOPs only where Lightning has counted some, for which it needs
``example_input_array``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import rich
from lightning.pytorch.callbacks import RichModelSummary, RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from lightning.pytorch.utilities.model_summary.model_summary import (
    get_formatted_model_size,
    get_human_readable_count,
)
from rich.console import RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

WARNINGS = (
    ".*LeafSpec.*",  # Lightning 2.6 calls what torch 2.13 deprecates
    # weights stay float32, so the summary's estimate holds
    ".*cb16-mixed is not supported by the model summary",
)
WARNINGS_OF_CSX = (
    # how long a step waits for data is measured, and told where that is long
    ".*does not have many workers",
    ".*PU available but not used",
)
TIPS = ("litlogger", "litmodels")
LINES_OF_CSX = ("GPU available: ", "TPU available: ")

_LIGHTNINGS = "lightning.pytorch.utilities.rank_zero"
_WORDS = ("Name", "Type", "Mode")
_NARROW, _WIDER = 100, 10_000
"""Columns of a terminal, and more than any has. Lightning's bar takes 85 before its metrics."""
_APART = "  "
"""Between two metrics: their names may have a space, and one stands after the colon."""


@contextlib.contextmanager
def without_noise(on_csx: bool) -> Iterator[None]:
    """Drop in the block what nobody can act on; the user's filters are as they were after it."""
    dropped = TIPS + (LINES_OF_CSX if on_csx else ())

    def is_told(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not any(word in text for word in dropped)

    logger = logging.getLogger(_LIGHTNINGS)
    before = list(warnings.filters)
    for message in WARNINGS + (WARNINGS_OF_CSX if on_csx else ()):
        warnings.filterwarnings("ignore", message=message)
    # not catch_warnings, which would undo what a hook of the user's filters meanwhile
    added = [one for one in warnings.filters if one not in before]
    logger.addFilter(is_told)
    try:
        yield
    finally:
        logger.removeFilter(is_told)
        for one in added:
            with contextlib.suppress(ValueError):  # the user has removed it
                warnings.filters.remove(one)  # type: ignore[attr-defined]


def replace_defaults(trainer: pl.Trainer, own: list[Any]) -> None:
    """Put ours in the places of Lightning's bar and summary, but for the user's own callbacks."""
    kinds: dict[type, type] = {RichProgressBar: Bar, RichModelSummary: Summary}
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for i, one in enumerate(callbacks):
        if type(one) in kinds and not any(one is other for other in own):
            callbacks[i] = kinds[type(one)]()


class Bar(RichProgressBar):
    """Lightning's bar, in one line of a narrow terminal; metrics that do not fit are below it."""

    def __init__(self) -> None:
        super().__init__(theme=RichProgressBarTheme(metrics_text_delimiter=_APART))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin the display, as Lightning does: from here on it has metrics."""
        super().on_train_start(trainer, pl_module)
        if self.progress is not None:
            shown = functools.partial(_with_metrics_below, self.progress)
            vars(self.progress)["get_renderables"] = shown

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """The logged values, without the number of the logger's version."""
        metrics = super().get_metrics(trainer, pl_module)
        return {name: value for name, value in metrics.items() if name != "v_num"}

    def configure_columns(self, trainer: pl.Trainer) -> list[ProgressColumn]:
        """Lightning's; in a narrow terminal a short bar, and the time that is left alone."""
        columns: list[ProgressColumn] = super().configure_columns(trainer)
        if rich.get_console().width >= _NARROW:
            return columns
        text, _, batches, _, speed = columns
        bar = BarColumn(
            10,
            complete_style=self.theme.progress_bar,
            finished_style=self.theme.progress_bar_finished,
        )
        left = TimeRemainingColumn(compact=True, elapsed_when_finished=True)
        return [text, bar, batches, left, speed]


def _with_metrics_below(progress: Progress) -> Iterator[RenderableType]:
    """What Rich draws: Lightning's table, whose last column are the metrics, if it fits as it is.

    Else the column would be narrow, and break names and values: they are below the table.
    """
    table = progress.make_tasks_table(progress.tasks)
    console = progress.console
    in_one_line = console.options.update(max_width=_WIDER)  # else it is measured as it is folded
    if Measurement.get(console, in_one_line, table).maximum > console.width:
        from rich.columns import Columns  # which Lightning does not import

        metrics = [cell for cell in table.columns.pop().cells if isinstance(cell, Text)]
        yield table
        yield from (Columns(cell.split(_APART), padding=(0, 2)) for cell in metrics if cell)
    else:
        yield table


class Summary(RichModelSummary):
    """Lightning's table of a model, without FLOPs where none were counted."""

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        """Print Lightning's table, or the same without FLOPs."""
        if total_flops:
            totals = (total_training_modes, total_flops)
            numbers = (total_parameters, trainable_parameters, model_size)
            RichModelSummary.summarize(summary_data, *numbers, *totals, **summarize_kwargs)
            return
        shown = [column for column in summary_data if column[0] != "FLOPs"]
        table = Table(header_style=summarize_kwargs.get("header_style", "bold magenta"))
        for name, _ in shown:
            table.add_column(name, justify="left" if name in _WORDS else "right")
        for row in zip(*(cells for _, cells in shown), strict=True):
            table.add_row(*row)
        rich.get_console().print(table)
        frozen = total_parameters - trainable_parameters
        counts = {
            "Trainable params": get_human_readable_count(trainable_parameters),
            "Non-trainable params": get_human_readable_count(frozen),
            "Total params": get_human_readable_count(total_parameters),
            "Total estimated model params size (MB)": get_formatted_model_size(model_size),
            "Modules in train mode": total_training_modes["train"],
            "Modules in eval mode": total_training_modes["eval"],
        }
        for name, count in counts.items():
            rich.get_console().print(f"[bold]{name}[/]: {count}", highlight=False)
