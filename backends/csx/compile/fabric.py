"""A fabric: what runs programs (not Lightning Fabric). Other rooms know this interface alone.

A new kind of machine is one class with these methods, in a folder of its own (``host`` is the
first), one line in ``fabrics``, and its name among those built in ``config.CSXBackend.fabric``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fulgurite.backends.csx.compile.programs.kernels import Kernels
from fulgurite.backends.csx.compile.threads import Threads
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.votes import Votes

Call = Callable[[list[Tensor]], Sequence[Tensor]]
Shown = Callable[[str], AbstractContextManager[None]]


@dataclass(slots=True, kw_only=True)
class Loaded:
    """A graph that can be run: ``call`` takes its inputs in order and returns its outputs.

    ``built`` is whether it was compiled now, rather than found compiled in the cache; ``how`` says
    it in words; ``graph`` is what a fabric asks when a run fails. A fabric may change ``call``,
    ``compiled`` and ``how`` when the graph has run once, and later where ``compiling`` is set:
    it is compiled in the background. ``when_settled`` is called when that has ended, either way.
    ``threads`` says how many of the host's compute it. ``kernels`` says what runs it, as
    long as ``how`` says so; ``one_by_one`` what would, operation by operation. ``check_again``,
    where it is set, lets the next run be compared with what the operations give one by one.
    ``progress`` says how far it is while it is ``compiling``; empty: it has not begun. ``cpu_s``
    is how long processors compiled it in the background, ``by_operations_s`` how long a run takes
    operation by operation at least, where that is known of compiled code;
    ``key`` is the same for the same code in another process.
    """

    call: Call
    compiled: bool
    built: bool
    seconds: float
    how: str
    graph: Graph | None = None
    compiling: bool = False
    when_settled: Callable[[], None] | None = None
    threads: Threads = field(default_factory=Threads)
    kernels: Callable[[], Kernels] = Kernels
    one_by_one: Callable[[], Kernels] = Kernels
    check_again: Callable[[], None] | None = None
    progress: Callable[[], str] = str
    cpu_s: float = 0.0
    by_operations_s: float | None = None
    key: str = ""

    @property
    def runs(self) -> Graph | None:
        """The graph whose operations ``kernels`` counts: not compiled, it runs as traced."""
        graph = self.graph
        return graph if graph is None or self.compiled else graph.runs

    @property
    def why_not(self) -> str | None:
        """Why it is not compiled, in words, or "" as long as it may be; None: it is."""
        if self.compiled:
            return None
        return "" if self.compiling else self.how.partition("(")[2].removesuffix(")")

    def run_by_operations(self, call: Call, how: str) -> None:
        """Let ``call`` run it operation by operation from now on; ``how`` says so, and why."""
        self.call, self.how, self.kernels = call, how, self.one_by_one
        self.compiled = self.compiling = False
        self.check_again = None

    def settled(self) -> None:
        """Tell whoever wants to know, once, what runs the graph from now on."""
        if self.when_settled is not None:
            self.when_settled()
            self.when_settled = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """When something is compiled in the background.

    Args:
        urgent: whether it runs more than now: it is compiled before others, which wait for the
            first one that does.
        worth: whether compiling it may begin, if this share of a run (0 to 1) stays as it is,
            since compiled code calls the same library; asked again and again until it does.
        together: what the processes that run it at the same time tell each other with it.
        never: why it is not compiled at all; empty: it is.
        what: whose program it is, for a list of those that are compiled.
    """

    urgent: bool = True
    worth: Callable[[float], bool] = lambda fixed: True
    together: Votes | None = None
    never: str = ""
    what: str = ""


NOW = Wanted()


class Timer(Protocol):
    """Whoever wants to know how long programs run."""

    def begin(self) -> None:
        """A program is about to run."""

    def end(self) -> None:
        """It has run, or has failed."""


class Fabric(Protocol):
    """What runs programs.

    Args:
        backend: its options.

    Attributes:
        timer: told of every run, where there is one.
        torn: a run failed, or was interrupted, that may have written a part of the state.
    """

    timer: Timer | None
    torn: bool

    def __init__(self, backend: CSXBackend) -> None: ...

    @property
    def waits(self) -> bool:
        """Whether programs are compiled before they run, and not in the background."""

    @staticmethod
    def devices() -> tuple[torch.device, ...]:
        """Where this process's programs keep their tensors; known before a fabric is made."""

    def describe(self, loads: Sequence[Loaded]) -> str:
        """What runs these graphs, in words, for every line that says what ran where.

        Args:
            loads: the graphs; none where they are only checked.
        """

    def load(self, graph: Graph, shown: Shown, wanted: Wanted = NOW) -> Loaded:
        """Make a graph runnable.

        Args:
            graph: the graph.
            shown: entered with what is done ("compiling") where that may take long.
            wanted: when it is compiled, where that is done in the background.

        Raises:
            RuntimeError: ``compile_only`` on a machine that cannot compile.
        """

    def run(self, loaded: Loaded, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Run a graph once: its state inputs are updated in place."""
