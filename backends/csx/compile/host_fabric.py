"""The host fabric: programs run on the CPU of this machine.

A graph is compiled, or found compiled in the cache, or, without a compiler or with
``autogen_policy="disabled"``, run operation by operation by torch's own kernels; so it is, too,
while it is compiled in the background. Compiled code is trusted after its first step was checked
(``selfcheck``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from fulgurite.backends.csx.compile import (
    background,
    compiler_log,
    denormals,
    fused,
    toolchain,
)
from fulgurite.backends.csx.compile.background import Job, queue
from fulgurite.backends.csx.compile.cache import (
    REPORTS,
    CompileCache,
    Fetched,
    NothingKept,
)
from fulgurite.backends.csx.compile.cache_folder import SharedFolder
from fulgurite.backends.csx.compile.compilation import Compilation
from fulgurite.backends.csx.compile.fabric import NOW, Call, Fabric, Loaded, Shown, Wanted
from fulgurite.backends.csx.compile.failures import explained
from fulgurite.backends.csx.compile.headers import header_job
from fulgurite.backends.csx.compile.idle_threads import idle_threads
from fulgurite.backends.csx.compile.made import one_by_one, tell_fallen
from fulgurite.backends.csx.compile.meanwhile import Meanwhile
from fulgurite.backends.csx.compile.threads import (
    set_threads,
    threads_for,
)
from fulgurite.backends.csx.compile.toolchain import (
    CompilerFailed,
    NoToolchain,
    cpu_name,
    failures_told,
    nothing_compiled,
)
from fulgurite.backends.csx.compile.trust import Trust
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.graph.collectives import is_one_of_several
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.passes import INTERPRETER_PASSES, lower
from fulgurite.backends.csx.graph.passes.as_traced import changed_early
from fulgurite.backends.csx.graph.passes.hold import held_inputs

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

    def load(self, graph: Graph, shown: Shown, wanted: Wanted = NOW) -> Loaded:
        """Find a graph compiled in the cache or compile it, else run it operation by operation."""
        began = perf_counter()
        threads = threads_for(graph)
        if next(graph.runs.operations(), None) is None:
            return _interpreted(graph, began, "it computes nothing", threads)
        has_regions, policy = fused.has_regions(graph), self._backend.policy
        try:
            if policy == "disabled" and not has_regions:
                raise NoToolchain("autogen_policy='disabled'")
            self._cache  # noqa: B018  # which may be an error of the user's
            with failures_told():
                compilation = self._compilation(graph, threads)
                if self.waits:
                    found = compilation.fetch(shown)
                else:
                    there = compilation.find()
                    if there is None:
                        compilation.check_regions()
                        later = _interpreted(graph, began, "", threads)
                        return self._load_later(later, compilation, wanted)
                    if wanted.urgent:
                        queue.hurry()
                    found = there
        except (NoToolchain, NothingKept) as missing:
            why = _with_log(missing)
            if has_regions and not isinstance(missing, CompilerFailed):
                raise fused.not_compiled(graph, why) from None
            if self._backend.compile_only:
                raise nothing_compiled(missing, why) from None
            return _interpreted(graph, began, why, threads)
        loaded = _compiled(graph, began, found, compilation, threads, policy)
        tell_fallen(graph, compilation.folder)
        self._trust(loaded, found, compilation, lambda: _one_by_one(graph)).begin()
        return loaded

    def _compilation(self, graph: Graph, threads: int) -> Compilation:
        return Compilation(graph, self._cache, threads, self._backend.policy)

    @property
    def waits(self) -> bool:
        """Whether programs are compiled before they run, and not in the background.

        Graphs are written down after each pass by this process, as long as it builds a program.
        Several processes that train together run the same code at each step: their weights would
        drift apart by rounding.
        """
        backend = self._backend
        return (
            not (backend.background and background.AVAILABLE)
            or backend.compile_only
            or backend.artifact_dir is not None
            or torch.are_deterministic_algorithms_enabled()
            or is_one_of_several()
        )

    def _load_later(self, loaded: Loaded, compilation: Compilation, wanted: Wanted) -> Loaded:
        """Run a graph operation by operation while it is compiled."""
        missing = toolchain.toolchain_missing(starts=False)  # the worker starts it
        if missing is not None:
            raise NoToolchain(missing)
        loaded.how, loaded.compiling = "running operation by operation until it is compiled", True
        loaded.call = self._meanwhile(loaded, loaded.call, compilation, wanted)
        return loaded

    def _meanwhile(
        self, loaded: Loaded, reference: Call, compilation: Compilation, wanted: Wanted = NOW
    ) -> Meanwhile:
        """What runs a graph operation by operation until it is compiled."""
        name = (str(self._cache.folder), compilation.key)
        job = Job(name=name, run=compilation.in_background, wanted=wanted, fixed=None)
        call = self._until(job, loaded, reference)
        queue.add(header_job(self._cache.folder, call.job))
        return call

    def _until(self, job: Job, loaded: Loaded, reference: Call) -> Meanwhile:
        """What runs a graph operation by operation until a job has ended."""
        job, wanted = queue.add(job), job.wanted
        if wanted.urgent:
            queue.hurry()
        return Meanwhile(job, reference, functools.partial(self._settle, loaded, reference))

    def _settle(self, loaded: Loaded, reference: Call, job: Job) -> Call:
        """What runs from now on, since a job has ended."""
        why, found, graph = job.failure or "its compiled code is gone", None, loaded.graph
        assert graph is not None
        try:
            if job.full and job.name[0] == str(self._cache.folder):
                self._cache.leave(OSError(why))
            with failures_told():
                compilation = self._compilation(graph, loaded.threads)
                found = None if job.failure is not None else compilation.find()
        except (NoToolchain, NothingKept, SharedFolder) as missing:
            why = _with_log(missing)
        else:
            if job.full:
                loaded.call = self._meanwhile(loaded, reference, compilation)
                return loaded.call
        loaded.compiling, loaded.seconds = False, job.seconds
        if found is None:
            why = compiler_log.with_log(why, job.log)
            loaded.call, loaded.how = reference, f"run operation by operation ({why})"
            loaded.tell()
            return loaded.call
        loaded.call, loaded.compiled, loaded.how = found.value, True, "compiled"
        loaded.made = compilation.made
        tell_fallen(graph, compilation.folder)
        if not self._trust(loaded, found, compilation, lambda: reference).begin():
            loaded.tell()
        return loaded.call

    def _trust(
        self, loaded: Loaded, found: Fetched[Call], compiled: Compilation, right: Callable[[], Call]
    ) -> Trust:
        """What checks compiled code. What is wrong is narrowed down once."""
        narrow = functools.partial(self._narrow, loaded, found, compiled)
        reports = Path(self._backend.artifact_dir or self._cache.folder / REPORTS)
        return Trust(
            loaded=loaded,
            found=found,
            reference=right,
            program=compiled.folder,
            reports=reports,
            narrow=None if compiled.library else narrow,
        )

    def _narrow(
        self, loaded: Loaded, found: Fetched[Call], compiled: Compilation, right: Call, report: Path
    ) -> None:
        """Look for the kernels that are wrong, and compile all others again."""
        run = functools.partial(compiled.narrowed, found, right, report)
        name = (str(self._cache.folder), compiled.key, "narrowed")
        job = Job(name=name, run=run)
        if self.waits:
            job.failure, job.ended = run(), True
            self._settle(loaded, right, job)
        else:
            loaded.compiling = True
            loaded.call = self._until(job, loaded, right)

    def run(self, loaded: Loaded, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Run a graph without gradients, with denormals as zero, with its number of threads."""
        timer = self.timer
        if timer is not None:
            timer.begin()
        gradients = torch.is_grad_enabled()
        stays = not self._backend.flush_denormals or denormals.is_flushing()
        own, mkl = torch.get_num_threads(), None
        threads = min(loaded.threads, own)
        if threads > 1:
            idle_threads.look()
        flush, restore = denormals.switches(threads)
        given = list(inputs)  # compiled code empties the other one
        try:
            _set_grad_enabled(False)
            if threads != own:
                mkl = set_threads(threads)
            if not stays:
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
            if not stays:
                restore()
            if threads != own:
                set_threads(own, mkl)
            _set_grad_enabled(gradients)
            if timer is not None:
                timer.end()


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
        made=lambda: one_by_one(graph.runs),
    )


