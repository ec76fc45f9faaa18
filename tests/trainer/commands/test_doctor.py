"""``fulgurite doctor``: what it finds, what it advises, and with which status it ends."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from fulgurite import cli
from fulgurite.backends.csx.compile.inductor import toolchain
from fulgurite.backends.csx.compile.inductor.headers import Headers
from fulgurite.backends.csx.compile.store.cache import CompileCache
from fulgurite.commands import doctor, self_test
from fulgurite.commands.self_test import Outcome, OutOfTime

GOOD = Outcome(
    lightning_us=1000, program_us=100, compiled=True, how="compiled", prepared_s=5.0, apart=2e-7
)


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which all is well, and whose self-test takes no time."""
    monkeypatch.setattr(toolchain, "toolchain_missing", lambda: None)
    monkeypatch.setattr(toolchain, "compiler_version", lambda: "g++ 12.2.0")
    monkeypatch.setattr(toolchain, "loading_fails", lambda folder: None)
    monkeypatch.setattr(Headers, "keep", lambda headers: None)
    monkeypatch.setattr(doctor, "self_test", lambda folder: GOOD)
    monkeypatch.setattr(doctor, "cores", torch.get_num_threads)
    monkeypatch.setattr(doctor, "meets", lambda: doctor.Finding("meeting", "they met"))
    without_place(monkeypatch)


def without_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing says where processes meet."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.compiler
def test_a_machine_that_compiles_is_well_and_its_cache_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_place(monkeypatch)
    monkeypatch.setattr(doctor, "cores", torch.get_num_threads)
    monkeypatch.setattr(doctor, "MEETING_LIMIT_S", 300.0)
    monkeypatch.setattr(self_test, "LIMIT_S", 300.0)  # tests share the machine
    assert cli.main(["doctor", "--compile-dir", str(tmp_path / "programs")]) == 0
    lines = told(capsys)
    assert re.findall(r"^ +(ok|MEND) +([\w-]+) ", lines, re.MULTILINE) == [
        ("ok", name)
        for name in (
            *("versions", "processor", "threads", "network", "meeting", "cache"),
            *("compiler", "header", "self-test"),
        )
    ]
    assert f"torch {version('torch')}, " in lines
    assert "what it makes can be loaded" in lines
    assert re.search(r"AdamW: compiled, ready after .* s; losses equal Lightning's within", lines)
    assert re.search(r"this program  █+ +\d+ µs a step", lines)
    assert lines.endswith("All is well.\n")
    assert [path.name for path in (tmp_path / "programs").iterdir()] == ["headers"]


@pytest.mark.usefixtures("healthy")
def test_a_header_that_cannot_be_kept_is_told_and_no_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(headers: Headers) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Headers, "keep", fail)
    assert cli.main(["doctor", "--compile-dir", str(tmp_path)]) == 0
    assert "header     not kept: [Errno 28] No space left on device\n" in told(capsys)


