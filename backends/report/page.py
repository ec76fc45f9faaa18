"""The page: ``report.html``, one file that needs no other, and no JavaScript.

``page.html`` beside this file is the page, with gaps that jinja fills and escapes, whoever wrote
what goes there. Here is what it asks of a report: rows in their order, and points of the picture.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from importlib import resources
from math import ceil, log2
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from fulgurite.backends.report import scaling, words
from fulgurite.backends.report.words import Data

PHASES = {"captured": "traced", "generate": "code generated", "compile": "C++ compiled"}
PHASES |= {"compiled": "compiled, in all", "loaded": "loaded from the cache", "waited": "in all"}
MARKS = {"compute": "b1", "memory": "b2", "bandwidth": "b2", "latency": "b2"}
MARKS |= {"weight streaming": "b3"}
"""What may bound a step, by the class of its colour."""
CHECKED = "The program was checked and not built, so there are no kernels: this is not known."
LAYERS = {
    "parameters": ("parameters_bytes",),
    "optimizer state": ("optimizer_bytes",),
    "buffers and other state": ("buffers_bytes", "other_state_bytes"),
    "batch": ("batch_bytes",),
    "activations": ("activations_bytes",),
    "temporaries": ("temporaries_bytes",),
}
"""What is in memory, from below, and the fields that are it; what comes and goes is above."""
WIDTH, HEIGHT = 1000, 240
_MOST_STEPS = 600
_MOST_COLUMNS = 3  # that a phone shows beside one another; bars it leaves out
_WITH_TEMPLATE = ("bmm", "baddbmm")
_COLUMNS = {"n": Markup(' class="num"'), "b": Markup(' class="wide"')}


def page(report: Data) -> str:
    """A report as HTML; training, which is what people look for, stands first."""
    programs = sorted(report["programs"], key=lambda one: one["stage"] != "training")
    options = (f"{k}={v}" for k, v in report["options"].items() if k != "autogen_policy")
    return _template().render(
        report=report,
        programs=programs,
        names=_names(programs),
        models=[*dict.fromkeys(one["model"] for one in programs if one["model"])],
        options=", ".join(options),
    )


def _names(programs: Sequence[Data]) -> list[str]:
    """Each program's stage, with a number where the stage has several."""
    stages = [one["stage"] for one in programs]
    return [
        f"{stage} {stages[:i].count(stage) + 1}" if stages.count(stage) > 1 else stage
        for i, stage in enumerate(stages)
    ]


@functools.cache
def _template() -> Template:
    source = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    # elements stand on lines of their own for who reads the template; in a row that were spaces
    source = re.sub(r"(?<=[>}])\n\s*|\n\s*(?=[<{])", "", source)
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters.update(
        bytes=words.in_bytes,
        flops=words.in_flops,
        time=words.in_time,
        counted=words.counted,
        date=lambda written: f"{datetime.fromisoformat(written):%Y-%m-%d %H:%M} UTC",
        number="{:,}".format,
        percent="{:.0%}".format,
        batch="batch {:,}".format,
        bar_length=lambda share: f"{ceil(1000 * min(share, 1.0)) / 10:g}",
        many=_many,
        column=lambda kinds, i: _COLUMNS.get(kinds[i : i + 1], ""),
    )
    environment.globals.update(words=words, scaling=scaling, page=sys.modules[__name__])
    return environment.from_string(source)


def _many(headers: Sequence[str], columns: str) -> str:
    """The class of a table that a narrow window shows cell by cell."""
    return Markup(' class="many"') if len(headers) - columns.count("b") > _MOST_COLUMNS else ""


def makers_of(entry: Data) -> str:
    """``of 38 traced; 40 library, 147 generated``: of how many the trace had, the compiler has
    these, and who computes them.
    """
    found = Counter(one["maker"] for one in entry["operations"])
    makers = ", ".join(f"{found[name]:,} {name}" for name in words.MAKERS if found[name])
    traced = [f"of {one['before']:,} traced" for one in entry["passes"][:1]]
    return "; ".join(filter(None, [*traced, makers]))


