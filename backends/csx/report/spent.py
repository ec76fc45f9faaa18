"""Sections of the page about cost: by module, in memory over time, and on other machines."""

from __future__ import annotations

from typing import Any

from fulgurite.backends.csx.report.markup import (
    Safe,
    details,
    mono,
    muted,
    swatch,
    table,
    tag,
)
from fulgurite.backends.csx.report.pictures import bar, round_up, stacked
from fulgurite.backends.csx.report.words import counted, in_bytes, in_flops, in_time

Data = dict[str, Any]

CHECKED = "The program was checked and not built, so there are no kernels: this is not known."
_MOST_STEPS = 600

LAYERS = (
    ("parameters", ("parameters_bytes",)),
    ("optimizer state", ("optimizer_bytes",)),
    ("buffers and other state", ("buffers_bytes", "other_state_bytes")),
    ("batch", ("batch_bytes",)),
)
"""What is in memory all the time, from below: its name, and the fields that are it."""


def modules(entry: Data) -> list[Safe]:
    """What each module takes, the one that takes the most first."""
    rows, built = entry["modules"], bool(entry["calls"])
    order = "seconds" if built else "forward_flops"
    rows = sorted(rows, key=lambda row: (-row[order], -row["operations"]))
    total = sum(row["seconds"] for row in rows) or 1.0
    headers = ["module", "operations", "FLOPs forward", "backward"]
    headers += ["read", "written", "predicted time", "share", ""] if built else []
    cells = []
    for row in rows:
        cell: list[str] = [tag("span", mono(row["module"] or "elsewhere"), class_="name")]
        cell += [f"{row['operations']:,}", in_flops(row["forward_flops"])]
        cell += [in_flops(row["backward_flops"])]
        if built:
            share = row["seconds"] / total
            cell += [in_bytes(row["read_bytes"]), in_bytes(row["written_bytes"])]
            cell += [in_time(row["seconds"]), f"{share:.0%}", Safe(bar(share))]
        cells.append(cell)
    said = "A function's name stands for what no module computes: the loss, the optimizer."
    return [
        tag("p", said),
        table(headers, cells, "costs by module", " nnnnnnnb" if built else " nnn"),
    ]


def memory(entry: Data) -> list[Safe]:
    """What is in memory while the program runs, as a picture and in numbers."""
    found = entry["memory"]
    if found is None or not found["timeline"]:
        return [tag("p", CHECKED)]
    constant = [(name, sum(found[key] for key in keys)) for name, keys in LAYERS]
    points = _thinned(found["timeline"])
    peak = max(points, key=lambda one: one["activations_bytes"] + one["temporaries_bytes"])
    moving = [(name, f"{name}_bytes") for name in ("activations", "temporaries")]
    layers = [[float(size)] * len(points) for _, size in constant]
    layers += [[float(one[key]) for one in points] for _, key in moving]
    at_peak = [*constant, *((name, peak[key]) for name, key in moving)]
    top = round_up(max(map(sum, zip(*layers, strict=True))))
    titles = [_title(entry, one, sum(size for _, size in constant)) for one in points]
    ticks = (tag("span", in_bytes(top * part / 4)) for part in (4, 3, 2, 1))
    picture = tag(
        "div",
        tag("div", *ticks, class_="y"),
        tag("div", Safe(stacked(layers, titles, top)), class_="area"),
        _phases(entry),
        class_="plot",
    )
    total = sum(size for _, size in at_peak) or 1
    rows = [
        (
            _key(f"c{i + 1}", name),
            in_bytes(size),
            f"{size / total:.0%}",
            Safe(bar(size / total, f"c{i + 1}")),
        )
        for i, (name, size) in enumerate(at_peak)
        if size
    ]
    said = (
        f"From the first kernel to the last. The peak, {in_bytes(found['peak_bytes'])}, is at call"
        f" {peak['call'] + 1} of {len(entry['calls'])}. What stays is blue; what comes and goes is"
        " orange: activations are made by the forward pass for the backward pass."
    )
    if found["kept_bytes"]:
        said += f" Compiled code keeps {in_bytes(found['kept_bytes'])} of that for the next step."
    return [
        tag("p", said),
        picture,
        tag("h4", "At the peak"),
        table(["", "bytes", "share", ""], rows, "memory at the peak", " nnb"),
        *_activations(found["at_peak"]),
    ]


