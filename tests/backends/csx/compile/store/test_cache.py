"""The compile cache: what is found again, what is built again, and two processes at once."""

from __future__ import annotations

import errno
import grp
import hashlib
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fulgurite.backends.csx.compile.store import cache, cache_folder
from fulgurite.backends.csx.compile.store.cache import CompileCache, NothingStored, UnfitEntry
from fulgurite.backends.csx.compile.store.entries import is_whole, remove
from fulgurite.backends.runtime import interrupted_once

BACKENDS = Path(cache.__file__).parents[3]
KEYS = [hashlib.sha256(bytes([i])).hexdigest() for i in range(4)]
KEY = KEYS[0]


def build(folder: Path) -> None:
    """An entry of two files, one in a folder."""
    (folder / "program.py").write_text("answer = 42\n")
    (folder / "kernels").mkdir()
    (folder / "kernels" / "first.so").write_bytes(bytes(range(64)))


def load(folder: Path) -> str:
    return (folder / "program.py").read_text()


def never(folder: Path) -> None:
    raise AssertionError("built again")


@pytest.fixture(autouse=True)
def no_temporary_folder() -> None:
    """The process has none yet, and has told of none."""
    cache_folder._temporary.cache_clear()
    cache_folder.folder_of_this_process.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "programs"


def test_what_was_built_is_found_again_by_its_key_alone(folder: Path) -> None:
    first = CompileCache(folder).fetch(KEY, build, load)
    assert (first.value, first.built) == ("answer = 42\n", True)
    again = CompileCache(folder).fetch(KEY, never, load)
    assert (again.value, again.built) == ("answer = 42\n", False)
    assert CompileCache(folder).fetch(KEYS[1], build, load).built
    assert {path.name for path in folder.iterdir()} == {
        *(KEY, KEYS[1]),
        *(f"{KEY}.lock", f"{KEYS[1]}.lock"),
    }


def test_the_folder_and_all_in_it_are_their_owners_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        CompileCache(folder).fetch(KEY, build, load)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / KEY).stat().st_mode & 0o077 == 0
    assert is_whole(folder / KEY)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / KEY).rglob("*") if path.is_file())


def flipped(data: bytes, i: int) -> bytes:
    """One bit of byte ``i`` is another."""
    return data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :]


def test_one_flipped_bit_in_any_file_builds_the_entry_again(folder: Path) -> None:
    CompileCache(folder).fetch(KEY, build, load)
    names = [path.name for path in files(folder)]
    assert names == ["first.so", "manifest", "program.py"]
    for path in files(folder):
        whole = path.read_bytes()
        for i in range(len(whole)):
            path.write_bytes(flipped(whole, i))
            assert not is_whole(folder / KEY), (path.name, i)
        assert CompileCache(folder).fetch(KEY, build, load).built, path.name
        assert not CompileCache(folder).fetch(KEY, never, load).built


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a file is missing": lambda entry: (entry / "program.py").unlink(),
    "a file is shorter": lambda entry: os.truncate(entry / "program.py", 3),
    "a file is empty": lambda entry: os.truncate(entry / "manifest", 0),
    "a folder has another name": lambda entry: (entry / "kernels").rename(entry / "other"),
    "there is no manifest": lambda entry: (entry / "manifest").unlink(),
    "a file was added": lambda entry: (entry / "more.py").write_text(""),
    "a link was added": lambda entry: (entry / "more.py").symlink_to("program.py"),
    "others can write a file": lambda entry: (entry / "program.py").chmod(0o666),
    "others can write the entry": lambda entry: entry.chmod(0o777),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_an_entry_is_built_again_where(damage: Callable[[Path], object], folder: Path) -> None:
    CompileCache(folder).fetch(KEY, build, load)
    damage(folder / KEY)
    assert CompileCache(folder).fetch(KEY, build, load).built
    assert not CompileCache(folder).fetch(KEY, never, load).built


