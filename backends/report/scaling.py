"""How long a step takes on more systems, each with its own part of the data, and all of the model
or a part of it.

The model: a system computes as it does alone. When a part of a pass is done, a message is on its
way; messages go one after the other, beside what is computed until they are needed: gradients by
the update, a tensor that is gathered from its parts by what uses it.

Words: a *message* is one collective, with the bytes that each process puts into it, or all of them
together where it gathers the parts of a tensor. It *begins* and is *needed* when some share of a
pass is done, by FLOPs: of the forward pass from -1 to 0, of the backward pass from 0 to 1. What the
time of a message is made of:

- *latency*: from one system to the next, so many times as its way has steps;
- *bandwidth*: its bytes over the link, which carries as many in the other direction meanwhile.

A ring of k systems adds up n bytes in 2 (k - 1) steps and moves 2 n (k - 1) / k; a binomial tree
broadcasts in log2 k steps, n each: Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", IJHPCA 19(1), 2005. Two pipelined trees add up in 2 log2 k steps
and move 2 n: Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan", Parallel Computing 35(12), 2009. Links in groups are used one after the other:
each system of a group has the sum of its own share of the bytes, of which the groups make theirs.

Assumed, and better than what is: no system is slower than another, no two messages are in each
other's way, links carry what is published, adding up takes no time, and data are always there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import ceil, log

from fulgurite.backends.report.words import Data, counted, in_time, predicted_s

SYSTEMS = tuple(2**n for n in range(12))
SHOWN = (1, 8, 64, 512, 2048)
"""So many systems are told first."""
COMPUTE, LATENCY, BANDWIDTH, STREAMING = "compute", "latency", "bandwidth", "weight streaming"
_LITTLE = 0.05  # of a step, that it waits: then computing bounds it
ALL_REDUCE, SCATTER, GATHER = "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"
PARTS = f"{GATHER} of parts"
"""Of a tensor that lies in parts: as large as it is, among how many systems ever."""
SENT: Mapping[str, Callable[[int], float]] = {
    ALL_REDUCE: lambda count: 2 * (count - 1) / count,  # the parts' sums, then the sums to all
    SCATTER: lambda count: (count - 1) / count,
    "broadcast": lambda count: (count - 1) / count,  # all but one receive it, once
    GATHER: lambda count: count - 1,
    PARTS: lambda count: (count - 1) / count,
}
"""The least that a process sends, on average of all, for each byte of a message; it receives as
many. Rings and pipelined trees reach it: Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", J. Parallel Distrib. Comput. 69(2), 2009."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A collective: its kind, its bytes, when it begins and when what it brings is needed."""

    kind: str = ALL_REDUCE
    size_bytes: int
    begins: float
    needed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins the systems of a group, or the groups.

    Args:
        bytes_per_s: that a system sends, and receives at the same time.
        latency_s: from one to the next.
        systems: of a group; None: all that there are.
        trees: whether sums go over trees where that is sooner, and not over rings alone.
        fan_in: of switches that add up, in a tree; 0 where systems do it themselves.
    """

    bytes_per_s: float
    latency_s: float
    systems: int | None = None
    trees: bool = False
    fan_in: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What joins systems.

    Args:
        name: in reports.
        links: of the smallest groups first.
        streamed: how many bytes pass a system's link in a step for each byte of gradients, where
            weights do not stay in the systems; 0 where they do.
        cores: that all systems have together, each using one; None: each has its own, and one
            more for its messages.
    """

    name: str
    links: tuple[Link, ...]
    streamed: float = 0.0
    cores: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of one system.

    Args:
        compute_s: alone.
        backward_share: of that, in the backward pass.
        messages: in their order.
    """

    compute_s: float
    backward_share: float
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A step on so many systems.

    Args:
        systems: how many.
        step_s: how long it takes.
        efficiency: samples a second, of what so many single systems would do.
        sent_bytes: by a system, which receives as many: where weights are streamed, through its
            link in both directions together.
        bound: what it is bounded by: ``compute``, ``latency``, ``bandwidth``, ``weight streaming``.
    """

    systems: int
    step_s: float
    efficiency: float
    sent_bytes: float
    bound: str


def scaled(step: Step, network: Network, systems: int, shares_batch: bool = False) -> Scaled:
    """A step on so many systems.

    Args:
        step: of one.
        network: what joins them.
        systems: how many.
        shares_batch: whether they share one system's batch (strong scaling), and do not have one
            each (weak scaling).
    """
    alone_s, _ = _step(step, network, 1, 1.0)
    share = 1 / systems if shares_batch else 1.0
    step_s, bound = _step(step, network, systems, share)
    return Scaled(
        systems=systems,
        step_s=step_s,
        efficiency=share * alone_s / step_s,
        sent_bytes=_sent(step.messages, network, systems),
        bound=bound,
    )


def table(
    step: Step, network: Network, systems: Iterable[int] = SYSTEMS, shares_batch: bool = False
) -> list[Scaled]:
    """A row for each number of systems."""
    return [scaled(step, network, count, shares_batch) for count in systems]


def most(rows: Iterable[Scaled], efficiency: float) -> Scaled:
    """The last of the rows before the first that is less efficient."""
    first, *others = rows
    return [first, *takewhile(lambda row: row.efficiency >= efficiency, others)][-1]


def message_s(message: Message, network: Network, systems: int) -> tuple[float, float]:
    """How long a message takes alone, for its latency and for its bytes."""
    latency_s = bytes_s = 0.0
    size_bytes = float(message.size_bytes)
    if message.kind == GATHER:
        size_bytes *= systems  # a gather is half of a sum, of all that comes of it
    for link, count in _levels(network, systems):
        one_s, other_s = min(_ways(message.kind, size_bytes, link, count), key=sum)
        latency_s, bytes_s = latency_s + one_s, bytes_s + other_s
        if message.kind != "broadcast":
            # the next level sums up each system's share of what this one has
            size_bytes /= count
    return latency_s, bytes_s


def _ways(kind: str, size_bytes: float, link: Link, count: int) -> Iterator[tuple[float, float]]:
    """Seconds of latency and of bytes, in each of the ways that a link has for a message."""
    byte_s = size_bytes / link.bytes_per_s
    if kind == "broadcast":
        steps = ceil(log(count, 2))
        yield steps * link.latency_s, steps * byte_s
        return
    times = 2 if kind == ALL_REDUCE else 1
    if link.fan_in:
        # a logarithm may lie a little above its whole number
        yield times * ceil(log(count, link.fan_in) - 1e-9) * link.latency_s, byte_s
        return
    yield times * (count - 1) * link.latency_s, times * byte_s * (count - 1) / count
    if link.trees:
        yield times * ceil(log(count, 2)) * link.latency_s, times * byte_s


def _levels(network: Network, systems: int) -> Iterator[tuple[Link, int]]:
    """The links that so many systems use, and how many systems or groups each joins."""
    for link in network.links:
        count = min(systems, link.systems or systems)
        if count > 1:
            yield link, count
        systems = ceil(systems / count)


def _step(step: Step, network: Network, systems: int, share: float) -> tuple[float, str]:
    """Seconds of a step whose systems compute a share of it each, and what bounds it."""
    compute_s = share * step.compute_s
    if network.cores is not None:
        compute_s *= max(1.0, systems / network.cores)
    if network.streamed:
        return _streamed(step, network, systems, compute_s)
    waits_s = latency_s = bytes_s = 0.0
    if systems > 1:
        each = [message_s(message, network, systems) for message in step.messages]
        latency_s, bytes_s = (sum(one[i] for one in each) for i in (0, 1))
        beside = network.cores is None or systems < network.cores  # a core is free for messages
        taken = [sum(one) for one in each]
        waits_s = _waits_s(step, taken, compute_s) if beside else sum(taken)
    bound = LATENCY if latency_s > bytes_s else BANDWIDTH
    step_s = compute_s + waits_s
    return step_s, bound if waits_s > _LITTLE * step_s else COMPUTE


def _waits_s(step: Step, taken_s: Sequence[float], compute_s: float) -> float:
    """What computing waits for messages that take so long."""
    forward_s, backward_s = compute_s * (1 - step.backward_share), compute_s * step.backward_share
    begins = [(one.begins, False, i) for i, one in enumerate(step.messages)]
    needed = [(one.needed, True, i) for i, one in enumerate(step.messages)]
    ends_s, free_s, late_s = dict[int, float](), -forward_s, 0.0
    for share, is_needed, i in sorted(begins + needed):
        here_s = share * (backward_s if share > 0 else forward_s) + late_s
        if is_needed:
            late_s += max(0.0, ends_s[i] - here_s)
        else:
            ends_s[i] = free_s = max(free_s, here_s) + taken_s[i]
    return late_s


def _streamed(step: Step, network: Network, systems: int, compute_s: float) -> tuple[float, str]:
    """Weights come and gradients go beside computing; the last one's way is beside nothing."""
    [link] = network.links
    streamed_s = network.streamed * _gradients(step.messages) / link.bytes_per_s
    way_s = ceil(log(systems, link.fan_in) - 1e-9) * link.latency_s
    step_s = max(compute_s, streamed_s) + 2 * way_s
    if 2 * way_s > _LITTLE * step_s:
        return step_s, LATENCY
    return step_s, STREAMING if streamed_s > compute_s else COMPUTE