def _activations(held: list[Any]) -> list[Safe]:
    """Whose activations are alive at the peak."""
    if not held:
        return []
    total = sum(size for _, size in held)
    rows = [
        (
            tag("span", mono(name or "elsewhere"), class_="name"),
            in_bytes(size),
            f"{size / total:.0%}",
            Safe(bar(size / total, "c5")),
        )
        for name, size in held
    ]
    headers = ["module", "bytes", "share", ""]
    title = tag("summary", f"whose activations they are: {counted(len(held), 'module')}")
    return [tag("details", title, table(headers, rows, "activations at the peak", " nnb"))]


def _key(kind: str, name: str) -> Safe:
    return tag("span", swatch(kind), name, class_="name")


def _thinned(points: list[Data]) -> list[Data]:
    """At most so many points as a screen shows, of each stretch the highest."""
    stride = -(-len(points) // _MOST_STEPS)
    parts = (points[i : i + stride] for i in range(0, len(points), stride))
    return [max(p, key=lambda x: x["activations_bytes"] + x["temporaries_bytes"]) for p in parts]


def _title(entry: Data, point: Data, constant: int) -> str:
    call = entry["calls"][point["call"]]
    held = constant + point["activations_bytes"] + point["temporaries_bytes"]
    return f"call {point['call'] + 1}: {call['kernel']}, {in_bytes(held)}"


def _phases(entry: Data) -> Safe:
    """Forward, backward and update below the picture, each as wide as its calls.

    A kernel is of the backward pass when most of its operations are.
    """
    backward = [
        2 * sum(entry["operations"][i]["backward"] for i in call["operations"])
        > len(call["operations"])
        for call in entry["calls"]
    ]
    count = len(backward)
    if True not in backward:
        return tag("div", tag("span", "forward", style="width:100%"), class_="phases")
    begin, end = backward.index(True), count - backward[::-1].index(True)
    parts = {"forward": begin, "backward": end - begin, "update": count - end}
    return tag(
        "div",
        *(tag("span", k, style=f"width:{100 * n / count:.2f}%") for k, n in parts.items() if n),
        class_="phases",
    )


BOUNDS = {"compute": "compute_s", "memory": "memory_s", "weight streaming": "weights_s"}
"""What may bound a step, and the field that says how long it takes."""


def roofline(entry: Data) -> list[Safe]:
    """What bounds a step on which machine, by batch size and number of systems."""
    if not entry["roofline"]:
        return [tag("p", CHECKED)]
    found = {(r["system"], r["systems"], r["batch_size"]): r for r in entry["roofline"]}
    batches = sorted({batch for _, _, batch in found})
    rows = [
        (
            tag("span", system, class_="name"),
            f"{systems:,}",
            *(_bounded(found.get((system, systems, batch))) for batch in batches),
        )
        for system, systems in dict.fromkeys((one[0], one[1]) for one in found)
    ]
    said = (
        "The least time of a step, and what bounds it: its products at the machine's peak, what it"
        " moves at the memory's, or, for CS-2 and CS-3, the weights over the link that they are"
        " streamed by. This machine's figures are measured, the others' published; what is assumed"
        " is in docs/costs.md."
    )
    headers = ["machine", "systems", *(f"batch {batch:,}" for batch in batches)]
    figures = details("all figures", _figures(entry["roofline"]))
    return [tag("p", said), table(headers, rows, "roofline", " n"), figures]


def _bounded(row: Data | None) -> Safe:
    """The longest time, and what it is of."""
    if row is None:
        return muted("fewer samples")
    longest = in_time(max(row[key] for key in BOUNDS.values()))
    mark = f"b{list(BOUNDS).index(row['bound']) + 1}"
    return tag("span", longest, tag("span", row["bound"], class_=f"bound {mark}"), class_="cell")


def _figures(bounds: list[Data]) -> Safe:
    rows = [
        (
            one["system"],
            f"{one['systems']:,}",
            f"{one['batch_size']:,}",
            *(in_time(one[key]) for key in BOUNDS.values()),
            one["bound"],
        )
        for one in bounds
    ]
    headers = ["machine", "systems", "batch size", *BOUNDS, "bound by"]
    return table(headers, rows, "all figures of the roofline", " nnnnn")
