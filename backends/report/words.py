"""What the page, the terminal and a comparison say alike: numbers in words, kernels by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

Data = dict[str, Any]
"""A part of a report, as ``report_file`` reads it."""

MAKERS = {
    "library": "by a kernel of the library",
    "generated": "by a kernel that the compiler generated",
    "host": "on the host's path",
    "collective": "by all processes together",
}
"""Who makes what operations give that run, in the order in which they are told."""


def in_bytes(count: float) -> str:
    """``1.5 MiB``; under 1 KiB whole."""
    size, unit = _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    return f"{size:.0f} B" if unit == "B" else f"{_three(size)} {unit}"


def in_flops(count: float) -> str:
    """``1.23 GFLOP``; ``0`` where there are none."""
    size, unit = _scaled(count, 1000, ("", "k", "M", "G", "T", "P"))
    return f"{_three(size)} {unit}FLOP" if count else "0"


def _scaled(count: float, step: int, units: Sequence[str]) -> tuple[float, str]:
    """A number in the first unit that leaves less than a step of it, or in the last."""
    for unit in units[:-1]:
        if abs(count) < step:
            return count, unit
        count /= step
    return count, units[-1]


def in_time(seconds: float) -> str:
    """``1.23 s``, ``45.6 ms``, ``789 µs``, ``12 ns``."""
    if seconds == 0:
        return "0"
    for unit, size_s in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= size_s:
            return f"{_three(seconds / size_s)} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def _three(number: float) -> str:
    """Three digits, or all before the point."""
    size = abs(number)
    return f"{number:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"


def counted(number: int, what: str) -> str:
    """``1 kernel``, ``2,400 kernels``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def few(names: Sequence[str], most: int) -> str:
    """The first names of a list, and how many more there are."""
    more = f", {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def short(kernel: str) -> str:
    """A kernel's name without the most of its hash: ``kernel_526913``."""
    return re.sub(r"^(kernel_[0-9a-f]{6})[0-9a-f]+$", r"\1", kernel)


def moved_bytes(calls: Iterable[Data]) -> int:
    """Bytes that calls of kernels read and write."""
    return sum(call["read_bytes"] + call["written_bytes"] for call in calls)


def sent_bytes(calls: Iterable[Data]) -> int:
    """Bytes that a process sends in calls, and receives as well."""
    return sum(call["sent_bytes"] for call in calls)


def predicted_s(calls: Iterable[Data]) -> float:
    """Seconds that calls of kernels take, as predicted."""
    return float(sum(call["seconds"] for call in calls))


def by_kernel(calls: Iterable[Data]) -> list[tuple[str, list[Data]]]:
    """Each kernel's name and its calls, the one that takes the most time first."""
    found: dict[str, list[Data]] = {}
    for call in calls:
        found.setdefault(call["kernel"], []).append(call)
    return sorted(found.items(), key=lambda item: -predicted_s(item[1]))


def computed(entry: Data, calls: Iterable[Data]) -> list[Data]:
    """The operations of some of an entry point's calls."""
    return [entry["operations"][i] for call in calls for i in call["operations"]]


def exchanged(entry: Data) -> str:
    """What goes between processes, in a line; empty where there is one."""
    if entry["processes"] < 2 or not entry["messages"]:
        return ""
    return (
        f"{counted(len(entry['messages']), 'collective')} of {entry['processes']} processes,"
        f" each sends {in_bytes(sent_bytes(entry['calls']))} a step and receives as much"
    )


def in_parts(entry: Data) -> str:
    """What of a step's tensors in parts is gathered, in a line; empty where none is."""
    told = []
    for held, how in ((True, "held for the backward pass"), (False, "gathered for each pass")):
        if found := [one for one in entry["gathered"] if one["held"] is held]:
            size = in_bytes(sum(one["size_bytes"] for one in found))
            told.append(f"{counted(len(found), 'tensor')} of {size} {how}")
    return f"in parts: {', '.join(told)}" if told else ""


def share_of_pass(share: float) -> str:
    """How much of which pass is done, of a message's ``begins`` or ``needed``."""
    return f"forward {1 + share:.0%}" if share < 0 else f"backward {share:.0%}"
