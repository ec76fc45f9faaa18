"""What torch's compiler says of a graph, as steps: its own scheduling and wrapper, in subclasses.

The compiler's scheduler fuses loops and orders kernels; its wrapper writes the Python around them.
Here the typed lines of that wrapper become steps, and no Python is written. On the CPU, loops that
follow each other become one function of C++, so a fused region is one kernel where its loops follow
each other and nothing else comes into that function. Imported when the first graph is compiled: the
compiler takes seconds. Checked against torch 2.13.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.codegen.common import (
    FileBackedGraphModule,
    device_codegens,
    init_backend_registration,
    register_backend_for_device,
)
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.wrapper import (
    AllocateLine,
    CommentLine,
    ExternKernelAllocLine,
    ExternKernelOutLine,
    FreeIfNotReusedLine,
    FreeLine,
    IndexPutFallbackLine,
    KernelCallLine,
    MultiOutputLine,
    NullLine,
    PythonWrapperCodegen,
    ReinterpretLine,
    ReuseLine,
    ScatterFallbackLine,
    UnbackedSymbolDefsLine,
)
from torch._inductor.memory import prepare_planning_info
from torch._inductor.scheduler import GroupedSchedulerNode, Scheduler
from torch._inductor.utils import LineContext, Placeholder
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from fulgurite.backends.csx.compile.inductor.generate import AT
from fulgurite.backends.csx.compile.inductor.translation_unit import throw_after_loops
from fulgurite.backends.csx.compile.programs.steps import (
    Alias,
    Alloc,
    Extern,
    Free,
    Generated,
    Item,
    Kernel,
    Name,
    Operand,
    Program,
    Step,
    UnknownProgram,
    View,
)
from fulgurite.backends.csx.graph.op_schema import is_view
from fulgurite.backends.csx.graph.passes.realize import realize
from fulgurite.backends.csx.graph.passes.region_borders import MARK
from fulgurite.backends.patches import Patch, patches_of
from fulgurite.backends.torch_versions import CHECKED

_DRAW = "torch.ops.fulgurite."
_PRODUCTS = "extern_kernels"  # torch.mm and the like, under the same names


_IN_PLACE = (
    ir.InplaceBernoulliFallback,
    ir.InplaceCopyFallback,
    ir.MutatingFirstArgExternKernel,
)


class Wrapper(PythonWrapperCodegen):
    """Has the compiler's lines become steps.

    Attributes:
        sources: kernels in C++, by name.
        noted: what each kernel computes: a call of it without arguments.
        written: gets what the compiler makes of each graph.
    """

    supports_caching = False  # the folders are our cache
    written: ClassVar[list[Generated]]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources: dict[str, str] = {}
        self.noted: dict[str, list[Kernel]] = {}
        self._views: dict[str, View] = {}  # by the compiler's text for them

    @classmethod
    def create(cls, is_subgraph: bool, subgraph_name: str | None, *parent: Any) -> Wrapper:
        """A wrapper for a graph; the compiler asks for one."""
        if is_subgraph:
            raise UnknownProgram(f"a graph inside it, {subgraph_name}")
        return cls()

    def writeline(self, line: Any) -> None:
        """A line; where the compiler has a text alone for an operation in place, a typed one."""
        is_text = isinstance(line, str) and not line.startswith(self.comment)
        current = V.graph.scheduler.current_node if is_text else None
        if current is not None and type(current.node) in _IN_PLACE:
            # by its text alone nobody would know what it reads and writes
            line = ExternKernelAllocLine(self, current.node)  # type: ignore[arg-type]
        super().writeline(line)  # type: ignore[no-untyped-call]

    def codegen_reinterpret_view(
        self,
        data: Any,
        size: Any,
        stride: Any,
        offset: Any,
        writeline: Any,
        dtype: torch.dtype | None = None,
    ) -> str:
        """The compiler's text for a view, of which we remember what it stands for."""
        write: Any = super().codegen_reinterpret_view
        # without the dtype first: what differs says whether layout, dtype or both are another
        plain: str = write(data, size, stride, offset, writeline)
        text: str = write(data, size, stride, offset, writeline, dtype)
        name = Name(data.get_name())
        if text != name:
            layout = None if plain == name else (_numbers(size), _numbers(stride), int(offset))
            self._views[text] = View(name, layout, None if text == plain else dtype)
        return text

    def _generate(self, is_inference: bool) -> tuple[Any, None]:
        """All lines as steps: the compiler has nothing else to write."""
        self.run_wrapper_ir_passes(is_inference)
        steps = [step for line in self.lines for step in self._steps(line)]
        inputs = tuple(map(Name, self.get_graph_inputs()))
        outputs = tuple(map(self._value, self.get_graph_outputs()))
        program = Program(inputs, tuple(steps), outputs)
        self.written.append(Generated(program, self.sources, dict(V.graph.constants)))
        return _Nothing(), None

    def _steps(self, line: Any) -> Iterator[Step]:
        """The steps of a line; none of a comment."""
        match line:
            case NullLine() | CommentLine() | LineContext():
                return
            case str() if not line or line.startswith(self.comment):
                return
            case UnbackedSymbolDefsLine() if not line.unbacked_bindings:
                return  # all sizes are known
            case AllocateLine(node=node, comm_buffer=False):
                yield self._allocation(node)
            case FreeIfNotReusedLine(node=node):
                if not line.is_reused:
                    yield Free(Name(node.get_name()))
            case FreeLine(node=node):
                yield Free(Name(node.get_name()))
            case ReuseLine():
                yield from self._reuse(line)
            case ReinterpretLine(reused_as=new, layout=layout):
                yield Alias(Name(new.get_name()), self._value(vars(layout)["view"]))
            case MultiOutputLine():
                name, of = Name(line.result_name), Name(line.arg_name)
                path = tuple(key for _, key in line.indices)
                yield Item(name, of, path) if path else Alias(name, of)
            case KernelCallLine(triton=False):
                # equal kernels have one name, and a note for each place that they compute for
                [call, *rest] = self.noted[line.kernel_name]
                self.noted[line.kernel_name] = rest or [call]
                yield replace(call, args=tuple(map(self._operand, line.call_args)))
            case IndexPutFallbackLine():
                yield from self._index_put(line)
            case ScatterFallbackLine():
                yield from self._scatter(line)
            case ExternKernelOutLine():
                yield self._out(line.node)
            case ExternKernelAllocLine():
                yield from self._call(line.node)
            case _:
                raise UnknownProgram(line if isinstance(line, str) else type(line).__name__)

    def _allocation(self, buffer: Any) -> Alloc:
        shape, strides = _numbers(buffer.get_size()), _numbers(buffer.get_stride())
        if _numbers(V.graph.get_allocation_size(buffer)) != shape or buffer.get_is_pinned():
            raise UnknownProgram(f"memory that is larger than {buffer}, or pinned")
        return Alloc(Name(buffer.get_name()), shape, strides, buffer.get_dtype())

    def _reuse(self, line: Any) -> Iterator[Step]:
        """Memory of one value for the next: another name, and the first one ends."""
        old, new = line.node, line.reused_as
        layout = _numbers(new.get_size()), _numbers(new.get_stride())
        name = Name(old.get_name())
        if layout == (_numbers(old.get_size()), _numbers(old.get_stride())):
            yield Alias(Name(new.get_name()), name)
        else:
            yield Alias(Name(new.get_name()), View(name, (*layout, 0)))
        # torch's own condition: what is returned keeps its name
        if line.delete_old and name not in V.graph.get_output_names():
            yield Free(name)

    def _out(self, node: Any) -> Extern:
        """A call that writes into memory that is there."""
        out = self._value(node.output_view or node)
        args = [*map(self._value, node.inputs), *map(self._value, node.constant_args)]
        kwargs = {k: self._value(v) for k, v in node.kwargs.items()} | {"out": out}
        return self._extern(node, args, kwargs)

    def _call(self, node: Any) -> Iterator[Step]:
        """A call that returns new memory, or writes into its operands."""
        if isinstance(node, ir.FallbackKernel):
            inputs = [self._value(one) for one in node.inputs]
            args, kwargs = node.unflatten_args(inputs, node.constant_args)
        else:
            args, kwargs = [*map(self._value, node.inputs), *node.constant_args], {}
        kwargs = {k: self._value(v) for k, v in {**node.kwargs, **kwargs}.items()}
        result = None if isinstance(node.layout, ir.NoneLayout) else Name(node.get_name())
        call = self._extern(node, map(self._value, args), kwargs, result)
        yield from _drawn_in_place(call) if call.function.startswith(_DRAW) else [call]

    def _index_put(self, line: Any) -> Iterator[Step]:
        node = line.node
        x, values = map(self._value, node.inputs[:2])
        indices = [None if one is None else self._value(one) for one in line.indices]
        yield self._extern(node, [x, indices, values, *node.constant_args], {})

    def _scatter(self, line: Any) -> Iterator[Step]:
        node = line.node
        x, index, *source = map(self._value, node.inputs)
        source = source or [self._value(node.constant_args[1])]
        kwargs = {k: self._value(v) for k, v in node.kwargs.items()}
        if not node.python_kernel_name.startswith("aten.scatter_reduce"):
            # aten.scatter_ takes this keyword alone, and only where it has a value
            kwargs = {"reduce": kwargs["reduce"]} if kwargs["reduce"] else {}
        yield self._extern(node, [x, node.constant_args[0], index, *source], kwargs)

    def _extern(
        self, node: Any, args: Any, kwargs: dict[str, Any], result: Name | None = None
    ) -> Extern:
        last = _last(node)
        at = None if last is None else last.meta.get("custom", {}).get(AT)
        name = getattr(node, "op_overload", None) or getattr(node, "python_kernel_name", None)
        return Extern(
            function=_function(node.get_kernel_name()),
            args=tuple(args),
            kwargs=tuple(kwargs.items()),
            result=result,
            kernel=str(name or type(node).__name__),
            at=() if at is None else (at,),
            region=_region([node]),
        )

    def _value(self, value: Any) -> Any:
        """A value of the compiler's as an operand or a constant."""
        if isinstance(value, (Name, View)) or value is None or isinstance(value, (str, bool)):
            return value
        if isinstance(value, ir.NoneAsConstantBuffer):
            return None
        if isinstance(value, ir.ShapeAsConstantBuffer):
            return self._value(value.expr)
        if isinstance(value, ir.IRNode):
            return self._operand(value.codegen_reference())
        if isinstance(value, (list, tuple, torch.Size)):
            values = [*map(self._value, value)]
            return values if isinstance(value, list) else tuple(values)
        if getattr(value, "is_Integer", False):  # of sympy
            return int(value)
        if getattr(value, "is_Float", False):
            return float(value)
        return value

    def _operand(self, text: str) -> Operand:
        """What a text of the compiler's stands for."""
        if text in self._views:
            return self._views[text]
        if not text.isidentifier():
            raise UnknownProgram(f"an operand {text}")
        return Name(text)


