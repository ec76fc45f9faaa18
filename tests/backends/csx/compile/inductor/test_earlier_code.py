"""What earlier compilations left: a changed model compiles what changed, a stopped one goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Run, assert_same_run, fit
from models import Classifier, loader
from torch import Tensor, nn

from fulgurite.backends.csx.compile.inductor import earlier_code, kernel_modules
from fulgurite.backends.csx.compile.inductor import generate as inductor
from fulgurite.backends.csx.compile.inductor.earlier_code import EarlierCode
from fulgurite.backends.csx.compile.programs import parts
from fulgurite.backends.csx.compile.programs.parts import Part
from fulgurite.backends.csx.compile.programs.steps import Generated, KernelSource, Name, Program
from fulgurite.backends.csx.compile.store.cache import CompileCache

pytestmark = pytest.mark.compiler


class Tower(nn.Module):
    """So many equal layers."""

    def __init__(self, layers: int, activation: type[nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), activation()) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for one in self.layers:
            x = x + one(x)
        return self.out(x)


class Compiled:
    """Counts what is generated and compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.generated, self.kernels = 0, 0
        generate, build = inductor._generated, kernel_modules.build

        def counted(part: Part, *rest: Any) -> Generated:
            self.generated += 1
            return generate(part, *rest)

        def built(kernels: Sequence[KernelSource], *where: Any) -> list[list[str]]:
            self.kernels += len(kernels)
            return build(kernels, *where)

        monkeypatch.setattr(inductor, "_generated", counted)
        monkeypatch.setattr(kernel_modules, "build", built)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    monkeypatch.setattr(parts, "SMALL", 0)
    return Compiled(monkeypatch)


def run(folder: Path | None, layers: int, activation: type[nn.Module] = nn.Tanh) -> Run:
    """A fit: compiled into a folder, or stock Lightning's."""
    return fit(
        lambda: Classifier(Tower(layers, activation)),
        lambda: (loader(64, 16),),
        static=folder is not None,
        policy="default",
        backend={"compile_dir": folder},
    )


@pytest.mark.long
@pytest.mark.numbers
def test_a_changed_model_compiles_what_changed(compiled: Compiled, tmp_path: Path) -> None:
    assert_same_run(run(tmp_path, 12), run(None, 12))
    cold = compiled.generated, compiled.kernels
    assert cold[0] >= 4
    compiled.generated = compiled.kernels = 0
    assert_same_run(run(tmp_path, 24), run(None, 24))
    assert compiled.generated <= cold[0] // 2
    assert compiled.kernels <= cold[1] // 2
    compiled.generated = compiled.kernels = 0
    assert_same_run(run(tmp_path, 12, nn.Softplus), run(None, 12, nn.Softplus))
    assert compiled.generated < cold[0]
    assert compiled.kernels < cold[1]


@pytest.mark.long
@pytest.mark.numbers
def test_what_was_generated_before_a_process_ended_is_not_generated_again(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(kernel_modules, "build", interrupted)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            run(tmp_path, 2)
    assert compiled.generated
    compiled.generated = 0
    assert_same_run(run(tmp_path, 2), run(None, 2))
    assert compiled.generated == 0
    assert compiled.kernels


@pytest.mark.core
def test_code_for_other_threads_vectors_readers_or_policies_is_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CompileCache(tmp_path)
    part = Part(torch.fx.GraphModule({}, torch.fx.Graph()), (), "the same", read_by_others=False)
    made: list[int] = []

    def code(part: Part, threads: int = 1) -> str:
        def generate(part: Part) -> Generated:
            made.append(len(made))
            program = Program((Name(f"number {made[-1]}"),), (), ())
            return Generated(program, {}, {"ones": torch.ones(made[-1])})

        found = EarlierCode(cache, threads).part(part, generate)
        [name] = found.program.inputs
        assert torch.equal(found.constants["ones"], torch.ones(int(name[-1])))
        return str(name)

    assert [code(part), code(part)] == ["number 0"] * 2
    assert [code(part, threads=2), code(part, threads=2)] == ["number 1"] * 2
    other = Part(part.module, (), "the same", read_by_others=True)
    assert [code(other), code(other)] == ["number 2"] * 2
    other = Part(part.module, (), "the same", read_by_others=False, policy="aggressive")
    assert [code(other), code(other)] == ["number 3"] * 2
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.pick_vec_isa", lambda: "fewer")
    assert code(part) == "number 4"
    names = {EarlierCode(cache, threads).name_of("source") for threads in (1, 2)}
    assert len(names) == 2


def test_a_damaged_program_lends_nothing(tmp_path: Path) -> None:
    entry = tmp_path / ("0" * 64)
    entry.mkdir(parents=True)
    (entry / earlier_code.INDEX).write_text('{"kernels": [["kernel_a"]]}')
    (entry / "kernels_0.so").write_bytes(b"whatever")
    folder = tmp_path / "new"
    folder.mkdir()
    assert EarlierCode(CompileCache(tmp_path), 1).copy_into({"kernel_a"}, folder) == []
    (entry / earlier_code.INDEX).write_text("no json")
    assert EarlierCode(CompileCache(tmp_path), 1).copy_into({"kernel_a"}, folder) == []
    assert list(folder.iterdir()) == []
