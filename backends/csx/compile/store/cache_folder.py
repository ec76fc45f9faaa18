"""The folder of the compile cache: one that nobody else can write, on a disk that takes it.

Where the user's default folder cannot be used, or any folder stops taking files in the middle of a
run, a temporary folder of this process stands in for it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import grp
import os
import pwd
import shutil
import stat
import tempfile
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path

from fulgurite.backends.csx.compile.store.entries import is_ours


class SharedFolder(PermissionError):
    """Others can write the folder, and with it the code that this process would run."""


class UnusableFolder(PermissionError):
    """The folder that was given takes no files or locks; ``errno`` is the system's."""


def default_folder() -> Path:
    """The user's cache folder; where it cannot be used, a temporary one and a warning."""
    try:
        folder = make(users_folder())
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        return folder_of_this_process(f"the default compile_dir cannot be used ({error})")
    refuse_shared(folder)
    return folder


def users_folder() -> Path:
    """The user's cache folder, whether it is there or not.

    Raises:
        RuntimeError: the user has no home.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return home.expanduser() / "fulgurite"


def given_folder(folder: Path) -> Path:
    """The folder that the user gave, made if missing.

    Raises:
        UnusableFolder: it cannot be used; also where it is not a matter of permission.
        SharedFolder: others can write it.
    """
    try:
        folder = make(folder.expanduser())
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
        why = getattr(error, "strerror", None) or error
        unusable = UnusableFolder(
            f"compile_dir={str(folder)!r} cannot be used: {why}. Give a folder of your own."
        )
        unusable.errno = getattr(error, "errno", None)
        raise unusable from None
    refuse_shared(folder)
    return folder


def read_only_folder(folder: Path) -> Path:
    """A folder that the user gave, from which entries are copied: whoever owns it is trusted.

    Raises:
        UnusableFolder: it is not there, or cannot be read.
        SharedFolder: others than its owner can write it.
    """
    folder = folder.expanduser().resolve()
    if not (folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)):
        why = "cannot be read" if folder.exists() else "is not there"
        raise UnusableFolder(
            f"compile_dir={str(folder)!r}, from which compiled programs are to be read, {why}."
            " Leave it out, or give a folder that this user may read."
        )
    refuse_shared(folder, owner=folder.lstat().st_uid)
    return folder


def make(folder: Path) -> Path:
    """The folder without links, made if missing; an OSError if it takes no files or locks."""
    folder = folder.resolve()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(f"no permission to write {str(folder)!r}")
    with contextlib.suppress(BlockingIOError), locked(folder, fcntl.LOCK_SH | fcntl.LOCK_NB):
        pass  # some network file systems have no locks; who holds one shows that this one has
    return folder


@contextlib.contextmanager
def locked(folder: Path, how: int) -> Iterator[None]:
    """Hold a lock of the folder itself."""
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, how)
        yield
    finally:
        os.close(file)


def refuse_shared(folder: Path, owner: int | None = None) -> None:
    """Raise SharedFolder unless a folder without links is its owner's alone to write.

    The owner is this user, unless another one is given. Looked at from the root down, and never
    through a link: what lies in a folder that nobody else can write is still there, and the same,
    when its code is loaded.
    """
    owner = os.geteuid() if owner is None else owner
    refused = f"compile_dir={str(folder)!r} holds code that will be run, and"
    # who can write a folder above can put another one in this one's place
    for parent in reversed(folder.parents):
        _refuse_shared_parent(parent, refused, _trusted() | {owner})
    found = folder.lstat()
    if found.st_uid != owner:
        raise SharedFolder(f"{refused} belongs to another user. Give a folder of your own.")
    _refuse_link(folder, found, refused)
    if not is_ours(folder, owner):
        raise SharedFolder(f"{refused} others can write it. Type: chmod go-w '{folder}'")


def _refuse_shared_parent(parent: Path, refused: str, trusted: Collection[int]) -> None:
    found = parent.lstat()
    if found.st_uid not in trusted:
        raise SharedFolder(
            f"{refused} {str(parent)!r}, where it could be replaced, belongs to another user"
            f" ({found.st_uid}). Give a folder of your own."
        )
    _refuse_link(parent, found, refused)
    if found.st_mode & stat.S_ISVTX:
        return  # nobody can rename there what another owns
    shared = found.st_mode & stat.S_IWGRP and not _is_alone_in(found.st_gid)
    who = "o" * bool(found.st_mode & stat.S_IWOTH) or "g" * bool(shared)
    if who:
        many = "everybody" if who == "o" else f"the group {found.st_gid}"
        raise SharedFolder(
            f"{refused} {many} can write {str(parent)!r}, where they could replace it."
            f" Type: chmod {who}-w '{parent}', or give another folder."
        )


def _refuse_link(path: Path, found: os.stat_result, refused: str) -> None:
    """Links were followed when the folder was made: one that is there now took its place."""
    if stat.S_ISLNK(found.st_mode):
        raise SharedFolder(f"{refused} {str(path)!r} became a link. Give a folder of your own.")


def _trusted() -> set[int]:
    """Users who could change any folder, and this one; in a container "/" may be nobody's."""
    return {0, os.geteuid(), Path("/").stat().st_uid}


def _is_alone_in(group: int) -> bool:
    """Whether a group is nobody else's: many systems make one for each user."""
    user = os.geteuid()
    if group == 0:
        return True
    try:
        members = grp.getgrgid(group).gr_mem
    except KeyError:  # nobody is said to be in it
        return group == os.getegid()
    users = [one for one in pwd.getpwall() if one.pw_name in members or one.pw_gid == group]
    return all(one.pw_uid == user for one in users)


@functools.cache
def folder_of_this_process(why: str) -> Path:
    """A temporary folder that ends with the process, the same every time; each reason is told once.

    Raises:
        OSError: there is no place for temporary files.
    """
    folder = _temporary()
    warnings.warn(
        f"Compiled programs are not kept: {why}. A temporary folder takes them until this process"
        " ends. Remedy: backend('CSX', compile_dir=...), a folder of your own with free space.",
        stacklevel=2,
    )
    return folder


@functools.cache
def _temporary() -> Path:
    folder = tempfile.mkdtemp(prefix="fulgurite-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder).resolve()
