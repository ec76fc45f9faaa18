"""Two reports side by side: what a change did to the graph, the kernels and the cost.

Programs are compared with those of the same stage, in their order; entry points by name. Kernels
are the same when their source is, whatever they are called. Predicted seconds are told where there
is another difference: this machine's peaks are measured anew by each run.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

from fulgurite.backends.report.words import (
    Data,
    computed,
    counted,
    few,
    in_bytes,
    in_flops,
    in_time,
    moved_bytes,
    predicted_s,
    sent_bytes,
    short,
)


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
            # what is equal on both sides is left out: the layouts are the news
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
            yield from _changed(
                "predicted time", in_time, lambda one: predicted_s(one["calls"]), before, after
            )
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
        # what computes the same operations by another source took its place
        waiting[_computes(before, call)].append(call)
    fresh, pairs = [], defaultdict[tuple[str, str], list[Data]](list)
    for call in came:
        if same := waiting[_computes(after, call)]:
            pairs[_called(same.pop(0)), _called(call)].append(call)
        else:
            fresh.append(call)
    for (one, other), calls in pairs.items():
        yield f"~ kernel {one} -> {other}: {_gist(after, calls)}"
    left = [call for calls in waiting.values() for call in calls]
    yield from _told("-", before, left)
    yield from _told("+", after, fresh)


def _told(sign: str, entry: Data, calls: list[Data]) -> Iterator[str]:
    """A line for each kernel, with its calls."""
    kernels: dict[str, list[Data]] = defaultdict(list)
    for call in calls:
        kernels[_called(call)].append(call)
    for name, found in kernels.items():
        count = f", {len(found)} calls" * (len(found) > 1)
        yield f"{sign} kernel {name}{count}: {_gist(entry, found)}"


def _by_content(entry: Data) -> dict[str, list[Data]]:
    calls: dict[str, list[Data]] = defaultdict(list)
    for call in entry["calls"]:
        source = entry["sources"].get(call["kernel"])
        content = call["kernel"]
        if source is not None:
            # a kernel's name is made of its source and of what it was compiled with: another torch
            # names the same source otherwise
            content = hashlib.sha256(source.replace(call["kernel"], "").encode()).hexdigest()
        calls[f"{content} {call['maker']} {call['region']} {call['tuned']}"].append(call)
    return calls


def _computes(entry: Data, call: Data) -> str:
    found = computed(entry, [call])
    return str(sorted((one["kind"], one["module"], one["backward"]) for one in found))


def _called(call: Data) -> str:
    name = short(call["kernel"])
    told = ", ".join(filter(None, (call["maker"], call["region"], call["tuned"])))
    return f"{name} ({told})"


def _gist(entry: Data, calls: list[Data]) -> str:
    """What kernels compute, in a few words."""
    found = computed(entry, calls)
    names = list(dict.fromkeys(one["kind"] for one in found))
    modules = list(dict.fromkeys(one["module"] for one in found if one["module"]))
    return f"{few(names, 4)} of {few(modules, 2)}" if modules else few(names, 4)


def _costs(*both: Data) -> Iterator[str]:
    yield from _changed("operations", _plain, lambda one: len(one["operations"]), *both)
    yield from _changed("kernel calls", _plain, lambda one: len(one["calls"]), *both)
    yield from _changed("FLOPs", in_flops, lambda one: one["flops"], *both)
    processes = [one["processes"] for one in both]
    if processes[0] != processes[1]:
        yield f"processes: {processes[0]} -> {processes[1]}"
    yield from _changed("collectives", _plain, _collectives, *both)
    if not all(one["calls"] for one in both):
        return  # the rest is not known of what was only checked
    yield from _changed("bytes", in_bytes, lambda one: moved_bytes(one["calls"]), *both)
    yield from _changed(
        "bytes sent by a process", in_bytes, lambda one: sent_bytes(one["calls"]), *both
    )
    for name in ("peak", "activations", "parameters", "optimizer"):
        figure = functools.partial(_held_bytes, name)
        yield from _changed(f"{name} memory", in_bytes, figure, *both)


def _held_bytes(name: str, entry: Data) -> int:
    return int((entry["memory"] or {}).get(f"{name}_bytes", 0))


def _collectives(entry: Data) -> int:
    return len(entry["messages"]) if entry["processes"] > 1 else 0


def _changed(
    name: str, told: Callable[[float], str], figure: Callable[[Data], float], *both: Data
) -> Iterator[str]:
    """A figure of two entry points, where it reads otherwise."""
    before, after = map(figure, both)
    if told(before) != told(after):
        part = f" ({after / before - 1:+.1%})" if before and after else ""
        yield f"{name}: {told(before)} -> {told(after)}{part}"


_plain = "{:,.0f}".format
