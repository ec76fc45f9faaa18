"""A wrong program is narrowed down to the operation that is: the rest stays compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from graphs import graph_of
from harness import Run, assert_same_run, fit
from loss_cases import loads, makers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fulgurite.backends.csx.compile.checking import narrowing
from fulgurite.backends.csx.compile.fabric import Loaded
from fulgurite.backends.csx.compile.programs.kernels import (
    How,
    KernelCall,
    KernelFailed,
    Kernels,
    Maker,
)
from fulgurite.errors import MiscompiledWarning

COUNT = 9  # operations of ``chain``, two in each kernel but the last


def chain(x: Tensor) -> Tensor:
    for _ in range(COUNT):
        x = x.sin()
    return x


KERNELS = [tuple(range(i, min(i + 2, COUNT))) for i in range(0, COUNT, 2)]


def narrowed(tmp_path: Path, broken: Sequence[int], otherwise: bool = False) -> frozenset[int]:
    """What is found where some of the operations are wrong unless the library computes them.

    Args:
        tmp_path: a folder for the report.
        broken: these; if they are computed in kernels.
        otherwise: something else is wrong too, whoever computes what.
    """
    graph = graph_of(chain, torch.ones(3))
    x = torch.linspace(0.1, 1, 3)
    torch.save({"inputs": [x], "random_state": torch.get_rng_state()}, tmp_path / narrowing.START)

    def compiled(library: frozenset[int]) -> Any:
        def call(inputs: list[Tensor]) -> list[Tensor]:
            wrong = len(set(broken) - library) + otherwise
            return [chain(inputs[0]) + wrong]

        return call

    calls = [
        KernelCall(kernel=f"kernel_{i}", maker=Maker.GENERATED, operations=one)
        for i, one in enumerate(KERNELS)
    ]
    library = KernelCall(kernel="aten.mm.default", maker=Maker.LIBRARY, operations=(COUNT,))
    reference = lambda inputs: [chain(inputs[0])]  # noqa: E731
    kernels = Kernels(calls=(library, *calls))
    return narrowing.wrong_operations(graph, kernels, tmp_path, reference, compiled)


@pytest.mark.parametrize("broken", range(COUNT))
def test_each_operation_is_found(broken: int, tmp_path: Path) -> None:
    assert narrowed(tmp_path, [broken]) == {broken}


@pytest.mark.parametrize("broken", [(0, 1), (6, 8)])
def test_of_several_all_are_found(broken: tuple[int, ...], tmp_path: Path) -> None:
    found = narrowed(tmp_path, broken)
    assert found >= set(broken)
    assert len(found) <= COUNT / 2


@pytest.mark.parametrize(
    ("broken", "otherwise"),
    [((), False), ((), True), ((3,), True), ((0, 8), False), (tuple(range(COUNT)), False)],
    ids=["not wrong here", "no kernel", "a kernel and more", "far apart", "all"],
)
def test_nothing_is_found_where_no_few_kernels_are_wrong(
    broken: tuple[int, ...], otherwise: bool, tmp_path: Path
) -> None:
    assert narrowed(tmp_path, broken, otherwise) == frozenset()


@pytest.mark.parametrize("mark", [None, "", "wrong", "Linux 6.1\nstep 1 of a run"])
def test_a_mark_of_something_else_names_no_operation(mark: str | None) -> None:
    assert narrowing.wrong_in(mark) == frozenset()
    assert narrowing.wrong_in(narrowing.mark_of(frozenset({7, 2}))) == {2, 7}


class Softened(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        h = self.first(x).sigmoid() * 0.5
        return (self.last(h).exp() - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def run(folder: Path | None, **options: Any) -> Run:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    given = {"policy": "default", "backend": {"compile_dir": folder}} if folder else {}
    return fit(
        Softened,
        lambda: (DataLoader(TensorDataset(x), batch_size=8),),
        static=folder is not None,
        **given,
        **options,
    )


@pytest.fixture
def wrong_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler whose kernels compute another exponential."""
    from torch._inductor.codegen import cpp

    vectors = staticmethod(lambda x: f"({x}.exp() + {x}.exp())")
    monkeypatch.setattr(cpp.CppVecOverrides, "exp", vectors)
    monkeypatch.setattr(cpp.CppOverrides, "exp", staticmethod(lambda x: f"(2 * std::exp({x}))"))


@pytest.fixture(name="loads")
def _loads() -> Iterator[list[Loaded]]:
    with loads() as found:
        yield found


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.compiler
def test_one_wrong_kernel_is_the_librarys_and_the_rest_is_compiled(
    tmp_path: Path, wrong_exp: None, loads: list[Loaded]
) -> None:
    stock = run(None)
    with pytest.warns((MiscompiledWarning, KernelFailed)) as caught:
        ours = run(tmp_path)
    assert_same_run(ours, stock)
    of = [w for w in caught if w.category in (MiscompiledWarning, KernelFailed)]
    assert [w.category for w in of] == [MiscompiledWarning, KernelFailed]
    text = str(of[1].message)
    assert "wrong (aten.exp.default). The rest is compiled" in text
    assert "test_narrowing.py" in text
    with pytest.warns(KernelFailed, match=r"aten\.exp\.default"):  # told again, and not searched
        again = run(tmp_path)
    assert_same_run(again, stock)
    for loaded in loads:
        assert loaded.compiled
        found = makers(loaded)
        assert found.pop("aten.exp.default") == {Maker.LIBRARY}
        assert Maker.GENERATED in found["aten.sigmoid.default"]
        assert [one.how for one in loaded.kernels().unused] == [How.WRONG]
