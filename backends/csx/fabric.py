"""Fabrics: what runs a program. Here the host's CPU.

A graph is compiled, or, without a compiler or with ``autogen_policy="disabled"``, run operation by
operation by torch's own kernels.
"""

from __future__ import annotations

import functools
import platform
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from fulgurite.backends.csx import denormals
from fulgurite.backends.csx.compiler import Call, compile_graph, load_program
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A graph that can be run: ``call`` takes its inputs in order and returns its outputs."""

    call: Call
    compiled: bool
    seconds: float
    how: str


class HostFabric:
    """The CPU of this machine.

    Args:
        backend: its options.
    """

    def __init__(self, backend: CSXBackend) -> None:
        self._backend = backend

    @property
    def description(self) -> str:
        """The fabric in words, for every line that says what ran where."""
        threads = torch.get_num_threads()
        return f"host fabric ({cpu_name()}, {threads} thread{'s' * (threads > 1)})"

    def load(self, graph: Graph) -> Loaded:
        """Make a graph runnable."""
        missing = toolchain_missing() if self._backend.compiles else "autogen_policy='disabled'"
        began = time.perf_counter()
        if missing is not None:
            call = _flat(graph.module.forward)
            return Loaded(
                call=call,
                compiled=False,
                seconds=time.perf_counter() - began,
                how=f"run operation by operation ({missing})",
            )
        with tempfile.TemporaryDirectory() as folder:
            compile_graph(graph, Path(folder))
            call = load_program(Path(folder))
        seconds = time.perf_counter() - began
        return Loaded(call=call, compiled=True, seconds=seconds, how=f"compiled in {seconds:.1f} s")

    def run(self, loaded: Loaded, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Run a graph once: its state inputs are updated in place."""
        gradients = torch.is_grad_enabled()
        flushes = denormals.is_flushing()
        flush, restore = denormals.switches(torch.get_num_threads())
        # the bare setter: as a context manager it costs 2 µs (measured)
        torch._C._set_grad_enabled(False)
        if not flushes:
            flush()
        try:
            return loaded.call(inputs)
        finally:
            if not flushes:
                restore()
            torch._C._set_grad_enabled(gradients)


def _flat(forward: Callable[..., Any]) -> Call:
    """A graph's Python function; a graph of one output returns it bare."""

    def call(inputs: list[Tensor]) -> Sequence[Tensor]:
        outputs = forward(*inputs)
        return outputs if isinstance(outputs, (list, tuple)) else [outputs]

    return call


@functools.cache
def cpu_name() -> str:
    """The processor's name, as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def toolchain_missing() -> str | None:
    """What generated kernels lack on this machine: a reason in words, or None."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler was found"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "Python.h was not found"
    return None
