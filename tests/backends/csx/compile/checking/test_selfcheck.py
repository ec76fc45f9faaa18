"""The self-check: compiled code that computes something else is not used, and the user is told."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from broken_programs import BROKEN, Broken, Call, Wrong
from broken_programs import loaders as loaders_of_broken
from graphs import graph_of
from harness import Run, assert_same_run, both, fit
from models import SiluDropout
from settling import KEY, Settling
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fulgurite.backends.csx.compile.background import compilation
from fulgurite.backends.csx.compile.checking import selfcheck, trust
from fulgurite.backends.csx.compile.host import host_fabric
from fulgurite.backends.csx.compile.inductor import changes
from fulgurite.backends.csx.compile.programs import kernels, steps
from fulgurite.backends.csx.compile.programs.steps import Program
from fulgurite.backends.csx.compile.store.cache import Fetched
from fulgurite.backends.csx.compile.store.fingerprint import versions
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.passes import as_traced
from fulgurite.backends.csx.graph.passes.draws import functional_draws
from fulgurite.backends.torch_versions import LOSES_ORDER
from fulgurite.errors import MiscompiledWarning

Break = Callable[[Graph, list[Tensor], list[Tensor]], None]
"""Spoils what a call of a graph returned and wrote: its inputs and its outputs afterwards."""


class Normalized(pl.LightningModule):
    """A bias before BatchNorm, whose gradient is noise, under Adam; a mask and a count kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.register_buffer("hits", torch.zeros(3, dtype=torch.int64))
        self.mask: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = F.silu(self.norm(self.first(x)))
        self.mask = torch.rand_like(h) < 0.5
        logits = self.last(h * self.mask)
        self.hits += F.one_hot(logits.argmax(1), 3).sum(0)
        return F.cross_entropy(logits, y)  # the loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)


