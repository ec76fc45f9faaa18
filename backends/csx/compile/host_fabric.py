"""The host fabric: programs run on the CPU of this machine.

A graph is compiled, or found compiled in the cache, or, without a compiler or with
``autogen_policy="disabled"``, run operation by operation by torch's own kernels; so it is, too,
while it is compiled in the background. Compiled code is trusted after its first step was checked
(``selfcheck``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from torch._inductor import config as inductor

from fulgurite.backends.csx.compile import background, compiler_log, denormals, fused, made
from fulgurite.backends.csx.compile.background import Job, Meanwhile, queue
from fulgurite.backends.csx.compile.cache import (
    REPORTS,
    CompileCache,
    Fetched,
    NothingKept,
    UnfitEntry,
)
from fulgurite.backends.csx.compile.cache_folder import SharedFolder
from fulgurite.backends.csx.compile.fabric import Call, Fabric, Loaded, Shown
from fulgurite.backends.csx.compile.failures import explained
from fulgurite.backends.csx.compile.fingerprint import described_inputs, program_key
from fulgurite.backends.csx.compile.inductor import check_regions, compile_graph
from fulgurite.backends.csx.compile.kept import Kept
from fulgurite.backends.csx.compile.made import PROGRAM, one_by_one, tell_fallen
from fulgurite.backends.csx.compile.program import load as load_program
from fulgurite.backends.csx.compile.threads import (
    let_idle_threads_sleep,
    set_threads,
    threads_for,
)
from fulgurite.backends.csx.compile.toolchain import (
    CompilerFailed,
    NoToolchain,
    cpu_name,
    failures_told,
    nothing_compiled,
    toolchain_missing,
)
from fulgurite.backends.csx.compile.trust import check_first
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.passes import INTERPRETER_PASSES, lower

_set_grad_enabled = torch._C._set_grad_enabled  # as a context manager it costs 2 µs (measured)

_INPUTS = "inputs.txt"


class HostFabric(Fabric):
    """The CPU of this machine."""

    def __init__(self, backend: CSXBackend) -> None:
        self._backend, self.timer, self.torn = backend, None, False
        if backend.compiles and not backend.validate_only and backend.compile_dir is not None:
            self._cache  # noqa: B018  # so that a folder that cannot be used is known at once

    @functools.cached_property
    def _cache(self) -> CompileCache:
        return CompileCache(self._backend.compile_dir)

    @staticmethod
    def devices() -> tuple[torch.device, ...]:
        """The CPU."""
        return (torch.device("cpu"),)

    def describe(self, graphs: Sequence[Graph]) -> str:
        """The processor, and how many threads compute each graph where they differ."""
        threads = sorted({threads_for(graph) for graph in graphs})
        numbers = " or ".join(map(str, threads))
        return f"host fabric ({cpu_name()}, {numbers} thread{'s' * (threads[-1] > 1)})"

    def load(self, graph: Graph, shown: Shown, urgent: bool = True) -> Loaded:
        """Find a graph compiled in the cache or compile it, else run it operation by operation."""
        began = perf_counter()
        threads = threads_for(graph)
        if threads > 1:
            let_idle_threads_sleep()
        if next(graph.operations(), None) is None:
            return _interpreted(graph, began, "it computes nothing", threads)
        has_regions, policy = fused.has_regions(graph), self._backend.policy
        try:
            if policy == "disabled" and not has_regions:
                raise NoToolchain("autogen_policy='disabled'")
            cache = self._cache  # which may be an error of the user's
            with failures_told():
                key, kept = program_key(graph, threads, policy), Kept(cache, threads)
                if self.waits:
                    found = cache.fetch(
                        key,
                        build=lambda folder: _build(graph, folder, kept, policy, shown),
                        load=lambda folder: _load(graph, folder),
                        waiting=lambda: shown("waiting for another process that compiles"),
                    )
                else:
                    there = cache.find(key, lambda folder: _load(graph, folder))
                    if there is None:
                        if has_regions:
                            check_regions(graph, kept)
                        return self._load_later(graph, key, began, urgent, threads)
                    if urgent:
                        queue.hurry()
                    found = there
        except (NoToolchain, NothingKept) as missing:
            why = _with_log(missing)
            if has_regions and not isinstance(missing, CompilerFailed):
                raise fused.not_compiled(graph, why) from None
            if self._backend.compile_only:
                raise nothing_compiled(missing, why) from None
            return _interpreted(graph, began, why, threads)
        alone = "its fused losses " if policy == "disabled" else ""
        loaded = Loaded(
            call=found.value,
            compiled=True,
            built=found.built,
            seconds=perf_counter() - began,
            how=f"{alone}{'compiled' if found.built else 'loaded from the cache'}",
            graph=graph,
            threads=threads,
            made=functools.partial(made.read, self._cache.folder / key, graph),
        )
        tell_fallen(graph, self._cache.folder / key)
        self._check_first(loaded, graph, found, key, lambda: _one_by_one(graph))
        return loaded

    @property
    def waits(self) -> bool:
        """Whether programs are compiled before they run, and not in the background.

        Graphs are written down after each pass by this process, as long as it builds a program.
        """
        backend = self._backend
        return (
            not (backend.background and background.AVAILABLE)
            or backend.compile_only
            or backend.artifact_dir is not None
            or torch.are_deterministic_algorithms_enabled()
        )

    def _load_later(
        self, graph: Graph, key: str, began: float, urgent: bool, threads: int
    ) -> Loaded:
        """Run a graph operation by operation while it is compiled."""
        missing = toolchain_missing(starts=False)  # the worker starts it
        if missing is not None:
            raise NoToolchain(missing)
        loaded = _interpreted(graph, began, "", threads)
        loaded.how, loaded.compiling = "running operation by operation while it compiles", True
        loaded.call = self._meanwhile(loaded, loaded.call, graph, key, urgent)
        return loaded

    def _meanwhile(
        self, loaded: Loaded, reference: Call, graph: Graph, key: str, urgent: bool
    ) -> Meanwhile:
        kept = Kept(self._cache, loaded.threads)
        compiles = functools.partial(
            _compile_into, self._cache, graph, key, kept, self._backend.policy
        )
        job = queue.add(Job(name=(str(self._cache.folder), key), run=compiles, urgent=urgent))
        if urgent:
            queue.hurry()
        settle = functools.partial(self._settle, loaded, reference, graph, key)
        return Meanwhile(job, reference, settle)

    def _settle(self, loaded: Loaded, reference: Call, graph: Graph, key: str, job: Job) -> Call:
        """What runs from now on, since a job has ended."""
        why, found = job.failure or "its compiled code is gone", None
        try:
            if job.full:
                if job.name[0] == str(self._cache.folder):
                    self._cache.leave(OSError(why))
                loaded.call = self._meanwhile(loaded, reference, graph, key, urgent=True)
                return loaded.call
            if job.failure is None:
                with failures_told():
                    found = self._cache.find(key, lambda folder: _load(graph, folder))
        except (NoToolchain, NothingKept, SharedFolder) as missing:
            why = _with_log(missing)
        loaded.compiling, loaded.seconds = False, job.seconds
        if found is None:
            why = compiler_log.with_log(why, job.log)
            loaded.call, loaded.how = reference, f"run operation by operation ({why})"
            loaded.tell()
            return loaded.call
        loaded.call, loaded.compiled, loaded.how = found.value, True, "compiled"
        loaded.made = functools.partial(made.read, self._cache.folder / key, graph)
        tell_fallen(graph, self._cache.folder / key)
        if not self._check_first(loaded, graph, found, key, lambda: reference):
            loaded.tell()
        return loaded.call

    def _check_first(
        self,
        loaded: Loaded,
        graph: Graph,
        found: Fetched[Call],
        key: str,
        right: Callable[[], Call],
    ) -> bool:
        folder = self._cache.folder
        reports = Path(self._backend.artifact_dir or folder / REPORTS)
        return check_first(loaded, graph, found, right, folder / key, reports)

    def run(self, loaded: Loaded, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Run a graph without gradients, with denormals as zero, with its number of threads."""
        timer = self.timer
        if timer is not None:
            timer.begin()
        gradients = torch.is_grad_enabled()
        flushes = denormals.is_flushing()
        own, mkl = torch.get_num_threads(), None
        threads = min(loaded.threads, own)
        flush, restore = denormals.switches(threads)
        given = list(inputs)  # compiled code empties the other one
        try:
            _set_grad_enabled(False)
            if threads != own:
                mkl = set_threads(threads)
            if not flushes:
                flush()
            return loaded.call(inputs)
        except BaseException as error:  # Ctrl-C too
            graph, torn = loaded.graph, self.torn
            self.torn = torn or graph is None or bool(graph.written())
            if graph is None or not isinstance(error, (RuntimeError, IndexError)):
                raise
            compiled = loaded.compiled and getattr(loaded.call, "trusted", True)
            told, untouched = explained(graph, given, error, compiled)
            self.torn = torn or not untouched
            raise told from (None if told is not error else error.__cause__)
        finally:
            if not flushes:
                restore()
            if threads != own:
                set_threads(own, mkl)
            _set_grad_enabled(gradients)
            if timer is not None:
                timer.end()


