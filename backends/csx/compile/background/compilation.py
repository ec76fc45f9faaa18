"""A graph and its compiled code in the cache: looked up, made by this process, or by the worker."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from fulgurite.backends.csx.compile.fabric import Call, Shown
from fulgurite.backends.csx.compile.inductor import fused, toolchain
from fulgurite.backends.csx.compile.inductor.earlier_code import EarlierCode
from fulgurite.backends.csx.compile.inductor.generate import check_regions, compile_graph
from fulgurite.backends.csx.compile.inductor.program import TooMuchAtOnce, load_streamed
from fulgurite.backends.csx.compile.inductor.program import load as load_program
from fulgurite.backends.csx.compile.inductor.toolchain import (
    CompilerFailed,
    NoToolchain,
    failures_reported,
)
from fulgurite.backends.csx.compile.programs import kernels
from fulgurite.backends.csx.compile.programs.kernels import PROGRAM, Kernels
from fulgurite.backends.csx.compile.programs.steps import Target
from fulgurite.backends.csx.compile.store.cache import (
    CompileCache,
    Fetched,
    UnfitEntry,
)
from fulgurite.backends.csx.compile.store.fingerprint import (
    described_inputs,
    environment_digest,
    program_key,
)
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.streaming.residency import residency
from fulgurite.backends.torch_compiler import options

_INPUTS = "inputs.txt"
FOR = "for.txt"
"""In an entry: the digest of the environment that it was compiled in, and whose program it is."""


class Compilation:
    """A graph that is compiled into a cache.

    Args:
        graph: the graph.
        cache: where its compiled code lies.
        threads: how many compute it.
        policy, target: as of ``compile_graph``.
        what: whose program it is, in words that are kept with it.

    Attributes:
        key: of its compiled code.
    """

    def __init__(
        self,
        graph: Graph,
        cache: CompileCache,
        threads: int,
        policy: str,
        target: Target,
        what: str = "",
    ) -> None:
        self._graph, self._cache, self._policy, self._target = graph, cache, policy, target
        self._what, self.waited = what, False  # for another process, which compiled
        self._earlier = EarlierCode(cache, threads)
        self.key = program_key(graph, threads, policy)

    @property
    def folder(self) -> Path:
        """Of the compiled code."""
        return self._cache.folder / self.key

    def fetch(self, shown: Shown) -> Fetched[Call]:
        """The compiled code, made now where there is none."""

        def wait() -> AbstractContextManager[None]:
            self.waited = True
            return shown("waiting for another process that compiles")

        return self._cache.fetch(
            self.key,
            build=lambda folder: self._build(folder, shown),
            load=self._load,
            waiting=wait,
        )

    def find(self) -> Fetched[Call] | None:
        """The compiled code, where there is some."""
        return self._cache.find(self.key, self._load)

    def check_regions(self) -> None:
        """See that each fused region of the graph is one kernel.

        Raises:
            UnfusedLoss: it is not.
        """
        if fused.has_regions(self._graph):
            check_regions(self._graph, self._earlier, self._target)

    def kernels(self) -> Kernels:
        """What runs the graph, compiled."""
        return kernels.read(self.folder, self._graph, self._target.has_kernel)

    def in_background(self) -> str | None:
        """Compile, in the worker; returns why that failed, if it did."""
        try:
            with failures_reported():
                self._cache.fetch_here(
                    self.key, build=lambda folder: self._build(folder, _unseen), load=self._load
                )
        except NoToolchain as missing:
            if isinstance(missing, CompilerFailed):
                print(missing.printed)  # the worker's output is the log
            return str(missing)
        return None

    def _build(self, folder: Path, shown: Shown) -> None:
        """Compile the graph into a folder, with what it expects as inputs."""
        # the compiler writes the number of threads into its loops
        with options.patch({"cpp.threads": self._earlier.threads}):
            missing = toolchain.toolchain_missing()  # asked only here: to ask starts a process
            if missing is not None:
                raise NoToolchain(missing)
            with shown("compiling"):
                compile_graph(self._graph, folder, self._earlier, self._target, self._policy)
        (folder / _INPUTS).write_text("\n".join(described_inputs(self._graph)))
        (folder / FOR).write_text(f"{environment_digest()}\n{self._what}\n")

    def _load(self, folder: Path) -> Call:
        """The program in a folder.

        Raises:
            UnfitEntry: it expects other inputs than the graph has: it would read beyond them.
        """
        if (folder / _INPUTS).read_text() != "\n".join(described_inputs(self._graph)):
            raise UnfitEntry
        if not (folder / PROGRAM).exists():  # only its fused regions are compiled
            return fused.load(self._graph, folder)
        if not residency.is_open:
            return load_program(folder)
        try:
            return load_streamed(folder, self._graph, self._target.allocate)
        except TooMuchAtOnce as error:
            raise NoToolchain(str(error)) from None


def _unseen(doing: str) -> AbstractContextManager[None]:
    """Nobody looks at what a process beside the training does."""
    return nullcontext()
