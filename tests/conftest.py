"""Fixtures of all tests: each starts with no backend in the process, and quiet loggers."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import warnings
from collections.abc import Iterator

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores; torch reads it when imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import harness
import pytest
import torch
from cutting import cutting

from fulgurite.backends import reset_backend
from fulgurite.backends.csx.compile.toolchain import toolchain_missing
from fulgurite.backends.csx.graph.passes import looking
from fulgurite.backends.csx.graph.verify import verify

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

# Lightning and torch, not this project: each names what it is about
FOREIGN = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"The '.*_dataloader' does not have many workers",
    r"The `srun` command is available",
    r"GPU available but not used",
    r"The number of training batches .* is smaller than the logging interval",
    r"Starting from v1.9.0, `tensorboardX` has been removed",
    r"Checkpoint directory .* exists and is not empty",
    r"The dirpath has changed from",
    r"You defined a `validation_step` but have no `val_dataloader`",
    r"You are trying to `self.log\(\)` but",
    r"`torch.jit.script` is deprecated",  # by torch's own forward-mode formulas
    r"Attempted to insert a get_attr Node",  # by torch.func.linearize
    r"LSTM with projections is not supported with oneDNN",
    r"This DataLoader will create \d+ worker processes in total",  # on a machine of one core
)


@pytest.fixture(autouse=True)
def cache_folder(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Compiled programs are kept for the session, not in the user's folder."""
    if request.node.get_closest_marker("packaging") is None:  # pip keeps its own there
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp()))


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """No backend lives, one seed, warnings are errors but for those of others."""
    reset_backend()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning ignores it after a Ctrl-C
    torch.manual_seed(0)
    with warnings.catch_warnings():
        for message in FOREIGN:
            warnings.filterwarnings("ignore", message=message)
        yield
    reset_backend()


@pytest.fixture(autouse=True)
def verified_graphs(request: pytest.FixtureRequest) -> Iterator[None]:
    """In one test of ten, in all with ``--verify``, graphs are verified after every pass."""
    drawn = request.config.getoption("--verify") or is_drawn(request.node.nodeid, 10, "verify")
    with looking(lambda name, before, graph: verify(graph)) if drawn else contextlib.nullcontext():
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of ``tests/tools/compiled.py``, and ``--verify``."""
    parser.addoption("--verify", action="store_true", help="verify every graph after every pass")
    parser.addoption("--compiled", action="store_true", help="compile what no test says more of")
    parser.addoption("--background", action="store_true", help="with --compiled: meanwhile")
    parser.addoption("--cut", type=int, metavar="N", help="programs in parts of N operations")
    parser.addoption("--sample", type=int, default=1, metavar="N", help="one test in N")
    parser.addoption("--draw", default="", metavar="WORD", help="every word draws another sample")


def pytest_configure(config: pytest.Config) -> None:
    """Let the harness compile where it is asked to."""
    if config.getoption("--compiled"):
        background = config.getoption("--background")
        harness.defaults.update(autogen_policy="default", audit=True, background=background)
    if config.getoption("--cut"):
        cutting(config.getoption("--cut"))


def is_drawn(name: str, one_in: int, word: str) -> bool:
    """Whether a test is in a sample."""
    digest = hashlib.sha256(f"{name} {word}".encode()).digest()
    return int.from_bytes(digest[:8]) % one_in == 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw the sample; skip what compiles kernels where nothing can be, and say what is missing."""
    sample = config.getoption("--sample"), config.getoption("--draw")
    items[:] = [item for item in items if is_drawn(item.nodeid, *sample)]
    missing = toolchain_missing()
    for item in items if missing else ():
        if item.get_closest_marker("compiler"):
            item.add_marker(pytest.mark.skip(reason=f"needs a C++ toolchain: {missing}"))