class _Nothing(FileBackedGraphModule):
    """What the compiler gets in place of its output: nothing was written, so it shows no file."""

    def __init__(self) -> None:
        super().__init__(fx.GraphModule({}, fx.Graph()), lambda *args: None)

    def __post_init__(self) -> None:
        """No file of it."""

    @property
    def __file__(self) -> str:
        return os.devnull


class Scheduling(CppScheduling):
    """Notes which kernel computes what, and gives fused regions kernels of their own."""

    def define_kernel(self, src_code: str, nodes: Sequence[Any], kernel_args: Any = None) -> str:
        """A name for a kernel, whose source is kept."""
        wrapper: Any = V.graph.wrapper_code
        name: str = wrapper.src_to_kernel.setdefault(
            src_code, f"cpp_{wrapper.next_kernel_suffix()}"
        )
        source = src_code.replace(str(Placeholder.KERNEL_NAME), "kernel")
        source = source.replace(str(Placeholder.DESCRIPTIVE_NAME), name)
        # ``#pragma CMT`` begins torch's comments; it mends them where it writes a kernel out
        wrapper.sources[name] = throw_after_loops(source.replace("#pragma CMT", "//"))
        at = {i for node in nodes for one in node.get_nodes() for i in _computed(one)}
        template = str(nodes[0].node.template.name) if nodes[0].is_template() else ""
        region = "".join(sorted({region_of(node) for node in nodes}))
        call = Kernel(kernel=name, args=(), at=tuple(sorted(at)), region=region, template=template)
        wrapper.noted.setdefault(name, []).append(call)
        return name

    def codegen_node(self, node: Any) -> None:
        """The loops of a node; those of another region begin a function of their own."""
        region = region_of(node)
        if self.__dict__.get(MARK, "") != region:
            self.flush()  # type: ignore[no-untyped-call]
        self.__dict__[MARK] = region
        super().codegen_node(node)


