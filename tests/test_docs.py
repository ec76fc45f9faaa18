"""The links of README.md, its neighbours and docs/ lead somewhere; the site has every page."""

from __future__ import annotations

import re

import pytest
from build_docs import (
    ERRORS,
    LINK,
    NAV,
    ROOT,
    anchors,
    links,
    navigation,
    outside_code,
    pages,
    place,
    target,
)


def broken() -> list[str]:
    """Each relative link whose file or anchor does not exist."""
    neighbours = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("*.md")}
    texts = pages() | neighbours
    found = []
    for source, text in texts.items():
        for path, anchor in links(text):
            led = target(source, path)
            lost = not (ROOT / led).is_file()
            if lost or (anchor and anchor not in anchors(texts.get(led, ""))):
                found.append(f"{source}: {path}#{anchor}")
    return found


def test_every_relative_link_leads_to_a_file_and_an_anchor_that_exist() -> None:
    assert sum(1 for text in pages().values() for _ in links(text)) > 100
    assert broken() == []


def test_links_are_those_outside_code() -> None:
    text = (
        "[a](b.md#c) `[d](e.md)`\n\n    [f](g.md)\n\n[`h`](#i) [j](http://k)\n```\n[l](m.md)\n```\n"
    )
    assert list(links(text)) == [("b.md", "c"), ("", "i")]
    assert outside_code(text, lambda part: LINK.sub("", part)).count("()") == 2


def test_pictures_in_html_are_links_too() -> None:
    text = '<source srcset="docs/a.png">\n<img src="docs/b.png" alt="c">'
    assert list(links(text)) == [("docs/a.png", ""), ("docs/b.png", "")]


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("## A loss that is not finite", "a-loss-that-is-not-finite"),
        ("## `DataExecutor(loader, num_steps=None)`", "dataexecutorloader-num_stepsnone"),
        ("### Frozen, with a warning - or two", "frozen-with-a-warning---or-two"),
        ('### <a id="if"></a>`if tensor:`', "if"),
        ("# Twice\n\n# Twice", "twice-1"),
    ],
)
def test_anchors_are_githubs(heading: str, anchor: str) -> None:
    assert anchor in anchors(heading)
    assert anchor not in anchors(f"```\n{heading}\n```")


def test_the_navigation_has_every_page_and_none_that_does_not_exist() -> None:
    named = {name for names in NAV.values() for name in names}
    here = {place(source) for source in pages() if not source.startswith(ERRORS)}
    assert {f"{name}.md" for name in named} | {"index.md"} >= here
    listed = re.findall(r"\w+\.md", str(navigation()))
    assert sorted(listed) == sorted(here)


def test_the_readme_is_short_and_links_every_page() -> None:
    led = {target("README.md", path) for path, _ in links(pages()["README.md"])}
    assert {source for source in pages() if source.startswith("docs/")} - led == set()
    assert len(pages()["README.md"].splitlines()) <= 150
