"""Lightning's parts, a row each: on CSX they do what stock does, or an error says why not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from document_lightning_parts import PAGE, page
from harness import assert_close, make_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_parts import TABLES
from lightning_parts.base import Part, run

SWA, CASE = "`StochasticWeightAveraging`", "with BatchNorm, validating"
ROWS = [
    pytest.param(row, id=re.sub(r"\W+", "_", f"{part} {case}").strip("_"))
    for table in TABLES.values()
    for part, cases in table.items()
    for case, row in cases.items()
]
WORKING = [row for row in ROWS if not row.values[0].refused]
REFUSED = [row for row in ROWS if row.values[0].refused]
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),  # what stock says too
    pytest.mark.filterwarnings("ignore:A checkpoint was saved in on_train_epoch_start"),
]


@pytest.mark.numbers
@pytest.mark.parametrize("part", WORKING)
def test_a_part_does_what_stock_does(part: Part, tmp_path: Path) -> None:
    ours = run(part, tmp_path / "ours", static=True)
    stock = run(part, tmp_path / "stock", static=False)
    assert ours.diary.entries == stock.diary.entries
    assert_close(ours.diary.losses, stock.diary.losses, 1e-5, "losses")
    assert_close(ours.diary.metrics, stock.diary.metrics, 1e-5, "metrics")
    assert_close(ours.state, stock.state, 2e-5, "weights")
    for key in ("state", "param_groups"):
        mine, theirs = ([one[key] for one in of.optimizers] for of in (ours, stock))
        assert_close(mine, theirs, 2e-5, key)
    assert ours.step == stock.step
    assert part.steps in (None, stock.step)
    if stock.found is not None:
        assert_close(ours.found, stock.found, 1e-4, "found")


@pytest.mark.fits
@pytest.mark.parametrize("part", REFUSED)
def test_what_is_refused_says_why(part: Part, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=part.refused):
        run(part, tmp_path, static=True, policy="disabled")


@pytest.mark.numbers
@pytest.mark.parametrize("epoch", [0, 2, 3])
def test_averaging_is_gone_on_with(epoch: int, tmp_path: Path) -> None:
    [case] = [
        row for part in TABLES.values() for name, row in part.get(SWA, {}).items() if name == CASE
    ]

    def trained(**options: Any) -> Any:
        torch.manual_seed(0)
        module = case.module()
        saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        arguments = case.options(tmp_path)
        callbacks = [*arguments.pop("callbacks"), saving]
        trainer = make_trainer(True, callbacks=callbacks, enable_checkpointing=True, **arguments)
        trainer.fit(module, *case.data(), **options)
        return module.state_dict()

    whole, rest = trained(), trained(ckpt_path=tmp_path / f"epoch={epoch}.ckpt")
    assert_close(rest, whole, 1e-6, "weights and statistics")


def test_the_docs_list_every_part() -> None:
    assert all(row.values[0].why for row in REFUSED)
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "run: python tests/tools/document_lightning_parts.py"
    )