def loaders() -> tuple[Any, ...]:
    """Four batches of 8."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 6, generator=generator)
    y = torch.randint(0, 3, (32,), generator=generator)
    return (DataLoader(TensorDataset(x, y), batch_size=8),)


@pytest.fixture
def fake_compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[Wrong | None], None]:
    """Instead of the compiler, one whose programs are right, and then made wrong."""

    def install(wrong: Wrong | None) -> None:
        graphs: list[Graph] = []

        def compiled(graph: Graph, folder: Path, *rest: Any) -> None:
            graphs.append(graph)
            (folder / "program.py").write_text("text\n")
            index = {"kernels": [], "program": steps.plain(Program((), (), ()))}
            (folder / "program.json").write_text(json.dumps(index))
            kernels.write(folder, (), {}, {})

        def load(folder: Path) -> Any:
            graph, memory = graphs[-1], dict[str, Any]()
            run = host_fabric.reference_of(graph)

            def call(inputs: list[Tensor]) -> Any:
                outputs = lambda given: [one.clone() for one in run(given)]  # noqa: E731
                return outputs(inputs) if wrong is None else wrong(graph, outputs, inputs, memory)

            return call

        monkeypatch.setattr(compilation, "compile_graph", compiled)
        monkeypatch.setattr(compilation, "load_program", load)

    return install


def spoiled(broken: Break) -> Wrong:
    """Right, and then spoiled."""

    def wrong(graph: Graph, run: Call, inputs: list[Tensor], memory: Any) -> list[Tensor]:
        outputs = run(inputs)
        broken(graph, inputs, outputs)
        return outputs

    return wrong


def state(name: str, change: Callable[[Tensor], Any]) -> Break:
    def broken(graph: Graph, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        [found] = [t for item, t in zip(graph.inputs, inputs, strict=True) if item.name == name]
        change(found)

    return broken


def first_of(dtype: torch.dtype, change: Callable[[Tensor], Any]) -> Break:
    def broken(graph: Graph, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        change(next(output for output in outputs if output.dtype is dtype))

    return broken


def no_draw(graph: Graph, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    torch.set_rng_state(torch.manual_seed(3).get_state())


WRONG: dict[str, tuple[Break, str, str]] = {
    "a loss": (
        first_of(torch.float32, lambda loss: loss.mul_(1.01)),
        "what the step returns is ",
        "return F.cross_entropy(logits, y)  # the loss",
    ),
    "a NaN": (
        first_of(torch.float32, lambda loss: loss.fill_(float("nan"))),
        "what the step returns is nan instead of ",
        "return F.cross_entropy(logits, y)  # the loss",
    ),
    "a mask": (
        first_of(torch.bool, lambda mask: mask[3, 5].logical_not_()),
        " at [3, 5] (1 of 128 elements)",
        "self.mask = torch.rand_like(h) < 0.5",
    ),
    "a count": (
        state("self.hits", lambda hits: hits[1].add_(1)),
        "self.hits is ",
        "self.hits += F.one_hot(logits.argmax(1), 3).sum(0)",
    ),
    "a weight": (
        state("self.last.weight", lambda weight: weight[0, 2].add_(1e-2)),
        "self.last.weight is ",
        "",
    ),
    "a running mean": (
        state("self.norm.running_mean", lambda mean: mean.mul_(1.01)),
        "self.norm.running_mean is ",
        "h = F.silu(self.norm(self.first(x)))",
    ),
    "the random state": (no_draw, "another number of random numbers was drawn", "rand_like"),
}


def run(tmp_path: Path, **options: Any) -> Run:
    return fit(
        Normalized,
        loaders,
        static=True,
        policy="default",
        backend={"compile_dir": tmp_path / "programs", **options},
    )


@pytest.mark.numbers
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_program_is_told_with_its_line_and_not_used(
    what: str, fake_compiler: Callable[[Wrong | None], None], tmp_path: Path
) -> None:
    broken, words, line = WRONG[what]
    fake_compiler(None if broken is None else spoiled(broken))
    with pytest.warns(MiscompiledWarning) as warned:
        ours = run(tmp_path)
    [message] = [str(w.message) for w in warned if w.category is MiscompiledWarning]
    assert words in message
    assert line in message
    assert f"{Path(__file__).name}:" in message
    noise = ("first.bias", "norm.running_mean")
    assert_same_run(ours, fit(Normalized, loaders, static=False), noise)
    [folder] = (tmp_path / "programs" / "reports").iterdir()
    assert str(folder) in message
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("graph.txt", "versions.txt", "program.py"),
        *("inputs.pt", "compiled.pt", "right.pt"),
    }
    kept = torch.load(folder / "inputs.pt", weights_only=True)
    assert len(kept["inputs"]) > 10


@pytest.mark.fits
def test_the_report_is_an_artifact_where_a_folder_for_them_is_given(
    fake_compiler: Callable[[Wrong | None], None], tmp_path: Path
) -> None:
    fake_compiler(spoiled(WRONG["a NaN"][0]))
    with pytest.warns(MiscompiledWarning, match="miscompiled-"):
        run(tmp_path, artifact_dir=tmp_path / "artifacts")
    assert list((tmp_path / "artifacts").glob("miscompiled-*/program.py"))


@pytest.mark.fits
def test_a_program_that_passed_is_not_checked_again_until_it_is_built_again(
    fake_compiler: Callable[[Wrong | None], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(None)
    checks: list[selfcheck.SelfCheck] = []
    original = selfcheck.SelfCheck.__call__

    def counted(self: selfcheck.SelfCheck, inputs: list[Tensor]) -> Any:
        checks.append(self)
        return original(self, inputs)

    monkeypatch.setattr(selfcheck.SelfCheck, "__call__", counted)
    first = run(tmp_path)
    assert len(checks) == 2  # the first step, and the second, by when all state has changed
    assert_same_run(run(tmp_path), first)
    assert len(checks) == 2
    [entry] = [path for path in (tmp_path / "programs").iterdir() if path.is_dir()]
    (entry / "program.py").write_text("damaged\n")  # and so built again: the same bytes
    monkeypatch.setattr(
        compilation,
        "compile_graph",
        lambda graph, folder, *rest: (folder / "program.py").write_text("new\n"),
    )
    run(tmp_path)
    assert len(checks) == 4


@pytest.mark.long
@pytest.mark.fits
def test_a_program_that_failed_is_checked_again(
    fake_compiler: Callable[[Wrong | None], None], tmp_path: Path
) -> None:
    fake_compiler(spoiled(WRONG["a NaN"][0]))
    for _ in range(2):
        with pytest.warns(MiscompiledWarning):
            run(tmp_path)


class Infinite(Normalized):
    """Weights, inputs and results that are not finite."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.first.weight[0, 0] = torch.nan
            self.last.bias[1] = torch.inf


@pytest.mark.fits
@pytest.mark.parametrize(
    "broken", [None, first_of(torch.bool, lambda mask: mask[3, 5].logical_not_())]
)
def test_nan_equals_nan(
    broken: Break | None, fake_compiler: Callable[[Wrong | None], None], tmp_path: Path
) -> None:
    fake_compiler(None if broken is None else spoiled(broken))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fit(
            Infinite,
            loaders,
            static=True,
            policy="default",
            backend={"compile_dir": tmp_path / "programs"},
        )
    assert any(w.category is MiscompiledWarning for w in warned) is (broken is not None)


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.compiler
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_no_alarm_where_a_gradient_is_rounding_noise(precision: Any) -> None:
    ours, stock = both(Normalized, loaders, policy="default", precision=precision)
    assert ours.losses[0] == pytest.approx(stock.losses[0], rel=1e-2)
    assert ours.trainer.strategy.fabric is not None


