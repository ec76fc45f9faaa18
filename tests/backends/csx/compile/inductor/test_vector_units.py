"""Vector units: believed at first, asked for where a compiler fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config, cpu_vec_isa
from torch._inductor.cpu_vec_isa import VecISA, pick_vec_isa
from torch._inductor.exc import CppCompileError

from fulgurite.backends.csx.compile.host.host_fabric import HOST
from fulgurite.backends.csx.compile.inductor import generate as inductor
from fulgurite.backends.csx.compile.inductor import toolchain
from fulgurite.backends.csx.compile.inductor.toolchain import ask_the_compiler, believed
from fulgurite.backends.patches import applied

NEWEST = ("avx2", "avx512", "avx512_vnni", "amx_tile")


@pytest.fixture
def tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A processor with everything; the test programs that a compiler is asked for, and makes."""
    asked: list[str] = []

    def check_build(self: VecISA, code: str) -> bool:
        asked.append(str(self))
        return "avx512" not in str(self)

    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)  # it would choose among them
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: list(NEWEST))
    monkeypatch.setattr(cpu_vec_isa.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu_vec_isa.sys, "platform", "linux")
    monkeypatch.setattr(VecISA, "check_build", check_build)
    for name in (
        *("_is_avx512_bf16_supported", "_is_vnni_supported", "_init_amx"),
        "_is_amx_fp16_supported",
    ):
        monkeypatch.setattr(torch.cpu, name, lambda: True)
    ask_the_compiler()
    asked.clear()
    yield asked
    monkeypatch.undo()
    ask_the_compiler()


def forget() -> None:
    """As in a process that has asked nothing yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "_described", lambda: None)
        ask_the_compiler()


@pytest.mark.long
@pytest.mark.process
def test_what_the_processor_has_is_believed_without_a_test_program(tests: list[str]) -> None:
    forget()
    with applied(believed()):
        unit = pick_vec_isa()
    assert str(unit) == "avx512 avx512_vnni amx_tile"
    assert unit.build_arch_flags().endswith("-mavx512bf16 -mamx-fp16")
    assert tests == []


def test_who_sets_the_answer_is_believed_too(tests: list[str]) -> None:
    forget()
    with config.patch({"cpp.vec_isa_ok": False}), applied(believed()):
        assert not pick_vec_isa()


def test_a_compiler_that_can_do_less_is_found_out_when_it_is_asked(tests: list[str]) -> None:
    forget()
    with applied(believed()):
        pick_vec_isa()
    assert ask_the_compiler()
    assert str(pick_vec_isa()) == "avx2"
    assert "avx512" in tests
    assert not ask_the_compiler()


@pytest.mark.parametrize("less", [True, False])
def test_a_compilation_that_fails_is_tried_again_where_the_compiler_can_do_less(
    less: bool, tests: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[str] = []

    def compile_one(attempt: Any, folder: Path) -> None:
        seen.append(str(pick_vec_isa()))
        if seen[-1] != "avx2" or not less:
            raise CppCompileError(["c++"], "unrecognized command-line option")

    if less:
        forget()
    monkeypatch.setattr(inductor.Attempt, "compile", compile_one)
    graph: Any = None
    kept: Any = None
    if less:
        inductor.compile_graph(graph, tmp_path, kept, HOST)
        assert seen == ["avx512 avx512_vnni amx_tile", "avx2"]
    else:
        with pytest.raises(CppCompileError, match="unrecognized"):
            inductor.compile_graph(graph, tmp_path, kept, HOST)
        assert seen == ["avx2"]
