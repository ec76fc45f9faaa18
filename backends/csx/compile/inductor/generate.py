"""From graph to machine code, through torch's Inductor and a C++ compiler.

A compiled graph is a folder: the steps of its program, and its kernels in an extension module or a
few (``program``). Loading it starts no compiler. What is heavy of Inductor is imported where it is
used: most processes compile nothing. Checked against torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch
from torch._inductor import config as inductor
from torch._inductor.exc import CppCompileError
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from fulgurite.backends.csx.compile.inductor import fused, kernel_modules, program, toolchain
from fulgurite.backends.csx.compile.inductor.earlier_code import EarlierCode
from fulgurite.backends.csx.compile.inductor.fused import Fused
from fulgurite.backends.csx.compile.inductor.processes import compilers
from fulgurite.backends.csx.compile.programs import compiler_log, kernels
from fulgurite.backends.csx.compile.programs.kernels import How, UnusedKernel
from fulgurite.backends.csx.compile.programs.linking import linked
from fulgurite.backends.csx.compile.programs.parts import (
    Division,
    Part,
    divided,
    numbered,
    operations_of,
    whole,
)
from fulgurite.backends.csx.compile.programs.progress import CODE, tell
from fulgurite.backends.csx.compile.programs.steps import (
    Extern,
    Generated,
    Kernel,
    KernelSource,
    Target,
    calls,
)
from fulgurite.backends.csx.diagnostics.trace_errors import UnfusedLoss
from fulgurite.backends.csx.graph.collectives import is_gather
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.op_schema import is_mutable, is_view
from fulgurite.backends.csx.graph.passes import COMPILER_PASSES, lower
from fulgurite.backends.csx.graph.passes.realize import realize
from fulgurite.backends.patches import FX, applied, fx_lock, patches_of
from fulgurite.backends.runtime import shielded
from fulgurite.backends.torch_versions import CHECKED

# size_asserts: inputs are checked before (BatchSpec, Binding). combo_kernels: small independent
# kernels in one call. Together 100-106 against 110-119 µs a step on an MLP 64-128-128-10.
# fallback_random: random operations stay torch's own, so that dropout masks equal eager's.
# emulate_precision_casts: bfloat16 results are rounded where eager rounds them, also inside a fused
# loop: optimizers under "bf16-true" then equal eager's bit for bit.
# fx_graph_cache: the folders are our cache.
# layout_optimization: would make convolutions channels-last, and copy what is not. On one thread
# ResNet-18 takes 300 ms a step without, 400-460 with, 353 in eager torch; a U-Net 52, 63 and 67.
# alignment_asserts: would stand in the program's Python; loops ask for no alignment.
# fallback_scatter_reduce_sum: where code is for several threads; ``sums_in_order`` is as fast.
FLAGS = {
    "alignment_asserts": False,
    "fallback_random": True,
    "size_asserts": False,
    "combo_kernels": True,
    "cpp.fallback_scatter_reduce_sum": False,
    "emulate_precision_casts": True,
    "fx_graph_cache": False,
    "layout_optimization": False,
}
# the compiler moves collectives to where most of them overlap with something, or memory is least by
# its estimate: all gradients were there before the first was reduced (seen with torch 2.13)
IN_ORDER = {"reorder_for_locality": False, "reorder_for_peak_memory": False}
# products for which there is a template (on the CPU: batches of them, bmm) are generated too, and
# timed beside the library's
AGGRESSIVE = {
    "max_autotune": True,
    "max_autotune_gemm_backends": "ATEN,CPP",
    "max_autotune_report_choices_stats": False,  # in the log
}


def compile_graph(
    graph: Graph,
    folder: Path,
    earlier: EarlierCode,
    target: Target,
    policy: str = "medium",
) -> None:
    """Compile a graph into an existing, empty folder.

    The graph is functional and decomposed already, so Inductor's inner entry takes it: its outer
    one would trace it a third time. Where the C++ compiler fails on some kernels and not on
    others, their operations run by the library's kernels.

    Args:
        graph: what to compile.
        folder: where.
        earlier: what earlier compilations left.
        target: what for.
        policy: "disabled" (its fused regions alone), "medium" or "aggressive".

    Raises:
        CppCompileError: the C++ compiler failed, not on some of the kernels alone.
        UnfusedLoss: a fused region cannot be one kernel.
        Exception: whatever else fails in torch's compiler, or in our work on what it wrote.
    """
    attempt = Attempt(graph, earlier, target, policy)
    with fx_lock:
        failed = _tried(attempt, folder, believed=True)
        if failed is None:
            return
        with _ended_with_us():  # a Ctrl-C here has no failure, with all its output, as its context
            # it may have been asked for vector units that it does not know: only now is that found
            # out, for asking takes 3 to 7 s
            changed = toolchain.ask_the_compiler()
        if changed:
            failed = _tried(attempt, folder, believed=False)
        while failed is not None and attempt.without_failing_kernels():
            failed = _tried(attempt, folder, believed=not changed)
        if failed is not None:
            raise failed


def check_regions(graph: Graph, earlier: EarlierCode, target: Target) -> None:
    """Generate the code of each fused region, to see that it is one kernel.

    Raises:
        UnfusedLoss: it is not.
    """
    with fx_lock, applied(toolchain.believed()):
        Attempt(graph, earlier, target, "medium").regions()


def _tried(attempt: Attempt, folder: Path, believed: bool) -> CppCompileError | None:
    """Compile; returns how the C++ compiler failed, if it did.

    Args:
        attempt: what to compile.
        folder: where.
        believed: what the system says of vector units is.
    """
    try:
        with applied(toolchain.believed() if believed else ()):
            attempt.compile(folder)
    except CppCompileError as error:
        return error
    return None


AT = "at"
"""In a node's ``meta["custom"]``: its position among the operations of its part."""


