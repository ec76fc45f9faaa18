"""Who made which kernel: what the compiler says, and what becomes of a kernel that it fails on."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Run, assert_same_run, fit
from loss_cases import loads, makers
from models import CLASSES, loader
from torch import Tensor, nn

from fulgurite.backends.csx.compile.fabric import Loaded
from fulgurite.backends.csx.compile.host import library
from fulgurite.backends.csx.compile.inductor import generate as inductor
from fulgurite.backends.csx.compile.programs.kernels import KernelFailed, Kernels, Maker
from fulgurite.backends.csx.compile.programs.parts import Part
from fulgurite.backends.csx.compile.programs.steps import Generated
from fulgurite.backends.csx.graph.op_schema import is_view, operation_name


class Gelu(pl.LightningModule):
    """A net with an ``erf``, and a sort that no compiler generates."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        return nn.functional.cross_entropy(out, y) + out.sort(1).values[:, 0].mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.fixture(name="loads")
def _loads() -> Iterator[list[Loaded]]:
    with loads() as found:
        yield found


def run(policy: str | None, **backend: Any) -> Run:
    """A fit; in stock Lightning where there is no policy."""
    static = policy is not None
    return fit(Gelu, lambda: (loader(64),), static=static, policy=policy, backend=backend)


@pytest.mark.fits
def test_without_a_compiler_the_table_says_who_made_a_kernel(loads: list[Loaded]) -> None:
    run("disabled")
    found = makers(loads[0])
    assert found["aten.gelu.default"] == found["aten.addmm.default"] == {Maker.LIBRARY}
    assert found["aten.sort.default"] == {Maker.HOST}


