"""Torch's header, read once: used where it is whole, made anew where not, never needed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from harness import fit
from models import Classifier, loader, mlp
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.exc import CppCompileError

from fulgurite.backends.csx.compile.background.queue import queue
from fulgurite.backends.csx.compile.inductor import headers
from fulgurite.backends.csx.compile.inductor.headers import Headers
from fulgurite.backends.csx.compile.inductor.kernel_modules import build, load
from fulgurite.backends.csx.compile.inductor.processes import compilers
from fulgurite.backends.csx.compile.programs.steps import KernelSource
from fulgurite.backends.csx.compile.store.cache_folder import users_folder
from fulgurite.backends.csx.program import speed
from fulgurite.commands import cached as cache

pytestmark = pytest.mark.compiler

HALVED = """#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0,
                       float* out_ptr0)
{
    using Vector = at::vec::Vectorized<float>;  // of 4 to 16 numbers, by the processor
    for (int i = 0; i < 16; i += Vector::size())
        (Vector::loadu(in_ptr0 + i) * Vector(0.5)).store(out_ptr0 + i);
}
"""


@pytest.fixture
def kept(header: None) -> Headers:
    """That of the session (``tests/conftest.py``)."""
    return Headers(users_folder())


def compiled(folder: Path, found: Headers | None) -> torch.Tensor:
    """What a kernel computes that was compiled into a folder."""
    names = build([KernelSource("halved", HALVED)], folder, headers=found)
    x, out = torch.arange(16.0), torch.empty(16)
    load(folder, names)["halved"](x, out)
    return out


def test_kernels_are_compiled_with_the_header_as_it_was_read(kept: Headers, tmp_path: Path) -> None:
    flags = kept.copy_into(tmp_path)
    (tmp_path / "prefix.h").write_text("#error it is read once more\n")
    (tmp_path / "kernel.cpp").write_text(HALVED)
    command = CppBuilder("kernel", "kernel.cpp", flags).get_command_line()
    with compilers() as running:
        running.run(command, str(tmp_path))
        (tmp_path / "prefix.h.gch").unlink()
        with pytest.raises(CppCompileError, match="it is read once more"):
            running.run(command, str(tmp_path))


def test_kernels_are_the_same_with_it_and_without(kept: Headers, tmp_path: Path) -> None:
    results = []
    for name, found in (("with", kept), ("without", None)):
        (tmp_path / name).mkdir()
        results.append(compiled(tmp_path / name, found))
    assert torch.equal(*results)
    assert torch.equal(results[0], torch.arange(16.0) / 2)


@pytest.mark.long
def test_one_that_is_gone_or_damaged_is_done_without_and_made_anew(tmp_path: Path) -> None:
    found, out = Headers(tmp_path), tmp_path / "out"
    out.mkdir()
    file = found.keep()
    assert file is not None
    file.chmod(0o600)
    with file.open("r+b") as opened:
        opened.seek(1000)
        opened.write(b"\x00\x01\x02\x03")
    headers._checked.clear()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert found.copy_into(scratch).precompiled_header is None
    assert compiled(out, found)[2] == 1
    before = file.stat().st_mtime_ns
    assert found.keep() == file
    assert file.stat().st_mtime_ns != before
    assert found.copy_into(scratch).precompiled_header == "prefix.h"


def test_another_compiler_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "is_gcc", lambda: False)
    assert Headers(tmp_path).keep() is None
    assert not list(tmp_path.iterdir())


@pytest.mark.fits
@pytest.mark.process
def test_the_worker_keeps_it_when_it_has_compiled_what_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "TIMES", 0.0)
    options = {"background": True, "compile_dir": str(tmp_path), "autogen_policy": "default"}
    fit(lambda: Classifier(mlp()), lambda: (loader(),), static=True, backend=options)
    until = time.monotonic() + 300
    while not list(tmp_path.glob("headers/*/manifest*")) and time.monotonic() < until:
        queue.poll()
        time.sleep(0.1)
    assert cache.show(str(tmp_path)) == 0
    assert "1 header (1" in capsys.readouterr().out
    assert cache.clear(str(tmp_path)) == 0
    assert ", and 1 header (1" in capsys.readouterr().out
    assert not list(tmp_path.glob("headers/*/*"))