@dataclass(frozen=True, slots=True)
class _Tried:
    """The text of a part, its operations as the graph numbers them, and its code."""

    text: str
    operations: tuple[int, ...]
    code: Generated


class Attempt:
    """A graph that is compiled, perhaps several times until no kernel fails.

    Args:
        graph, earlier, target, policy: as of ``compile_graph``.
    """

    def __init__(
        self,
        graph: Graph,
        earlier: EarlierCode,
        target: Target,
        policy: str,
    ) -> None:
        self._graph, self._earlier, self._policy = graph, earlier, policy
        self._target = target
        self._library: dict[str, frozenset[int]] = {}  # of parts: what has no generated kernel
        self._unused: list[UnusedKernel] = []
        self._parts: list[_Tried] = []

    def regions(self) -> list[tuple[Fused, Generated]]:
        """The graph's fused regions, with the kernel of each."""
        return fused.generated(numbered(self._graph), self._generate)

    def compile(self, folder: Path) -> None:
        """Compile into a folder."""
        began, self._parts = perf_counter(), []
        # first of all: a loss that cannot be one kernel is an error, and no program is compiled
        regions = self.regions() if fused.has_regions(self._graph) else []
        if self._policy == "disabled":
            return self._compile_alone(regions, folder)
        graph = lower(numbered(self._graph), COMPILER_PASSES)
        division = divided(graph)
        parts = [whole(graph)] if division is None else division.parts
        numbers = [operations_of(part.module) for part in parts]  # before the compiler changes them
        parts = [replace(part, policy=self._policy) for part in parts]
        code = []
        for i, part in enumerate(parts):
            tell(CODE, i, len(parts))
            code.append(self._generate(part))
        generated = perf_counter()
        rows, sources = self._write(folder, parts, numbers, code, division)
        seconds = {"generate": generated - began, "compile": perf_counter() - generated}
        kernels.write(folder, rows, sources, seconds, self._unused)
        return None

    def _compile_alone(self, regions: list[tuple[Fused, Generated]], folder: Path) -> None:
        """Compile each fused region into a folder of its own."""
        began, rows, sources = perf_counter(), [], dict[str, str]()
        for one, code in regions:
            own = folder / one.name
            own.mkdir(exist_ok=True)
            found, its_sources = self._write(own, [one.part], [one.operations], [code], None)
            rows += [replace(call, region=str(one.region)) for call in found]
            sources |= its_sources
        kernels.write(folder, rows, sources, {"compile": perf_counter() - began}, self._unused)

    def _by_compiler(self, part: Part) -> Generated:
        return _generated(part, self._graph.mode, self._target.device)

    def _write(
        self,
        folder: Path,
        parts: Sequence[Part],
        numbers: Sequence[tuple[int, ...]],
        sources: Sequence[Generated],
        division: Division | None,
    ) -> tuple[list[Kernel | Extern], dict[str, str]]:
        """Compile parts as one program; returns what it calls, and its kernels in C++."""
        rows = zip(parts, numbers, sources, strict=True)
        self._parts += [_Tried(part.text, own, code) for part, own, code in rows]
        whole = linked(sources, division, numbers, self._earlier.name_of)
        program.write(folder, whole, self._earlier, self._target.allocate)
        in_cpp = {one.name: one.source for one in whole.kernels}
        return list(calls(whole.program.steps)), in_cpp

    def _generate(self, part: Part) -> Generated:
        part = replace(part, library=self._library.get(part.text, frozenset()))
        try:
            return self._earlier.part(part, self._by_compiler)
        # a full disk, and a loss that nothing can fuse, are no fault of a template
        except (OSError, UnfusedLoss):
            raise
        except Exception as error:  # anything, of a template that it tries
            if part.policy != "aggressive":
                raise
            printed = f"error: {compiler_log.in_a_line(error)}"
        numbers = [i for i in operations_of(part.module) if i >= 0]
        medium = self._earlier.part(replace(part, policy="medium"), self._by_compiler)
        self._unused.append(UnusedKernel("", numbers, printed, How.TEMPLATE))
        return medium

    def _give(self, part: str, operations: Iterable[int]) -> None:
        """Leave operations of a part to the library."""
        self._library[part] = self._library.get(part, frozenset()).union(operations)

    def without_failing_kernels(self) -> bool:
        """Give operations back to the library whose kernels the C++ compiler fails on.

        Returns:
            Whether there are some, and not all.
        """
        sources = [source for one in self._parts for source in one.code.sources.values()]
        kernels = [KernelSource(self._earlier.name_of(one), one) for one in sources]
        failing = kernel_modules.failing(kernels)
        if failing is None:
            return False
        for one in self._parts:
            for call in calls(one.code.program.steps):
                if not isinstance(call, Kernel):
                    continue
                name = self._earlier.name_of(one.code.sources[call.kernel])
                if name in failing:
                    self._give(one.text, call.at)
                    operations = [one.operations[i] for i in call.at]
                    self._unused.append(UnusedKernel(name, operations, failing[name], How.FAILED))
        return True


