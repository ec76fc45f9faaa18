"""Say what is done while a program is compiled, where that takes long."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fulgurite.backends.csx.program import report

PATIENCE_S = 2.0
_under_way: set[object] = set()


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Let ``is_building`` be true while the block runs: it traces and compiles a program."""
    one = object()
    _under_way.add(one)
    try:
        yield
    finally:
        _under_way.discard(one)


def is_building() -> bool:
    """Whether a program is being traced or compiled, in any thread."""
    return bool(_under_way)


@contextlib.contextmanager
def shown(trainer: pl.Trainer | None, doing: str) -> Iterator[None]:
    """Show ``doing`` while the block runs, if it runs for more than two seconds.

    Below Lightning's Rich progress bar on a terminal it is a line with the seconds that passed,
    gone with the block. Else it is one plain line: above another kind of bar, or in the log.
    A block that Ctrl-C stops, or a signal handler that exits, ends with a line too.
    """
    live = None if trainer is None else _line_below(trainer.progress_bar_callback, doing)
    say = functools.partial(report.say, trainer, f"CSX: {doing} ...")
    timer = threading.Timer(PATIENCE_S, say if live is None else live.start)
    stopped = False
    timer.daemon = True  # a process that ends meanwhile does not wait for it
    timer.start()
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        stopped = True
        raise
    finally:
        timer.cancel()
        timer.join()
        if live is not None:
            live.stop()
        if stopped:
            report.say(trainer, f"CSX: stopped while {doing}")


def _line_below(bar: ProgressBar | None, doing: str) -> Progress | None:
    """A line for the display that Lightning's bar drives (rich 14.1 draws one inside another)."""
    if not isinstance(bar, RichProgressBar) or bar.progress is None:
        return None
    console = bar.progress.console
    if not (bar.progress.live.is_started and console.is_interactive):
        return None
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    line = Progress(*columns, console=console, transient=True)
    line.add_task(f"CSX: {doing}", total=None)
    return line
