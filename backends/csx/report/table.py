"""A report on the terminal: what each program is made of and what it costs, in a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from fulgurite.backends.csx.report import systems
from fulgurite.backends.csx.report.kernels import COMPUTED_BY, short
from fulgurite.backends.csx.report.words import counted, in_bytes, in_flops, in_time

Data = dict[str, Any]

_WIDEST = 44
TOP = 8
"""So many kernels and modules are shown of each entry point."""


def lines(report: Data) -> Iterator[str]:
    """A report as lines."""
    if not report["programs"]:
        yield "No program was built."
    for i, program in enumerate(report["programs"]):
        if i:
            yield ""
        yield program["headline"]
        for entry in program["entries"]:
            if len(program["entries"]) > 1:
                yield f"entry point {entry['name']}"
            yield from _entry(entry)
        built = program["seconds"].get("waited", 0.0)
        yield f"  built in {in_time(built)}" + _phases(program)
        for one in program["warnings"]:
            yield f"  {one['category']}: {one['text'].splitlines()[0]}"


def _phases(program: Data) -> str:
    taken = {k: s for k, s in program["seconds"].items() if k != "waited" and s}
    return f" ({', '.join(f'{k} {in_time(s)}' for k, s in taken.items())})" if taken else ""


def _entry(entry: Data) -> Iterator[str]:
    yield f"  {', '.join(_totals(entry))}"
    yield f"  makers: {_makers(entry)}" if entry["calls"] else "  no kernels: it was only checked"
    if memory := entry["memory"]:
        kept = {"parameters": "parameters_bytes", "optimizer": "optimizer_bytes"}
        kept |= {"activations": "activations_bytes"}
        parts = ", ".join(f"{name} {in_bytes(memory[key])}" for name, key in kept.items())
        yield f"  memory: peak {in_bytes(memory['peak_bytes'])} ({parts})"
    if entry["roofline"]:
        first = entry["roofline"][0]
        yield f"  bound on {first['system']}: {first['bound']}"
    if told := systems.exchanged(entry):
        yield f"  {told}"
    yield from _modules(entry)
    yield from _kernels(entry)
    if rows := [*systems.lines(entry)]:
        yield from _aligned(rows[0], rows[1:], len(rows) - 1)


def _totals(entry: Data) -> Iterator[str]:
    yield counted(len(entry["operations"]), "operation")
    if entry["calls"]:
        yield counted(len(entry["calls"]), "kernel call")
    yield f"{in_flops(entry['flops'])} a step"
    if entry["calls"]:
        yield f"{in_bytes(moved_bytes(entry['calls']))} read and written"
        yield f"predicted {in_time(sum(call['seconds'] for call in entry['calls']))}"


def _makers(entry: Data) -> str:
    kinds: dict[str, Counter[str]] = {}
    for one in entry["operations"]:
        kinds.setdefault(one["maker"], Counter())[one["kind"]] += 1
    told = []
    for name in COMPUTED_BY:
        found = kinds.get(name, Counter())
        most = ", ".join(f"{kind} {count}" for kind, count in found.most_common(4))
        more = ", ..." if len(found) > 4 else ""
        told += [f"{name} {found.total()} ({most}{more})"] if found else []
    return "; ".join(told)


def _modules(entry: Data) -> Iterator[str]:
    known = bool(entry["calls"])  # which kernels there are
    order = "seconds" if known else "forward_flops"
    rows = sorted(entry["modules"], key=lambda row: -row[order])
    shown = [
        (
            _cut(row["module"] or "elsewhere"),
            f"{row['operations']:,}",
            in_flops(row["forward_flops"] + row["backward_flops"]),
            *(_moved(row) if known else ()),
        )
        for row in rows[:TOP]
    ]
    headers = ("module", "operations", "FLOPs", *(("bytes", "time") if known else ()))
    yield from _aligned(headers, shown, len(rows))


def _moved(row: Data) -> tuple[str, str]:
    return in_bytes(row["read_bytes"] + row["written_bytes"]), in_time(row["seconds"])


def _kernels(entry: Data) -> Iterator[str]:
    calls: dict[str, list[Data]] = {}
    for call in entry["calls"]:
        calls.setdefault(call["kernel"], []).append(call)
    rows = sorted(calls.items(), key=lambda item: -sum(call["seconds"] for call in item[1]))
    shown = [
        (
            _cut(" ".join(filter(None, (short(name), found[0]["region"])))),
            found[0]["maker"],
            f"{len(found):,}",
            in_bytes(moved_bytes(found)),
            in_time(sum(call["seconds"] for call in found)),
        )
        for name, found in rows[:TOP]
    ]
    yield from _aligned(("kernel", "made by", "calls", "bytes", "time"), shown, len(rows))


def _cut(name: str) -> str:
    """A name that leaves room for the numbers beside it, and no control sequences."""
    name = "".join(one if one.isprintable() else "?" for one in name)
    return name if len(name) <= _WIDEST else f"...{name[3 - _WIDEST :]}"


def moved_bytes(calls: Sequence[Data]) -> int:
    """Bytes that calls of kernels read and write."""
    return sum(call["read_bytes"] + call["written_bytes"] for call in calls)


def _aligned(headers: Sequence[str], rows: Sequence[Sequence[str]], whole: int) -> Iterator[str]:
    """A table: the first column to the left, the others to the right."""
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    for row in (headers, *rows):
        first, *others = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "    " + "  ".join([first, *others])
    if whole > len(rows):
        yield f"    ... and {whole - len(rows)} more, see report.html"
