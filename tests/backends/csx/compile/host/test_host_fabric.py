"""The host fabric and what it builds: with and without a compiler, denormals, programs as data."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Run, assert_same_run, both, fit, make_trainer
from models import Classifier, Measured, loader, mlp
from torch._inductor import config as inductor
from torch._inductor.exc import CppCompileError, InductorError

import fulgurite
from fulgurite.backends.csx.capture import captured_step
from fulgurite.backends.csx.compile.background import compilation
from fulgurite.backends.csx.compile.fabric import Loaded
from fulgurite.backends.csx.compile.host import denormals
from fulgurite.backends.csx.compile.inductor import generate as compiling
from fulgurite.backends.csx.compile.inductor import toolchain
from fulgurite.backends.csx.compile.inductor.toolchain import cpu_name, toolchain_missing
from fulgurite.backends.csx.graph.passes import as_traced, observing_passes
from fulgurite.backends.csx.program import announcements
from fulgurite.backends.csx.program.announcements import headline

SUPPORT = str(Path(__file__).parents[4] / "support")
SCRIPT = """
import sys, torch, logging
sys.path.insert(0, {support!r})
from harness import fit
from models import Classifier, loader, mlp
logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
run = fit(lambda: Classifier(mlp()), lambda: (loader(64),), static=True, policy="default")
print(len(run.losses), "steps")
"""


def run_script(tmp_path: Path, **environment: str) -> str:
    """What a script prints in its own process and with empty caches."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT.format(support=SUPPORT)],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def test_a_step_that_computes_nothing_has_a_program_of_nothing() -> None:
    class Idle(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.net(batch[0])

    for backend, results in (({}, [{}]), ({"compile_only": True}, [])):
        trainer = make_trainer(True, "default", backend=backend)
        assert trainer.validate(Idle(mlp()), loader(32), verbose=False) == results
        assert trainer.strategy.programs[0].operations == 0


@pytest.mark.long
@pytest.mark.process
def test_without_a_compiler_programs_run_operation_by_operation(tmp_path: Path) -> None:
    text = run_script(tmp_path, CXX="/nonexistent/c++", PATH="/nonexistent")
    assert "training program, " in text
    assert "run operation by operation (no C++ compiler was found)" in text
    assert "4 steps" in text


@pytest.mark.fits
def test_without_python_h_programs_run_operation_by_operation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(toolchain, "get_cpp_compiler", lambda: "c++")
    monkeypatch.setattr(toolchain.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    ours = fit(
        lambda: Classifier(mlp()),
        lambda: (loader(64),),
        static=True,
        policy="default",
        backend={"compile_dir": tmp_path / "programs"},
    )
    [executable] = ours.trainer.strategy.step_functions["training"].executables()
    assert "Python.h was not found" in executable.loaded.how


@pytest.mark.process
@pytest.mark.skipif(shutil.which("false") is None, reason="no command that always fails")
def test_a_compiler_is_looked_for_at_once_and_started_only_where_it_is_needed() -> None:
    with inductor.patch({"cpp.cxx": (None, "false")}):  # is there, and does not run
        assert toolchain_missing(starts=False) is None
        assert toolchain_missing() == "false does not run"
    with inductor.patch({"cpp.cxx": (None, "nonexistent-c++")}):
        assert toolchain_missing(starts=False) == "no C++ compiler was found"


class Bar(pl.callbacks.ProgressBar):
    """Keeps the lines that are printed above it."""

    is_enabled = True

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def disable(self) -> None: ...

    def enable(self) -> None: ...

    def print(self, *text: Any) -> None:
        self.lines.append(" ".join(map(str, text)))


def compiled(folder: Path) -> tuple[Run, str]:
    """A compiled run with a cache in ``folder``, and the line that says what was built."""
    bar = Bar()
    announcements._kinds.clear()  # as in a process of its own
    run = fit(
        lambda: Classifier(mlp()),
        lambda: (loader(64),),
        static=True,
        policy="medium",
        callbacks=(bar,),
        enable_progress_bar=True,
        backend={"compile_dir": folder},
    )
    return run, next(line for line in bar.lines if line.startswith("CSX on"))


@pytest.mark.long
@pytest.mark.fits
@pytest.mark.compiler
def test_programs_say_where_they_come_from_and_how_long_it_took(tmp_path: Path) -> None:
    run, line = compiled(tmp_path / "programs")
    count = run.trainer.strategy.programs[0].operations
    where = f"CSX on host fabric ({cpu_name()}, 1 thread)"  # as many as so small a program uses
    assert re.fullmatch(
        rf"{re.escape(where)}: training program, {count} operations, compiled in \d+\.\d s", line
    )
    again, line = compiled(tmp_path / "programs")
    assert re.search(r", loaded from the cache in \d+\.\d+ s$", line)
    assert again.losses == run.losses


@pytest.fixture
def programs(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A cache with the one program of ``compiled``, and its losses; compiled once a session."""
    session = tmp_path_factory.getbasetemp() / "programs"
    run, _ = compiled(session)
    shutil.copytree(session, tmp_path / "programs")
    return tmp_path / "programs", run.losses


@pytest.mark.long
@pytest.mark.fits
@pytest.mark.compiler
def test_one_flipped_bit_in_any_file_of_a_program_compiles_it_again(
    programs: tuple[Path, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, losses = programs
    [entry] = (path for path in folder.iterdir() if len(path.name) == 64)
    whole = entry.rename(tmp_path / "whole")
    compiles: list[Path] = []

    def compile_graph(graph: Any, folder: Path, *rest: Any) -> None:
        compiles.append(folder)
        for path in whole.iterdir():
            if path.name != "manifest":
                shutil.copy(path, folder)

    monkeypatch.setattr(compilation, "compile_graph", compile_graph)
    names = {path.name for path in whole.iterdir()}
    told = {"program.py", "program.json", "kernels.json"}
    assert names == {"manifest", "inputs.txt", "for.txt", "kernels_0.so", *told}
    for name in sorted(names):
        shutil.rmtree(
            entry, ignore_errors=True
        )  # not in place: this process has mapped the kernels
        shutil.copytree(whole, entry)
        data = bytearray((entry / name).read_bytes())
        data[len(data) // 2] ^= 4
        (entry / name).write_bytes(data)
        again, line = compiled(folder)
        assert "compiled in" in line, name
        assert again.losses == losses
    assert len(compiles) == len(names)


@pytest.mark.fits
@pytest.mark.compiler
def test_a_program_that_is_found_starts_no_process_and_needs_no_compiler(
    programs: tuple[Path, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, losses = programs
    started: list[Any] = []
    monkeypatch.setattr(toolchain, "toolchain_missing", lambda: pytest.fail("asked for a compiler"))
    monkeypatch.setattr(compilation, "compile_graph", lambda *args: pytest.fail("compiled"))
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **_: started.append(args))
    again, line = compiled(folder)
    assert "loaded from the cache" in line
    assert started == []
    assert again.losses == losses


@pytest.mark.fits
@pytest.mark.compiler
def test_a_program_that_is_found_imports_no_compiler(programs: tuple[Path, list[float]]) -> None:
    [source] = [path.read_text() for path in programs[0].glob("*/program.py")]
    assert "addmm = torch.addmm\n" in source
    assert "torch._inductor" not in source


@pytest.mark.fits
@pytest.mark.parametrize(
    ("built", "how"),
    [
        ((False, False), "loaded from the cache in 1.0 s"),
        ((False, True), "compiled in 1.0 s"),
        ((True, False), "compiled in 1.0 s"),
    ],
)
def test_a_program_was_compiled_if_one_of_its_entry_points_was(
    built: tuple[bool, bool], how: str
) -> None:
    run = fit(
        lambda: Classifier(mlp()), lambda: (loader(16),), static=True, accumulate_grad_batches=2
    )
    words = {True: "compiled", False: "loaded from the cache"}
    loads = [
        Loaded(call=list, compiled=True, built=now, seconds=0.5, how=words[now]) for now in built
    ]
    strategy = run.trainer.strategy
    assert headline(strategy.fabric, strategy.programs[0], loads).endswith(f", {how}")


@pytest.mark.fits
def test_a_program_of_which_one_entry_point_is_compiled_says_which() -> None:
    run = fit(
        lambda: Classifier(mlp()), lambda: (loader(16),), static=True, accumulate_grad_batches=2
    )
    loads = [
        Loaded(call=list, compiled=now, built=now, seconds=0.5, how=how)
        for now, how in ((True, "compiled"), (False, "running operation by operation"))
    ]
    strategy = run.trainer.strategy
    said = headline(strategy.fabric, strategy.programs[0], loads)
    each = "'accumulate' compiled; 'accumulate and step' running operation by operation"
    assert said.endswith(f" in two entry points, {each}")


def test_a_compile_dir_that_cannot_be_used_is_known_before_step_0(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PermissionError, match=r"compile_dir='.*file' cannot be used"):
        fulgurite.Trainer(backend={"backend_type": "CSX", "compile_dir": tmp_path / "file"})


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.compiler
def test_compiled_accumulation_and_metrics_equal_stock() -> None:
    ours, stock = both(
        Measured,
        lambda: (loader(16 * 10), loader(64)),
        policy="default",
        accumulate_grad_batches=3,
    )
    assert_same_run(ours, stock)


@pytest.mark.fits
def test_a_program_is_frozen_plain_and_printable(tmp_path: Path) -> None:
    run = fit(
        lambda: Classifier(mlp()),
        lambda: (loader(64),),
        static=True,
        backend={"artifact_dir": tmp_path / "artifacts"},
        accumulate_grad_batches=2,
    )
    [program] = run.trainer.strategy.programs
    with pytest.raises(dataclasses.FrozenInstanceError):
        program.stage = "other"
    text = str(program)
    for line in (
        "  batch[0]: float32[16, 8]",
        "  batch[1]: int64[16]",
        "  optimizers[0].param_groups[0]['lr']",
        "  self.net.0.weight: float32[16, 8], replicated, updated",
        "  optimizers[0].state[net.0.weight]['exp_avg']: float32[16, 8], replicated, updated",
        "  net.0.weight.grad: float32[16, 8], replicated, updated",
    ):
        assert line in text.splitlines()
    assert [entry.name for entry in program.entries] == ["accumulate", "step"]
    assert program.operations == sum(entry.operations for entry in program.entries)
    written = tmp_path / "artifacts" / "training.txt"
    assert "models.py" in written.read_text()
    assert program.text() in written.read_text()


@pytest.mark.fits
@pytest.mark.parametrize("precision", ["32-true", "cb16-mixed"])
def test_passes_are_pure(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    seen: list[str] = []

    def watched(graph: Any, passes: Any) -> Any:
        for one in passes:
            before = graph.module.code, graph.inputs
            after = one(graph)
            assert (graph.module.code, graph.inputs) == before, one.__name__
            seen.append(one.__name__)
            graph = after
        return graph

    for module in (captured_step, as_traced):
        monkeypatch.setattr(module, "lower", watched)
    with observing_passes(lambda *_: None):
        fit(lambda: Classifier(mlp()), lambda: (loader(16),), static=True, precision=precision)
    assert seen == [
        "write_updates_out",
        "drop_renames",
        "functional_draws",
        *(["to_cbfloat16"] if precision == "cb16-mixed" else []),
        "functionalize",
        "drop_renames",
        "fold_zeros",
        "simplify",
        "prune",
        "hold_state",
    ]


class Denormal(pl.LightningModule):
    """Its step makes denormals of 4 million elements, more than one thread's share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.register_buffer("tiny", torch.full((1 << 22,), 1e-20))
        self.register_buffer("product", torch.ones(1 << 22))

    def training_step(self, batch: Any) -> Any:
        self.product.copy_(self.tiny * (self.tiny * 0.01))
        return self.weight * 1.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def count_denormals() -> int:
    """Elements that are not flushed, of an eager operation over all threads."""
    product = torch.full((1 << 22,), 1e-20) * 1e-22
    return int((product.view(torch.int32) != 0).sum())


@pytest.mark.fits
@pytest.mark.parametrize(
    "policy", ["disabled", pytest.param("default", marks=pytest.mark.compiler)]
)
def test_denormals_are_flushed_in_every_thread_while_programs_run_and_only_then(
    policy: str,
) -> None:
    assert count_denormals() == 1 << 22
    between: list[int] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            between.append(count_denormals())

    run = fit(
        Denormal,
        lambda: (loader(32),),
        static=True,
        policy=policy,
        callbacks=(Look(),),
    )
    assert int((run.module.product.view(torch.int32) != 0).sum()) == 0
    assert between == [1 << 22] * 2
    assert count_denormals() == 1 << 22


@pytest.mark.fits
@pytest.mark.parametrize(
    "policy", ["disabled", pytest.param("default", marks=pytest.mark.compiler)]
)
def test_denormals_stay_where_they_are_to(policy: str) -> None:
    run = fit(
        Denormal,
        lambda: (loader(32),),
        static=True,
        policy=policy,
        backend={"flush_denormals": False},
    )
    assert int((run.module.product == 1e-20 * 1e-22).sum()) == 1 << 22
    assert count_denormals() == 1 << 22


@pytest.mark.fits
def test_a_process_that_flushes_itself_still_does_after() -> None:
    torch.set_flush_denormal(True)
    try:
        fit(Denormal, lambda: (loader(32),), static=True)
        assert denormals.is_flushing()
    finally:
        torch.set_flush_denormal(False)


PRINTED = "\n".join(["net.h:1: warning: unused", "net.h:2: error: bad", *["more"] * 1000])


@pytest.mark.failing_compiler
@pytest.mark.fits
@pytest.mark.parametrize(
    ("error", "why"),
    [
        (KeyError("buf25"), "KeyError: 'buf25'"),
        (CppCompileError(["c++"], PRINTED), "the C++ compiler: net.h:2: error: bad"),
    ],
    ids=["a defect", "C++"],
)
def test_where_a_compiler_fails_the_program_runs_operation_by_operation_and_a_file_has_the_rest(
    error: Exception,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail(graph: Any, folder: Path, *rest: Any) -> None:
        raise InductorError(error, None)

    monkeypatch.setattr(compilation, "compile_graph", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ours = fit(
        lambda: Classifier(mlp()),
        lambda: (loader(64),),
        static=True,
        policy="default",
        backend={"compile_dir": tmp_path / "programs", "background": False},
    )
    [executable] = ours.trainer.strategy.step_functions["training"].executables()
    [log] = tmp_path.glob("fulgurite-compile-*.txt")
    assert executable.loaded.how == (
        f"run operation by operation (torch's compiler failed: {why}; {log} has more)"
    )
    assert str(error) in log.read_text()
    assert len(ours.losses) == 4
    assert not re.search("^more$", "".join(capfd.readouterr()), re.MULTILINE)


def test_a_ctrl_c_after_a_failure_does_not_show_what_the_compiler_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The processor's vector units are asked for then, which takes seconds."""

    def fail(*args: Any) -> None:
        raise CppCompileError(["c++"], PRINTED)

    def ctrl_c() -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiling.Attempt, "compile", fail)
    monkeypatch.setattr(toolchain, "ask_the_compiler", ctrl_c)
    nothing: Any = None
    with pytest.raises(KeyboardInterrupt) as caught:
        compiling.compile_graph(nothing, tmp_path, nothing, nothing)
    assert caught.value.__context__ is None
