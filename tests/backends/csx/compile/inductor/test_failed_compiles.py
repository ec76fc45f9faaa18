"""Whatever fails below ``compile_graph`` is a failed compile: the run goes on, a line says why."""

from __future__ import annotations

import ast
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Run, assert_same_run, fit, make_trainer
from models import Classifier, loader, mlp
from settling import Settling
from torch import Tensor

from fulgurite.backends.csx.compile.background import compilation
from fulgurite.backends.csx.compile.inductor import generate as inductor
from fulgurite.backends.csx.compile.inductor import toolchain
from fulgurite.backends.csx.compile.programs import compiler_log, steps
from fulgurite.backends.csx.compile.programs.steps import UnknownProgram
from fulgurite.backends.csx.compile.store.cache import NothingStored
from fulgurite.errors import MiscompiledWarning, UnfusedLoss

pytestmark = [pytest.mark.failing_compiler, pytest.mark.numbers]

Break = Callable[[pytest.MonkeyPatch], str]
"""Makes something fail that compiling needs; returns what the line says of it."""


def _raise(error: Exception) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


def _compile_graph(error: Exception) -> Break:
    def spoil(patch: pytest.MonkeyPatch) -> str:
        patch.setattr(compilation, "compile_graph", _raise(error))
        said = [f": {line}" for line in str(error).splitlines()]
        return f"{type(error).__name__}{[*said, ''][0]} (test_failed_compiles.py:"

    return spoil


def _the_output_of_the_compiler(patch: pytest.MonkeyPatch) -> str:
    inductor._import_compiler()
    patch.setattr(
        "torch._inductor.codegen.wrapper.PythonWrapperCodegen.codegen_allocation",
        lambda wrapper, buffer: wrapper.writeline("buf0 = memory()"),
    )
    return (
        "UnknownProgram: the compiler made a program with a step that is not known: buf0 = memory"
    )


def _a_name_of_the_compiler(patch: pytest.MonkeyPatch) -> str:
    inductor._import_compiler()
    patch.delattr("torch._inductor.compile_fx.compile_fx_inner")
    return "ImportError: cannot import name 'compile_fx_inner'"