@contextlib.contextmanager
def registered(device: str) -> Iterator[list[Generated]]:
    """Have the compiler use ours for a device; the list gets what it makes of each graph."""
    init_backend_registration()
    before, written = device_codegens[device], list[Generated]()
    # a class of its own: the compiler makes the wrapper, and is given its class
    ours = type("Ours", (Wrapper,), {"written": written})
    register_backend_for_device(device, Scheduling, ours)
    try:
        yield written
    finally:
        device_codegens[device] = before


def _drawn_in_place(call: Extern) -> Iterator[Step]:
    """Allocate what a draw returns, and let aten's operation draw into it.

    Instead of a call of the operation of ``passes/draws.py``, which is Python's and does the same.
    """
    assert call.result is not None
    shape, strides, dtype, *numbers = call.args
    yield Alloc(call.result, tuple(shape), tuple(strides), dtype)
    name, _, overload = call.function.removeprefix(_DRAW).partition(".")
    yield replace(
        call,
        function=f"torch.ops.aten.{name}_.{overload}",
        args=(call.result, *numbers),
        result=None,
    )


def _function(name: str) -> str:
    """Where a function is that the compiler's Python would call by a name."""
    root, _, rest = name.partition(".")
    if root == _PRODUCTS:
        compiler = "torch._inductor.select_algorithm"
        # the same function under torch's own name: to import the compiler for it takes 1.2 s of CPU
        # whenever the program is loaded
        own = getattr(importlib.import_module(compiler).extern_kernels, rest)
        is_torchs = own is getattr(torch, rest, None)
        return f"torch.{rest}" if is_torchs else f"{compiler}.{name}"
    if root not in ("torch", "aten"):
        raise UnknownProgram(f"a call of {name}")
    return f"torch.ops.{name}" if root == "aten" else name


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(int(one) for one in values)