def test_an_entry_under_another_programs_key_is_built_again(folder: Path) -> None:
    def other(part: Path) -> None:
        (part / "program.py").write_text("answer = 43\n")

    CompileCache(folder).fetch(KEYS[0], build, load)
    CompileCache(folder).fetch(KEYS[1], other, load).mark("checked")
    shutil.rmtree(folder / KEYS[0])
    shutil.copytree(folder / KEYS[1], folder / KEYS[0])  # as a script that tidies up would
    shutil.copy(folder / f"{KEYS[1]}.mark", folder / f"{KEYS[0]}.mark")
    again = CompileCache(folder).fetch(KEYS[0], build, load)
    assert (again.value, again.built, again.marked) == ("answer = 42\n", True, None)
    assert not CompileCache(folder).fetch(KEYS[1], never, load).built


def test_an_entry_that_is_whole_and_does_not_fit_is_built_again(folder: Path) -> None:
    def fitting(part: Path) -> str:
        if load(part) != "answer = 42\n":
            raise UnfitEntry
        return load(part)

    def unfit(part: Path) -> None:
        (part / "program.py").write_text("answer = 43\n")

    CompileCache(folder).fetch(KEY, unfit, load)
    again = CompileCache(folder).fetch(KEY, build, fitting)
    assert (again.value, again.built) == ("answer = 42\n", True)
    assert not CompileCache(folder).fetch(KEY, never, fitting).built


def as_file(path: Path, elsewhere: Path) -> None:
    path.write_text("not yours")


def as_folder(path: Path, elsewhere: Path) -> None:
    (path / "deep").mkdir(parents=True)
    (path / "deep" / "file").write_text("")
    (path / "deep").chmod(0)


def as_link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def as_link_to_nothing(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere / "nothing")


def as_link_to_itself(path: Path, elsewhere: Path) -> None:
    path.symlink_to(path)


def as_fifo(path: Path, elsewhere: Path) -> None:
    os.mkfifo(path)


def as_unreadable_file(path: Path, elsewhere: Path) -> None:
    path.write_text("")
    path.chmod(0)


ODD = (
    *(as_file, as_folder, as_link, as_link_to_nothing, as_link_to_itself, as_fifo),
    as_unreadable_file,
)
PLACES = ("{key}", "{key}/manifest", "{key}/kernels", "{key}.lock", "{key}.mark", "{key}.x.part")


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("place", PLACES)
def test_something_else_in_the_cache_is_removed_and_no_more_than_that(
    place: str, odd: Callable[[Path, Path], None], folder: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.tex").write_text("years")
    CompileCache(folder).fetch(KEY, build, load)
    path = folder / place.format(key=KEY)
    remove(path)
    odd(path, elsewhere)
    found = CompileCache(folder).fetch(KEY, build, load)
    assert found.value == "answer = 42\n"
    assert found.built == ("." not in place)
    assert CompileCache(folder).folder == folder
    found.mark("checked")
    assert CompileCache(folder).fetch(KEY, never, load).marked == "checked"
    assert [path.name for path in elsewhere.iterdir()] == ["thesis.tex"]


def test_a_build_that_fails_leaves_nothing_and_its_exception_unchanged(folder: Path) -> None:
    def fails(part: Path) -> None:
        build(part)
        raise KeyError("the compiler's own")

    with pytest.raises(KeyError, match="the compiler's own"):
        CompileCache(folder).fetch(KEY, fails, load)
    assert list(folder.iterdir()) == []


def test_ctrl_c_in_a_build_leaves_nothing_and_a_second_one_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(part: Path) -> None:
        build(part)
        signal.raise_signal(signal.SIGINT)

    def remove_slowly(path: Path) -> None:
        signal.raise_signal(signal.SIGINT)
        remove(path)

    monkeypatch.setattr(cache, "remove", remove_slowly)
    with pytest.raises(KeyboardInterrupt) as caught, interrupted_once():
        CompileCache(folder).fetch(KEY, interrupted, load)
    assert caught.value.__context__ is None
    assert list(folder.iterdir()) == []
    with pytest.raises(KeyboardInterrupt):  # the handler is as it was
        signal.raise_signal(signal.SIGINT)


def test_a_folder_that_was_removed_meanwhile_is_made_again(folder: Path) -> None:
    kept = CompileCache(folder)
    folder.rmdir()
    assert kept.fetch(KEY, build, load).built


# -- the size limit --------------------------------------------------------------------------------


def of_100_bytes(folder: Path) -> None:
    (folder / "code").write_bytes(bytes(100))


def keys_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if "." not in path.name}