def _compiled(
    graph: Graph,
    began: float,
    found: Fetched[Call],
    compilation: Compilation,
    threads: int,
    policy: str,
) -> Loaded:
    """A graph that compiled code runs."""
    alone = "its fused losses " if policy == "disabled" else ""
    return Loaded(
        call=found.value,
        compiled=True,
        built=found.built,
        seconds=perf_counter() - began,
        how=f"{alone}{'compiled' if found.built else 'loaded from the cache'}",
        graph=graph,
        threads=threads,
        made=compilation.made,
    )


def _one_by_one(graph: Graph) -> Call:
    """A graph's operations by torch's own kernels; a graph of one output returns it bare."""
    forward = (graph.as_traced or lower(graph, INTERPRETER_PASSES)).module

    early = [] if graph.as_traced is None else changed_early(graph.as_traced)

    def call(inputs: list[Tensor]) -> Sequence[Tensor]:
        before = [inputs[i].clone() for i in early]
        try:
            outputs = forward(*inputs)
        except (RuntimeError, IndexError):
            for i, state in zip(early, before, strict=True):
                inputs[i].copy_(state)
            raise
        return outputs if isinstance(outputs, (list, tuple)) else [outputs]

    held = None if graph.as_traced is None else held_inputs(graph)
    return call if held is None else functools.partial(_holding, call, *held)


def _holding(call: Call, guard: int, held: list[int], inputs: list[Tensor]) -> Sequence[Tensor]:
    """Run a step as it was traced, and put its state back where the guard says that it was wrong.

    ``guard`` and ``held`` are positions of inputs (see ``passes.hold``).
    """
    before = [inputs[i].clone() for i in held]
    outputs = call(inputs)
    if inputs[guard].item() < 0:
        for i, state in zip(held, before, strict=True):
            inputs[i].copy_(state)
    return outputs
