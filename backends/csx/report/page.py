"""The page: ``report.html``, one file that needs no other, and no JavaScript."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fulgurite.backends.csx.report import sections, spent, systems
from fulgurite.backends.csx.report.kernels import kernels, operations
from fulgurite.backends.csx.report.markup import Safe, join, safe, section, tag
from fulgurite.backends.csx.report.style import CSS

Data = dict[str, Any]

OF_ENTRY = {
    "modules": ("FLOPs, bytes and time by module", spent.modules),
    "memory": ("Memory", spent.memory),
    "kernels": ("Kernels", kernels),
    "operations": ("Operations", operations),
    "passes": ("Passes", sections.passes),
    "roofline": ("Roofline", spent.roofline),
    "systems": ("On more systems", systems.systems),
}
OF_PROGRAM = {
    "warnings": ("Warnings", sections.warnings),
    "building": ("Compile time", sections.building),
}
"""Key of a section -> its title, and what makes it."""


def page(report: Data) -> str:
    """A report as HTML; training, which is what people look for, stands first."""
    programs = sorted(report["programs"], key=lambda one: one["stage"] != "training")
    report = {**report, "programs": programs}
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    names = [_name(report, i) for i in range(len(report["programs"]))]
    title = f"Fulgurite report: {', '.join(names)}"
    links = [tag("a", tag("b", name), href=f"#p{i}") for i, name in enumerate(names)]
    body = [
        tag("header", tag("div", tag("h1", "Fulgurite report"), tag("p", versions))),
        tag("nav", tag("div", *links)),
        tag("main", *(_program(report, i, names[i]) for i in range(len(names)))),
        tag("footer", f"Written {report['written']}. The same as data: report.json."),
    ]
    head = join(
        [
            Safe('<meta charset="utf-8">'),
            Safe('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Safe('<link rel="icon" href="data:,">'),
            tag("title", title),
            Safe(f"<style>{CSS}</style>"),
        ]
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{join(body)}</body></html>\n'


def _name(report: Data, i: int) -> str:
    """A program's stage, with a number where the stage has several."""
    stages = [one["stage"] for one in report["programs"]]
    before = stages[:i].count(stages[i])
    return f"{stages[i]} {before + 1}" if stages.count(stages[i]) > 1 else str(stages[i])


def _links(program: Data, at: str) -> list[Safe]:
    last = len(program["entries"]) - 1
    parts = [(f"{at}e{last}-{key}", title) for key, (title, _) in OF_ENTRY.items()]
    parts += [(f"{at}-{key}", title) for key, (title, _) in OF_PROGRAM.items()]
    return [tag("a", title, href=f"#{where}") for where, title in parts]


def _program(report: Data, i: int, name: str) -> Safe:
    program, at = report["programs"][i], f"p{i}"
    summary = section(
        "summary", "Summary", f"{at}-summary", sections.summary(program, report["options"])
    )
    parts = [tag("h2", name), tag("p", program["headline"])]
    parts.append(tag("p", *_links(program, at), class_="jump"))
    several = len(program["entries"]) > 1
    for j, entry in enumerate(program["entries"]):
        title = [tag("p", f"Entry point {entry['name']}", class_="entry")] if several else []
        parts += [summary] if several and j == 0 else []
        parts += [*title, sections.tiles(program, entry)]
        parts += [] if several else [summary]
        parts += _sections(entry, f"{at}e{j}")
    parts += [
        section(key, title, f"{at}-{key}", *shown)
        for key, (title, make) in OF_PROGRAM.items()
        if (shown := [safe(one) for one in make(program)])
    ]
    return tag("article", *parts, id=at)


def _sections(entry: Data, at: str) -> Iterator[Safe]:
    for key, (title, make) in OF_ENTRY.items():
        yield section(key, title, f"{at}-{key}", *make(entry))