@pytest.mark.numbers
def test_an_operation_that_is_taken_out_of_the_table_moves_to_the_host(
    loads: list[Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(library.LIBRARY, "gelu")
    assert_same_run(run("disabled"), run(None))
    assert makers(loads[0])["aten.gelu.default"] == {Maker.HOST}


@pytest.mark.fits
@pytest.mark.compiler
def test_a_compiled_program_says_what_each_kernel_computes(loads: list[Loaded]) -> None:
    run("default")
    [loaded] = loads
    assert loaded.graph is not None
    found, kernels = makers(loaded), loaded.kernels()
    assert found["aten.erf.default"] == {Maker.GENERATED}
    assert found["aten.addmm.default"] == found["aten.mm.default"] == {Maker.LIBRARY}
    assert found["aten.sort.default"] == {Maker.HOST}
    computed = {i for call in kernels.calls for i in call.operations}
    nodes = list(loaded.graph.operations())
    lost = [i for i, node in enumerate(nodes) if i not in computed and not is_view(node.target)]
    assert [str(nodes[i].target) for i in lost] in ([], ["aten.clone.default"] * len(lost))
    assert not any(is_view(nodes[i].target) for i in computed)
    generated = {call.kernel for call in kernels.calls if call.maker is Maker.GENERATED}
    assert generated == set(kernels.sources)
    assert all(" kernel(" in source for source in kernels.sources.values())
    assert set(kernels.seconds) == {"generate", "compile"}


class Convolved(Gelu):
    """What the compiler says of a kernel's origins would have those of its operands too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 8, 3), nn.BatchNorm1d(8), nn.GELU()),
            *(nn.Conv1d(8, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(32, CLASSES)),
        )


@pytest.mark.fits
@pytest.mark.compiler
def test_what_a_kernel_computes_is_in_its_source(loads: list[Loaded]) -> None:
    fit(Convolved, lambda: (loader(64),), static=True, policy="default")
    [loaded] = loads
    assert loaded.graph is not None
    nodes, kernels = list(loaded.graph.operations()), loaded.kernels()
    products = 0
    for call in kernels.calls:
        names = [operation_name(nodes[i].target) for i in call.operations]
        if call.maker is Maker.GENERATED:
            assert ("erf" in names) == ("erf()" in kernels.sources[call.kernel]), names
            assert names
        else:
            assert len(names) == 1, names
            products += names[0].startswith("convolution")
    assert products == 4


@pytest.mark.long
@pytest.mark.fits
@pytest.mark.compiler
def test_a_program_from_the_cache_says_the_same(loads: list[Loaded], tmp_path: Path) -> None:
    told: list[Kernels] = []
    for _ in range(2):
        run("default", compile_dir=tmp_path)
        told.append(loads[-1].kernels())
    assert [loaded.built for loaded in loads] == [True, False]
    assert told[0] == told[1]


def failing(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """Let the C++ compiler fail on each kernel with a word in it."""
    generate = inductor._generated

    def broken(*args: Any) -> Generated:
        code = generate(*args)
        sources = {
            name: f"{one}\nunknown x;" if word in one else one for name, one in code.sources.items()
        }
        return replace(code, sources=sources)

    monkeypatch.setattr(inductor, "_generated", broken)


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.compiler
def test_a_kernel_that_does_not_compile_is_the_librarys(
    loads: list[Loaded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = run(None)
    failing(monkeypatch, "erf()")
    for built in (True, False):  # the next run, which finds the program in the cache, says it too
        with pytest.warns(KernelFailed) as caught:
            ours = run("default", compile_dir=tmp_path)
        assert_same_run(ours, stock)
        assert loads[-1].built == built
        told = {str(one.message) for one in caught if one.category is KernelFailed}
        assert len(told) == 2  # the forward pass has an erf, and so has the backward pass
        text = min(told, key=len)
        assert "aten.erf.default" in text
        assert "test_kernels.py" in text
        [log] = re.findall(r"; (\S+) has more", text)
        assert "unknown" in Path(log).read_text()
    found = makers(loads[-1])
    assert found["aten.erf.default"] == {Maker.LIBRARY}
    assert Maker.GENERATED in found["aten.exp.default"]  # the others stay
    assert {one.kernel for one in loads[-1].kernels().unused}


@pytest.mark.long
@pytest.mark.fits
@pytest.mark.compiler
@pytest.mark.failing_compiler
def test_where_every_kernel_fails_it_is_the_compiler_that_does(
    loads: list[Loaded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "kernel")
    with warnings.catch_warnings():
        warnings.simplefilter("error", KernelFailed)
        run("default", compile_dir=tmp_path)
    assert not loads[-1].compiled
    assert "the C++ compiler" in loads[-1].how


class Attention(pl.LightningModule):
    """Products of batches of matrices, for which the compiler has a template."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 3 * 32 * 16), nn.Linear(16, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        q, k, v = self.into(x).view(-1, 3, 32, 16).unbind(1)
        seen = (q @ k.mT).softmax(-1) @ v
        return nn.functional.cross_entropy(self.out(seen.mean(1)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.compiler
def test_a_template_that_cannot_be_generated_is_told_and_the_rest_compiled(
    loads: list[Loaded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = run(None)
    generate = inductor._generated

    def generated(part: Part, *rest: Any) -> Generated:
        if part.policy == "aggressive":
            raise AssertionError
        return generate(part, *rest)

    monkeypatch.setattr(inductor, "_generated", generated)
    why = r"'aggressive' tries could not be generated: AssertionError \(test_kernels\.py:\d+\)"
    with pytest.warns(KernelFailed, match=f"{why}.*test_kernels.py:"):
        assert_same_run(run("aggressive", compile_dir=tmp_path), stock)
    assert loads[-1].compiled


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.compiler
def test_aggressive_tries_templates_for_products(loads: list[Loaded], tmp_path: Path) -> None:
    """Which wins depends on the machine; that they are tried is seen in the key and the time."""
    runs = [
        fit(Attention, lambda: (loader(64),), static=True, policy=policy, backend=options)
        for policy, options in (
            ("aggressive", {"compile_dir": tmp_path}),
            ("aggressive", {"compile_dir": tmp_path}),
            ("default", {"compile_dir": tmp_path}),
        )
    ]
    stock = fit(Attention, lambda: (loader(64),), static=False)
    for one in runs:
        assert_same_run(one, stock)
    assert [loaded.built for loaded in loads] == [True, False, True]
    first, again, default = (loaded.kernels() for loaded in loads)
    assert first.calls == again.calls  # the winners are kept
    assert all(call.maker is Maker.GENERATED for call in first.calls if call.tuned)
    assert not any(call.tuned for call in default.calls)
