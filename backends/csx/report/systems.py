"""A section of the report: the step on more systems, from its own messages and its own time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fulgurite.backends.csx.report.exchange import SENT, Message
from fulgurite.backends.csx.report.markup import Safe, details, mono, table, tag
from fulgurite.backends.csx.report.scaling import (
    BANDWIDTH,
    COMPUTE,
    ETHERNET,
    H200_NODES,
    LATENCY,
    STREAMING,
    SWARM,
    Network,
    Scaled,
    Step,
    most,
    scaled,
)
from fulgurite.backends.csx.report.scaling import table as scaled_table
from fulgurite.backends.csx.report.words import counted, in_bytes, in_time

Data = dict[str, Any]

SHOWN = (1, 8, 64, 512, 2048)
HALF = 0.5
_MARKS = {COMPUTE: "b1", BANDWIDTH: "b2", LATENCY: "b2", STREAMING: "b3"}
NOTHING = "This step has no gradients of weights that it changes, so there is nothing to exchange."


def steps_of(entry: Data) -> list[tuple[Network, Step]]:
    """An entry point's step on systems of each kind; none where it has no messages or no time.

    On this machine's kind it takes what was measured without waiting for other processes, or else
    what is predicted; on others the least that the roofline has for them.
    """
    messages, measured = tuple(Message(**one) for one in entry["messages"]), entry["measured"]
    if not messages or not entry["calls"]:
        return []
    alone_s = sum(call["seconds"] for call in entry["calls"])
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


def exchanged(entry: Data) -> str:
    """What goes between processes, in a line; empty where there is one."""
    sent = sum(call["sent_bytes"] for call in entry["calls"])
    if entry["processes"] < 2 or not entry["messages"]:
        return ""
    return (
        f"{counted(len(entry['messages']), 'collective')} of {entry['processes']} processes,"
        f" each sends {in_bytes(sent)} a step and receives as much"
    )


def lines(entry: Data) -> Iterator[tuple[str, ...]]:
    """Rows for the terminal, with their header: time and efficiency on so many systems."""
    found = steps_of(entry)
    if found:
        yield ("on more systems", *(f"{count:,}" for count in SHOWN))
    for network, step in found:
        rows = scaled_table(step, network, SHOWN)
        cells = (f"{in_time(row.step_s)} {row.efficiency:.0%}" for row in rows)
        yield (network.name.partition(",")[0], *cells)


def systems(entry: Data) -> list[Safe]:
    """The step on 1 to 2,048 systems."""
    found = steps_of(entry)
    if not found:
        return [tag("p", NOTHING if entry["calls"] else "Nothing was built: this is not known.")]
    said = (
        "A step where each system has a batch of its own: how long it takes, how many samples a"
        " second that is of what so many single systems would do, and what bounds it. On hosts a"
        f" step alone takes {in_time(found[0][1].compute_s)}, {told_time(entry)}; on H200 and CS-3"
        " the least that the roofline has, so that messages weigh most there. Links are as"
        " published; what is assumed is in docs/scaling.md."
    )
    rows = [
        (
            tag("span", network.name, class_="name"),
            *(_cell(scaled(step, network, count)) for count in SHOWN),
        )
        for network, step in found
    ]
    headers = ["network", *(counted(count, "system") for count in SHOWN)]
    figures = [figure for network, step in found for figure in _figures(network, step)]
    return [
        *_collectives(entry),
        tag("p", said),
        table(headers, rows, "the step on more systems"),
        details("all figures", *figures),
    ]


def _cell(row: Scaled) -> Safe:
    told = f"{row.efficiency:.0%}, {row.bound}"
    mark = tag("span", told, class_=f"bound {_MARKS[row.bound]}")
    return tag("span", in_time(row.step_s), mark, class_="cell")


def _collectives(entry: Data) -> list[Safe]:
    """The collectives of several processes, in order."""
    told, count = exchanged(entry), entry["processes"]
    if not told:
        return []
    rows = [
        (
            mono(one["kind"]),
            in_bytes(one["size_bytes"]),
            in_bytes(one["size_bytes"] * SENT[one["kind"]](count)),
            f"{one['begins']:.0%}",
        )
        for one in entry["messages"]
    ]
    said = (
        f"{told}. Bytes are what a process puts in; what it sends, and receives as well, is the"
        " least that this takes, on average of all. One begins when so much of the backward pass is"
        " done, by FLOPs; at 100% nothing is computed beside it."
    )
    headers = ["collective", "bytes", "sent", "begins"]
    return [tag("p", said), table(headers, rows, "collectives", " nnn")]


def _figures(network: Network, step: Step) -> list[Safe]:
    """All figures on a network."""
    rows = [
        (
            f"{row.systems:,}",
            in_time(row.step_s),
            f"{row.efficiency:.1%}",
            in_bytes(row.sent_bytes),
            row.bound,
        )
        for row in scaled_table(step, network)
    ]
    strong = most(scaled_table(step, network, shares_batch=True), HALF)
    said = (
        f"{network.name}. Sharing one batch instead, {counted(strong.systems, 'system')} are the"
        f" most of which each does half of what it would do alone."
    )
    headers = ["systems", "step", "efficiency", "sent by each", "bound by"]
    return [tag("p", said), table(headers, rows, f"all figures, {network.name}", "nnnn")]
