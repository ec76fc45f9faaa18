"""A report on the terminal: what each program is made of and what it costs, in a few lines."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fulgurite.backends.report import scaling
from fulgurite.backends.report.words import (
    MAKERS,
    Data,
    by_kernel,
    counted,
    exchanged,
    in_bytes,
    in_flops,
    in_parts,
    in_time,
    moved_bytes,
    predicted_s,
    short,
)

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
        kept = ("parameters", "optimizer", "activations")
        parts = ", ".join(f"{name} {in_bytes(memory[f'{name}_bytes'])}" for name in kept)
        yield f"  memory: peak {in_bytes(memory['peak_bytes'])} ({parts})"
    if entry["roofline"]:
        first = entry["roofline"][0]
        yield f"  bound on {first['system']}: {first['bound']}"
    yield from (f"  {told}" for told in (exchanged(entry), in_parts(entry)) if told)
    yield from _modules(entry)
    yield from _kernels(entry)
    yield from _systems(entry)


def _totals(entry: Data) -> Iterator[str]:
    yield counted(len(entry["operations"]), "operation")
    if entry["calls"]:
        yield counted(len(entry["calls"]), "kernel call")
    yield f"{in_flops(entry['flops'])} a step"
    if entry["calls"]:
        yield f"{in_bytes(moved_bytes(entry['calls']))} read and written"
        yield f"predicted {in_time(predicted_s(entry['calls']))}"


def _makers(entry: Data) -> str:
    told = []
    for name in MAKERS:
        found = Counter(one["kind"] for one in entry["operations"] if one["maker"] == name)
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
            *((in_bytes(moved_bytes([row])), in_time(row["seconds"])) if known else ()),
        )
        for row in rows[:TOP]
    ]
    headers = ("module", "operations", "FLOPs", *(("bytes", "time") if known else ()))
    yield from _aligned(headers, shown, len(rows))


def _kernels(entry: Data) -> Iterator[str]:
    rows = by_kernel(entry["calls"])
    shown = [
        (
            _cut(" ".join(filter(None, (short(name), calls[0]["region"])))),
            calls[0]["maker"],
            f"{len(calls):,}",
            in_bytes(moved_bytes(calls)),
            in_time(predicted_s(calls)),
        )
        for name, calls in rows[:TOP]
    ]
    yield from _aligned(("kernel", "made by", "calls", "bytes", "time"), shown, len(rows))


def _systems(entry: Data) -> Iterator[str]:
    """Time and efficiency on so many systems."""
    rows = []
    for network, step in scaling.steps_of(entry):
        scaled = scaling.table(step, network, scaling.SHOWN)
        cells = (f"{in_time(one.step_s)} {one.efficiency:.0%}" for one in scaled)
        rows.append((network.name.partition(",")[0], *cells))
    headers = ("on more systems", *(f"{count:,}" for count in scaling.SHOWN))
    yield from _aligned(headers, rows, len(rows))


def _cut(name: str) -> str:
    """A name that leaves room for the numbers beside it, and no control sequences."""
    name = "".join(one if one.isprintable() else "?" for one in name)
    return name if len(name) <= _WIDEST else f"...{name[3 - _WIDEST :]}"


def _aligned(headers: Sequence[str], rows: Sequence[Sequence[str]], whole: int) -> Iterator[str]:
    """A table: the first column to the left, the others to the right."""
    if not rows:
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    for i in range(len(headers)):
        table.add_column(justify="right" if i else "left", no_wrap=True)
    for row in (headers, *rows):
        table.add_row(*map(Text, row))  # a str would be read for rich's markup
    console = Console(file=io.StringIO(), width=1000)
    with console.capture() as captured:
        console.print(table)
    yield from (f"    {line.rstrip()}" for line in captured.get().splitlines())
    if whole > len(rows):
        yield f"    ... and {whole - len(rows)} more, see report.html"