def _computed(node: Any) -> set[int]:
    """The positions of the operations that a scheduler's node computes.

    The compiler's own list of them, ``origins``, has what its operands are made of too, also where
    these are tensors that it reads. So they are followed from the last one back to those.
    """
    last = None if node.node is None else _last(node.node)
    if last is None:
        return set()
    origins = set(node.node.get_origins())
    known = node.scheduler.name_to_buf
    buffers = [known[one.name].node for one in node.read_writes.reads if one.name in known]
    read = {one for one in map(_last, buffers) if one is not None}
    found, waiting = {last}, [last]
    while waiting:
        for one in map(_behind, waiting.pop().all_input_nodes):
            if one in origins and one not in read and one not in found:
                found.add(one)
                waiting.append(one)
    positions = (one.meta.get("custom", {}).get(AT) for one in found)
    return {i for i in positions if i is not None}


def _last(buffer: Any) -> fx.Node | None:
    """The operation whose result a buffer is."""
    node = buffer.get_origin_node()
    if node is None:
        origins: Any = getattr(buffer, "get_origins", tuple)()  # none of what is written in place
        marked = [one for one in origins if AT in one.meta.get("custom", {})]
        node = max(marked, key=lambda one: one.meta["custom"][AT], default=None)
    return None if node is None else _behind(node)


def _behind(node: fx.Node) -> fx.Node:
    """The operation that computed what a view, or a barrier, looks at."""
    while node.all_input_nodes and (is_view(node.target) or node.target is realize()):
        node = node.all_input_nodes[0]
    return node


def grouped(nodes: list[Any]) -> list[Any]:
    """Group the scheduler's nodes of each region: nothing is fused with them, or comes between."""
    groups: dict[str, list[Any]] = {}
    for node in nodes:
        groups.setdefault(region_of(node), []).append(node)
    # a region of one node too: combo kernels and horizontal fusion made one kernel of two
    ends = {id(group[-1]): group for name, group in groups.items() if name}
    inside = {id(node) for group in ends.values() for node in group}
    found: list[Any] = []
    for node in nodes:
        if id(node) in ends:
            found.append(_Group.create(ends[id(node)]))
        elif id(node) not in inside:
            found.append(node)
    # a group stands at its last node's place: what reads its first may stand before it
    return found if not ends else found[0].scheduler.topological_sort_schedule(found)


class _Group(GroupedSchedulerNode):
    """A group under a name that no node has: torch forgets a name with its group."""

    def get_name(self) -> str:  # type: ignore[override]
        """The group's name."""
        return f"group_{super().get_name()}"


def plans_of_groups() -> Iterator[Patch]:
    """A patch that plans memory for the nodes that groups are taken apart into."""
    process = Scheduler.process_grouped_nodes

    def process_grouped_nodes(scheduler: Any) -> None:
        before = list(scheduler.nodes)
        process(scheduler)
        if scheduler.nodes != before:
            given = OrderedSet(V.graph.graph_inputs)
            names = scheduler.name_to_buf, scheduler.name_to_fused_node
            prepare_planning_info(
                scheduler.nodes, *names, given, OrderedSet(V.graph.get_output_names())
            )

    planning = {"process_grouped_nodes": process_grouped_nodes}
    why = "plans of memory name groups that are no more"
    return patches_of(Scheduler, planning, why=why, checked=CHECKED)


def region_of(node: Any) -> str:
    """The region of a scheduler's node; empty if it is in none."""
    return _region([one.node for one in node.get_nodes() if one.node is not None])


def _region(values: Sequence[Any]) -> str:
    """The region that the operations behind values are marked with."""
    origins: list[fx.Node] = [origin for one in values for origin in one.get_origins()]
    marks = [origin.meta.get("custom", {}).get(MARK) for origin in origins]
    return str(next((one for one in marks if one is not None), ""))
