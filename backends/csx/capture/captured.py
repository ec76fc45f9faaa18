"""What a trace of one entry point gives: a graph, and all that is needed to run it."""

from __future__ import annotations

from dataclasses import dataclass

from fulgurite.backends.csx.capture.batch_spec import BatchSpec
from fulgurite.backends.csx.capture.logs import Accumulator
from fulgurite.backends.csx.capture.outputs import Outputs
from fulgurite.backends.csx.capture.recording import Recording
from fulgurite.backends.csx.capture.trainer_state import Answers
from fulgurite.backends.csx.contract.constants import Source
from fulgurite.backends.csx.contract.frozen_scalars import Access
from fulgurite.backends.csx.graph.flops import Product
from fulgurite.backends.csx.graph.graph import Graph, Kind
from fulgurite.backends.csx.hyperparams.slots import NumberSlot
from fulgurite.backends.csx.hyperparams.traced_float import NumberGuard
from fulgurite.backends.csx.state.gradients import Handover
from fulgurite.backends.csx.state.places import StateTensor
from fulgurite.backends.csx.state.storage import StateInput
from fulgurite.backends.schedules import ProgramScheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSources:
    """Where a graph's inputs come from: each kind in the order of ``Input.index``."""

    state: tuple[StateInput, ...]
    gradients: Handover
    numbers: tuple[NumberSlot, ...]
    constants: tuple[Source | Accumulator, ...]
    batch: BatchSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What the traced Python read on the host: the graph is right while it would read the same."""

    numbers: tuple[NumberGuard, ...]  # of param groups
    scalars: tuple[Access, ...]  # of modules
    answers: Answers  # of the trainer, about its state


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One captured entry point."""

    graph: Graph
    sources: InputSources
    outputs: Outputs
    assumptions: Assumptions
    changes: tuple[Access, ...]  # scalars of modules that the step changed
    counted: tuple[tuple[ProgramScheduler, int], ...]  # schedulers, and how often it steps each
    recording: Recording | None  # for later traces to be compared with
    products: tuple[Product, ...]  # of matrices, before any pass

    def state_tensors(self) -> list[StateTensor]:
        """The tensors that the graph works on."""
        used = [item.index for item in self.graph.inputs if item.kind is Kind.STATE]
        return [held for i in used for held in self.sources.state[i].tensors]