def _sent(messages: Iterable[Message], network: Network, systems: int) -> float:
    if network.streamed:
        return network.streamed * _gradients(messages)
    return sum(one.size_bytes * SENT[one.kind](systems) for one in messages)


def _gradients(messages: Iterable[Message]) -> int:
    return sum(one.size_bytes for one in messages if one.kind in (ALL_REDUCE, SCATTER))


# Gloo adds up over rings alone (its default; gloo/allreduce.h). 25GBASE: IEEE 802.3by. The latency
# is measured: half of the median of a sum of 16 bytes by gloo between two processes of one machine,
# on busy cores; what the wire adds (10 to 30 microseconds, assumed) is less than its scatter.
ETHERNET = Network(
    name="hosts, 25 Gb/s Ethernet, gloo",
    links=(Link(bytes_per_s=25e9 / 8, latency_s=196e-6),),
)
# NVLink, 900 GB/s in both directions together, 8 GPUs; a ConnectX-7 of 400 Gb/s for each GPU:
# NVIDIA's data sheets of the H200 and the DGX H200. Latencies are those by which NCCL chooses, of
# its protocol "Simple" (src/graph/tuning.cc, 2.19 and later); trees: its algorithm since 2.4. That
# NVSwitch and InfiniBand switches can add up (SHARP) is left out.
H200_NODES = Network(
    name="H200, nodes of 8 with NVLink, 400 Gb/s InfiniBand",
    links=(
        Link(bytes_per_s=450e9, latency_s=3.4e-6, systems=8),
        Link(bytes_per_s=400e9 / 8, latency_s=14e-6, trees=True),
    ),
)
# 1.2 Tb/s to and from a system: see ``csx/costs/machine.py``. SwarmX: a tree of nodes that
# broadcast weights to 4 systems or nodes and add up gradients at line rate, as many nodes as it
# takes to give each system its rate: Cerebras' glossary, "SwarmX". 2,048 systems at most: its
# announcement of the CS-3, March 2024. The latency of a node is assumed. A weight of 16 bits comes
# twice and its gradient goes once (``csx/costs/roofline.py``), for a gradient of 32 bits here:
# 3 * 2 / 4.
SWARM = Network(
    name="CS-3, SwarmX and MemoryX",
    links=(Link(bytes_per_s=1.2e12 / 8, latency_s=5e-6, fan_in=4),),
    streamed=1.5,
)


