"""Fabrics: what runs a program. Here the host's CPU; the only file that touches the compiler.

A graph is compiled by torch's Inductor into one C++ module, or, without a compiler or with
``autogen_policy="disabled"``, run operation by operation by torch's own kernels.
"""

from __future__ import annotations

import functools
import platform
import sysconfig
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.standalone_compile import standalone_compile

from fulgurite.backends.csx import denormals
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.graph import Graph
from fulgurite.backends.csx.passes import COMPILER_PASSES, lower

# size_asserts: inputs are checked before (BatchSpec, Binding). combo_kernels: small independent
# kernels in one call. Together 100-106 against 110-119 µs a step on an MLP 64-128-128-10.
# fallback_random: random operations stay torch's own, so that dropout masks equal eager's.
# emulate_precision_casts: bfloat16 results are rounded where eager rounds them, also inside a fused
# loop: optimizers under "bf16-true" then equal eager's bit for bit.
_INDUCTOR = {
    "fallback_random": True,
    "size_asserts": False,
    "combo_kernels": True,
    "emulate_precision_casts": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A graph that can be run: ``call`` takes its inputs in order and returns its outputs."""

    call: Callable[..., Sequence[Tensor]]
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
        graph = lower(graph, COMPILER_PASSES)
        with warnings.catch_warnings(), inductor.patch(_INDUCTOR), torch.no_grad():
            warnings.filterwarnings("ignore", module=r"torch\.")  # its own deprecations
            call = standalone_compile(
                graph.module,
                [entry.example for entry in graph.inputs],
                dynamic_shapes="from_example_inputs",
                options={},
            )
        seconds = time.perf_counter() - began
        return Loaded(call=call, compiled=True, seconds=seconds, how=f"compiled in {seconds:.1f} s")

    def run(self, loaded: Loaded, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Run a graph once: its state inputs are updated in place."""
        if denormals.is_flushing():
            return loaded.call(*inputs)
        flush, restore = denormals.switches(torch.get_num_threads())
        flush()
        try:
            return loaded.call(*inputs)
        finally:
            restore()


def _flat(forward: Callable[..., Any]) -> Callable[..., Sequence[Tensor]]:
    """A graph's Python function; a graph of one output returns it bare."""

    def call(*inputs: Tensor) -> Sequence[Tensor]:
        with torch.no_grad():
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
