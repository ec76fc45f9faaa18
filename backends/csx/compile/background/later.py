"""Compiled code that comes while the operations run one by one; and whether it is trusted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch

from fulgurite.backends.csx.compile.background import queue as background
from fulgurite.backends.csx.compile.background.compilation import Compilation
from fulgurite.backends.csx.compile.background.meanwhile import Meanwhile
from fulgurite.backends.csx.compile.background.queue import Job, queue
from fulgurite.backends.csx.compile.background.together import Together, shared
from fulgurite.backends.csx.compile.checking.trust import Trust
from fulgurite.backends.csx.compile.fabric import Call, Loaded, Wanted
from fulgurite.backends.csx.compile.inductor import toolchain
from fulgurite.backends.csx.compile.inductor.headers import HEADER, Headers
from fulgurite.backends.csx.compile.inductor.toolchain import (
    CompilerFailed,
    NoToolchain,
    failures_reported,
)
from fulgurite.backends.csx.compile.programs import compiler_log
from fulgurite.backends.csx.compile.programs.kernels import warn_of_unused
from fulgurite.backends.csx.compile.programs.steps import Target
from fulgurite.backends.csx.compile.store.cache import (
    REPORTS,
    CompileCache,
    Fetched,
    NothingStored,
)
from fulgurite.backends.csx.compile.store.cache_folder import SharedFolder
from fulgurite.backends.csx.compile.threads import threads_beside_another
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.votes import Vote, Votes


class Later:
    """Lets graphs run while they are compiled, and takes the code when it is there.

    Args:
        backend: its options.
        target: what graphs are compiled for.
    """

    def __init__(self, backend: CSXBackend, target: Target) -> None:
        self._backend, self._target = backend, target

    @functools.cached_property
    def cache(self) -> CompileCache:
        """Where compiled code lies."""
        return CompileCache(self._backend.compile_dir)

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
            # from which step on compiled code runs depends on the machine, and it rounds otherwise
            or torch.are_deterministic_algorithms_enabled()
        )

    def compilation(self, graph: Graph, threads: int, what: str = "") -> Compilation:
        """A graph and its compiled code in the cache, whose program is ``what``."""
        return Compilation(graph, self.cache, threads, self._backend.policy, self._target, what)

    def begin(self, loaded: Loaded, compilation: Compilation, wanted: Wanted) -> Loaded:
        """Run a graph operation by operation while it is compiled."""
        missing = toolchain.toolchain_missing(starts=False)  # the worker starts it
        if missing is not None:
            raise NoToolchain(missing)
        loaded.how, loaded.compiling = "running operation by operation until it is compiled", True
        loaded.call = self._meanwhile(loaded, loaded.call, compilation, wanted)
        return loaded

    def _meanwhile(
        self, loaded: Loaded, reference: Call, compilation: Compilation, wanted: Wanted
    ) -> Meanwhile:
        """What runs a graph operation by operation until it is compiled."""
        name = (str(self.cache.folder), compilation.key)
        job = Job(name=name, run=compilation.in_background, wanted=wanted, fixed=None)
        job = queue.add(job)
        loaded.progress = functools.partial(queue.progress, job)
        if wanted.urgent:
            queue.hurry()
        if threads_beside_another():  # else it would hold up the training
            queue.add(_header_job(self.cache.folder, job))
        settle = functools.partial(self._settle, loaded, reference)
        if wanted.together is None:
            return Meanwhile(job, reference, settle, loaded.threads)
        shared(wanted.together, loaded, lambda: reference)
        return Together(job, reference, settle, loaded.threads, wanted.together)

    def _settle(self, loaded: Loaded, reference: Call, job: Job) -> Call:
        """What runs from now on, since a job has ended."""
        together = job.wanted.together
        why, found, graph = job.failure or "its compiled code is gone", None, loaded.graph
        assert graph is not None
        try:
            # the folder that the worker could not write, unless this process has left it already
            if job.full and job.name[0] == str(self.cache.folder):
                self.cache.leave(OSError(why))
            with failures_reported():
                compilation = self.compilation(graph, loaded.threads.most)
                found = None if job.failure is not None else compilation.find()
        except (NoToolchain, NothingStored, SharedFolder) as missing:
            why = with_log(missing)
        else:
            if job.full:  # once more, in the folder that took its place
                loaded.call = self._meanwhile(loaded, reference, compilation, job.wanted)
                return loaded.call
        loaded.compiling, loaded.seconds, loaded.cpu_s = False, job.seconds, job.cpu_s
        if found is None:
            why = compiler_log.with_log(why, job.log)
            loaded.call, loaded.how = reference, f"run operation by operation ({why})"
            if together is not None:
                together.say(Vote.REFUSES, True)
            loaded.settled()
            return loaded.call
        loaded.call, loaded.compiled, loaded.how = found.value, True, "compiled"
        loaded.kernels = compilation.kernels
        loaded.by_operations_s = min(loaded.threads.run_s.values(), default=None)
        loaded.threads.begin()
        warn_of_unused(graph, compilation.folder)
        if not self.trust(loaded, found, compilation, lambda: reference, together).begin():
            loaded.settled()
        return loaded.call

    def trust(
        self,
        loaded: Loaded,
        found: Fetched[Call],
        compiled: Compilation,
        right: Callable[[], Call],
        together: Votes | None,
    ) -> Trust:
        """What checks compiled code; wrong in one of several processes, none of them uses it."""
        return Trust(
            loaded=loaded,
            found=found,
            reference=right,
            program=compiled.folder,
            reports=Path(self._backend.artifact_dir or self.cache.folder / REPORTS),
            is_wrong=None if together is None else shared(together, loaded, right),
        )


def with_log(missing: Exception) -> str:
    """Why nothing is compiled, and which file has what the compiler printed."""
    printed = missing.printed if isinstance(missing, CompilerFailed) else ""
    return compiler_log.with_log(str(missing), compiler_log.keep(printed))


def _header_job(programs: Path, program: Job) -> Job:
    """What lets the worker keep the header, when it has compiled what was wanted.

    It begins only where compiling a program does: for the sake of the next ones.
    """
    later = Wanted(urgent=False, worth=lambda fixed: program.is_worth())
    return Job(name=(str(programs), HEADER), run=Headers(programs).in_background, wanted=later)
