"""Tables that a step makes of constants on first use, and what the host may do to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same_run, both, fit
from models import Classifier, loader, mlp
from torch import Tensor

from fulgurite.backends.csx.diagnostics.trace_errors import StateChanged

FEW: dict[str, Any] = {"limit_train_batches": 4, "max_epochs": 2}


class Table(Classifier):
    """Weighs by a table that it makes where there is none; a hook does something to that.

    Args:
        change: what.
        first: whether there is one from the beginning.
    """

    def __init__(self, change: Callable[[dict[int, Tensor]], object], first: bool = False) -> None:
        super().__init__(mlp())
        self.tables: dict[int, Tensor] = {}
        self.change = change
        if first:
            self.table()

    def table(self) -> Tensor:
        if 4 not in self.tables:
            self.tables[4] = 0.9 ** torch.arange(4).float()
        return self.tables[4]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net(batch[0]) * self.table()).square().mean()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.change(self.tables)


CHANGES: dict[str, Callable[[dict[int, Tensor]], object]] = {
    "replaced": lambda tables: tables.update({4: torch.ones(4)}),
    "in place": lambda tables: tables[4].fill_(1.0),
}


@pytest.mark.fits
@pytest.mark.parametrize("name", CHANGES)
def test_a_table_that_a_step_made_is_not_the_hosts_to_change(name: str) -> None:
    """Eagerly the first step alone makes it; a program makes it in each, and would not see this."""
    with pytest.raises(StateChanged, match=r"self\.tables\[4\] was made in the step, of constants"):
        fit(lambda: Table(CHANGES[name]), lambda: (loader(),), static=True, **FEW)


@pytest.mark.numbers
@pytest.mark.parametrize("name", CHANGES)
def test_one_that_was_there_before_is(name: str) -> None:
    run = both(lambda: Table(CHANGES[name], first=True), lambda: (loader(),), **FEW)
    assert_same_run(*run)


@pytest.mark.numbers
def test_one_that_the_host_takes_away_or_leaves_alone_is_as_it_was() -> None:
    for change in (dict.clear, len):
        assert_same_run(*both(lambda: Table(change), lambda: (loader(),), **FEW))  # noqa: B023
