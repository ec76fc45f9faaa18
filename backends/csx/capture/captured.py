"""What a trace of one entry point gives: its graph, and all that running it needs to know."""

from __future__ import annotations

from dataclasses import dataclass

from fulgurite.backends.csx.capture.batch_spec import BatchSpec
from fulgurite.backends.csx.capture.logs import Accumulator
from fulgurite.backends.csx.capture.outputs import Outputs
from fulgurite.backends.csx.capture.recording import Recording
from fulgurite.backends.csx.capture.trainer_state import Answers
from fulgurite.backends.csx.contract.attributes import Access
from fulgurite.backends.csx.contract.constants import Source
from fulgurite.backends.csx.graph.graph import Graph, Kind
from fulgurite.backends.csx.hyperparams.slots import NumberSlot
from fulgurite.backends.csx.hyperparams.traced_float import Guard
from fulgurite.backends.csx.state.gradients import Handover
from fulgurite.backends.csx.state.places import StateTensor
from fulgurite.backends.csx.state.storage import StateInput
from fulgurite.backends.schedules import ProgramScheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One captured item point."""

    graph: Graph
    state: tuple[StateInput, ...]  # state, by ``Input.index``
    numbers: tuple[NumberSlot, ...]
    guards: tuple[Guard, ...]
    used_numbers: frozenset[int]
    constants: tuple[Source | Accumulator, ...]
    batch: BatchSpec
    outputs: Outputs
    reads: tuple[Access, ...]  # scalars of modules that the step's Python read
    changes: tuple[Access, ...]  # and those that it changed
    recording: Recording | None  # for later traces to be compared with
    gradients: Handover
    answers: Answers  # what the step asked of the trainer's state
    counted: tuple[tuple[ProgramScheduler, int], ...]  # schedulers, and how often it steps each
    trained: frozenset[int]  # the identity of the optimizers' parameters

    def state_tensors(self) -> list[StateTensor]:
        """The tensors of its state."""
        used = [item.index for item in self.graph.inputs if item.kind is Kind.STATE]
        return [held for i in used for held in self.state[i].tensors]
