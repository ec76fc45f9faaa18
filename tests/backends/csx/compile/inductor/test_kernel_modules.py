"""Kernels as machine code: what is compiled runs, what fails or is interrupted leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._inductor import async_compile
from torch._inductor.exc import CppCompileError

from fulgurite.backends.csx.compile.inductor import translation_unit
from fulgurite.backends.csx.compile.inductor.kernel_modules import build, load
from fulgurite.backends.csx.compile.programs.steps import KernelSource

# both have a name of their own in common, as kernels of one program may
SCALE = """#include <cstdint>
static int64_t helper() {{ return {factor}; }}
extern "C"  void  kernel(const float* in_ptr0,
                       float* out_ptr0)
{{
    if (in_ptr0[0] < 0) throw std::out_of_range("negative");
    for (int64_t i = 0; i < 4; ++i) out_ptr0[i] = in_ptr0[i] * helper();
}}
"""


def scale(name: str, factor: str) -> KernelSource:
    return KernelSource(name, "#include <stdexcept>\n" + SCALE.format(factor=factor))


@pytest.mark.compiler
def test_kernels_of_one_module_and_of_several_are_found_by_name_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, out = torch.arange(4.0), torch.empty(4)
    kernels = [scale("double", "2"), scale("triple", "3")]
    for folder, size, modules in ((tmp_path / "a", 1 << 20, 1), (tmp_path / "b", 1, 2)):
        folder.mkdir()
        monkeypatch.setattr(translation_unit, "UNIT_BYTES", size)
        monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 2)
        names = build(kernels, folder)
        assert sorted(path.name for path in folder.iterdir()) == [
            f"kernels_{i}.so" for i in range(modules)
        ]
        found = load(folder, names)
        for name, factor in (("double", 2), ("triple", 3)):
            found[name](x, out)
            assert torch.equal(out, x * factor)
        with pytest.raises(RuntimeError, match="negative"):
            found["double"](x - 1, out)
        with pytest.raises(RuntimeError, match="wrong number of tensors"):
            found["double"](x)
        with pytest.raises(RuntimeError, match="tensor"):
            found["double"](x, 1.0)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("factor", "told"), [("this is no C++", "error"), ("missing()", "undefined symbol: .*missing")]
)
def test_what_cannot_be_compiled_or_loaded_is_an_error_and_leaves_nothing(
    factor: str, told: str, tmp_path: Path
) -> None:
    kernel = KernelSource("bad", "int64_t missing();\n" + scale("bad", factor).source)
    with pytest.raises(CppCompileError, match=told):
        build([KernelSource("bad", "#include <cstdint>\n" + kernel.source)], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_program_without_kernels_has_no_module(tmp_path: Path) -> None:
    assert build([], tmp_path) == []
    assert load(tmp_path, []) == {}


COMPILER = """#!/bin/sh
case "$*" in *kernels_*) ;; *) exec c++ "$@";; esac
sleep 300 &
echo $! > {folder}/sleeps.$$
wait
"""
SCRIPT = """
import sys, pathlib
from torch._inductor import async_compile
from fulgurite.backends.csx.compile.inductor import kernel_modules, toolchain, translation_unit
from fulgurite.backends.patches import applied
translation_unit.UNIT_BYTES = 1
async_compile.get_compile_threads = lambda: 2
text = 'extern "C" void kernel(float* x) {}'
kernels = [translation_unit.KernelSource(name, text) for name in ("a", "b")]
try:
    with applied(toolchain.believed()):
        kernel_modules.build(kernels, pathlib.Path(sys.argv[1]))
except KeyboardInterrupt:
    print("interrupted")
"""


def numbers(folder: Path) -> list[str]:
    """Of the processes that the compilers have started."""
    return [text for path in folder.glob("sleeps.*") if (text := path.read_text().strip())]


def runs(number: str) -> bool:
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    return True


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.compiler
def test_ctrl_c_ends_the_compilers_of_all_units_with_all_that_they_started(tmp_path: Path) -> None:
    compiler, folder, scratch = tmp_path / "c++", tmp_path / "entry", tmp_path / "tmp"
    compiler.write_text(COMPILER.format(folder=tmp_path))
    compiler.chmod(0o700)
    folder.mkdir()
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, folder],
        env={**os.environ, "CXX": str(compiler), "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        text=True,
    )
    until(lambda: len(numbers(tmp_path)) == 2)
    sleeping = numbers(tmp_path)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=40)
    assert out == "interrupted\n"
    until(lambda: not any(map(runs, sleeping)))
    assert list(folder.iterdir()) == []
    assert list(scratch.glob("tmp*")) == []
