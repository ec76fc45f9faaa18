"""Fixtures of all tests: each starts with no backend in the process, and quiet loggers."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import logging
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores; torch reads it when imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import harness
import needs
import pytest
import recorded
import torch
from cutting import cutting
from lightning.fabric.utilities import registry
from selection import MARKS, Passed, Selection, is_drawn, needs_of

from fulgurite.backends import reset_backend
from fulgurite.backends.csx.compile.inductor.headers import Headers
from fulgurite.backends.csx.compile.inductor.toolchain import CompilerFailed, toolchain_missing
from fulgurite.backends.csx.compile.store.cache_folder import users_folder
from fulgurite.backends.csx.graph.passes import observing_passes
from fulgurite.backends.csx.graph.verify import verify
from fulgurite.backends.csx.program import announcements

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
# each Trainer asks for callbacks of installed packages, and reads the metadata of all of them
setattr(registry, "entry_points", functools.cache(importlib.metadata.entry_points))  # noqa: B010

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
    """Compiled programs are kept for the session, by all workers, not in the user's folder."""
    if request.node.get_closest_marker("packaging") is None:  # pip keeps its own there
        folder = tmp_path_factory.getbasetemp()
        own = "PYTEST_XDIST_WORKER" in os.environ
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent if own else folder))


@pytest.fixture(autouse=True)
def no_seed_of_others() -> Iterator[None]:
    """What ``seed_everything`` leaves in the environment, for processes that are started later."""
    yield
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def header(request: pytest.FixtureRequest, cache_folder: None) -> None:
    """Torch's header is read once for the session: 1.3 s less for each program that is compiled."""
    if request.node.get_closest_marker("compiler") is not None:
        _read_header(users_folder())


@functools.cache
def _read_header(folder: Path) -> None:
    if toolchain_missing() is None:
        folder.mkdir(parents=True, exist_ok=True)
        Headers(folder).keep()


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """No backend lives, nothing was said, one seed, warnings are errors but for those of others."""
    reset_backend()
    announcements._said.clear()
    announcements._kinds.clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning ignores it after a Ctrl-C
    torch.manual_seed(0)
    with warnings.catch_warnings():
        for message in FOREIGN:
            warnings.filterwarnings("ignore", message=message)
        yield
    reset_backend()


@pytest.fixture(autouse=True)
def failed_compiles(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A run goes on where compiling fails: a test that does not mean it to would see nothing."""
    failed: list[Exception] = []
    init = CompilerFailed.__init__

    def noted(self: CompilerFailed, error: Exception) -> None:
        failed.append(error)
        init(self, error)

    monkeypatch.setattr(CompilerFailed, "__init__", noted)
    yield
    if failed and request.node.get_closest_marker("failing_compiler") is None:
        raise failed[0]


@pytest.fixture(autouse=True)
def verified_graphs(request: pytest.FixtureRequest) -> Iterator[None]:
    """In one test of ten, in all with ``--verify``, graphs are verified after every pass."""
    drawn = request.config.getoption("--verify") or is_drawn(request.node.nodeid, 10, "verify")
    with (
        observing_passes(lambda name, before, graph: verify(graph))
        if drawn
        else contextlib.nullcontext()
    ):
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which tests run (``selection``), and how."""
    group = parser.getgroup("fulgurite")
    group.addoption("--core", action="store_true", help="what needs nothing, and the named core")
    group.addoption("--sample", type=one_in, metavar="N", help="of the others one in N")
    group.addoption("--draw", default="", metavar="WORD", help="every word draws another sample")
    group.addoption("--passed", type=added_to, metavar="FILE", help="skip what passed; add it")
    group.addoption("--costs", type=added_to, metavar="FILE", help="write what each test took")
    group.addoption("--record", action="store_true", help="fit stock Lightning again everywhere")
    group.addoption("--verify", action="store_true", help="verify every graph after every pass")
    group.addoption("--compiled", action="store_true", help="compile what no test says more of")
    group.addoption("--background", action="store_true", help="with --compiled: meanwhile")
    group.addoption("--cut", type=int, metavar="N", help="programs in parts of N operations")


def one_in(text: str) -> int:
    """N of a sample of one in N; 0 for none."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a number from 0 on is wanted; got {text!r}")
    return int(text)


def added_to(text: str) -> Path:
    """A file to which lines can be added; its folder is made."""
    file = Path(text)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"no file that can be written: {error}") from None
    return file


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers; let the harness compile where it is asked to."""
    for name, text in {**needs.MARKERS, **MARKS}.items():
        config.addinivalue_line("markers", f"{name}: {text}")
    needs.install()
    recorded.again = config.getoption("--record")
    if config.getoption("--compiled"):
        background = config.getoption("--background")
        harness.defaults.update(autogen_policy="default", audit=True, background=background)
    if config.getoption("--cut"):
        cutting(config.getoption("--cut"))
    config.pluginmanager.register(Conductor(config))


class Conductor:
    """Chooses the tests that run, watches what each needs, and says in the end what ran.

    Workers of xdist choose, watch and write costs; what passed is written by the process that
    started them, which hears of every test.
    """

    def __init__(self, config: pytest.Config) -> None:
        given = config.option
        self._mode = f"compiled {given.background} {given.cut}" if given.compiled else "as written"
        self._worker: dict[str, Any] | None = getattr(config, "workeroutput", None)
        self._passed = Passed(given.passed, self._mode) if given.passed else None
        self._costs = needs.Costs(given.costs) if given.costs else None
        others = int(not given.core) if given.sample is None else given.sample
        self._selection = Selection(core=given.core, one_in=others, word=given.draw)
        self._failed: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep those that are chosen; skip what compiles kernels where nothing can be."""
        if self._passed is not None:
            self._selection.passed = self._passed.read()
        found, items[:] = list(items), self._selection.of(items)
        chosen = set(items)
        config.hook.pytest_deselected(items=[item for item in found if item not in chosen])
        missing = toolchain_missing()
        for item in items if missing else ():
            if item.get_closest_marker("compiler"):
                item.add_marker(pytest.mark.skip(reason=f"needs a C++ toolchain: {missing}"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Watch a test from its setup to its teardown."""
        needs.watch.begin()
        if self._costs is not None:
            self._costs.begin()
        result = yield
        if self._costs is not None:
            self._costs.end(item.nodeid, needs_of(item))
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """A test that needs what none of its markers says fails."""
        result = yield
        said = needs_of(item) | ({"compiler"} if self._mode != "as written" else set())
        lacking = needs.watch.lacking(said)
        if lacking is not None:
            pytest.fail(f"{item.nodeid}: {lacking}; see tests/support/needs.py", pytrace=False)
        return result

    def pytest_exception_interact(self, call: pytest.CallInfo[Any]) -> None:
        """End the session at a Ctrl-C in a training, of which Lightning makes a ``SystemExit``."""
        error = call.excinfo.value if call.excinfo is not None else None
        if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
            pytest.exit("interrupted in a training")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write down what passed, from its setup to its teardown."""
        if self._passed is None or self._worker is not None:
            return
        if not report.passed:
            self._failed.add(report.nodeid)
        if report.when == "teardown" and report.nodeid not in self._failed:
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """A worker tells what it chose."""
        if self._worker is not None:
            self._worker["counts"] = self._selection.counts

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Workers choose the same tests: one of them tells."""
        self._selection.counts = getattr(node, "workeroutput", {}).get("counts", {})

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """The closing line of ``make test``."""
        if self._worker is None and self._selection.core and self._selection.counts:
            config.get_terminal_writer().line(self._selection.summary())
