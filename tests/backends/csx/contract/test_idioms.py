"""Idioms: each gives stock's numbers, or the error that the docs say."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from document_idioms import PAGE, page
from harness import assert_same_run, both, fit
from idioms import IDIOMS
from idioms.base import Idiom
from idioms.refused import Refused, refusals

from fulgurite import TraceError

EVERY = [idiom for group in IDIOMS.values() for idiom in group]


@pytest.mark.parametrize("idiom", EVERY, ids=lambda idiom: idiom.name)
def test_an_idiom_gives_the_numbers_of_stock(idiom: Idiom) -> None:
    options: dict[str, Any] = {"limit_train_batches": 4, "backend": {"audit": True}}
    ours, stock = both(idiom.make, lambda: (idiom.batches(),), **options)
    assert len(stock.losses) == 4
    assert_same_run(ours, stock, idiom.noise, idiom.tolerance, 2 * idiom.tolerance)


@pytest.mark.filterwarnings("ignore:.* is kept in ")
@pytest.mark.parametrize("kind", list(refusals()), ids=lambda kind: kind.__name__)
def test_what_does_not_work_is_an_error_with_its_remedy(kind: type[Refused]) -> None:
    module: Any = None

    def make() -> Any:
        nonlocal module
        module = kind()
        return module

    with pytest.raises(TraceError) as raised:
        fit(make, lambda: (kind.batches(),), static=True)
    assert isinstance(raised.value, kind.error)
    assert kind.remedy in str(raised.value).partition("Remedy: ")[2]
    assert raised.value.line is not None
    lines, first = inspect.getsourcelines(kind)
    marked = [first + i for i, line in enumerate(lines) if line.endswith("# here\n")]
    if marked:
        assert Path(raised.value.line.file) == Path(inspect.getfile(kind))
        assert [raised.value.line.line] == marked
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_the_docs_list_every_idiom() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/tools/document_idioms.py"
