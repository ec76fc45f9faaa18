"""The host fabric: programs run on the CPU of this machine.

A graph is compiled, or found compiled in the cache, or, without a compiler or with
``autogen_policy="disabled"``, run operation by operation by torch's own kernels; so it is, too,
while it is compiled in the background. Compiled code is trusted after its first step was checked
(``selfcheck``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from fulgurite.backends.csx.compile.background.compilation import Compilation
from fulgurite.backends.csx.compile.background.later import Later, with_log
from fulgurite.backends.csx.compile.background.queue import queue
from fulgurite.backends.csx.compile.background.together import found_together
from fulgurite.backends.csx.compile.checking.failures import explained
from fulgurite.backends.csx.compile.checking.reference import reference_of
from fulgurite.backends.csx.compile.fabric import NOW, Call, Fabric, Loaded, Shown, Wanted
from fulgurite.backends.csx.compile.host import denormals, library
from fulgurite.backends.csx.compile.inductor import fused
from fulgurite.backends.csx.compile.inductor.toolchain import (
    CompilerFailed,
    NoToolchain,
    cpu_name,
    failures_reported,
    nothing_compiled,
)
from fulgurite.backends.csx.compile.programs.kernels import Kernels, one_by_one, warn_of_unused
from fulgurite.backends.csx.compile.programs.steps import Target
from fulgurite.backends.csx.compile.store.cache import (
    Fetched,
    NothingStored,
)
from fulgurite.backends.csx.compile.threads import (
    Threads,
    counted,
    reset_threads,
    set_threads,
    threads_beside_another,
)
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.graph.collectives import has_collectives, processes
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.votes import Vote, Votes

HOST = Target(
    device="cpu",
    allocate="torch._C._dynamo.guards._empty_strided_cpu",
    has_kernel=library.has,
)
_set_grad_enabled = torch._C._set_grad_enabled  # as a context manager it costs 2 µs (measured)


class HostFabric(Fabric):
    """The CPU of this machine."""

    def __init__(self, backend: CSXBackend) -> None:
        self._backend, self.timer, self.torn = backend, None, False
        self._later = Later(backend, HOST)
        if backend.compiles and not backend.validate_only and backend.compile_dir is not None:
            self._later.cache  # noqa: B018  # so that a folder that cannot be used is known at once

    @staticmethod
    def devices() -> tuple[torch.device, ...]:
        """The CPU."""
        return (torch.device(HOST.device),)

    def describe(self, loads: Sequence[Loaded]) -> str:
        """The processor, and how many threads compute programs."""
        threads = loads[0].threads if loads else Threads()
        either = "" if threads.is_fixed else "1 or "
        return f"host fabric ({cpu_name()}, {either}{counted(threads.most)})"

    def load(self, graph: Graph, shown: Shown, wanted: Wanted = NOW) -> Loaded:
        """Find a graph compiled in the cache or compile it, else run it operation by operation."""
        began, together = perf_counter(), wanted.together
        exactly = processes() > 1 or torch.are_deterministic_algorithms_enabled()
        threads = Threads(is_fixed=exactly)
        if next(graph.runs.operations(), None) is None:
            return _interpreted(graph, began, "it computes nothing", threads)
        has_regions, policy = fused.has_regions(graph), self._backend.policy
        try:
            never = "autogen_policy='disabled'" if policy == "disabled" else wanted.never
            if never and not has_regions:
                raise NoToolchain(never)
            self._later.cache  # noqa: B018  # which may be an error of the user's
            with failures_reported():
                compilation = self._later.compilation(graph, threads.most, wanted.what)
                if self._waits_for(graph, together):
                    found = compilation.fetch(shown)
                else:
                    there = found_together(compilation.find, together)
                    if there is None:
                        # a loss that cannot be fused is an error before the first step, not when it
                        # is compiled
                        compilation.check_regions()
                        later = replace(
                            _interpreted(graph, began, "", threads), key=compilation.key
                        )
                        return self._later.begin(later, compilation, wanted)
                    if wanted.urgent:
                        queue.hurry()
                    found = there
        except (NoToolchain, NothingStored) as missing:
            why = with_log(missing)
            if has_regions and not isinstance(missing, CompilerFailed):
                raise fused.not_compiled(graph, why) from None
            if self._backend.compile_only:
                raise nothing_compiled(missing, why) from None
            if together is not None:
                together.say(Vote.REFUSES, policy != "disabled")
            return _interpreted(graph, began, why, threads)
        loaded = _compiled(graph, began, found, compilation, threads, policy)
        warn_of_unused(graph, compilation.folder)
        self._later.trust(loaded, found, compilation, lambda: reference_of(graph), together).begin()
        return loaded

    @property
    def waits(self) -> bool:
        """Whether programs are compiled before they run, and not in the background."""
        return self._later.waits

    def _waits_for(self, graph: Graph, together: Votes | None) -> bool:
        """Whether a graph is compiled before it runs.

        One with collectives runs the same code in all processes at each step: they agree when that
        is another one, or begin with it.
        """
        if self.waits:
            return True
        return has_collectives(graph.runs) if together is None else together.compiled

    def run(self, loaded: Loaded, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Run a graph without gradients, with denormals as zero, with its number of threads."""
        timer = self.timer
        if timer is not None:
            timer.begin()
        gradients = torch.is_grad_enabled()
        stays = not self._backend.flush_denormals or denormals.is_flushing()
        own, mkl, choice = torch.get_num_threads(), None, loaded.threads
        # the user may have asked for fewer since it was loaded
        threads, beside = min(choice.number, own), queue.compiles
        if beside:
            queue.poll()
            # a thread that waits for the compiler's core makes all others wait
            threads = min(threads, max(1, threads_beside_another()))
        flush, restore = denormals.switches(threads)
        given = list(inputs)  # compiled code empties the other one
        try:
            _set_grad_enabled(False)
            if threads < max(own, choice.most):
                mkl = set_threads(threads)
            if not stays:
                flush()
            began = perf_counter()
            outputs = loaded.call(inputs)
            if not beside:
                choice.note(perf_counter() - began)
            return outputs
        except BaseException as error:  # Ctrl-C too
            graph, torn = loaded.graph, self.torn
            # whatever was written: until it is known better, below
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
            if mkl is not None:
                reset_threads(own, mkl)
            _set_grad_enabled(gradients)
            if timer is not None:
                timer.end()


def _interpreted(graph: Graph, began: float, why: str, threads: Threads) -> Loaded:
    """A graph that torch's own kernels run, and why; ``began`` is when loading it began."""
    return Loaded(
        call=reference_of(graph),
        compiled=False,
        built=False,
        seconds=perf_counter() - began,
        how=f"run operation by operation ({why})",
        graph=graph,
        threads=threads,
        kernels=lambda: _by_operations(graph),
        one_by_one=lambda: _by_operations(graph),
    )


def _by_operations(graph: Graph) -> Kernels:
    return one_by_one(graph.runs, HOST.has_kernel)


def _compiled(
    graph: Graph,
    began: float,
    found: Fetched[Call],
    compilation: Compilation,
    threads: Threads,
    policy: str,
) -> Loaded:
    """A graph that compiled code runs."""
    alone = "its fused losses " if policy == "disabled" else ""
    way = "compiled by another process" if compilation.waited else "loaded from the cache"
    return Loaded(
        call=found.value,
        compiled=True,
        built=found.built,
        seconds=perf_counter() - began,
        how=f"{alone}{'compiled' if found.built else way}",
        graph=graph,
        threads=threads,
        kernels=compilation.kernels,
        key=compilation.key,
        one_by_one=lambda: _by_operations(graph),
    )
