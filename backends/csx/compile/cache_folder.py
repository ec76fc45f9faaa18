"""The folder of the compile cache: one that nobody else can write, on a disk that takes it.

Where the user's default folder cannot be used, or any folder stops taking files in the middle of a
run, a temporary folder of this process stands in for it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from fulgurite.backends.csx.compile.entries import is_ours


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


def refuse_shared(folder: Path) -> None:
    """Raise SharedFolder unless a folder is this user's alone to write."""
    refused = f"compile_dir={str(folder)!r} holds code that will be run, and"
    if folder.stat().st_uid != os.geteuid():
        raise SharedFolder(f"{refused} belongs to another user. Give a folder of your own.")
    if not is_ours(folder):
        raise SharedFolder(f"{refused} others can write it. Type: chmod go-w '{folder}'")
    for parent in folder.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise SharedFolder(
                f"{refused} everybody can write {str(parent)!r}, where they could replace it."
                f" Type: chmod o-w '{parent}', or give another folder."
            )


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
