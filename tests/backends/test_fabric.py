"""The host fabric and what it builds: with and without a compiler, denormals, programs as data."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_same_run, both, fit
from models import Classifier, Measured, loader, mlp

from fulgurite.backends.csx import denormals, fabric
from fulgurite.backends.csx.fabric import cpu_name
from fulgurite.backends.csx.passes import PASSES

SCRIPT = """
import sys, torch, logging
sys.path.insert(0, {tests!r})
from harness import fit
from models import Classifier, loader, mlp
logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
run = fit(lambda: Classifier(mlp()), lambda: (loader(64),), static=True, policy="default")
print(len(run.losses), "steps")
"""


def run_script(tmp_path: Path, **environment: str) -> str:
    """What a script prints in its own process and with an empty compiler cache."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT.format(tests=str(Path(__file__).parents[1]))],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def test_without_a_compiler_programs_run_operation_by_operation(tmp_path: Path) -> None:
    text = run_script(tmp_path, CXX="/nonexistent/c++", PATH="/nonexistent")
    assert "training program, " in text
    assert "run operation by operation (no C++ compiler was found)" in text
    assert "4 steps" in text


def test_without_python_h_programs_run_operation_by_operation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fabric, "get_cpp_compiler", lambda: "c++")
    monkeypatch.setattr(fabric.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    ours = fit(lambda: Classifier(mlp()), lambda: (loader(64),), static=True, policy="default")
    built = ours.trainer.strategy.step_functions["training"]._built[0]
    assert "Python.h was not found" in built.ready["step"]._loaded.how


@pytest.mark.compiler
def test_compiled_programs_say_how_long_it_took() -> None:
    lines: list[str] = []

    class Bar(pl.callbacks.ProgressBar):
        is_enabled = True

        def disable(self) -> None: ...

        def enable(self) -> None: ...

        def print(self, *text: Any) -> None:
            lines.append(" ".join(map(str, text)))

    run = fit(
        lambda: Classifier(mlp()),
        lambda: (loader(64),),
        static=True,
        policy="medium",
        callbacks=(Bar(),),
        enable_progress_bar=True,
    )
    count = run.trainer.strategy.programs[0].operations
    threads = torch.get_num_threads()
    where = f"CSX on host fabric ({cpu_name()}, {threads} thread{'s' * (threads > 1)})"
    [line] = lines
    assert line.startswith(f"{where}: training program, {count} operations, compiled in ")
    assert line.endswith(" s")


@pytest.mark.compiler
def test_compiled_accumulation_and_metrics_equal_stock() -> None:
    ours, stock = both(
        Measured,
        lambda: (loader(16 * 10), loader(64)),
        policy="default",
        accumulate_grad_batches=3,
    )
    assert_same_run(ours, stock)


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
    [written] = (tmp_path / "artifacts").iterdir()
    assert written.name == "training.txt"
    assert "models.py" in written.read_text()
    assert program.text() in written.read_text()


def test_passes_are_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str, str]] = []
    from fulgurite.backends.csx import capture

    def watched(graph: Any) -> Any:
        for one in PASSES:
            before = graph.module.code, graph.inputs
            after = one(graph)
            assert (graph.module.code, graph.inputs) == before, one.__name__
            seen.append((one.__name__, *map(str, (len(before[1]), len(after.inputs)))))
            graph = after
        return graph

    monkeypatch.setattr(capture, "lower", watched)
    fit(lambda: Classifier(mlp()), lambda: (loader(16),), static=True)
    assert [name for name, _, _ in seen] == [
        "drop_renames",
        "functionalize",
        "drop_renames",
        "simplify",
        "prune",
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


def test_a_process_that_flushes_itself_still_does_after() -> None:
    torch.set_flush_denormal(True)
    try:
        fit(Denormal, lambda: (loader(32),), static=True)
        assert denormals.is_flushing()
    finally:
        torch.set_flush_denormal(False)