def fit_of(program: Data) -> str:
    """How long the fit took, all in all; empty before it has ended."""
    fit = program.get("fit")
    if fit is None:
        return ""
    return (
        f"{fit['batches']:,} batch{'es' * (fit['batches'] != 1)} in {words.in_time(fit['total_s'])}"
    )


def tuned(program: Data) -> str:
    """How many products have a generated kernel that was faster than the library's; or why none."""
    entries = program["entries"]
    found = sum(bool(call["tuned"]) for entry in entries for call in entry["calls"])
    if found:
        return words.counted(found, "product")
    kinds = [one["kind"] for entry in entries for one in entry["operations"]]
    tried = sum(kind in _WITH_TEMPLATE for kind in kinds)
    if tried:
        return f"none of {tried} batched products (bmm): the library's are faster here"
    return "nothing: batched products (bmm) alone have a template, and there are none"


def modules_of(entry: Data) -> list[tuple[Data, float]]:
    """Rows of modules and their shares of the time, the one that takes the most first."""
    order = "seconds" if entry["calls"] else "forward_flops"
    rows = sorted(entry["modules"], key=lambda row: (-row[order], -row["operations"]))
    total = words.predicted_s(rows) or 1.0
    return [(row, row["seconds"] / total) for row in rows]


def memory_of(entry: Data) -> Data:
    """The picture of memory: its areas, what the pointer shows, and what is held at the peak."""
    points = _thinned(entry["memory"]["timeline"])
    # found among the points that are left: each is the highest of its stretch
    peak, calls = max(points, key=_intermediates), [entry["calls"][one["call"]] for one in points]
    found = entry["memory"]
    # what a budget leaves in files is some of both at a time
    streamed = {key: found[key] for key in ("parameters_bytes", "optimizer_bytes")}
    there = 1 - found["files_bytes"] / max(1, sum(streamed.values()))
    resident = {key: round(there * size) for key, size in streamed.items()}
    # a point's own in place of the most
    fields = [{**found, **resident, **one} for one in points]
    layers = {
        name: [sum(one[key] for key in keys) for one in fields] for name, keys in LAYERS.items()
    }
    heights = [sum(column) for column in zip(*layers.values(), strict=True)]
    held = {name: layer[points.index(peak)] for name, layer in layers.items()}
    top, total = round_up(max(heights)), sum(held.values()) or 1
    return {
        "peak": peak,
        "top": top,
        "areas": areas([*layers.values()], top),
        "points": [*zip(calls, points, heights, strict=True)],
        "phases": [*_phases(entry)],
        "held": [
            (name, f"c{i}", size, size / total)
            for i, (name, size) in enumerate(held.items(), 1)
            if size
        ],
    }


def _intermediates(point: Data) -> int:
    return int(point["activations_bytes"] + point["temporaries_bytes"])


