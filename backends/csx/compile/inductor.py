"""From graph to machine code, through torch's Inductor and a C++ compiler.

A compiled graph is a folder: for each of its parts the order of kernels and matrix products
(``part_0.py``), the order of parts (``program.py``), and the kernels in an extension module, or a
few. Loading it starts no compiler. What is heavy of Inductor is imported where it is used: most
processes compile nothing. Checked against torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor
from torch._inductor.exc import CppCompileError, InductorError
from torch._inductor.utils import BoxedBool
from torch._subclasses.fake_tensor import FakeTensorMode

from fulgurite.backends.csx.compile import indices, made, program, vector_units
from fulgurite.backends.csx.compile.kept import Generated, Kept
from fulgurite.backends.csx.compile.parts import (
    Call,
    Part,
    divided,
    numbered,
    operations_of,
    whole,
)
from fulgurite.backends.csx.compile.processes import compilers
from fulgurite.backends.csx.compile.scheduling import AT, Noted, grouped
from fulgurite.backends.csx.graph.graph import Graph, storage_of
from fulgurite.backends.csx.graph.op_schema import is_random
from fulgurite.backends.csx.graph.passes import COMPILER_PASSES, lower
from fulgurite.backends.interrupts import shielded
from fulgurite.backends.patches import FX, Patch, applied, fx_lock, patches_of

# size_asserts: inputs are checked before (BatchSpec, Binding). combo_kernels: small independent
# kernels in one call. Together 100-106 against 110-119 µs a step on an MLP 64-128-128-10.
# fallback_random: random operations stay torch's own, so that dropout masks equal eager's.
# emulate_precision_casts: bfloat16 results are rounded where eager rounds them, also inside a fused
# loop: optimizers under "bf16-true" then equal eager's bit for bit.
# fx_graph_cache: the folders are our cache.
# layout_optimization: would make convolutions channels-last, and copy what is not. On one thread
# ResNet-18 takes 300 ms a step without, 400-460 with, 353 in eager torch; a U-Net 52, 63 and 67.
FLAGS = {
    "fallback_random": True,
    "size_asserts": False,
    "combo_kernels": True,
    "emulate_precision_casts": True,
    "fx_graph_cache": False,
    "layout_optimization": False,
}
_READ_EARLY = "https://github.com/pytorch/pytorch/issues/185509"
_READ_LATE = "https://github.com/pytorch/pytorch/issues/198131"


def compile_graph(graph: Graph, folder: Path, kept: Kept) -> None:
    """Compile a graph into an existing, empty folder.

    The graph is functional and decomposed already, so Inductor's inner item takes it: its outer
    one would trace it a third time.

    Args:
        graph: what to compile.
        folder: where.
        kept: what earlier compilations left.

    Raises:
        InductorError: a compiler failed.
    """
    with fx_lock:
        failed = _attempt(graph, folder, kept, believed=True)
        if failed is None:
            return
        with _ended_with_us():  # a Ctrl-C here has no failure, with all its output, as its context
            changed = vector_units.ask_the_compiler()
        if changed:
            failed = _attempt(graph, folder, kept, believed=False)
        if failed is not None:
            raise InductorError(failed, None)


def _attempt(graph: Graph, folder: Path, kept: Kept, believed: bool) -> CppCompileError | None:
    """Compile; returns how the C++ compiler failed, if it did.

    Args:
        graph, folder, kept: as of ``compile_graph``.
        believed: what the system says of vector units is.
    """
    try:
        with applied(vector_units.believed() if believed else ()):
            _compile(graph, folder, kept)
    except CppCompileError as error:
        return error
    return None


def _compile(graph: Graph, folder: Path, kept: Kept) -> None:
    began = perf_counter()
    graph = lower(numbered(graph), COMPILER_PASSES)
    division = divided(graph)
    parts = [whole(graph)] if division is None else division.parts
    # before the compiler's own passes, which change the parts
    calls = division.calls if division else [Call(0, (), (), operations_of(parts[0].module))]
    sources = [kept.part(part, _generated, graph.mode) for part in parts]
    generated = perf_counter()
    kernels = program.write(folder, sources, division, kept)
    seconds = {"generate": generated - began, "compile": perf_counter() - generated}
    rows = [
        (one, kernels[call.part].get(one.kernel), call.operations)
        for call in calls
        if isinstance(call, Call)
        for one in sources[call.part].calls
    ]
    made.write(folder, rows, seconds)


def _generated(part: Part, mode: FakeTensorMode) -> Generated:
    """The code that Inductor makes of operations.

    Results lie in memory as the graph says where other parts read them.
    """
    _import_compiler()
    from torch._inductor.compile_fx import compile_fx_inner, record_original_output_strides
    from torch._inductor.virtualized import V

    noted = Noted()
    for i, node in enumerate(one for one in part.module.graph.nodes if one.op == "call_function"):
        node.meta["custom"] = {**node.meta.get("custom", {}), AT: i}
    if part.read_by_others:
        (output,) = part.module.graph.find_nodes(op="output")
        output.meta["user_visible_output_idxs"] = range(len(output.args[0]))
        record_original_output_strides(part.module)
    context = torch._guards.TracingContext(mode)
    with (
        warnings.catch_warnings(),
        torch._guards.tracing(context),
        V.set_fake_mode(mode),
        inductor.patch({**FLAGS, "_pre_fusion_custom_pass": grouped}),
        torch.no_grad(),
    ):
        warnings.filterwarnings("ignore", module=r"torch\.")  # its own deprecations
        patches = (
            FX,
            *_order_after_writes(),
            *_copies_first(),
            *_kernels_later(),
            *indices.read_off(),
            *noted.patches(),
        )
        with _files_of_this_process_alone(), applied(patches):
            _keep_draws_as_they_are()
            compiled: Any = compile_fx_inner(
                part.module, list(part.examples), cudagraphs=BoxedBool(False), is_inference=True
            )
    constants = dict(compiled.constants or {})
    return Generated(compiled.source_code, constants, tuple(noted.calls))


@functools.cache
def _import_compiler() -> None:
    """Import torch's compiler, and tell it what our own operations are.

    A Ctrl-C waits until it is imported: what half of it registered with torch could never be
    imported again in this process.
    """
    with shielded(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")  # its own deprecations
        importlib.import_module("torch._inductor.compile_fx")
        from fulgurite.backends.csx.compile.lowerings import register_lowerings
    register_lowerings()


def _order_after_writes() -> Iterator[Patch]:
    """A patch that keeps reads of a buffer behind the in-place operation that fills it.

    Where the C++ backend fits one loop to another it looks again at what the loop reads, by the
    buffer's first name: the order after an operation that wrote into the buffer is lost, unless the
    loop has artificial dependencies too. docs/backends.md, "Two bugs in the compiler", has more.
    """
    from torch._inductor.scheduler import SchedulerNode

    original = SchedulerNode.recompute_size_and_body

    def recompute_size_and_body(self: SchedulerNode, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    method = {"recompute_size_and_body": recompute_size_and_body}
    why = "a buffer may be read before the operation that fills it, and give NaN"
    return patches_of(SchedulerNode, method, why=why, checked="torch 2.13", upstream=_READ_EARLY)


def _copies_first() -> Iterator[Patch]:
    """A patch that keeps copies of an input which is overwritten at the end.

    The compiler drops an operation that only copies, and reads its operand instead. Where that is
    an input, and it is the new value of another one (``target.load_state_dict(net.state_dict())``
    in a step), it would be read when the graph has overwritten it already. In docs/backends.md too.
    """
    from torch._inductor.fx_passes import post_grad

    original = post_grad.remove_noop_ops
    copy_ = torch.ops.aten.copy_.default

    def remove_noop_ops(graph: fx.Graph) -> None:
        original(graph)
        copies = graph.find_nodes(op="call_function", target=copy_)
        writes = [node for node in copies if node.args[0].op == "placeholder"]
        overwritten = {storage_of(node.args[0].meta["val"]) for node in writes}
        for node in writes:
            value = node.args[1]
            if storage_of(value.meta["val"]) in overwritten:
                with graph.inserting_before(writes[0]):
                    kept = graph.call_function(torch.ops.aten.clone.default, (value,))
                kept.meta.update(value.meta, val=value.meta["val"].clone())
                node.replace_input_with(value, kept)

    why = "a copy of an input may be read after the input was overwritten"
    graph_pass = {"remove_noop_ops": remove_noop_ops}
    return patches_of(post_grad, graph_pass, why=why, checked="torch 2.13", upstream=_READ_LATE)


def _kernels_later() -> Iterator[Patch]:
    """A patch that lets Inductor compile no kernel: all of them are compiled at once when known."""
    from torch._inductor.async_compile import AsyncCompile

    def cpp_pybinding(self: AsyncCompile, argtypes: list[str], source_code: str) -> None:
        return None

    method = {"cpp_pybinding": cpp_pybinding}
    why = "the C++ compiler would read torch's header for each kernel anew"
    return patches_of(AsyncCompile, method, why=why, checked="torch 2.13")


@functools.cache
def _keep_draws_as_they_are() -> None:
    """Let random operations be calls of torch's own, with arguments in the layout they had.

    They draw in the order of memory. The compiler has no rule for some of which torch has a
    decomposition, which is not used here (see ``passes/functionalize.py``).
    """
    from torch._inductor import lowering

    constraint: Any = lowering.constrain_to_fx_strides
    make_fallback: Any = lowering.make_fallback
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace != "aten":
            continue
        operation = getattr(getattr(torch.ops.aten, base), overload or "default", None)
        if not is_random(operation):
            continue
        if operation not in lowering.lowerings:
            make_fallback(operation, constraint, warn=False, override_decomp=True)
        elif lowering.maybe_layout_constraints(operation) is None:
            lowering.add_layout_constraint(operation, constraint)


_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


@contextlib.contextmanager
def _files_of_this_process_alone() -> Iterator[None]:
    """Let Inductor write its Python into a temporary folder, where nothing of it is left."""
    before = os.environ.get(_FOLDER)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ[_FOLDER] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[_FOLDER]
            else:
                os.environ[_FOLDER] = before


@contextlib.contextmanager
def _ended_with_us() -> Iterator[None]:
    """Let C++ compilers that Inductor starts not outlive an exception: Ctrl-C, or a failure."""
    from torch._inductor import cpp_builder

    with compilers() as running:
        method = {"_run_compile_cmd": running.run}
        why = "g++'s own processes outlive it"
        with applied(patches_of(cpp_builder, method, why=why, checked="torch 2.13")):
            yield
