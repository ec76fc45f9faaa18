"""The page in a browser: headless Chromium, wide and on a phone, light and dark.

Screenshots are kept in runs/report. Without Chromium the tests are skipped, where CHROMIUM_NEEDED
is set they fail: .ci/run sets it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, found
from reports import OF_ENTRY, OF_PROGRAM, accumulated, full

from fulgurite.backends.report.page import page

pytestmark = [pytest.mark.browser, pytest.mark.fits]

KEPT = Path(__file__).parents[3] / "runs" / "report"
LEAST_CONTRAST = 4.5
"""Of text: level AA of the Web Content Accessibility Guidelines 2.2, criterion 1.4.3."""

SECTIONS = """
[...document.querySelectorAll('[data-section]')].map(one => {
  const box = one.getBoundingClientRect();
  return [one.dataset.section, box.width, box.height, one.innerText.trim().length];
})
"""
AREAS = """
[...document.querySelectorAll('.area polygon')].map(one => {
  const box = one.getBoundingClientRect();
  return [box.width, box.height];
})
"""
OVERFLOWING = """
(() => {
  const wide = document.documentElement.clientWidth, inside = one => {
    for (let up = one.parentElement; up; up = up.parentElement)
      if (['auto', 'hidden', 'scroll'].includes(getComputedStyle(up).overflowX)) return true;
    return false;
  };
  const out = [...document.body.querySelectorAll('*')].filter(one =>
    one.getBoundingClientRect().right > wide + 0.5 && !inside(one));
  return [document.documentElement.scrollWidth, wide, out.map(one => one.outerHTML.slice(0, 99))];
})()
"""
TEXTS = """
(() => {
  const number = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const behind = one => {
    for (; one; one = one.parentElement) {
      const [r, g, b, a = 1] = number(getComputedStyle(one).backgroundColor);
      if (a === 1) return [r, g, b];
      if (a > 0) throw Error('half transparent: ' + one.outerHTML.slice(0, 99));
    }
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), seen = {};
  while (walker.nextNode()) {
    const one = walker.currentNode.parentElement, style = getComputedStyle(one);
    if (!walker.currentNode.textContent.trim() || !one.getClientRects().length) continue;
    if (one.closest('svg')) continue;
    const key = [number(style.color), behind(one), parseFloat(style.fontSize)];
    seen[JSON.stringify(key)] = one.outerHTML.slice(0, 99);
  }
  return Object.entries(seen);
})()
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for all tests of this file."""
    path = found()
    if path is None:
        missing = "Chromium is not installed: apt-get install chromium"
        if os.environ.get("CHROMIUM_NEEDED"):
            pytest.fail(missing)
        pytest.skip(missing)
    opened = Browser(path)
    yield opened
    opened.close()


@pytest.fixture(
    params=[(1280, False), (1280, True), (390, False), (390, True)],
    ids=["wide-light", "wide-dark", "phone-light", "phone-dark"],
)
def shown(request: pytest.FixtureRequest, browser: Browser, tmp_path: Path) -> Browser:
    """A browser that shows a page with all there is."""
    file = tmp_path / "report.html"
    file.write_text(page(full(accumulated())), encoding="utf-8")
    browser.said.clear()
    width, dark = request.param
    browser.open(file, width, dark)
    return browser


def opened(browser: Browser) -> Browser:
    """The same with everything open."""
    browser.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    return browser


def test_every_section_is_there_to_be_read(shown: Browser, request: pytest.FixtureRequest) -> None:
    shown.screenshot(KEPT / f"{request.node.callspec.id}.png")
    sections = shown.run(SECTIONS)
    assert {name for name, *_ in sections} == {"summary", *OF_ENTRY, *OF_PROGRAM}
    for name, width, height, text in sections:
        assert width > 300, name
        assert height > 50, name
        assert text > 20, name
    areas = shown.run(AREAS)
    assert len(areas) >= 3 * 3  # three entry points
    assert min(map(min, areas)) > 0


def test_the_page_never_scrolls_sideways(shown: Browser) -> None:
    for browser in (shown, opened(shown)):
        scroll, width, out = browser.run(OVERFLOWING)
        assert out == []
        assert scroll == width in (1280, 390)


def test_no_table_is_cut_in_a_narrow_window(shown: Browser) -> None:
    wider = "[...document.querySelectorAll('.scroll')].filter(o => o.scrollWidth > o.clientWidth)"
    # an element of a closed part has no width
    assert opened(shown).run(f"{wider}.map(one => one.innerHTML.slice(0, 300))") == []


def test_all_text_stands_out_and_is_large_enough(shown: Browser) -> None:
    texts = opened(shown).run(TEXTS)
    assert len(texts) >= 5
    for key, where in texts:
        colour, behind, size = json.loads(key)
        assert contrast(colour, behind) >= LEAST_CONTRAST, where
        assert size >= 12, where


def test_light_and_dark_are_what_the_reader_asks_for(
    shown: Browser, request: pytest.FixtureRequest
) -> None:
    colour = shown.run("getComputedStyle(document.body).backgroundColor")
    red, green, blue = (int(part) for part in colour[4:-1].split(","))
    assert (luminance([red, green, blue]) < 0.1) == request.node.callspec.id.endswith("dark")


def test_the_console_stays_empty_and_nothing_is_asked_for(shown: Browser) -> None:
    opened(shown).run("scrollTo(0, 9999)")
    assert shown.said == []
    assert shown.run("document.scripts.length") == 0


def test_a_page_that_is_wrong_is_noticed(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "wrong.html"
    wrong = '<p style="width:900px;color:#999;background:#fff">wide and pale</p>'
    script = "<script>console.error('said'); missing();</script><img src='none.png'>"
    phone = '<meta name="viewport" content="width=device-width">'
    file.write_text(f"<!doctype html>{phone}{wrong}{script}", encoding="utf-8")
    browser.said.clear()
    browser.open(file, 390, dark=False)
    scroll, width, out = browser.run(OVERFLOWING)
    assert scroll > width
    assert len(out) == 1
    [(key, _)] = browser.run(TEXTS)
    assert contrast(*json.loads(key)[:2]) < LEAST_CONTRAST
    words = ("said", "missing", "none.png")
    browser.wait(lambda: all(word in str(browser.said) for word in words))


def contrast(one: list[float], other: list[float]) -> float:
    """The contrast ratio of two colours, from 1 to 21 (WCAG 2.2)."""
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def luminance(colour: list[float]) -> float:
    """The relative luminance of red, green and blue from 0 to 255 (WCAG 2.2)."""
    linear: list[Any] = []
    for part in (value / 255 for value in colour):
        linear.append(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
    return float(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
