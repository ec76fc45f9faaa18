"""Idioms: each gives stock's numbers, or the error that the docs say."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import same_passes
import torch
from document_idioms import PAGE, page
from harness import assert_same_run, both, fit
from idioms import IDIOMS
from idioms.base import Example, Idiom, optimizer
from idioms.refused import Refused, refusals
from together import Together, check_each, groups

from fulgurite import TraceError
from fulgurite.backends.csx.graph.passes import observing_passes

OPTIONS: dict[str, Any] = {"limit_train_batches": 4, "backend": {"audit": True}}


def is_plain(idiom: Idiom) -> bool:
    """Whether nothing but its loss is its own, so that it can be trained beside others."""
    kind = type(idiom.make())
    own = {"training_step", "configure_optimizers"} & {
        name for base in kind.__mro__[: kind.__mro__.index(Example)] for name in vars(base)
    }
    return not own and not idiom.why and not idiom.noise and not kind.alone


def in_trainings() -> Iterator[Any]:
    """The plain idioms of a group in few trainings, each of the others in its own."""
    for idioms in IDIOMS.values():
        plain = [idiom for idiom in idioms if is_plain(idiom)]
        alone = [[idiom] for idiom in idioms if idiom not in plain]
        for batches in {idiom.batches: None for idiom in plain}:
            alone.extend(groups([idiom for idiom in plain if idiom.batches is batches]))
        for rows in alone:
            last = f"_to_{rows[-1].name}" * (len(rows) > 1)
            yield pytest.param(rows, id=rows[0].name + last)


def as_stock(idioms: Sequence[Idiom]) -> None:
    """Train idioms on CSX and in stock Lightning, and compare."""
    first = idioms[0]

    def make() -> Any:
        parts: list[Any] = [idiom.make() for idiom in idioms]
        return parts[0] if len(parts) == 1 else Together(parts, optimizer)

    with observing_passes(same_passes.compare):
        ours, stock = both(make, lambda: (first.batches(),), **OPTIONS)
    assert len(stock.losses) == 4
    assert_same_run(ours, stock, first.noise, first.tolerance, 2 * first.tolerance)


# torch.compile asks every tensor for its gradient; since torch 2.14 one that is no leaf warns of it
@pytest.mark.numbers
@pytest.mark.filterwarnings(r"ignore:The \.grad attri:UserWarning:torch._dynamo.variables.builder")
@pytest.mark.filterwarnings(r"ignore:The \.grad attri:UserWarning:torch._subclasses.meta_utils")
@pytest.mark.parametrize("idioms", list(in_trainings()))
def test_idioms_give_the_numbers_of_stock(idioms: list[Idiom]) -> None:
    check_each(idioms, as_stock, lambda idiom: idiom.name)


@pytest.mark.fits
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
