"""Two sections of the page: kernels with their source, and operations by kind and maker."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from fulgurite.backends.csx.report.markup import (
    Safe,
    code,
    details,
    join,
    mono,
    safe,
    swatch,
    table,
    tag,
)
from fulgurite.backends.csx.report.pictures import bar, parts_of
from fulgurite.backends.csx.report.words import counted, in_bytes, in_time

Data = dict[str, Any]

COMPUTED_BY = ("library", "generated", "host", "collective")
MAKERS = {
    "library": "by a kernel of the library",
    "generated": "by a kernel that the compiler generated",
    "host": "on the host's path",
    "collective": "by all processes together",
    "view": "only looks at memory: nothing runs",
    "removed": "the compiler left it out",
}


def maker(name: str) -> Safe:
    """Who made a kernel, with its colour."""
    return join([swatch(name), safe(name or "not built")])


def kernels(entry: Data) -> list[Safe]:
    """Each kernel, the one that takes the most time first: what it computes, and its source."""
    if not entry["calls"]:
        said = "The program was checked and not built, so there are no kernels."
        return [tag("p", said if entry["how"] == "checked" else "It is not known what runs this.")]
    calls: dict[str, list[Data]] = defaultdict(list)
    for call in entry["calls"]:
        calls[call["kernel"]].append(call)
    order = sorted(calls, key=lambda name: -sum(call["seconds"] for call in calls[name]))
    head = tag(
        "div",
        *(
            tag("span", one)
            for one in ("kernel", "made by", "calls", "operations", "bytes", "time")
        ),
        class_="row head",
    )
    shown = [_kernel(entry, name, calls[name]) for name in order]
    whole = []
    if entry["calling"]:
        whole = [details("the Python that calls them, in order", code(entry["calling"]))]
    return [_makers(entry), head, *shown, *whole]


def _makers(entry: Data) -> Safe:
    """How many calls are whose, as a bar and in words."""
    found = Counter(call["maker"] for call in entry["calls"])
    total = found.total()
    keys = join(
        tag("span", join([swatch(name), f"{counted(found[name], 'call')} {MAKERS[name]}"]))
        for name in MAKERS
        if found[name]
    )
    picture = Safe(parts_of([(name, found[name] / total) for name in MAKERS if found[name]]))
    return join([picture, tag("div", keys, class_="keys")])


def _kernel(entry: Data, name: str, calls: list[Data]) -> Safe:
    moved = sum(call["read_bytes"] + call["written_bytes"] for call in calls)
    positions = [i for call in calls for i in call["operations"]]
    computed = [entry["operations"][i] for i in positions]
    cells = (
        join([mono(short(name)), tag("span", _gist(calls, computed), class_="gist")]),
        maker(calls[0]["maker"]),
        f"{len(calls):,}",
        f"{len(positions):,}",
        in_bytes(moved),
        in_time(sum(call["seconds"] for call in calls)),
    )
    row = tag("span", *(tag("span", cell) for cell in cells), class_="row")
    inside = [operations_table(computed)]
    if name in entry["sources"]:
        inside.append(code(entry["sources"][name]))
    return details(row, *inside)


def short(name: str) -> str:
    """A kernel's name without the most of its hash: ``kernel_526913``."""
    return re.sub(r"^(kernel_[0-9a-f]{6})[0-9a-f]+$", r"\1", name)


def _gist(calls: list[Data], computed: list[Data]) -> str:
    """Which loss it is and how it was chosen, whose operations it computes, and which."""
    said = [call[key] for call in calls for key in ("region", "tuned") if call[key]]
    modules = [name for name, _ in Counter(one["module"] for one in computed).most_common() if name]
    found = [kind for kind, _ in Counter(one["kind"] for one in computed).most_common()]
    parts = [*dict.fromkeys(said), few(modules, 2), few(found, 4) if len(found) > 1 else ""]
    return " · ".join(filter(None, parts))


def few(names: list[str], most: int) -> str:
    """The first names of a list, and how many more there are."""
    more = f", {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def operations_table(operations: Iterable[Data]) -> Safe:
    """Operations with the user's module and line; those alike are one row."""
    keys = ("kind", "module", "backward", "line", "source", "result")
    found = Counter(tuple(one[key] for key in keys) for one in operations)
    rows = [
        (
            mono(kind),
            module or "",
            "backward" if backward else "",
            join([safe(line), tag("code", source, class_="source")]) if line else "",
            mono(result),
            f"{count:,}" if count > 1 else "",
        )
        for (kind, module, backward, line, source, result), count in found.items()
    ]
    headers = ["operation", "module", "pass", "line", "result", "times"]
    return table(headers, rows, "operations", "     n")


def operations(entry: Data) -> list[Safe]:
    """Operations by kind and maker, the most frequent first."""
    groups: dict[tuple[str, str], list[Data]] = defaultdict(list)
    for one in entry["operations"]:
        groups[one["kind"], one["maker"]].append(one)
    order = sorted(groups, key=lambda key: (-len(groups[key]), key))
    most = len(groups[order[0]]) if order else 1
    head = tag(
        "div",
        *(tag("span", one) for one in ("kind", "computed", "count", "")),
        class_="row kinds head",
    )
    shown = []
    for kind, name in order:
        count = len(groups[kind, name])
        cells = (mono(kind), maker(name), f"{count:,}", Safe(bar(count / most, name or "c1")))
        row = tag("span", *(tag("span", cell) for cell in cells), class_="row kinds")
        shown.append(details(row, operations_table(groups[kind, name])))
    return [head, *shown]
