"""HTML by hand: what is not ``Safe`` is escaped, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Safe(str):
    """Text that is HTML already."""

    __slots__ = ()


def safe(text: str) -> Safe:
    """Text as HTML; what is HTML stays as it is."""
    return text if isinstance(text, Safe) else Safe(escape(text))


def join(parts: Iterable[str], between: str = "") -> Safe:
    """Parts as one."""
    return Safe(safe(between).join(map(safe, parts)))


def tag(name: str, *inside: str, **attributes: str) -> Safe:
    """An element; ``class_`` and ``aria_label`` are ``class`` and ``aria-label``."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
    )
    return Safe(f"<{name}{given}>{join(inside)}</{name}>")


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], label: str, numbers: str = ""
) -> Safe:
    """A table in a box that scrolls sideways by itself.

    Args:
        headers: of the columns.
        rows: cells.
        label: what it shows, for those who do not see it.
        numbers: a letter for each column: ``n`` to the right, ``b`` as wide as a bar, else a space.
    """
    kinds = [{"n": "num", "b": "wide"}.get(one, "") for one in numbers.ljust(len(headers))]
    head = join(_cell("th", cell, kind) for cell, kind in zip(headers, kinds, strict=True))
    body = join(
        tag("tr", *(_cell("td", cell, kind) for cell, kind in zip(row, kinds, strict=True)))
        for row in rows
    )
    inside = tag("table", tag("thead", tag("tr", head)), tag("tbody", body))
    return tag("div", inside, class_="scroll", tabindex="0", role="region", aria_label=label)


def _cell(name: str, inside: str, kind: str) -> Safe:
    return tag(name, inside, class_=kind) if kind else tag(name, inside)


def details(summary: str, *inside: str, class_: str = "") -> Safe:
    """What opens when its summary is clicked."""
    return tag(
        "details", tag("summary", summary), *inside, **({"class_": class_} if class_ else {})
    )


def code(text: str) -> Safe:
    """Source text, in a box that scrolls."""
    return tag("pre", tag("code", text), tabindex="0")


def mono(text: str) -> Safe:
    """A name from a program."""
    return tag("code", text)


def muted(text: str) -> Safe:
    """What is said by the way."""
    return tag("span", text, class_="muted")


def facts(pairs: Iterable[tuple[str, str]]) -> Safe:
    """Names and values; those without a value are left out."""
    return tag(
        "dl",
        *(join([tag("dt", name), tag("dd", value)]) for name, value in pairs if value),
        class_="facts",
    )


def swatch(kind: str) -> Safe:
    """A small square in the colour of a class."""
    square = f'<svg viewBox="0 0 1 1"><rect class="{kind}" width="1" height="1"/></svg>'
    return tag("span", Safe(square), class_="key")


def section(key: str, title: str, id_: str, *inside: str) -> Safe:
    """A section of the page: ``key`` says which it is."""
    return tag("section", tag("h3", title), *inside, id=id_, data_section=key)