class LogsParts(pl.LightningModule):
    """Results that are one memory in the step's own code: elements of a tensor, a value twice."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.automatic_optimization = nn.Linear(6, 3), False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        losses = (self.net(batch[0]) - 1).abs().mean(0)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(losses.mean())
        optimizer.step()
        self.log("loss", losses.mean(), on_step=True, on_epoch=True)
        for k in range(3):
            self.log(f"loss_{k}", losses[k])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.numbers
@pytest.mark.compiler
def test_no_alarm_where_results_are_parts_of_one_value() -> None:
    ours, stock = both(LogsParts, loaders, policy="default")
    assert_same_run(ours, stock)
    [entry] = ours.trainer.strategy.training.executables()
    assert entry.loaded.how == "compiled"


def batch_of_64() -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(128, n, generator=generator) for n in (12, 1))
    return (DataLoader(TensorDataset(x, y), batch_size=64),)


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.compiler
@pytest.mark.parametrize("ordered", [True, False])
def test_the_compilers_own_bug(
    ordered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With draws as the compiler has them: the order that it loses is kept, or else found out."""
    passes = tuple(one for one in as_traced.PASSES if one is not functional_draws)
    monkeypatch.setattr(as_traced, "PASSES", passes)
    if not ordered:
        monkeypatch.setattr(changes, "order_after_writes", lambda: ())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ours, stock = both(
            SiluDropout, batch_of_64, policy="default", backend={"compile_dir": tmp_path}
        )
    told = [str(w.message) for w in warned if w.category is MiscompiledWarning]
    assert len(told) == (LOSES_ORDER and not ordered), "whether the compiler loses the order"
    assert all("nan instead of" in message for message in told)
    assert_same_run(ours, stock, ("net.0.bias", "net.1.running_mean"))


@pytest.mark.parametrize("marked", [versions(), "of an older libc", None])
def test_what_came_from_the_background_is_checked_first_unless_it_was(
    marked: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settling = Settling(tmp_path)
    compiled = Fetched(value=lambda inputs: inputs, built=False, marked=marked, mark=print)
    cache = settling.fabric._later.cache
    (cache.folder / KEY).mkdir(parents=True)
    kernels.write(cache.folder / KEY, (), {}, {})
    monkeypatch.setattr(cache, "find", lambda key, load: compiled)
    monkeypatch.setattr(trust, "SelfCheck", lambda *args: args)
    call = settling.settle()
    assert settling.loaded.call is call
    checked = (settling.loaded.graph, compiled.value)
    assert call is compiled.value if marked == versions() else call[:2] == checked


@pytest.mark.parametrize("agreed", [True, False])
def test_who_waits_for_code_is_told_what_came_of_its_check(
    agreed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settling, marks, told = Settling(tmp_path), list[str](), list[str]()
    compiled = Fetched(value=lambda inputs: inputs, built=False, marked=None, mark=marks.append)
    cache = settling.fabric._later.cache
    (cache.folder / KEY).mkdir(parents=True)
    kernels.write(cache.folder / KEY, (), {}, {})
    monkeypatch.setattr(cache, "find", lambda key, load: compiled)
    monkeypatch.setattr(trust, "SelfCheck", lambda *args: args)
    loaded: Any = settling.loaded
    loaded.when_settled = lambda: told.append(loaded.how)
    settled = settling.settle()[3]
    assert told == []
    settled(agreed, "a step")
    assert (loaded.call is compiled.value, loaded.compiled) == (agreed, agreed)
    assert told == ["compiled" if agreed else "run operation by operation (compiled, it was wrong)"]
    assert marks == [f"{versions()}\na step" if agreed else "wrong"]


EVERY_SIXTH = frozenset([*BROKEN][::6])


@pytest.mark.fits
@pytest.mark.parametrize(
    "what",
    [
        None,
        *(pytest.param(w, marks=() if w in EVERY_SIXTH else pytest.mark.long) for w in BROKEN),
    ],
)
def test_a_program_that_is_wrong_in_one_way_is_seen_within_eight_steps(
    what: str | None, fake_compiler: Callable[[Wrong | None], None], tmp_path: Path
) -> None:
    fake_compiler(None if what is None else BROKEN[what])
    backend = {"compile_dir": tmp_path / "programs"}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fit(
            Broken,
            loaders_of_broken,
            static=True,
            policy="default",
            backend=backend,
            max_steps=10,
            max_epochs=-1,
        )
    told = [str(w.message) for w in warned if w.category is MiscompiledWarning]
    assert len(told) == (what is not None), told
    marks = [path.read_text() for path in (tmp_path / "programs").glob("*.mark")]
    assert [mark.splitlines()[1:] for mark in marks] == (
        [[versions(), "moved inputs, step 1 of a run, step 2 of a run"]]
        if what is None
        else [["wrong"]]
    )


def test_a_pass_that_is_wrong_is_seen(tmp_path: Path) -> None:
    """Rounding is measured in the operations after all passes: it excuses nothing of theirs."""
    traced = graph_of(lambda a: (a * 2.0).sum(), torch.rand(8))
    wrong = graph_of(lambda a: (a * 3.0).sum(), torch.rand(8))
    settled: list[bool] = []
    check = selfcheck.SelfCheck(
        wrong,
        lambda inputs: list(wrong.module(*inputs)),
        lambda inputs: list(traced.module(*inputs)),
        lambda passed, *_: settled.append(passed),
        tmp_path,
        tmp_path,
    )
    with pytest.warns(MiscompiledWarning, match="what the step returns"):
        [result] = check([torch.ones(8)])
    assert (float(result), settled) == (16.0, [False])
