"""Results of stock Lightning, fitted once: kept by what they follow from, made again on demand.

A result follows from the test and its row (the source of its file, of ``tests/support`` and of
those parts of the product that stock Lightning runs too), from the versions of torch and Lightning,
from the CPU's vector instructions and the number of threads; the seed is in the source. All of that
is in the name of its file. ``pytest --record`` fits all again. Results lie in the user's cache
folder, not in the repository: the rounding of another machine is not this one's.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics

import fulgurite.callbacks
import fulgurite.nn
import fulgurite.optim

TESTS = Path(__file__).parents[1]
FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "fulgurite-tests", "stock")
KEPT_S = 30 * 24 * 3600
"""What was not read for so long is removed."""
STOCK_RUNS_TOO = (fulgurite.callbacks, fulgurite.nn, fulgurite.optim)
again = False
"""Whether results are made again (``--record``)."""

_asked: Counter[tuple[str, ...]] = Counter()
_rows: tuple[str, ...] = ()


@contextlib.contextmanager
def of_rows(names: tuple[str, ...]) -> Iterator[None]:
    """While it lasts, what is recorded is of these rows of a test, not of all of it."""
    global _rows
    before, _rows = _rows, names
    try:
        yield
    finally:
        _rows = before


def place() -> Path | None:
    """Where the result of a test's next stock run is kept; None outside a test.

    Who trains beside stock asks first: a run that fails must not move those after it.
    """
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    return _file(test) if test else None


def recorded(make: Callable[[], Any], file: Path | None) -> Any:
    """What ``make`` returned when this row was last fitted with this torch; else what it returns.

    Without a place, and where a result cannot be pickled, it is made each time.
    """
    if file is None:
        return make()
    if file.exists() and not again:
        os.utime(file)
        return torch.load(file, weights_only=False)
    result = make()
    with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
        _keep(file, result)  # unless it holds a class of the test's own function
    return result


def _file(test: str) -> Path:
    _asked[test, *_rows] += 1
    own = TESTS / test.partition("::")[0].removeprefix("tests/")
    sources = _source(own), _source(TESTS / "support")
    row = test, _rows, _asked[test, *_rows], *sources, _surroundings()
    return FOLDER / f"{hashlib.sha256(repr(row).encode()).hexdigest()}.pt"


@functools.cache
def _source(path: Path) -> str:
    """A digest of a file, or of all Python files in a folder."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


@functools.cache
def _surroundings() -> tuple[object, ...]:
    versions = torch.__version__, pl.__version__, torchmetrics.__version__
    shared = [_source(Path(str(package.__file__)).parent) for package in STOCK_RUNS_TOO]
    return *versions, *shared, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()


def _keep(file: Path, result: Any) -> None:
    """Write a result at once or not at all: workers write the same ones."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    try:
        torch.save(result, part)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def forget_old() -> None:
    """Remove what was not read for a month."""
    for file in FOLDER.glob("*"):
        if time.time() - file.stat().st_mtime > KEPT_S:
            file.unlink(missing_ok=True)
