"""The program of a stage: what is built once and then only fed.

A program is plain data. It has one entry point ("step"), or two when gradients are accumulated over
batches: "accumulate" for the first batches of a window, "step" for its last. Both work on one
state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fulgurite.backends.csx.capture import CapturedStep
from fulgurite.backends.csx.graph.graph import Graph, Kind, Placement
from fulgurite.backends.csx.graph.products import Product
from fulgurite.backends.csx.objects import Leaf
from fulgurite.backends.csx.program.speed import Gain, Payback
from fulgurite.backends.csx.state import Layout

ACCUMULATE, STEP = "accumulate", "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One resident state of a program."""

    name: str
    layout: Layout
    placement: Placement
    written: bool

    def __str__(self) -> str:
        access = "updated" if self.written else "read"
        return f"{self.name}: {self.layout}, {self.placement.value}, {access}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPoint:
    """One way to call a program."""

    name: str
    graph: Graph
    state: tuple[str, ...]  # names, in the order of its inputs
    outputs: int
    products: tuple[Product, ...] = ()  # of matrices, as they were traced

    @property
    def operations(self) -> int:
        """How many operations it has, as it was traced."""
        return sum(1 for _ in self.graph.runs.operations())


@dataclass(slots=True, kw_only=True)
class Cost:
    """What it took to build a program; ``began`` is when, by ``time.perf_counter``.

    Where it was compiled in the background: ``first_compiled_step`` is the number of the first step
    of the stage, from 1, that compiled code did; 0 until then. ``gain`` is known some steps after
    it, where there were enough before. ``capture_cpu_s`` are seconds of the processor.
    ``payback`` says whether compiling may begin there.
    """

    began: float
    captured_s: float
    capture_cpu_s: float
    compiled_s: float
    loaded_s: float  # from the cache
    waited_s: float  # by the step that needed it
    first_compiled_step: int = 0
    gain: Gain | None = None
    payback: Payback | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A stage's program.

    ``str(program)`` lists inputs, state and entry points; ``program.text()`` adds every operation
    with the user's line that it comes from.
    """

    stage: str
    inputs: tuple[Leaf, ...]
    numbers: tuple[str, ...]
    state: tuple[State, ...]
    entries: tuple[EntryPoint, ...]
    cost: Cost | None = None  # once it is built
    reason: str = ""  # why the stage's other programs did not fit

    @property
    def operations(self) -> int:
        """How many operations all entry points have together."""
        return sum(entry.operations for entry in self.entries)

    def __str__(self) -> str:
        lines = [f"{self.stage} program, {self.operations} operations"]
        lines += ["inputs:"] + [f"  {leaf}" for leaf in self.inputs]
        lines += ["numbers:"] * bool(self.numbers) + [f"  {name}" for name in self.numbers]
        lines += ["state:"] + [f"  {state}" for state in self.state]
        for entry in self.entries:
            lines.append(
                f"entry point {entry.name}: {entry.operations} operations,"
                f" {len(entry.state)} states, {entry.outputs} outputs"
            )
        return "\n".join(lines)

    def text(self) -> str:
        """Everything there is to know about the program."""
        parts = [str(self)]
        for entry in self.entries:
            parts.append(f"\n{entry.name}:")
            for node in entry.graph.operations():
                where = str(node.meta.get("stack_trace", "")).partition("\n")[0]
                parts.append(f"  {node.format_node()}    # {where}")
        return "\n".join(parts)


def make_program(stage: str, captured: Mapping[str, CapturedStep]) -> Program:
    """Describe the captured entry points of a stage as one program."""
    states: dict[str, State] = {}
    entries = []
    for name, one in captured.items():
        written, used = one.graph.written(), list[str]()
        for i, item in enumerate(one.graph.inputs):
            if item.kind in (Kind.STATE, Kind.GRADIENT):
                used.append(item.name)
                before = states.get(item.name)
                states[item.name] = State(
                    name=item.name,
                    layout=Layout.of(item.example),
                    placement=item.placement,
                    # both entry points work on one state, which one of them may only read
                    written=i in written or (before is not None and before.written),
                )
        outputs = len(one.graph.runs.module.graph.output_node().args[0])  # type: ignore[arg-type]
        found = EntryPoint(name=name, graph=one.graph, state=tuple(used), outputs=outputs)
        entries.append(replace(found, products=one.products))
    first = next(iter(captured.values()))
    return Program(
        stage=stage,
        inputs=first.sources.batch.leaves,
        numbers=tuple(map(str, first.sources.numbers)),
        state=tuple(states.values()),
        entries=tuple(entries),
    )