@pytest.mark.usefixtures("healthy")
def test_a_screen_without_blocks_gets_plain_bars(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    assert cli.main(["doctor", "--compile-dir", str(tmp_path)]) == 0
    screen.seek(0)
    assert f"this program  ####{' ' * 38}100 us a step" in screen.read()


@pytest.mark.usefixtures("healthy")
def test_without_a_compiler_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(toolchain, "toolchain_missing", lambda: "no C++ compiler was found")
    assert cli.main(["doctor", "--compile-dir", str(tmp_path)]) == 1
    lines = told(capsys)
    assert "MEND  compiler   no C++ compiler was found\n" in lines
    assert "-> Install one: " in lines
    assert "ok  self-test  not run, for nothing can be compiled" in lines
    assert lines.endswith("To be mended: 1, see above.\n")


@pytest.mark.compiler
@pytest.mark.usefixtures("healthy")
def test_a_compiler_whose_libraries_cannot_be_loaded_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    assert toolchain.loading_fails(tmp_path) is None

    def refuse(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(toolchain.ctypes, "CDLL", refuse)
    assert "failed to map segment" in str(toolchain.loading_fails(tmp_path))
    found = doctor.compiler(tmp_path)
    assert "but what it makes cannot be loaded: " in found.text
    assert "'noexec'" in found.remedy


@pytest.mark.usefixtures("healthy")
def test_more_threads_than_cores_are_told_with_the_number_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert cli.main(["doctor", "--compile-dir", str(tmp_path)]) == 1
    assert "-> Set OMP_NUM_THREADS=2 before Python starts" in told(capsys)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 4), ("200000 100000", 2), ("50000 100000", 1), ("900000 100000", 4), ("", 4)],
)
def test_a_containers_share_of_the_cores_counts(
    quota: str, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(quota)
    monkeypatch.setattr(doctor, "_QUOTA", file)
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    assert doctor.cores() == expected


def test_a_cache_that_others_can_write_or_that_is_a_file_is_told(tmp_path: Path) -> None:
    shared, file = tmp_path / "shared", tmp_path / "file"
    shared.mkdir()
    shared.chmod(0o777)
    file.write_text("")
    for path, says in [(shared, "chmod go-w"), (file, "File exists")]:
        found, cache = doctor.cache(str(path))
        assert says in found.text
        assert found.remedy
        assert cache is None


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = doctor.shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    found, _ = doctor.cache(str(tmp_path))
    assert "only 1.0 MiB left on its disk" in found.text
    assert found.remedy.startswith("Make room")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"compiled": False, "how": "run operation by operation (why)"}, "(why)"),
        ({"apart": 0.1}, "losses are apart by 1.0e-01"),
        ({"apart": float("nan")}, "losses are apart by nan"),
    ],
    ids=["not compiled", "apart", "nan"],
)
@pytest.mark.usefixtures("healthy")
def test_a_self_test_that_fails_ends_with_1(
    changed: dict[str, object],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "self_test", lambda folder: replace(GOOD, **changed))
    assert cli.main(["doctor", "--compile-dir", str(tmp_path)]) == 1
    lines = told(capsys)
    assert "MEND  self-test" in lines
    assert says in lines


@pytest.mark.parametrize("is_older", [False, True])
def test_a_program_that_an_older_torch_does_not_compile_wants_a_newer_one(
    is_older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "IS_OLDER", is_older)
    remedy = doctor.tested(replace(GOOD, compiled=False)).remedy
    assert remedy.startswith("pip install 'torch>=2.13,<2.16': " if is_older else "Report it")


@pytest.mark.usefixtures("healthy")
@pytest.mark.fits
def test_a_self_test_that_takes_too_long_is_stopped_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "self_test", self_test.self_test)
    monkeypatch.setattr(self_test, "LIMIT_S", 0.01)
    assert cli.main(["doctor", "--compile-dir", str(tmp_path)]) == 1
    lines = told(capsys)
    assert "MEND  self-test  not done after " in lines
    assert "try again when less runs here" in lines
    assert list(tmp_path.iterdir()) == []


def test_time_that_is_over_is_no_error_that_a_compiler_could_catch() -> None:
    assert not issubclass(OutOfTime, Exception)


def test_scratch_is_gone_after_an_exception(tmp_path: Path) -> None:
    def use() -> None:
        with CompileCache(tmp_path).scratch() as folder:
            (folder / "kernel.cpp").write_text("")
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert list(tmp_path.iterdir()) == []


def test_a_torch_that_has_its_vector_units_elsewhere_is_to_be_mended(
    healthy: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delattr("torch._inductor.cpu_vec_isa.pick_vec_isa")
    assert cli.main(["doctor", "--compile-dir", str(tmp_path)]) == 1
    said = " ".join(told(capsys).split())
    assert "torch does not say its vector units: module 'torch._inductor.cpu_vec_isa'" in said
    assert "pip install 'torch>=2.13,<2.16'" in said


def test_on_a_terminal_findings_keep_to_its_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = doctor.Finding("network", "an address of an interface, " * 10, "choose one, " * 10)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert doctor._tell(finding)
    lines = told(capsys).splitlines()
    assert len(lines) > 4
    assert max(map(len, lines)) <= 80
    assert all(line.startswith(" " * 18) for line in lines[1:])