def steps_of(entry: Data) -> list[tuple[Network, Step]]:
    """An entry point's step on systems of each kind; none where it has no messages or no time.

    On this machine's kind it takes what was measured without waiting for other processes, or else
    what is predicted; on others the least that the roofline has for them.
    """
    messages, measured = tuple(Message(**one) for one in entry["messages"]), entry["measured"]
    if not messages or not entry["calls"]:
        return []
    alone_s = predicted_s(entry["calls"])
    if measured is not None:
        alone_s = measured["step_s"] - measured["waits_s"]
    times = [(ETHERNET, alone_s)]
    batch = min((row["batch_size"] for row in entry["roofline"]), default=0)
    for network, machine in ((H200_NODES, "H200"), (SWARM, "CS-3")):
        times += [
            (network, max(row["compute_s"], row["memory_s"]))
            for row in entry["roofline"]
            if (row["system"], row["systems"], row["batch_size"]) == (machine, 1, batch)
        ]
    share = entry["backward_share"]
    return [
        (network, Step(compute_s=compute_s, backward_share=share, messages=messages))
        for network, compute_s in times
        if compute_s > 0
    ]


def told_time(entry: Data) -> str:
    """Where the time of a step on this machine is from, in words."""
    measured = entry["measured"]
    if measured is None:
        return "as predicted, for the run had not ended when this was written"
    told = f"the mean of {counted(measured['steps'], 'step')}"
    if measured["waits_s"]:
        told += f", without the {in_time(measured['waits_s'])} that each waited for other processes"
    return told