def _compile_into(
    cache: CompileCache, graph: Graph, key: str, kept: Kept, policy: str
) -> str | None:
    """Compile a graph into the cache, in the background; returns why that failed, if it did."""
    try:
        with failures_told():
            cache.fetch_here(
                key,
                build=lambda folder: _build(graph, folder, kept, policy, _unseen),
                load=lambda folder: _load(graph, folder),
            )
    except NoToolchain as missing:
        if isinstance(missing, CompilerFailed):
            print(missing.printed)  # the worker's output is the log
        return str(missing)
    return None


def _with_log(missing: Exception) -> str:
    """Why nothing is compiled, and which file has what the compiler printed."""
    printed = missing.printed if isinstance(missing, CompilerFailed) else ""
    return compiler_log.with_log(str(missing), compiler_log.keep(printed))


def _interpreted(graph: Graph, began: float, why: str, threads: int) -> Loaded:
    """A graph that torch's own kernels run, and why; ``began`` is when loading it began."""
    return Loaded(
        call=_one_by_one(graph),
        compiled=False,
        built=False,
        seconds=perf_counter() - began,
        how=f"run operation by operation ({why})",
        graph=graph,
        threads=threads,
        made=lambda: one_by_one(graph),
    )


def _build(graph: Graph, folder: Path, kept: Kept, policy: str, shown: Shown) -> None:
    """Compile a graph into a folder, with what it expects as inputs."""
    with inductor.patch({"cpp.threads": kept.threads}):
        _compile(graph, folder, kept, policy, shown)
    (folder / _INPUTS).write_text("\n".join(described_inputs(graph)))


def _load(graph: Graph, folder: Path) -> Call:
    """The program in a folder.

    Raises:
        UnfitEntry: it expects other inputs than the graph has, and would read or write beyond them.
    """
    if (folder / _INPUTS).read_text() != "\n".join(described_inputs(graph)):
        raise UnfitEntry
    if not (folder / PROGRAM).exists():  # only its fused regions are compiled
        return fused.load(graph, folder)
    return load_program(folder)


def _compile(graph: Graph, folder: Path, kept: Kept, policy: str, shown: Shown) -> None:
    missing = toolchain_missing()  # asked only here: to ask starts a process
    if missing is not None:
        raise NoToolchain(missing)
    with shown("compiling"):
        compile_graph(graph, folder, kept, policy)


def _unseen(doing: str) -> AbstractContextManager[None]:
    """Nobody looks at what a process beside the training does."""
    return nullcontext()


def _one_by_one(graph: Graph) -> Call:
    """A graph's operations by torch's own kernels; a graph of one output returns it bare."""
    forward = lower(graph, INTERPRETER_PASSES).module

    def call(inputs: list[Tensor]) -> Sequence[Tensor]:
        outputs = forward(*inputs)
        return outputs if isinstance(outputs, (list, tuple)) else [outputs]

    return call
