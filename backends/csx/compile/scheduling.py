"""What torch's compiler decides of kernels: noted, and for fused regions decided here.

The compiler's scheduler fuses loops and orders kernels; on the CPU, loops that follow each other
become one function of C++. So a fused region is one kernel where its loops follow each other and
nothing else comes into that function. Checked against torch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fulgurite.backends.csx.graph.op_schema import is_view
from fulgurite.backends.csx.graph.passes.realize import realize
from fulgurite.backends.csx.graph.passes.regions import MARK
from fulgurite.backends.patches import Patch, patches_of
from fulgurite.backends.torch_versions import CHECKED

AT = "at"
"""In a node's ``meta["custom"]``: its position among the operations of its part."""


@dataclass(frozen=True, slots=True)
class PartCall:
    """A call of a kernel in a part, as the compiler writes it.

    Args:
        kernel: its name.
        generated: whether it is a function of C++ in the part, rather than one of torch's.
        at: what it computes, as positions among the part's operations.
        region: the fused region, as text.
        template: it was chosen among others, and this is the template.
    """

    kernel: str
    generated: bool
    at: tuple[int, ...]
    region: str = ""
    template: str = ""


@dataclass(slots=True)
class Noted:
    """The calls that the compiler writes, in order, while ``patches`` are in place."""

    calls: list[PartCall] = field(default_factory=list)

    def patches(self) -> Iterator[Patch]:
        """Patches that note each call, and give regions kernels of their own."""
        from torch._inductor.codegen.cpp import CppScheduling
        from torch._inductor.ir import MultiOutput
        from torch._inductor.scheduler import Scheduler

        define: Any = CppScheduling.define_kernel
        extern, node_of = Scheduler.codegen_extern_call, CppScheduling.codegen_node

        def define_kernel(scheduling: Any, source: str, nodes: Any, *rest: Any) -> str:
            kernel: str = define(scheduling, source, nodes, *rest)
            self._note(kernel, nodes, generated=True)
            return kernel

        def codegen_extern_call(scheduler: Any, node: Any) -> None:
            if not isinstance(node.node, MultiOutput):  # which only picks a result
                self._note(_name_of(node.node), [node], generated=False)
            extern(scheduler, node)

        def codegen_node(scheduling: Any, node: Any) -> None:
            region = _region(node)
            if scheduling.__dict__.get(MARK, "") != region:
                scheduling.flush()  # what follows is a function of its own
            scheduling.__dict__[MARK] = region
            node_of(scheduling, node)

        checked = CHECKED
        why = "the compiler does not say which kernel computes what"
        noting: dict[str, Any] = {"define_kernel": define_kernel}
        yield from patches_of(CppScheduling, noting, why=why, checked=checked)
        noting = {"codegen_extern_call": codegen_extern_call}
        yield from patches_of(Scheduler, noting, why=why, checked=checked)
        why = "other loops would come into the kernel of a fused region"
        separating = {"codegen_node": codegen_node}
        yield from patches_of(CppScheduling, separating, why=why, checked=checked)
        planning = {"process_grouped_nodes": _plan_again(Scheduler.process_grouped_nodes)}
        why = "plans of memory name groups that are no more"
        yield from patches_of(Scheduler, planning, why=why, checked=checked)

    def _note(self, kernel: str, nodes: Sequence[Any], generated: bool) -> None:
        at = {i for node in nodes for one in node.get_nodes() for i in _computed(one, generated)}
        template = ""
        if generated and nodes[0].is_template():
            template = str(nodes[0].node.template.name)
        region = "".join(sorted({_region(node) for node in nodes}))
        self.calls.append(PartCall(kernel, generated, tuple(sorted(at)), region, template))


def _computed(node: Any, generated: bool) -> set[int]:
    """The positions of the operations that a scheduler's node computes.

    The compiler's own list of them, ``origins``, has what its operands are made of too, also where
    these are tensors that it reads. So they are followed from the last one back to those.
    """
    if node.node is None:
        return set()
    last = _last(node.node)
    if last is None:
        return set()
    origins = set(node.node.get_origins())
    known = node.scheduler.name_to_buf
    buffers = [known[one.name].node for one in node.read_writes.reads if one.name in known]
    read = {one for one in map(_last, buffers) if one is not None}
    found, waiting = {last}, [last]
    while waiting and generated:
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
        groups.setdefault(_region(node), []).append(node)
    ends = {id(group[-1]): group for name, group in groups.items() if name}
    inside = {id(node) for group in ends.values() for node in group}
    made: list[Any] = []
    for node in nodes:
        if id(node) in ends:
            made.append(_group().create(ends[id(node)]))
        elif id(node) not in inside:
            made.append(node)
    return made if not ends else made[0].scheduler.topological_sort_schedule(made)


@functools.cache
def _group() -> Any:
    """A class of groups under names that no node has: torch forgets a name with its group."""
    from torch._inductor.scheduler import GroupedSchedulerNode

    base: Any = GroupedSchedulerNode
    name = {"get_name": lambda group: f"group_{base.get_name(group)}"}
    return type("Group", (base,), name)


def _plan_again(process: Callable[[Any], None]) -> Callable[[Any], None]:
    """Plan memory for the nodes that groups are taken apart into."""

    def process_grouped_nodes(scheduler: Any) -> None:
        from torch._inductor.memory import prepare_planning_info
        from torch._inductor.virtualized import V
        from torch.utils._ordered_set import OrderedSet

        before = list(scheduler.nodes)
        process(scheduler)
        if scheduler.nodes != before:
            given = OrderedSet(V.graph.graph_inputs)
            names = scheduler.name_to_buf, scheduler.name_to_fused_node
            prepare_planning_info(
                scheduler.nodes, *names, given, OrderedSet(V.graph.get_output_names())
            )

    return process_grouped_nodes


def _region(node: Any) -> str:
    """The region of a scheduler's node; empty if it is in none."""
    found: list[str] = _marks(node, MARK)
    return found[0] if found else ""


def _marks(node: Any, mark: str) -> list[Any]:
    """What the operations that a scheduler's node computes are marked with."""
    inner = [one.node for one in node.get_nodes() if one.node is not None]
    origins: list[fx.Node] = [origin for one in inner for origin in one.get_origins()]
    marks = [origin.meta.get("custom", {}).get(mark) for origin in origins]
    return [one for one in marks if one is not None]


def _name_of(node: Any) -> str:
    """The name of one of torch's kernels: ``aten.mm.default``, or as the compiler calls it."""
    operation = getattr(node, "op_overload", None)
    return str(operation or getattr(node, "python_kernel_name", None) or type(node).__name__)
