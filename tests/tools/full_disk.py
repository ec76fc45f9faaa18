"""Let the compile folder run full at every size: a fit goes on, and nothing half written stays.

python tests/tools/full_disk.py          files limited in size; a small disk, where one may mount
python tests/tools/full_disk.py --fit    a compiled fit on a full disk too (a minute; needs root)
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from damage_cache import KEYS, build, files_of, load

from fulgurite.backends.csx.compile.store import cache_folder
from fulgurite.backends.csx.compile.store.cache import CompileCache, NothingStored
from fulgurite.backends.csx.compile.store.entries import is_whole

KEY = KEYS[0]
DISK_KIB = 256


@contextlib.contextmanager
def limited(file_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def outcome(folder: Path) -> str:
    """Fetch an entry; what became of it."""
    kept = CompileCache(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = kept.fetch(KEY, build(KEY), load(KEY))
        except NothingStored:
            return "kept nowhere: operation by operation"
    assert found.value == int(KEY[:8], 16)
    if kept.folder == folder.resolve():
        return "kept"
    assert any("cannot be used any more" in str(one.message) for one in caught)
    return "kept in a temporary folder, with a warning"


def forget() -> None:
    """As in a new process: no temporary folder is known yet, and no warning given."""
    cache_folder.folder_of_this_process.cache_clear()
    cache_folder._temporary.cache_clear()


def limit_sizes(step: int = 8) -> Counter[str]:
    """Limit files to every size up to that of the largest; what became of each fetch."""
    outcomes = Counter[str]()
    largest = max(map(len, files_of(KEY).values())) + 600  # the manifest is larger
    for size in range(0, largest, step):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            forget()
            with limited(size):
                became = outcome(folder)
            assert is_whole(folder / KEY) == (became == "kept"), size
            assert list(folder.glob("*.part")) == []
            assert outcome(folder) == "kept"
            outcomes[became] += 1
    return outcomes


@contextlib.contextmanager
def disk() -> Iterator[Path | None]:
    """A small disk; None where this user may not mount one."""
    with tempfile.TemporaryDirectory() as name:
        size = f"size={DISK_KIB}k"
        command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", name]
        try:
            mounted = subprocess.run(command, capture_output=True).returncode == 0
        except FileNotFoundError:
            mounted = False
        try:
            yield Path(name) if mounted else None
        finally:
            if mounted:
                subprocess.run(["umount", name], check=True)


def fill_disk(folder: Path) -> Counter[str]:
    """Leave every number of pages free on a disk; what became of each fetch."""
    outcomes = Counter[str]()
    for pages in range(16):
        forget()
        programs = folder / "programs"
        programs.mkdir(mode=0o700)
        free = subprocess.run(["df", "-k", "--output=avail", folder], capture_output=True).stdout
        (folder / "full").write_bytes(bytes(max(0, int(free.split()[-1]) * 1024 - pages * 4096)))
        became = outcome(programs)
        assert is_whole(programs / KEY) == (became == "kept"), pages
        assert list(programs.glob("*.part")) == []
        outcomes[became] += 1
        for path in (*programs.rglob("*"), folder / "full"):
            if path.is_file():
                path.unlink()
        subprocess.run(["rm", "-r", programs], check=True)
    return outcomes


def fit_on_full_disk(folder: Path) -> None:
    """Train with compiled code and the compile folder on a full disk: as without one."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    from harness import fit
    from models import Classifier, loader, mlp

    forget()
    (folder / "programs").mkdir(mode=0o700)
    with contextlib.suppress(OSError), open(folder / "full", "wb", buffering=0) as file:
        while file.write(bytes(1024)):
            pass
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = [
            fit(
                lambda: Classifier(mlp()),
                lambda: (loader(128),),
                static=True,
                policy=policy,
                backend={"compile_dir": folder / "programs"},
            ).losses
            for policy in ("default", "disabled")
        ]
    told = [str(one.message) for one in caught if "cannot be used any more" in str(one.message)]
    assert len(told) == 1, told
    assert all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(*losses, strict=True)), losses
    print(f"a fit of {len(losses[0])} steps goes on. {told[0]}")


def main() -> int:
    """Return 0, or raise where a full disk did harm."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--fit", action="store_true")
    given = parser.parse_args()
    for became, count in limit_sizes().items():
        print(f"files limited in size: {count} times {became}")
    with disk() as small:
        if small is None:
            print("no small disk: this user may not mount one")
            return 0
        for became, count in fill_disk(small).items():
            print(f"a disk of {DISK_KIB} KiB that is full: {count} times {became}")
        if given.fit:
            fit_on_full_disk(small)
    return 0


if __name__ == "__main__":
    sys.exit(main())
