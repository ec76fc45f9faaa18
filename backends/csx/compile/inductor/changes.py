"""What is changed around torch's compiler while it makes code of a graph: its bugs, its habits, and
what our own operations are to it.

Imported when the first graph is compiled: the compiler's lowerings take 1.2 s of CPU (measured).
Checked against torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch._inductor.lowering import make_pointwise, register_lowering
from torch._inductor.virtualized import ops

from fulgurite.backends.csx.graph import dtypes as fmt
from fulgurite.backends.csx.graph.graph import storage_of
from fulgurite.backends.csx.graph.op_schema import is_random
from fulgurite.backends.csx.graph.passes.cbfloat16 import rounding
from fulgurite.backends.csx.graph.passes.realize import realize
from fulgurite.backends.patches import Patch, patches_of
from fulgurite.backends.torch_versions import CHECKED, DROPS_COPIES, LOSES_ORDER

_READ_EARLY = "https://github.com/pytorch/pytorch/issues/185509"
_READ_LATE = "https://github.com/pytorch/pytorch/issues/198131"
_NOT_READ = "https://github.com/pytorch/pytorch/issues/196570"


def order_after_writes() -> Iterator[Patch]:
    """A patch that keeps reads of a buffer behind the in-place operation that fills it.

    Where the C++ backend fits one loop to another it looks again at what the loop reads, by the
    buffer's first name: the order after an operation that wrote into the buffer is lost, unless the
    loop has artificial dependencies too. docs/backends.md, "Bugs in the compiler", has more.
    """
    if not LOSES_ORDER:
        return
    from torch._inductor.scheduler import SchedulerNode

    original = SchedulerNode.recompute_size_and_body

    def recompute_size_and_body(self: SchedulerNode, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # always: torch does so only where the loop has artificial dependencies
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    method = {"recompute_size_and_body": recompute_size_and_body}
    why = "a buffer may be read before the operation that fills it, and give NaN"
    yield from patches_of(SchedulerNode, method, why=why, checked=CHECKED, upstream=_READ_EARLY)


def copies_first() -> Iterator[Patch]:
    """A patch that keeps copies of an input which is overwritten at the end.

    The compiler drops an operation that only copies, and reads its operand instead. Where that is
    an input, and it is the new value of another one (``target.load_state_dict(net.state_dict())``
    in a step), it would be read when the graph has overwritten it already. In docs/backends.md too.
    """
    if not DROPS_COPIES:
        return
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
                # before all writes: any of them may be the one that overwrites it
                with graph.inserting_before(writes[0]):
                    kept = graph.call_function(torch.ops.aten.clone.default, (value,))
                kept.meta.update(value.meta, val=value.meta["val"].clone())
                node.replace_input_with(value, kept)

    why = "a copy of an input may be read after the input was overwritten"
    graph_pass = {"remove_noop_ops": remove_noop_ops}
    yield from patches_of(post_grad, graph_pass, why=why, checked=CHECKED, upstream=_READ_LATE)


def local_only_where_read() -> Iterator[Patch]:
    """A patch that keeps a buffer in memory where nothing reads it by its own name.

    The C++ backend asks where each user of a buffer reads it. What is written in place has a second
    name, by which nobody does: that was a ``KeyError``.
    """
    from torch._inductor.loop_body import LoopBody

    def get_read_expr(self: Any, buffer_name: str) -> Any:
        found = self.get_all_read_expr(buffer_name)
        return found[0] if found else None  # which is no contiguous index

    method = {"get_read_expr": get_read_expr}
    why = "the compiler fails where a softmax reads what was written in place"
    return patches_of(LoopBody, method, why=why, checked=CHECKED, upstream=_NOT_READ)


def library_in_ci() -> Iterator[Patch]:
    """A patch that lets the library run an operation where the environment says ``CI`` too.

    There the compiler refuses an operation that it has no rule for and torch could decompose.
    Which are decomposed is decided before it (``graph/passes/decompositions.py``).
    """
    from torch._inductor import graph as lowered
    from torch._inductor import lowering

    why = "a program with such an operation would not be compiled in a CI"
    quiet = {"make_fallback": functools.partial(lowering.make_fallback, warn=False)}
    return patches_of(lowered, quiet, why=why, checked=CHECKED)


def no_tables() -> Iterator[Patch]:
    """A patch that keeps the compiler from printing a table of each product that it tunes."""
    from torch._inductor import select_algorithm

    why = "tables of choices on the screen; the report says what was chosen"
    names = {"PRINT_AUTOTUNE": False}
    return patches_of(select_algorithm, names, why=why, checked=CHECKED)


def sums_in_order() -> Iterator[Patch]:
    """Patches that let one thread alone add to elements which indices name (``index_add``).

    Code for several adds atomically: in another order each time, element by element, in one thread
    too. A step of a graph network took 7.9 ms in one thread and 13.4 in two, for 3.5 in code for
    one (measured). torch's own kernels add in order as well.
    """
    from torch._inductor.codegen.cpp import (
        CppKernel,
        CppKernelProxy,
        CppVecKernel,
        OuterLoopFusedKernel,
        ParallelDepth,
    )

    def storing(original: Any) -> Any:
        def store(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> None:
            threads = self.num_threads
            if mode == "atomic_add":
                self.num_threads, self.adds = 1, True
            try:
                original(self, name, index, value, mode)
            finally:
                self.num_threads = threads

        return store

    def dividing(original: Any, loops: Callable[[Any], Iterable[Any]]) -> Any:
        def decide_parallel_depth(self: Any, deepest: Any, threads: int) -> Any:
            if any(hasattr(one, "adds") for one in loops(self)):
                return ParallelDepth(parallel_depth=0, start_depth=deepest.start_depth)
            return original(self, deepest, threads)

        return decide_parallel_depth

    def fused(self: Any) -> list[Any]:  # of several nests of loops, whose outer ones are one
        return [one for nest in self.inner for one in nest.get_kernel().kernels]

    why = "sums would be rounded differently each time, and in one thread take twice as long"
    element = {"store": storing(CppKernel.store)}
    vector = {"store": storing(CppVecKernel.store)}
    one, several = CppKernelProxy.decide_parallel_depth, OuterLoopFusedKernel.decide_parallel_depth
    nest = {"decide_parallel_depth": dividing(one, operator.attrgetter("kernels"))}
    nests = {"decide_parallel_depth": dividing(several, fused)}
    yield from patches_of(CppKernel, element, why=why, checked=CHECKED)
    yield from patches_of(CppVecKernel, vector, why=why, checked=CHECKED)
    yield from patches_of(CppKernelProxy, nest, why=why, checked=CHECKED)
    yield from patches_of(OuterLoopFusedKernel, nests, why=why, checked=CHECKED)


@functools.cache
def call_as_traced() -> None:
    """Let random operations, and gradients of convolutions, be calls with the layouts they had.

    Draws are in the order of memory. The compiler has no rule for some of which torch has a
    decomposition, which is not used here (see ``passes/functionalize.py``). A convolution's
    gradients it would compute from copies laid out as that of the weight, which for a depthwise
    convolution is any order: a block of ConvNeXt took 1.5 times as long as in torch (measured).
    """
    from torch._inductor import lowering

    constraint: Any = lowering.constrain_to_fx_strides
    make_fallback: Any = lowering.make_fallback
    gradients = torch.ops.aten.convolution_backward.default
    # override_decomp: else torch refuses a fallback for what it could decompose
    make_fallback(gradients, constraint, warn=False, override_decomp=True)
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
        # one that has a rule keeps it, and gets its operands as they were traced
        elif lowering.maybe_layout_constraints(operation) is None:
            lowering.add_layout_constraint(operation, constraint)


_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


@contextlib.contextmanager
def files_of_this_process_alone() -> Iterator[None]:
    """Let Inductor write its Python into a temporary folder, where nothing of it is left."""
    before = os.environ.get(_FOLDER)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # the compiler asks the environment for its folder each time
        os.environ[_FOLDER] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[_FOLDER]
            else:
                os.environ[_FOLDER] = before


def read_off() -> Iterator[Patch]:
    """A patch that asks sympy only of other indices than sums of variables times numbers."""
    from torch._inductor import sizevars

    if not hasattr(sizevars, "stride_at"):  # torch 2.12 has them elsewhere: there it asks
        return iter(())
    stride_at, simplified = sizevars.stride_at, sizevars.simplify_index_in_vec_range

    @functools.lru_cache
    def stride(index: Any, variable: Any) -> Any:
        if is_linear(index):
            return sympy.expand(index).coeff(variable)
        return stride_at(index, variable)

    @functools.lru_cache
    def in_vector(index: Any, variable: Any, vec_length: int) -> Any:
        if is_linear(index):
            return index
        return simplified(index, variable, vec_length)

    functions = {"stride_at": stride, "simplify_index_in_vec_range": in_vector}
    why = "sympy's simplify takes a third of the time in which C++ is generated"
    return patches_of(sizevars, functions, why=why, checked=CHECKED)


def is_linear(index: Any) -> bool:
    """Whether an expression is a sum of symbols times numbers, in whatever nesting."""
    if isinstance(index, int) or index.is_Number or index.is_Symbol:
        return True
    if index.is_Add:
        return all(map(is_linear, index.args))
    if index.is_Mul:
        others = [factor for factor in index.args if not factor.is_Number]
        return len(others) <= 1 and all(map(is_linear, others))
    return False


@functools.cache
def register_lowerings() -> None:
    """Tell the compiler what ``fulgurite::cbfloat16`` and ``fulgurite::realize`` are."""
    register_lowering(rounding(), type_promotion_kind=None)(make_pointwise(_rounded))
    register_lowering(realize(), type_promotion_kind=None)(_realized)


def _rounded(x: Any) -> Any:
    """``cbfloat16.rounded`` of an element, or of a vector of them, in the compiler's words."""
    bits, value = torch.int32, torch.float32
    exponent = ops.bitwise_and(
        ops.to_dtype_bitcast(x, bits, value), ops.constant(fmt.EXPONENT_BITS, bits)
    )
    exponent = ops.maximum(exponent, ops.constant(fmt.LOWEST, bits))
    exponent = ops.minimum(exponent, ops.constant(fmt.HIGHEST, bits))
    shift = ops.to_dtype_bitcast(ops.add(exponent, ops.constant(fmt.SHIFT, bits)), value, bits)
    y = ops.sub(ops.add(x, shift), shift)
    y = ops.mul(
        ops.mul(y, ops.constant(fmt.OVERFLOW, value)), ops.constant(1 / fmt.OVERFLOW, value)
    )
    return ops.copysign(y, x)


def _realized(x: Any) -> Any:
    """A value that is computed once, where no loop looks through it."""
    x.realize()
    return x