def _the_key(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(compilation, "program_key", _raise(AttributeError("no save_config_portable")))
    return "AttributeError: no save_config_portable"


def _loading(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(compilation, "compile_graph", lambda graph, folder, *rest: _empty(folder))
    patch.setattr(compilation, "load_program", _raise(ImportError("no empty_strided_cpu")))
    return "ImportError: no empty_strided_cpu"


def _empty(folder: Path) -> None:
    (folder / "program.py").write_text("")
    index = {"kernels": [], "program": steps.plain(steps.Program((), (), ()))}
    (folder / "program.json").write_text(json.dumps(index))
    (folder / "kernels.json").write_text(
        '{"unused": [], "calls": [], "sources": {}, "seconds": {}}'
    )


FAILURES: dict[str, Break] = {
    "an unknown wrapper": _compile_graph(UnknownProgram("x = 1")),
    "an attribute": _compile_graph(AttributeError("no attribute 'codegen_node'")),
    "a key": _compile_graph(KeyError("buf25")),
    "an import": _compile_graph(ImportError("cannot import name 'V'")),
    "an assertion": _compile_graph(AssertionError()),
    "a type": _compile_graph(TypeError("one argument is missing")),
    "no memory": _compile_graph(MemoryError()),
    "what the compiler writes": _the_output_of_the_compiler,
    "a name of the compiler's": _a_name_of_the_compiler,
    "the key": _the_key,
    "loading": _loading,
}
failures = pytest.mark.parametrize("spoil", FAILURES.values(), ids=FAILURES.keys())


@pytest.fixture(autouse=True)
def _logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(toolchain, "toolchain_missing", lambda starts=True: None)


def trained(folder: Path, *, deterministic: bool = False, **backend: Any) -> Run:
    """A short training, with an empty cache."""
    options = {"background": False, "compile_dir": folder / "programs", **backend}
    return fit(
        lambda: Classifier(mlp()),
        lambda: (loader(64),),
        static=True,
        policy="default",
        backend=options,
        **({"deterministic": True} if deterministic else {}),
    )


def how(run: Run) -> str:
    """What the line of the training program ends with."""
    [executable] = run.trainer.strategy.step_functions["training"].executables()
    assert not executable.loaded.compiled
    return str(executable.loaded.how)


@failures
def test_the_run_goes_on_operation_by_operation_and_the_line_says_why(
    spoil: Break, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    why = spoil(monkeypatch)
    run = trained(tmp_path)
    [log] = tmp_path.glob("fulgurite-compile-*.txt")
    line = how(run)
    assert line.startswith(f"run operation by operation (torch's compiler failed: {why}")
    assert line.endswith(f"; {log} has more)")
    assert "Traceback" in log.read_text()
    assert_same_run(run, fit(lambda: Classifier(mlp()), lambda: (loader(64),), static=False))


@pytest.mark.parametrize(
    "waits", [{"artifact_dir": "reports", "background": True}, {"deterministic": True}]
)
def test_so_it_is_whatever_the_run_waits_for(
    waits: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    why = FAILURES["what the compiler writes"](monkeypatch)
    monkeypatch.chdir(tmp_path)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        run = trained(tmp_path, **{"background": True, **waits})
    finally:
        torch.use_deterministic_algorithms(before)
    assert why in how(run)
    assert len(run.losses) == 4


def test_compile_only_ends_with_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    why = FAILURES["what the compiler writes"](monkeypatch)
    options = {"compile_only": True, "compile_dir": tmp_path / "programs"}
    trainer = make_trainer(True, "default", backend=options, max_epochs=1)
    with pytest.raises(RuntimeError, match="compile_only=True, but nothing can be") as caught:
        trainer.fit(Classifier(mlp()), loader(64))
    assert why in str(caught.value)
    [log] = tmp_path.glob("fulgurite-compile-*.txt")
    assert str(log) in str(caught.value)


def test_what_the_background_compiled_and_cannot_be_loaded_is_told_in_the_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The process beside the training loads it, as a trial; this one then cannot."""
    settling = Settling(tmp_path / "programs")
    loaded = settling.loaded
    monkeypatch.setattr(settling.fabric._later.cache, "find", _raise(AttributeError("no guards")))
    assert settling.settle() is settling.reference
    assert "AttributeError: no guards (test_failed_compiles.py:" in loaded.how
    assert not loaded.compiling


@pytest.mark.parametrize(
    "error",
    [
        *(NothingStored("no space"), UnfusedLoss("two kernels"), OSError(28, "full")),
        *(UserWarning("made an error"), KeyboardInterrupt(), SystemExit(3)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_no_failure_of_compiling_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, toolchain.failures_reported():
        raise error
    assert caught.value is error


def test_a_line_names_the_innermost_file_of_a_failure_inside_the_compiler() -> None:
    try:
        ast.parse("x =")
    except SyntaxError as error:
        inner: Exception = error

    class Wrapping(Exception):
        inner_exception = inner

    line = compiler_log.in_a_line(Wrapping())
    assert re.fullmatch(r"SyntaxError: invalid syntax .* \(ast\.py:\d+\)", line)
    assert compiler_log.in_a_line(KeyError("a" * 500)).endswith("...")


def test_compiled_code_that_fails_in_its_first_step_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def gone(inputs: list[Tensor]) -> list[Tensor]:
        raise NameError("name 'empty_strided_cpu' is not defined")

    monkeypatch.setattr(compilation, "compile_graph", lambda graph, folder, *rest: _empty(folder))
    monkeypatch.setattr(compilation, "load_program", lambda folder: gone)
    with pytest.warns(MiscompiledWarning, match="failed, and its operations did not: NameError: "):
        run = trained(tmp_path)
    assert_same_run(run, fit(lambda: Classifier(mlp()), lambda: (loader(64),), static=False))
    assert how(run) == "run operation by operation (compiled, it was wrong)"
    [report] = (tmp_path / "programs" / "reports").iterdir()
    assert "in gone" in (report / "compiled.txt").read_text()
    assert (report / "right.pt").exists()