def fill(folder: Path) -> None:
    """Three entries, the first used longest ago."""
    for age, key in zip((30, 20, 10), KEYS, strict=False):
        CompileCache(folder).fetch(key, of_100_bytes, os.listdir)
        os.utime(folder / key, (time.time() - age, time.time() - age))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """A folder of three entries, whose limit is that of three."""
    fill(folder)
    size = sum(path.stat().st_size for path in (folder / KEY).iterdir())
    monkeypatch.setenv("FULGURITE_CACHE_BYTES", str(3 * size))
    return folder


def test_past_the_limit_the_entry_goes_that_was_used_longest_ago(small: Path) -> None:
    assert not CompileCache(small).fetch(KEYS[0], never, os.listdir).built
    CompileCache(small).fetch(KEYS[3], of_100_bytes, os.listdir)
    assert keys_in(small) == {KEYS[0], KEYS[2], KEYS[3]}
    assert not (small / f"{KEYS[1]}.lock").exists()


def test_what_this_run_or_another_process_uses_never_goes(small: Path) -> None:
    kept = CompileCache(small)
    kept.fetch(KEYS[0], never, os.listdir)
    os.utime(small / KEYS[0], (0, 0))
    with CompileCache(small)._locked(KEYS[1], cache.fcntl.LOCK_SH):  # as while loading
        kept.fetch(KEYS[3], of_100_bytes, os.listdir)
    assert keys_in(small) == {KEYS[0], KEYS[1], KEYS[3]}


