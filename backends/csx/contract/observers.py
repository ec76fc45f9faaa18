"""All that looks at a step's code while it is traced, in the order in which it is put around it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

from torch import Tensor, fx, nn

from fulgurite.backends.csx.contract.attributes import Attributes, ModuleChanges
from fulgurite.backends.csx.contract.constants import Constants
from fulgurite.backends.csx.contract.dtype_rules import OneNarrowType
from fulgurite.backends.csx.contract.frozen_values import FrozenBuffers
from fulgurite.backends.csx.contract.function_mode import Contract
from fulgurite.backends.csx.contract.leaks import Names, fill_constants
from fulgurite.backends.csx.contract.proxies import replace_proxies
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, user_line
from fulgurite.backends.csx.graph.dtypes import in_double
from fulgurite.backends.csx.graph.recorder import Nodes
from fulgurite.backends.csx.state import Place, StateInput
from fulgurite.backends.patches import applied


class Observers:
    """What looks at the code of one traced step.

    Args:
        module: what the step works on.
        state: the program's state, whose tensors have names.
        boundary: the code of the frame where the trace begins.
        line_now: the user's line to blame while no code of theirs runs.
        fp16_type: the run's 16-bit type by name, where it has one.
        move: ``tensor.data = value``.
        look: is told whose ``.grad`` is read.

    Attributes:
        names: what tensors are called.
        constants: tensors that keep their value while the step is traced.
        fixed: buffers that Python reads.
        mode: stands in front of every torch call.
        attributes: what the step reads and writes in attributes of modules.
        changes: which line put something into a module.
    """

    def __init__(
        self,
        module: nn.Module,
        state: Iterable[StateInput],
        boundary: CodeType,
        *,
        line_now: Callable[[], UserLine | None],
        fp16_type: str | None,
        move: Callable[[Tensor, Tensor], None],
        look: Callable[[Tensor], None],
    ) -> None:
        self._module, self._boundary, self._line_now = module, boundary, line_now
        self.names = Names(state)
        self.constants = Constants(self.line, lambda *call: self.mode.run_below(*call))
        self.frozen_buffers = FrozenBuffers(self.line)
        self.mode = Contract(
            self.line,
            self.names,
            self.constants.value_of,
            move,
            look,
            OneNarrowType(fp16_type),
            self.frozen_buffers,
            in_double(module),
        )
        self.attributes, self.changes = Attributes(module), ModuleChanges(module)

    def around_trace(self) -> Iterator[AbstractContextManager[object]]:
        """What is there while the graph is made, the outermost first."""
        yield self.mode
        yield applied(self.mode.in_backward())

    def around_step(self) -> Iterator[AbstractContextManager[object]]:
        """What is there while the step's own code runs, the outermost first."""
        yield self.changes.watching(self._boundary)
        yield self.attributes.watching(self._boundary)
        yield self.constants

    def begin(self, tracker: Nodes, batch: Iterable[tuple[Tensor, str]]) -> None:
        """The step begins, with these tensors of its batch and their names.

        ``tracker`` tells which node of the graph each tensor is.
        """
        self.names.tracker = tracker
        given = {}
        for tensor, name in batch:
            self.constants.created.add(tensor)
            given[id(tensor)] = name
        self.names.give(given)

    def find_buffers(self, root: str, values: Mapping[int, Tensor]) -> None:
        """Find buffers, once fakes are in their places; ``values`` are what they stand for."""
        self.frozen_buffers.find(self._module, root, self.names.tracker, values)

    def settle(self) -> None:
        """The graph is made: put values where the user still holds proxies."""
        replace_proxies(self._line_now())

    def release(self) -> tuple[bool, list[weakref.ref[Tensor]]]:
        """The trace is over: whoever still holds one of its tensors is the user.

        Returns whether a table that the step caches was given its values, and the tensors that are
        errors from now on when they are used.
        """
        created = self.constants.created
        # first: a cached table of constants is no leak, it has a value
        filled = fill_constants(created.living(), self.constants.value_of)
        return filled, created.invalidate_living(self.names.origin, self.is_constant)

    def node_of(self, tensor: Tensor) -> fx.Node | None:
        """The node of the graph that a tensor is."""
        return self.names.tracker.get(tensor)

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a traced tensor follows from constants alone."""
        return self.constants.value_of(tensor) is not None

    def line(self) -> UserLine | None:
        """The user's line that runs now, or where they wrote the hook that does."""
        return user_line(self._boundary) or self._line_now()

    def line_of_change(self, place: Place, value: Any) -> UserLine | None:
        """Where the user put a value into a place, or else where they made it."""
        made = self.names.origin(value)[1] if isinstance(value, Tensor) else None
        return self.changes.line_of(place.container, place.key) or made or self.line()