def _thinned(points: list[Data]) -> list[Data]:
    """At most so many points as a screen shows, of each stretch the highest."""
    stride = -(-len(points) // _MOST_STEPS)
    parts = (points[i : i + stride] for i in range(0, len(points), stride))
    return [max(part, key=_intermediates) for part in parts]


def areas(layers: Sequence[Sequence[float]], top: float) -> list[tuple[str, str]]:
    """Areas over one another, as steps of equal width: the colour of each, and its points.

    Args:
        layers: a number for each step, the lowest layer first.
        top: the number at the upper edge.
    """
    found, below = [], [0.0] * len(layers[0])
    for i, layer in enumerate(layers, 1):
        above = [a + b for a, b in zip(below, layer, strict=True)]
        if any(layer):
            corners = [*_edge(above, top), *_edge(below, top)[::-1]]
            found.append((f"c{i}", " ".join(f"{x:g},{y:g}" for x, y in corners)))
        below = above
    return found


def _edge(heights: Sequence[float], top: float) -> list[tuple[float, float]]:
    width, ys = WIDTH / len(heights), [round(HEIGHT * (1 - one / top), 2) for one in heights]
    return [(round((i + right) * width, 2), y) for i, y in enumerate(ys) for right in (0, 1)]


def round_up(number: float) -> float:
    """The next of 1, 1.25, 1.5, 1.75 times a power of two that is at least so much."""
    power = 2.0 ** int(log2(max(number, 1)))
    return next(power * step for step in (1, 1.25, 1.5, 1.75, 2, 4) if power * step >= number)


def _phases(entry: Data) -> Iterator[tuple[str, str]]:
    """Forward, backward and update below the picture, each as wide as its calls, in percent.

    A kernel is of the backward pass when most of its operations are.
    """
    backward = [
        2 * sum(one["backward"] for one in words.computed(entry, [call])) > len(call["operations"])
        for call in entry["calls"]
    ]
    count = len(backward)
    if True not in backward:
        yield "forward", "100"
        return
    begin, end = backward.index(True), count - backward[::-1].index(True)
    for name, calls in (("forward", begin), ("backward", end - begin), ("update", count - end)):
        if calls:
            yield name, f"{100 * calls / count:.2f}"


def gist(calls: Iterable[Data], computed: Sequence[Data]) -> str:
    """Which loss a kernel is, how it was chosen, whose operations it computes, and which."""
    said = [call[key] for call in calls for key in ("region", "tuned") if call[key]]
    modules = [name for name, _ in Counter(one["module"] for one in computed).most_common() if name]
    found = [kind for kind, _ in Counter(one["kind"] for one in computed).most_common()]
    kinds = words.few(found, 4) if len(found) > 1 else ""
    return " · ".join(filter(None, [*dict.fromkeys(said), words.few(modules, 2), kinds]))


def alike(operations: Iterable[Data]) -> list[tuple[Data, int]]:
    """Operations with the user's module and line, and how many are just like each."""
    keys = ("kind", "module", "backward", "line", "source", "result")
    found = Counter(tuple(one[key] for key in keys) for one in operations)
    return [(dict(zip(keys, one, strict=True)), count) for one, count in found.items()]


def kinds_of(entry: Data) -> Iterator[tuple[str, str, list[Data], float]]:
    """Operations by kind and maker, the most frequent first, and how many that is of the most."""
    groups: dict[tuple[str, str], list[Data]] = defaultdict(list)
    for one in entry["operations"]:
        groups[one["kind"], one["maker"]].append(one)
    most = max(map(len, groups.values()), default=1)
    for key in sorted(groups, key=lambda key: (-len(groups[key]), key)):
        yield *key, groups[key], len(groups[key]) / most


def changes_of(one: Data) -> list[str]:
    """How many operations of which kind a pass changed, the largest change first."""
    changes = sorted(one["changes"].items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    return [f"{kind} {before} → {after}" for kind, (before, after) in changes]


def machines_of(entry: Data, batches: Sequence[int]) -> Iterator[tuple[str, int, list[Any]]]:
    """Rows of the roofline: a machine, how many of it, and what bounds it for each batch."""
    found = {(one["system"], one["systems"], one["batch_size"]): one for one in entry["roofline"]}
    for system, systems in dict.fromkeys(key[:2] for key in found):
        yield system, systems, [found.get((system, systems, batch)) for batch in batches]


def phases_of(program: Data) -> list[tuple[str, float, float]]:
    """How long building took, by phase, and that as a share of the longest."""
    phases: Counter[str] = Counter()
    for source in (program, *program["entries"]):
        phases.update(source["seconds"])
    longest, order = max(phases.values(), default=0) or 1, [*PHASES, *phases]
    names = sorted(filter(phases.get, phases), key=order.index)
    return [(PHASES.get(name, name), phases[name], phases[name] / longest) for name in names]
