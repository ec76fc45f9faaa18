"""The roofline: what bounds a step, on this machine, on a GPU, and on systems that stream weights.

A step takes at least as long as the longest of three: its products at the highest rate, moving what
it reads and writes in the memory that activations lie in, and streaming weights in and gradients
out. Assumed for systems with a link for weights:

- every rate is the published one, reached in full;
- numbers have 16 bits, products and all that is moved;
- a weight comes for the forward pass and again for the backward pass, and its gradient goes back,
  one after the other over a system's link (Cerebras' documentation of weight streaming);
- optimizers and their state are where the weights come from, and cost the system nothing (there);
- activations fit the system's memory;
- systems share the batch, and each gets all weights.

Systems that share a batch take no time to add up their gradients here; in ``scaling`` they do.
For all: products, and what is moved but for state, grow with the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fulgurite.backends.csx.compile.programs.kernels import Kernels
from fulgurite.backends.csx.costs.machine import CS2, CS3, H200, Machine
from fulgurite.backends.csx.costs.traffic import traffic
from fulgurite.backends.csx.graph.graph import Graph, Kind
from fulgurite.backends.csx.graph.products import Product

BATCHES = (1, 4, 16, 64)
SYSTEMS = (1, 2, 4, 16)
COMPUTE, MEMORY, WEIGHTS = "compute", "memory", "weight streaming"
_TIMES_STREAMED = 3  # a weight, in for both passes and its gradient out


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a step does.

    Args:
        flops: of its products.
        state_bytes: of state that it reads and writes.
        other_bytes: of all else that it reads and writes.
        parameters: how many numbers its weights have.
        number_bytes: of one of them.
        batch_size: samples in a batch.
    """

    flops: int
    state_bytes: int
    other_bytes: int
    parameters: int
    number_bytes: int
    batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How long a step takes at least.

    Args:
        system: the machine's name.
        systems: how many share the batch.
        batch_size: of all of them together.
        compute_s, memory_s: products, and what is moved.
        weights_s: streaming weights; 0 where they lie in the machine's own memory.
        bound: what takes longest: ``compute``, ``memory`` or ``weight streaming``.
    """

    system: str
    systems: int
    batch_size: int
    compute_s: float
    memory_s: float
    weights_s: float
    bound: str


def work_of(
    graph: Graph,
    kernels: Kernels,
    products: Iterable[Product],
    parameters_bytes: int,
    batch_size: int,
    number_bytes: int = 4,
) -> Work:
    """What a step does.

    Args:
        graph: its operations, after all passes.
        kernels: what runs them.
        products: those that were traced.
        parameters_bytes: of its weights.
        batch_size: samples in a batch.
        number_bytes: of one number of a weight.
    """
    moved = sum(one.read_bytes + one.written_bytes for one in traffic(graph, kernels))
    written = graph.written()
    state = sum(
        # read, and written where it changes
        item.example.numel() * item.example.element_size() * (1 + (i in written))
        for i, item in enumerate(graph.inputs)
        if item.kind in (Kind.STATE, Kind.GRADIENT)
    )
    return Work(
        flops=sum(product.flops for product in products),
        state_bytes=min(state, moved),
        other_bytes=max(0, moved - state),
        parameters=parameters_bytes // number_bytes,
        number_bytes=number_bytes,
        batch_size=batch_size,
    )


def roofline(
    work: Work,
    here: Machine,
    others: Sequence[Machine] = (H200, CS2, CS3),
    batches: Sequence[int] = BATCHES,
    systems: Sequence[int] = SYSTEMS,
) -> Iterator[Bound]:
    """What bounds a step: a row for each machine, batch and number of systems.

    Args:
        work: what it does.
        here: this machine, of which there is one.
        others: machines to which weights are streamed.
        batches: times the batch of ``work``.
        systems: how many share a batch; no more than it has samples.
    """
    for times in batches:
        yield _bound(work, here, times, 1)
    for machine in others:
        for count in systems:
            for times in batches:
                if count <= times * work.batch_size:
                    yield _bound(work, machine, times, count)


def _bound(work: Work, machine: Machine, times: int, systems: int) -> Bound:
    share = times / systems
    if machine.weights_bytes_per_s is None:
        moved = work.state_bytes + share * work.other_bytes
        weights_s = 0.0
    else:
        # state lies where weights come from: it costs the system nothing
        moved = share * work.other_bytes * machine.number_bytes / work.number_bytes
        streamed = _TIMES_STREAMED * work.parameters * machine.number_bytes
        weights_s = streamed / machine.weights_bytes_per_s
    if machine.measured is None:
        moving_s = moved / machine.bytes_per_s
    else:  # in the cache that all of it fits into, or in main memory
        moving_s = machine.measured.memory.seconds(moved)
    seconds = {
        COMPUTE: share * work.flops / machine.flops_per_s,
        MEMORY: moving_s,
        WEIGHTS: weights_s,
    }
    return Bound(
        system=machine.name,
        systems=systems,
        batch_size=times * work.batch_size,
        compute_s=seconds[COMPUTE],
        memory_s=seconds[MEMORY],
        weights_s=weights_s,
        bound=max(seconds, key=lambda name: seconds[name]),
    )