def test_nothing_else_in_the_folder_is_ever_removed(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULGURITE_CACHE_BYTES", "0")
    (small / "thesis").mkdir()
    (small / "thesis" / "thesis.tex").write_text("years")
    (small / "notes.part").mkdir()
    CompileCache(small).fetch(KEYS[3], of_100_bytes, os.listdir)
    assert keys_in(small) == {KEYS[3], "thesis"}
    assert (small / "thesis" / "thesis.tex").exists()
    assert (small / "notes.part").exists()


def test_a_limit_that_is_no_number_is_an_error(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("FULGURITE_CACHE_BYTES", "2 GB")
    with pytest.raises(
        ValueError, match=r"FULGURITE_CACHE_BYTES must be a number of bytes.*'2 GB'"
    ):
        CompileCache(folder)


# -- the folder ------------------------------------------------------------------------------------


def test_the_default_folder_is_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert CompileCache().folder == tmp_path / ".cache" / "fulgurite"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert CompileCache().folder == tmp_path / "elsewhere" / "fulgurite"


@pytest.fixture(params=["read-only", "no locks"])
def unusable(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Path:
    """A home on a read-only disk (also for root), or on one without locks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if request.param == "no locks":

        def flock(file: int, how: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(cache.fcntl, "flock", flock)
        return tmp_path
    monkeypatch.setattr(
        cache.os, "access", lambda path, mode: not str(path).startswith(str(tmp_path))
    )
    return tmp_path


def test_a_default_folder_that_cannot_be_used_is_one_warning_and_a_temporary_one(
    unusable: Path,
) -> None:
    with pytest.warns(UserWarning, match=r"not kept.*backend\('CSX', compile_dir=...\)") as caught:
        first, second = CompileCache(), CompileCache()
    assert len(caught) == 1
    assert first.folder == second.folder
    assert unusable not in first.folder.parents


def test_a_given_folder_that_cannot_be_used_is_an_error_that_names_it(unusable: Path) -> None:
    with pytest.raises(PermissionError, match=re.escape(f"compile_dir={str(unusable)!r} cannot")):
        CompileCache(unusable)


def test_a_given_folder_that_is_a_file_is_an_error_that_names_it(folder: Path) -> None:
    """It is no matter of permission, and the error says none: whoever catches that gets it too."""
    folder.write_text("")
    expected = (
        f"compile_dir={str(folder)!r} cannot be used: File exists. Give a folder of your own."
    )
    with pytest.raises(PermissionError, match=re.escape(expected)) as caught:
        CompileCache(folder)
    assert type(caught.value).__name__ == "UnusableFolder"
    assert caught.value.errno == errno.EEXIST


def test_a_given_folder_that_is_a_link_to_nothing_is_made(folder: Path, tmp_path: Path) -> None:
    folder.symlink_to(tmp_path / "disk" / "programs")
    assert CompileCache(folder).fetch(KEY, build, load).built
    assert keys_in(tmp_path / "disk" / "programs") == {KEY}


def test_a_given_folder_that_is_a_link_to_itself_is_an_error_that_names_it(folder: Path) -> None:
    folder.symlink_to(folder)
    with pytest.raises(PermissionError, match=re.escape(f"compile_dir={str(folder)!r} cannot")):
        CompileCache(folder)


def refusing(number: int, folder: Path) -> Callable[[Path], None]:
    """A build for which a folder has no space; others do."""

    def refused(part: Path) -> None:
        build(part)
        if folder in part.parents:
            raise OSError(number, os.strerror(number))

    return refused


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_folder_that_is_full_is_left_for_a_temporary_one_with_one_warning(
    number: int, folder: Path
) -> None:
    kept = CompileCache(folder)
    full = f"{folder}.*cannot be used any more.*{re.escape(os.strerror(number))}.*compile_dir="
    with pytest.warns(UserWarning, match=full) as caught:
        assert kept.fetch(KEY, refusing(number, folder), load).built
    assert not kept.fetch(KEY, never, load).built
    assert kept.fetch(KEYS[1], refusing(number, folder), load).built
    assert len(caught) == 1
    assert folder not in (kept.folder, *kept.folder.parents)
    assert list(folder.iterdir()) == []


def test_a_folder_that_became_read_only_is_left_for_a_temporary_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = CompileCache(folder)
    monkeypatch.setattr(
        cache.os, "access", lambda path, mode: not str(path).startswith(str(folder))
    )
    with pytest.warns(UserWarning, match=r"cannot be used any more \(no permission to write"):
        assert kept.fetch(KEYS[2], build, load).built


def test_where_no_folder_takes_programs_the_text_says_why(folder: Path) -> None:
    def full(part: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    kept = CompileCache(folder)
    for _ in range(2):
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            with pytest.raises(
                NothingStored, match=r"cannot be written: .* No space left on device"
            ):
                kept.fetch(KEYS[3], full, load)


def test_a_folder_that_others_can_write_by_now_is_an_error_still(folder: Path) -> None:
    kept = CompileCache(folder)
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match=re.escape(f"Type: chmod go-w '{folder}'")):
        kept.fetch(KEY, build, load)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_is_an_error_with_what_to_type(
    mode: int, folder: Path
) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PermissionError, match=re.escape(f"Type: chmod go-w '{folder}'")):
        CompileCache(folder)
    folder.chmod(mode & ~0o022)
    CompileCache(folder)


def test_a_folder_inside_one_that_everybody_can_write_is_an_error(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    folder.parent.chmod(0o777)
    with pytest.raises(PermissionError, match=re.escape(f"Type: chmod o-w '{folder.parent}'")):
        CompileCache(folder)
    folder.parent.chmod(0o1777)  # as /tmp: nobody can rename what another owns
    CompileCache(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
@pytest.mark.parametrize("above", [1, 2])
def test_a_folder_under_one_of_another_user_is_an_error(above: int, folder: Path) -> None:
    folder = folder / "x" / "y"
    folder.mkdir(parents=True)
    other = folder.parents[above - 1]
    os.chown(other, 12345, -1)
    with pytest.raises(PermissionError, match=f"{re.escape(repr(str(other)))}.*another user"):
        CompileCache(folder)
    os.chown(other, 0, -1)
    CompileCache(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to any group")
@pytest.mark.parametrize("members", [["ada", "eve"], ["eve"], ["ada"], []])
def test_a_folder_under_one_that_a_group_may_write(
    members: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error, unless the group is this user's alone."""
    users = [
        SimpleNamespace(pw_name="ada", pw_uid=os.geteuid(), pw_gid=0),
        SimpleNamespace(pw_name="eve", pw_uid=4321, pw_gid=4321),
    ]
    monkeypatch.setattr(pwd, "getpwall", lambda: users)
    monkeypatch.setattr(grp, "getgrgid", lambda group: SimpleNamespace(gr_mem=members))
    folder.mkdir(mode=0o700)
    folder.parent.chmod(0o770)
    os.chown(folder.parent, -1, 777)
    if "eve" not in members:
        CompileCache(folder)
        users[1].pw_gid = 777  # in it without being listed
    with pytest.raises(PermissionError, match=re.escape(f"Type: chmod g-w '{folder.parent}'")):
        CompileCache(folder)


@pytest.fixture
def team(tmp_path: Path) -> Path:
    """A folder that others may read, with an entry."""
    shared = tmp_path / "team"
    CompileCache(shared).fetch(KEY, build, load)
    for path in (shared, *shared.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return shared


def test_an_entry_of_a_folder_that_is_only_read_is_copied(folder: Path, team: Path) -> None:
    before = sorted(path.name for path in team.iterdir())
    assert CompileCache([folder, team]).fetch(KEY, never, load).value == "answer = 42\n"
    assert is_whole(folder / KEY)
    assert sorted(path.name for path in team.iterdir()) == before
    shutil.rmtree(team)
    found = CompileCache(folder).find(KEY, load)  # from now on it is this user's own
    assert found is not None
    assert not found.built


def test_it_is_found_between_two_steps_too(folder: Path, team: Path) -> None:
    assert CompileCache([folder, team]).find(KEYS[1], load) is None
    found = CompileCache([folder, team]).find(KEY, load)
    assert found is not None
    assert found.value == "answer = 42\n"


def test_what_is_only_read_is_not_written(folder: Path, team: Path) -> None:
    assert CompileCache([folder, team]).fetch(KEYS[1], build, load).built
    assert (folder / KEYS[1]).is_dir()
    assert not (team / KEYS[1]).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_who_owns_a_folder_that_is_only_read_is_trusted(folder: Path, team: Path) -> None:
    for path in (team, *team.rglob("*")):
        os.chown(path, 12345, -1)
    assert CompileCache([folder, team]).fetch(KEY, never, load).value == "answer = 42\n"
    os.chown(team / KEY / "program.py", 54321, -1)  # whose is this?
    shutil.rmtree(folder)
    assert CompileCache([folder, team]).fetch(KEY, build, load).built


@pytest.mark.parametrize("how", ["a byte", "a file more", "rights", "renamed"])
def test_a_damaged_entry_of_a_folder_that_is_only_read_is_built(
    how: str, folder: Path, team: Path
) -> None:
    key = KEY
    if how == "a byte":
        (team / KEY / "program.py").write_text("answer = 43\n")
    elif how == "a file more":
        (team / KEY / "other.py").write_text("")
    elif how == "rights":
        (team / KEY / "program.py").chmod(0o666)
    else:
        (team / KEY).rename(team / KEYS[2])
        key = KEYS[2]
    assert CompileCache([folder, team]).fetch(key, build, load).built
    assert not list(folder.glob("*.part"))


def test_a_folder_to_be_read_that_others_may_write_is_an_error(folder: Path, team: Path) -> None:
    team.chmod(0o775)
    with pytest.raises(PermissionError, match="others can write it"):
        CompileCache([folder, team])


def test_a_folder_to_be_read_that_is_not_there_is_an_error(folder: Path) -> None:
    with pytest.raises(PermissionError, match="is not there"):
        CompileCache([folder, folder.parent / "none"])
    assert not (folder.parent / "none").exists()


def test_another_users_folder_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(cache.os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        CompileCache(folder)


@pytest.mark.parametrize("above", [False, True], ids=["the folder", "a folder above it"])
def test_a_link_that_took_a_folders_place_is_an_error(
    above: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where it points to a folder of this user's: it may point elsewhere a moment later."""
    used = folder / "inner" if above else folder
    programs = CompileCache(used)
    real = folder.rename(tmp_path / "real")
    folder.symlink_to(real)
    monkeypatch.setattr(cache, "make", lambda found: found)  # it was looked at before
    with pytest.raises(PermissionError, match=f"{re.escape(repr(str(folder)))} became a link"):
        programs.fetch(KEY, build, load)


# -- several processes -----------------------------------------------------------------------------

PROCESS = """
import importlib.util, sys
from contextlib import contextmanager

backends, folder, name, key = sys.argv[1:]
room = "csx.compile.store"
for part in (f"{room}.{file}" for file in ("entries", "cache_folder", "upkeep", "cache")):
    full, path = f"fulgurite.backends.{part}", f"{backends}/{part.replace('.', '/')}.py"
    spec = importlib.util.spec_from_file_location(full, path)  # alone: torch would take seconds
    cache = sys.modules[full] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cache)

def load(folder):
    return (folder / "program.py").read_text()

def say(word):
    print(word, flush=True)

def build(folder):
    (folder / "half").write_text(name)
    say("builds")
    sys.stdin.readline()
    (folder / "program.py").write_text(name)

@contextmanager
def waiting():
    say("waits")
    yield

found = cache.CompileCache(folder).fetch(key, build, load, waiting)
say(f"{'built' if found.built else 'found'} {found.value}")
"""


class Process:
    """A process that fetches ``KEY`` and stops in the middle of building until told to go on."""

    def __init__(self, folder: Path, name: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(BACKENDS), str(folder), name, KEY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def says(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self.end()

    def end(self) -> None:
        self._process.communicate()


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[[str], Process]]:
    started: list[Process] = []

    def start(name: str) -> Process:
        started.append(Process(folder, name))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def two(start: Callable[[str], Process]) -> tuple[Process, Process]:
    """One process that builds, and a second that waits for it."""
    first = start("first")
    assert first.says() == "builds"
    second = start("second")
    assert second.says() == "waits"
    return first, second


@pytest.mark.process
def test_the_second_process_waits_and_takes_what_the_first_built(
    start: Callable[[str], Process],
) -> None:
    first, second = two(start)
    first.go_on()
    assert first.says() == "built first"
    assert second.says() == "found first"


@pytest.mark.process
def test_when_the_second_process_is_killed_the_first_ends_well_and_a_third_finds_its_entry(
    start: Callable[[str], Process], folder: Path
) -> None:
    first, second = two(start)
    second.kill()
    first.go_on()
    assert first.says() == "built first"
    third = start("third")
    assert third.says() == "found first"
    assert is_whole(folder / KEY)


@pytest.mark.process
def test_when_the_first_process_is_killed_the_second_takes_over_and_sweeps(
    start: Callable[[str], Process], folder: Path
) -> None:
    first, second = two(start)
    first.kill()
    assert second.says() == "builds"
    [part] = folder.glob("*.part")
    assert (part / "half").read_text() == "second"
    second.go_on()
    assert second.says() == "built second"
    assert keys_in(folder) == {KEY}
    assert list(folder.glob("*.part")) == []


@pytest.mark.process
def test_what_a_killed_process_left_goes_with_the_next_program_that_is_built(
    start: Callable[[str], Process], folder: Path
) -> None:
    first = start("first")
    assert first.says() == "builds"
    CompileCache(folder).fetch(KEYS[1], build, load)
    assert len(list(folder.glob("*.part"))) == 1  # a live process's
    first.kill()
    CompileCache(folder).fetch(KEYS[2], build, load)
    assert list(folder.glob("*.part")) == []


@pytest.mark.process
def test_an_entry_that_was_removed_while_a_process_waited_for_it_is_built_by_that_process(
    start: Callable[[str], Process], folder: Path
) -> None:
    kept = CompileCache(folder)
    kept.fetch(KEY, build, load)
    with kept._locked(KEY, cache.fcntl.LOCK_EX):
        second = start("second")
        assert second.says() == "waits"
        remove(folder / KEY)
        (folder / f"{KEY}.lock").unlink()
    assert second.says() == "builds"
    second.go_on()
    assert second.says() == "built second"
    assert is_whole(folder / KEY)
