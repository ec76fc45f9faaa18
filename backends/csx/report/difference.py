"""Two reports side by side: what a change did to the graph, the kernels and the cost.

Programs are compared with those of the same stage, in their order; entry points by name. Kernels
are the same when their source is, whatever they are called. Predicted seconds are told where there
is another difference: this machine's peaks are measured anew by each run.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from fulgurite.backends.csx.report.kernels import few, short
from fulgurite.backends.csx.report.table import moved_bytes
from fulgurite.backends.csx.report.words import counted, in_bytes, in_flops, in_time

Data = dict[str, Any]


def lines(before: Data, after: Data) -> list[str]:
    """What differs, a line each; one line where nothing does."""
    told = [*_options(before, after)]
    ours, others = _named(before), _named(after)
    for name in dict.fromkeys([*ours, *others]):
        if name not in others:
            told.append(f"- {name} program")
        elif name not in ours:
            told.append(f"+ {name} program: {others[name]['headline']}")
        elif found := [*_program(ours[name], others[name])]:
            told += [f"{name} program", *(f"  {line}" for line in found)]
    return told or [f"equal: {counted(len(ours), 'program')}, {', '.join(ours)}"]


def _named(report: Data) -> dict[str, Data]:
    """Programs by their stage, with a number from the second on."""
    seen: Counter[str] = Counter()
    named = {}
    for program in report["programs"]:
        seen[program["stage"]] += 1
        number = seen[program["stage"]]
        named[program["stage"] + (f" {number}" if number > 1 else "")] = program
    return named


def _options(before: Data, after: Data) -> Iterator[str]:
    for key in ("options", "versions"):
        for name in sorted({*before[key], *after[key]}):
            old, new = before[key].get(name, "default"), after[key].get(name, "default")
            if old != new:
                yield f"{name}: {old} -> {new}"


def _program(before: Data, after: Data) -> Iterator[str]:
    for what, key in (("input", "inputs"), ("state", "state")):
        yield from _listed(what, before[key], after[key])
    ours, others = ({e["name"]: e for e in one["entries"]} for one in (before, after))
    for name in dict.fromkeys([*ours, *others]):
        if name not in others:
            yield f"- entry point {name}"
        elif name not in ours:
            yield f"+ entry point {name}"
        elif found := [*_entry(ours[name], others[name])]:
            several = len(ours) > 1 or len(others) > 1
            yield from [f"entry point {name}"] if several else []
            yield from found


def _listed(what: str, before: Iterable[str], after: Iterable[str]) -> Iterator[str]:
    """Tensors that came, went or have another form; each is ``name: form``."""
    old, new = (dict(line.split(": ", 1) for line in lines) for lines in (before, after))
    for name in dict.fromkeys([*old, *new]):
        if name not in new:
            yield f"- {what} {name}: {old[name]}"
        elif name not in old:
            yield f"+ {what} {name}: {new[name]}"
        elif old[name] != new[name]:
            forms = [old[name], new[name]]
            layouts, rest = zip(*(form.rpartition("]")[::2] for form in forms), strict=True)
            if rest[0] == rest[1]:  # "replicated, updated"
                forms = [f"{layout}]" for layout in layouts]
            yield f"~ {what} {name}: {' -> '.join(forms)}"


def _entry(before: Data, after: Data) -> Iterator[str]:
    found = [*_operations(before, after), *_kernels(before, after)]
    costs = [*_costs(before, after)]
    if before["how"] != after["how"] and before["compiled"] != after["compiled"]:
        yield f"how: {before['how']} -> {after['how']}"
    if found or costs:
        yield from costs
        if before["calls"] and after["calls"]:
            yield from _changed("predicted time", _seconds(before), _seconds(after), in_time)
    yield from found


def _operations(before: Data, after: Data) -> Iterator[str]:
    """Kinds of operations of a module: more or fewer of them, or of other shapes."""
    old, new = _by_place(before), _by_place(after)
    for place in sorted({*old, *new}):
        less, more = old.get(place, Counter()), new.get(place, Counter())
        module, direction, kind = place
        where = f"in {direction}{module}" if module else f"{direction}elsewhere".strip()
        if less.total() != more.total():
            sign = "+" if more.total() > less.total() else "-"
            count = counted(abs(more.total() - less.total()), "operation")
            yield f"{sign} {count} {kind} {where}"
        elif less != more:
            shapes = [next(iter(only.elements())) for only in (less - more, more - less)]
            yield f"~ {kind} {where}: {' -> '.join(shapes)}"


def _by_place(entry: Data) -> dict[tuple[str, str, str], Counter[str]]:
    places: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for one in entry["operations"]:
        direction = "the backward pass of " if one["backward"] else ""
        places[one["module"], direction, one["kind"]][one["result"]] += 1
    return places


def _kernels(before: Data, after: Data) -> Iterator[str]:
    """Kernels that came, went, or compute the same operations by another source."""
    old, new = _by_content(before), _by_content(after)
    gone = [call for key, calls in old.items() for call in calls[len(new.get(key, ())) :]]
    came = [call for key, calls in new.items() for call in calls[len(old.get(key, ())) :]]
    waiting: dict[str, list[Data]] = defaultdict(list)
    for call in gone:
        waiting[_computes(before, call)].append(call)
    fresh, pairs = [], defaultdict[tuple[str, str], list[int]](list)
    for call in came:
        if same := waiting[_computes(after, call)]:
            pairs[_called(same.pop(0)), _called(call)] += call["operations"]
        else:
            fresh.append(call)
    for (one, other), positions in pairs.items():
        yield f"~ kernel {one} -> {other}: {_gist(after, positions)}"
    left = [call for calls in waiting.values() for call in calls]
    yield from _told("-", before, left)
    yield from _told("+", after, fresh)


def _told(sign: str, entry: Data, calls: list[Data]) -> Iterator[str]:
    """A line for each kernel, with its calls."""
    kernels: dict[str, list[Data]] = defaultdict(list)
    for call in calls:
        kernels[_called(call)].append(call)
    for name, found in kernels.items():
        positions = [i for call in found for i in call["operations"]]
        count = f", {len(found)} calls" * (len(found) > 1)
        yield f"{sign} kernel {name}{count}: {_gist(entry, positions)}"


def _by_content(entry: Data) -> dict[str, list[Data]]:
    calls: dict[str, list[Data]] = defaultdict(list)
    for call in entry["calls"]:
        source = entry["sources"].get(call["kernel"])
        content = call["kernel"]
        if source is not None:
            content = hashlib.sha256(source.replace(call["kernel"], "").encode()).hexdigest()
        calls[f"{content} {call['maker']} {call['region']} {call['tuned']}"].append(call)
    return calls


def _computes(entry: Data, call: Data) -> str:
    found = (entry["operations"][i] for i in call["operations"])
    return str(sorted((one["kind"], one["module"], one["backward"]) for one in found))


def _called(call: Data) -> str:
    name = short(call["kernel"])
    told = ", ".join(filter(None, (call["maker"], call["region"], call["tuned"])))
    return f"{name} ({told})"


def _gist(entry: Data, positions: list[int]) -> str:
    """What kernels compute, in a few words."""
    found = [entry["operations"][i] for i in positions]
    names = list(dict.fromkeys(one["kind"] for one in found))
    modules = list(dict.fromkeys(one["module"] for one in found if one["module"]))
    return f"{few(names, 4)} of {few(modules, 2)}" if modules else few(names, 4)


def _costs(before: Data, after: Data) -> Iterator[str]:
    yield from _changed("operations", len(before["operations"]), len(after["operations"]), _plain)
    yield from _changed("kernel calls", len(before["calls"]), len(after["calls"]), _plain)
    yield from _changed("FLOPs", before["flops"], after["flops"], in_flops)
    if before["processes"] != after["processes"]:
        yield f"processes: {before['processes']} -> {after['processes']}"
    old, new = (_collectives(entry) for entry in (before, after))
    yield from _changed("collectives", old, new, _plain)
    if not (before["calls"] and after["calls"]):
        return  # the rest is not known of what was only checked
    old, new = (moved_bytes(entry["calls"]) for entry in (before, after))
    yield from _changed("bytes", old, new, in_bytes)
    old, new = (sum(call["sent_bytes"] for call in entry["calls"]) for entry in (before, after))
    yield from _changed("bytes sent by a process", old, new, in_bytes)
    for key in ("peak_bytes", "activations_bytes", "parameters_bytes", "optimizer_bytes"):
        old, new = ((entry["memory"] or {}).get(key, 0) for entry in (before, after))
        yield from _changed(f"{key.removesuffix('_bytes')} memory", old, new, in_bytes)


def _collectives(entry: Data) -> int:
    return len(entry["messages"]) if entry["processes"] > 1 else 0


def _seconds(entry: Data) -> float:
    return float(sum(call["seconds"] for call in entry["calls"]))


def _changed(name: str, before: float, after: float, told: Any) -> Iterator[str]:
    if told(before) != told(after):
        part = f" ({after / before - 1:+.1%})" if before and after else ""
        yield f"{name}: {told(before)} -> {told(after)}{part}"


def _plain(number: float) -> str:
    return f"{number:,.0f}"
