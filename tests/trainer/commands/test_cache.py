"""``fulgurite cache``: what is listed, what is removed, and what never is."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from pathlib import Path

import pytest

from fulgurite import cli
from fulgurite.backends.csx.compile.background.compilation import FOR
from fulgurite.backends.csx.compile.store.cache import CompileCache
from fulgurite.backends.csx.compile.store.fingerprint import environment_digest
from fulgurite.backends.csx.compile.store.upkeep import locked_key
from fulgurite.commands.cached import ago

KEYS = sorted(hashlib.sha256(bytes([i])).hexdigest() for i in range(4))
DAY_S = 86400


def fill(folder: Path, count: int = 3, size_bytes: int = 1000) -> CompileCache:
    """A cache of entries; the first was used so many days ago as there are, the last one today."""
    cache = CompileCache(folder)
    for i, key in enumerate(KEYS[:count]):
        cache.fetch(
            key,
            lambda part: (part / "code").write_bytes(bytes(size_bytes)) and None,
            lambda entry: None,
        ).mark("checked")
        used = time.time() - (count - 1 - i) * DAY_S - 60
        os.utime(folder / key, (used, used))
    return cache


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def keys_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name in KEYS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "programs"


def test_list_shows_programs_the_one_used_last_first(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(folder)
    fill(folder / "parts", count=1)
    before = names(folder)
    assert cli.main(["cache", "list", "--compile-dir", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(folder)
    assert lines[1].split() == ["program", "size", "built", "last", "used"]
    assert [line.split()[0] for line in lines[2:5]] == [key[:12] for key in reversed(KEYS[:3])]
    assert lines[4].rstrip().endswith("just now    2 days ago")
    assert lines[5].startswith("3 programs (3.")
    assert lines[5].endswith(", and the code of 1 part (1.2 KiB); programs may take 2.0 GiB")
    assert names(folder) == before


def test_list_says_whose_programs_they_are(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = {0: environment_digest(), 1: "0" * 64}

    for i, digest in written.items():
        text = f"{digest}\nNet of train.py: the training program, {i + 50} operations\n"
        CompileCache(folder).fetch(
            KEYS[i], lambda part, text=text: (part / FOR).write_text(text) and None, lambda entry: 0
        )
    assert cli.main(["cache", "list", "--compile-dir", str(folder)]) == 0
    lines = "\n" + "\n".join(sorted(capsys.readouterr().out.splitlines()))
    indented = "\n              "
    assert f"{indented}Net of train.py: the training program, 50 operations\n" in lines
    assert f"{indented}compiled in another environment: Net of train.py: the training" in lines
    assert max(len(line) for line in lines.splitlines() if str(folder) not in line) <= 80


def test_list_keeps_to_80_columns_whatever_started_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        f"{environment_digest()}\nNet of train.py {'data/part.csv ' * 50}: the training program\n"
    )
    CompileCache(folder).fetch(
        KEYS[0], lambda part: (part / FOR).write_text(text) and None, lambda entry: 0
    )
    assert cli.main(["cache", "list", "--compile-dir", str(folder)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 6  # folder, head, the program, two lines of whose it is, the sum
    assert max(map(len, told[1:])) <= 80
    assert told[3].strip().startswith("Net of train.py data/part.csv")
    assert told[4].endswith(" ...")


def test_list_without_a_folder_is_of_the_users_and_makes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for what in ("list", "prune", "clear"):
        assert cli.main(["cache", what]) == 0
        assert capsys.readouterr().out.startswith("Nothing was compiled yet: ")
    assert names(tmp_path) == set()
    fill(tmp_path / "fulgurite", count=1)
    assert cli.main(["cache", "list"]) == 0
    assert "1 program (" in capsys.readouterr().out


def test_prune_keeps_within_the_caches_own_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(folder)
    assert cli.main(["cache", "prune", "--compile-dir", str(folder)]) == 0
    assert keys_in(folder) == KEYS[:3]
    assert capsys.readouterr().out.startswith(f"Removed no programs from {folder}.\n3 programs (")
    monkeypatch.setenv("FULGURITE_CACHE_BYTES", "2700")
    assert cli.main(["cache", "prune", "--compile-dir", str(folder)]) == 0
    assert keys_in(folder) == KEYS[1:3]
    assert capsys.readouterr().out.startswith("Removed 1 program (")


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--days", "1.5"], KEYS[1:3]),
        (["--days", "0"], []),
        (["--size", "2K"], KEYS[2:3]),
        (["--size", "1G"], KEYS[:3]),
        (["--days", "1", "--size", "1G"], KEYS[2:3]),
    ],
    ids=" ".join,
)
def test_prune_keeps_within_what_is_given(
    options: list[str], left: list[str], folder: Path
) -> None:
    fill(folder)
    assert cli.main(["cache", "prune", "--compile-dir", str(folder), *options]) == 0
    assert keys_in(folder) == left


def test_prune_leaves_an_eighth_as_much_code_of_parts_as_programs(folder: Path) -> None:
    fill(folder)
    fill(folder / "parts")
    assert cli.main(["cache", "prune", "--compile-dir", str(folder), "--size", "12K"]) == 0
    assert keys_in(folder) == KEYS[:3]
    assert keys_in(folder / "parts") == KEYS[2:3]


def test_clear_removes_what_the_cache_made_and_nothing_else(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(folder)
    fill(folder / "parts", count=2)
    (folder / f"{KEYS[3]}.x.part" / "half").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("")
    (folder / KEYS[3]).symlink_to(tmp_path / "outside")
    (folder / KEYS[0] / "link").symlink_to(tmp_path / "outside")
    mine = {"notes.txt", "reports", "reports/miscompiled-1", f"{KEYS[0]}.txt", KEYS[0][:10]}
    (folder / "reports" / "miscompiled-1").mkdir(parents=True)
    for name in mine - names(folder):
        (folder / name).write_text("")
    assert cli.main(["cache", "clear", "--compile-dir", str(folder)]) == 0
    assert names(folder) == {*mine, "parts"}
    assert (tmp_path / "outside" / "precious").exists()
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("Removed 4 programs (")
    assert "and the code of 2 parts (" in told[0]
    assert told[1:] == [
        f"Reports of programs that gave wrong numbers stay in {folder}/reports: they are yours."
    ]


def test_clear_does_not_follow_a_link_that_has_the_place_of_parts(
    folder: Path, tmp_path: Path
) -> None:
    fill(folder)
    fill(tmp_path / "other", count=2)
    (folder / "parts").symlink_to(tmp_path / "other")
    assert cli.main(["cache", "clear", "--compile-dir", str(folder)]) == 0
    assert names(folder) == {"parts"}
    assert keys_in(tmp_path / "other") == KEYS[:2]


def test_clear_leaves_what_another_process_loads(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(folder)
    with locked_key(folder, KEYS[1], fcntl.LOCK_SH):
        assert cli.main(["cache", "clear", "--compile-dir", str(folder)]) == 0
        assert keys_in(folder) == [KEYS[1]]
        told = capsys.readouterr().out
        assert told.startswith("Removed 2 programs (")
        assert told.endswith("What other processes build or load at this moment stays.\n")


def test_clear_leaves_what_another_process_builds(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = fill(folder)
    with cache.scratch() as part:
        assert cli.main(["cache", "clear", "--compile-dir", str(folder)]) == 0
        assert part.is_dir()
        assert "stays" in capsys.readouterr().out
    assert names(folder) == set()


def test_what_cannot_be_removed_is_told_with_status_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(folder)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("fulgurite.backends.csx.compile.store.upkeep.remove", refuse)
    assert cli.main(["cache", "clear", "--compile-dir", str(folder)]) == 1
    told = capsys.readouterr()
    assert told.out == f"Removed no programs from {folder}.\n"
    assert "not everything could be removed: [Errno 13] Permission denied:" in told.err


@pytest.mark.parametrize("what", ["list", "prune", "clear"])
def test_a_folder_that_is_none_or_no_cache_is_an_error_and_stays_as_it_is(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("")
    before = names(tmp_path)
    for name, told in [
        ("gone", "gone' is not there. Give"),
        ("file", "file' is a file. Give"),
        ("home", "home' is no compile cache: no program is in it, but 'thesis.tex' is. Nothing"),
    ]:
        assert cli.main(["cache", what, "--compile-dir", str(tmp_path / name)]) == 1
        assert told in capsys.readouterr().err
    assert names(tmp_path) == before


def test_a_folder_that_others_can_write_is_not_touched(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(folder)
    folder.chmod(0o777)
    assert cli.main(["cache", "clear", "--compile-dir", str(folder)]) == 1
    assert f"Type: chmod go-w '{folder}'" in capsys.readouterr().err
    assert keys_in(folder) == KEYS[:3]


def test_times_are_told_in_their_largest_unit() -> None:
    seconds = [-5, 59, 60, 7199, 7200, DAY_S, 40 * DAY_S]
    assert [ago(one) for one in seconds] == [
        *("just now", "just now", "1 minute ago", "1 hour ago", "2 hours ago"),
        *("1 day ago", "40 days ago"),
    ]
