"""Damage the compile cache at random: every entry is built again, or is as it was.

    python tests/tools/damage_cache.py                    1,000 bits, every exchange, 4 processes
    python tests/tools/damage_cache.py --bits 100000 --seed 3

Entries are small here, and building one takes no compiler. Damaged code must never be run, so
loading one looks at every byte that it would run.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fulgurite.backends.csx.compile.store.cache import LIMIT_VARIABLE, CompileCache, Fetched

COUNT = 6
KEYS = [hashlib.sha256(bytes([i])).hexdigest() for i in range(COUNT)]


class DamagedCode(AssertionError):
    """Code was run that is not what was built."""


def files_of(key: str) -> dict[str, bytes]:
    """The files of a program, by name; another key's are as long and hold other numbers."""
    content = hashlib.sha512(key.encode()).digest()
    return {
        "program.py": f"answer = {int(key[:8], 16)}\n".encode(),
        "inputs.txt": b"input batch torch.float32 (16, 8) (8, 1) cpu",
        "kernel_0.so": content,
        "kernels/kernel_1.so": content[::-1],
    }


def build(key: str) -> Callable[[Path], None]:
    """Writes a key's program."""

    def write(folder: Path) -> None:
        for name, content in files_of(key).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)

    return write


def load(key: str) -> Callable[[Path], int]:
    """Runs a key's program: returns its number."""

    def run(folder: Path) -> int:
        for name, content in files_of(key).items():
            if (folder / name).read_bytes() != content:
                raise DamagedCode(f"{name} of {folder.name}")
        names: dict[str, int] = {}
        exec((folder / "program.py").read_text(), names)
        return names["answer"]

    return run


def fetch(folder: Path, key: str) -> Fetched[int]:
    """Fetch as a process of its own would; the number must be right."""
    found = CompileCache(folder).fetch(key, build(key), load(key))
    if found.value != int(key[:8], 16):
        raise DamagedCode(f"{key}: {found.value}")
    return found


def flip_bits(folder: Path, count: int, seed: int) -> Counter[str]:
    """Flip bits, one at a time, anywhere in the entries and marks; what became of each."""
    draw, outcomes = random.Random(seed), Counter[str]()
    for key in KEYS:
        fetch(folder, key).mark("checked")
    for _ in range(count):
        key = draw.choice(KEYS)
        paths = [path for path in (folder / key).rglob("*") if path.is_file()]
        paths.append(folder / f"{key}.mark")
        sizes = [path.stat().st_size for path in paths]
        [path] = draw.choices(paths, sizes)
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        found = fetch(folder, key)
        same_bytes = path.suffix != ".mark"  # and so the same seal, if it was built again
        assert (found.marked is not None) == same_bytes, path
        assert found.built == (path.suffix != ".mark"), path
        found.mark("checked")
        outcomes["in an entry: built again" if found.built else "in a mark: checked again"] += 1
    return outcomes


def exchange_entries(folder: Path) -> int:
    """Put every entry, whole, in the place of every other; returns how many were built again."""
    for key in KEYS:
        fetch(folder, key)
    built = 0
    for ours, other in itertools.permutations(KEYS, 2):
        shutil.rmtree(folder / ours)
        shutil.copytree(folder / other, folder / ours)
        built += fetch(folder, ours).built
        assert not fetch(folder, other).built
    return built


def race(folder: Path, processes: int, rounds: int, seed: int) -> None:
    """Let processes fetch, build and evict the same entries at once.

    Raises:
        AssertionError: one of them failed, or left something half done.
    """
    before = os.environ.get(LIMIT_VARIABLE)
    os.environ[LIMIT_VARIABLE] = "1500"  # two entries: they evict each other's all the time
    context = multiprocessing.get_context("fork")
    started = [
        context.Process(target=_fetch_at_random, args=(folder, rounds, seed + i))
        for i in range(processes)
    ]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forks while torch has threads: none runs here
            for process in started:
                process.start()
        for process in started:
            process.join()
    finally:
        del os.environ[LIMIT_VARIABLE]
        if before is not None:
            os.environ[LIMIT_VARIABLE] = before
    assert [process.exitcode for process in started] == [0] * processes
    assert list(folder.glob("*.part")) == []
    for key in KEYS:
        fetch(folder, key)


def _fetch_at_random(folder: Path, rounds: int, seed: int) -> None:
    draw = random.Random(seed)
    warnings.simplefilter("error")
    for _ in range(rounds):
        fetch(folder, draw.choice(KEYS)).mark("checked")


def main() -> int:
    """Return 0, or raise where something damaged was believed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bits", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=500, help="fetches of each process")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name) / "programs", time.perf_counter()
        outcomes = flip_bits(folder, given.bits, given.seed)
        for outcome, count in outcomes.items():
            print(f"bits {outcome}: {count}")
        print(f"entries under another's key, built again: {exchange_entries(folder)}")
        race(folder, given.processes, given.rounds, given.seed)
        fetches = given.processes * given.rounds
        print(f"{given.processes} processes at once: {fetches} fetches, each with its own number")
        print(f"damaged code that was run: 0 ({time.perf_counter() - began:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