def _generated(part: Part, mode: FakeTensorMode, device: str) -> Generated:
    """The code that Inductor makes of operations.

    Results lie in memory as the graph says where other parts read them.
    """
    _import_compiler()
    from torch._inductor.compile_fx import compile_fx_inner, record_original_output_strides
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    from fulgurite.backends.csx.compile.inductor import changes, wrapper

    flags = FLAGS if part.policy == "medium" else FLAGS | AGGRESSIVE
    if any(is_gather(node.target) for node in part.module.graph.nodes):
        flags = flags | IN_ORDER  # ``shard_state`` has put them where they belong
    for i, node in enumerate(one for one in part.module.graph.nodes if one.op == "call_function"):
        # "custom" is the key that torch carries along where its passes replace a node
        node.meta["custom"] = {**node.meta.get("custom", {}), AT: i}
        if i in part.library and _computes(node.target):
            # torch's own mark: it then calls its kernel and generates none
            node.meta["should_fallback"] = True
    if part.read_by_others:
        (output,) = part.module.graph.find_nodes(op="output")
        output.meta["user_visible_output_idxs"] = range(len(output.args[0]))
        record_original_output_strides(part.module)
    context = torch._guards.TracingContext(mode)
    with (
        warnings.catch_warnings(),
        torch._guards.tracing(context),
        V.set_fake_mode(mode),
        inductor.patch({**flags, "_pre_fusion_custom_pass": wrapper.grouped}),
        torch.no_grad(),
    ):
        warnings.filterwarnings("ignore", module=r"torch\.")  # its own deprecations
        patches = (
            FX,
            *changes.order_after_writes(),
            *changes.copies_first(),
            *changes.local_only_where_read(),
            *changes.sums_in_order(),
            *changes.library_in_ci(),
            *(changes.no_tables() if part.policy == "aggressive" else ()),
            *changes.read_off(),
            *wrapper.plans_of_groups(),
        )
        with (
            changes.files_of_this_process_alone(),
            applied(patches),
            wrapper.registered(device) as written,
        ):
            changes.call_as_traced()
            compile_fx_inner(
                part.module, list(part.examples), cudagraphs=BoxedBool(False), is_inference=True
            )
    [code] = written
    return code


def _computes(operation: object) -> bool:
    """Whether torch has a kernel for an operation that a program can call."""
    if not isinstance(operation, OpOverload) or operation is realize():
        return False
    return not (is_view(operation) or is_mutable(operation))


@functools.cache
def _import_compiler() -> None:
    """Import torch's compiler, and tell it what our own operations are.

    A Ctrl-C waits until it is imported: what half of it registered with torch could never be
    imported again in this process.
    """
    with shielded(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")  # its own deprecations
        importlib.import_module("torch._inductor.compile_fx")
        from fulgurite.backends.csx.compile.inductor.changes import register_lowerings
    register_lowerings()


@contextlib.contextmanager
def _ended_with_us() -> Iterator[None]:
    """Let C++ compilers that Inductor starts not outlive an exception: Ctrl-C, or a failure."""
    from torch._inductor import cpp_builder

    with compilers() as running:
        method = {"_run_compile_cmd": running.run}
        why = "g++'s own processes outlive it"
        with applied(patches_of(cpp_builder, method, why=why, checked=CHECKED)):
            yield
