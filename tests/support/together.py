"""Rows that share one training: many small modules in one, checked together, found by halving.

A training costs seconds (it is traced, and compiled) where its steps cost milliseconds. So rows of
a table are parts of one module whose loss is the sum of theirs; each part trains as it would alone,
for no parameter is shared. Where the whole fails, the halves are checked, down to the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from recorded import of_rows
from torch import Tensor, nn

T = TypeVar("T")
MOST = 8
"""Rows in one training. Twelve layers, compiled, CPU seconds: 56 alone, 25 by four, 18 at once;
operation by operation 10, 9 and 12."""


def groups(rows: Sequence[T], most: int = MOST) -> Iterator[list[T]]:
    """The rows in order, in lists of nearly equal lengths."""
    count = -(-len(rows) // most)
    for number in range(count):
        yield list(rows[number * len(rows) // count : (number + 1) * len(rows) // count])


def check_each(
    rows: Sequence[T], check: Callable[[Sequence[T]], None], name: Callable[[T], str]
) -> None:
    """Check rows together; if that fails, raise what the rows at fault raise, found by halving.

    Args:
        rows: at least one.
        check: raises where one of the rows it is given is wrong.
        name: of a row, for the error.
    """
    try:
        with of_rows(tuple(map(name, rows))):
            check(rows)
    except Exception as error:  # whatever a row does wrong; it is raised again with its name
        failures = [] if len(rows) == 1 else _of_halves(rows, check, name)
        if failures:
            raise ExceptionGroup("rows that fail", failures) from None
        error.add_note(f"in {', '.join(map(name, rows))}" + ", together only" * (len(rows) > 1))
        raise


def _of_halves(
    rows: Sequence[T], check: Callable[[Sequence[T]], None], name: Callable[[T], str]
) -> list[Exception]:
    """The errors of the rows at fault."""
    failures: list[Exception] = []
    middle = len(rows) // 2
    for half in (rows[:middle], rows[middle:]):
        try:
            check_each(half, check, name)
        except ExceptionGroup as group:
            failures.extend(group.exceptions)
        except Exception as error:  # of one row, with its name
            failures.append(error)
    return failures


class Together(pl.LightningModule):
    """Modules with ``training_step(batch, batch_idx) -> loss``; each loss is logged by its number.

    Args:
        parts: the modules.
        optimizer: makes the optimizer of all their parameters.
    """

    def __init__(
        self, parts: Sequence[Any], optimizer: Callable[[Any], torch.optim.Optimizer]
    ) -> None:
        super().__init__()
        self.parts, self._make = nn.ModuleList(parts), optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = [part.training_step(batch, batch_idx) for part in self.parts]
        for number, loss in enumerate(losses):
            self.log(str(number), loss)
        return torch.stack(losses).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._make(self.parameters())
