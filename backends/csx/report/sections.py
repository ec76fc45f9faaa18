"""Sections of the page: summary, passes, warnings, compile time, and the numbers at the top."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fulgurite.backends.csx.report.kernels import COMPUTED_BY
from fulgurite.backends.csx.report.markup import (
    Safe,
    details,
    facts,
    join,
    mono,
    muted,
    table,
    tag,
)
from fulgurite.backends.csx.report.pictures import bar
from fulgurite.backends.csx.report.words import counted, in_bytes, in_flops, in_time

Data = dict[str, Any]

PHASES = {"captured": "traced", "generate": "code generated", "compile": "C++ compiled"}
PHASES |= {"compiled": "compiled, in all", "loaded": "loaded from the cache", "waited": "in all"}
_MOST_CHANGES = 6


def tiles(program: Data, entry: Data) -> Safe:
    """The numbers to look at first."""
    calls, memory = entry["calls"], entry["memory"]
    moved = sum(call["read_bytes"] + call["written_bytes"] for call in calls)
    shown = [("operations", f"{len(entry['operations']):,}", makers_of(entry))]
    if calls:
        shown.append(("kernel calls", f"{len(calls):,}", _kernels(calls)))
    shown.append(("FLOPs a step", in_flops(entry["flops"]), "matrix products, convolutions"))
    if calls:
        shown.append(("bytes a step", in_bytes(moved), "read and written"))
        time = sum(call["seconds"] for call in calls)
        shown.append(("predicted step", in_time(time), _bound(entry)))
    if memory is not None:
        kept = memory["activations_bytes"]
        shown.append(
            ("peak memory", in_bytes(memory["peak_bytes"]), f"activations {in_bytes(kept)}")
        )
    shown.append(("built in", in_time(program["seconds"].get("waited", 0.0)), _how(entry)))
    return tag(
        "div",
        *(
            tag("div", tag("span", name), tag("b", value), tag("span", note))
            for name, value, note in shown
        ),
        class_="tiles",
    )


def makers_of(entry: Data) -> str:
    """``40 library, 147 generated``: who computes operations."""
    makers = [one["maker"] for one in entry["operations"]]
    found = {name: makers.count(name) for name in COMPUTED_BY if name in makers}
    return ", ".join(f"{count:,} {name}" for name, count in found.items())


def _kernels(calls: list[Data]) -> str:
    return f"of {counted(len({call['kernel'] for call in calls}), 'kernel')}"


def _how(entry: Data) -> str:
    """What runs it, without the reason."""
    return str(entry["how"]).partition(" (")[0]


def _bound(entry: Data) -> str:
    return f"bound by {entry['roofline'][0]['bound']}" if entry["roofline"] else ""


_WITH_TEMPLATE = ("bmm", "baddbmm")


def summary(program: Data, options: Mapping[str, Any]) -> Safe:
    """What the program is, in words."""
    state = program["state"]
    return facts(
        [
            ("fabric", program["fabric"]),
            ("policy", str(options.get("autogen_policy", ""))),
            ("tuned", _tuned(program) if options.get("autogen_policy") == "aggressive" else ""),
            (
                "options",
                ", ".join(f"{k}={v}" for k, v in options.items() if k != "autogen_policy"),
            ),
            ("how", "; ".join(dict.fromkeys(entry["how"] for entry in program["entries"]))),
            ("why another program", program["reason"]),
            ("inputs", join(map(mono, program["inputs"]), ", ")),
            ("state", _listed(state) if state else "none"),
        ]
    )


def _tuned(program: Data) -> str:
    """How many products have a generated kernel that was faster than the library's; or why none."""
    entries = program["entries"]
    tuned = sum(bool(call["tuned"]) for entry in entries for call in entry["calls"])
    if tuned:
        return counted(tuned, "product")
    kinds = [one["kind"] for entry in entries for one in entry["operations"]]
    tried = sum(kind in _WITH_TEMPLATE for kind in kinds)
    if tried:
        return f"none of {tried} batched products (bmm): the library's are faster here"
    return "nothing: batched products (bmm) alone have a template, and there are none"


def _listed(names: list[str]) -> Safe:
    rows = join(tag("div", mono(name)) for name in names)
    return tag("details", tag("summary", counted(len(names), "tensor")), rows)


def passes(entry: Data) -> list[Safe]:
    """How many operations each pass left, and of which kinds."""
    rows = []
    for one in entry["passes"]:
        changes = sorted(one["changes"].items(), key=lambda item: -abs(item[1][1] - item[1][0]))
        told = [f"{kind} {before} → {after}" for kind, (before, after) in changes]
        difference = one["after"] - one["before"]
        rows.append(
            (
                tag("span", mono(one["name"]), class_="name"),
                f"{one['before']:,}",
                f"{one['after']:,}",
                f"{difference:+,}" if difference else "",
                _changes(told) if told else muted("as many of each kind"),
            )
        )
    said = "Operations before and after each pass over the graph, in the order in which they ran."
    headers = ["pass", "before", "after", "", "kinds that changed"]
    if not rows:
        return [tag("p", "No pass was seen.")]
    return [tag("p", said), table(headers, rows, "what passes changed", " nnn")]


def _changes(told: list[str]) -> Safe:
    """The largest changes, and the others when they are asked for."""
    most = ", ".join(told[:_MOST_CHANGES])
    if len(told) <= _MOST_CHANGES:
        return tag("div", most, class_="changes")
    others = details(f"{len(told) - _MOST_CHANGES} more", ", ".join(told[_MOST_CHANGES:]))
    return tag("div", most, others, class_="changes")


def warnings(program: Data) -> list[Safe]:
    """What was warned of while the program was built, and why it is not compiled."""
    shown = [
        tag("p", join([tag("strong", f"{one['category']}: "), one["text"], f"\n{one['place']}"]))
        for one in program["warnings"]
    ]
    shown += [
        tag("p", f"{entry['name']}: {entry['how']}")
        for entry in program["entries"]
        if entry["calls"] and not entry["compiled"]
    ]
    return [tag("div", one, class_="warning") for one in shown] or [
        tag("p", "Nothing was warned of.")
    ]


def building(program: Data) -> list[Safe]:
    """How long building took, by phase."""
    phases: dict[str, float] = {}
    for source in (program, *program["entries"]):
        for name, taken_s in source["seconds"].items():
            phases[name] = phases.get(name, 0.0) + taken_s
    longest = max(phases.values(), default=0.0) or 1.0
    order = [*PHASES, *phases]
    rows = [
        (PHASES.get(name, name), in_time(phases[name]), Safe(bar(phases[name] / longest)))
        for name in sorted(phases, key=order.index)
        if phases[name]
    ]
    return [table(["phase", "time", ""], rows, "compile time by phase", " nb")]
