"""The page as text: whole by itself, and nothing of a user's is taken for HTML."""

from __future__ import annotations

import copy
import re
from html.parser import HTMLParser

import pytest
from reports import HOSTILE, OF_ENTRY, OF_PROGRAM, accumulated, full

from fulgurite.backends.report.page import HEIGHT, WIDTH, areas, page, round_up
from fulgurite.backends.report.words import in_bytes, in_flops, in_time

pytestmark = pytest.mark.fits

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Elements(HTMLParser):
    """What a browser would make of a page: its elements, its text, and what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.open, self.wrong = "", list[str](), list[str]()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def elements() -> Elements:
    """Of a page with all that there is, and hostile names in it."""
    return Elements(page(full(accumulated())))


def test_elements_are_closed_in_their_order(elements: Elements) -> None:
    assert elements.wrong == []
    assert elements.open == []


def test_what_users_wrote_is_text(elements: Elements) -> None:
    tags = {tag for tag, _ in elements.tags}
    assert tags.isdisjoint({"script", "img", "iframe", "object"})
    assert not [name for _, given in elements.tags for name in given if name.startswith("on")]
    assert elements.text.count(HOSTILE) >= 5  # reason, warning, module, line's source, kernel


def test_the_page_asks_for_no_other_file(elements: Elements) -> None:
    for tag, given in elements.tags:
        assert "src" not in given
        assert tag == "link" or str(given.get("href", "#")).startswith("#")
    assert [given["href"] for tag, given in elements.tags if tag == "link"] == ["data:,"]
    style = re.findall(r"<style>(.*?)</style>", page(accumulated()), re.DOTALL)
    assert not re.search(r"url\(|@import|http", "".join(style))


def test_links_of_the_page_lead_to_elements(elements: Elements) -> None:
    ids = [given["id"] for _, given in elements.tags if "id" in given]
    assert len(ids) == len(set(ids))
    led = {given["href"] for tag, given in elements.tags if tag == "a"}
    assert {f"#{one}" for one in ids} >= led >= {"#p0", "#p1"}


def test_each_entry_point_has_its_sections_and_training_stands_first(elements: Elements) -> None:
    found = [given["data-section"] for _, given in elements.tags if "data-section" in given]
    assert found[:2] == ["summary", "modules"]
    entries, programs = 3, 2  # validation has one
    assert all(found.count(key) == entries for key in OF_ENTRY)
    assert all(found.count(key) == programs for key in (*OF_PROGRAM, "summary"))
    assert elements.text.index("Entry point accumulate") < elements.text.index("validation program")


def test_a_program_that_was_only_checked_has_a_page_too() -> None:
    report = full(accumulated())
    for program in report["programs"]:
        program["seconds"] = {}
        for entry in program["entries"]:
            entry |= {"calls": [], "memory": None, "roofline": [], "sources": {}, "calling": ""}
            entry |= {"how": "checked", "seconds": {}}
    found = Elements(page(report))
    assert found.wrong == []
    assert "The program was checked and not built" in found.text


def test_it_says_whose_it_is_when_it_was_written_and_how_long_steps_took() -> None:
    report = full(accumulated())
    report["written"] = "2026-01-31T09:05:07+00:00"
    training = next(one for one in report["programs"] if one["stage"] == "training")
    training["fit"] = {"batches": 300, "total_s": 3.46}
    training["entries"][-1]["measured"] = {"steps": 298, "step_s": 397e-6, "waits_s": 0.0}
    training["entries"][-1]["passes"] = [{"name": "p", "before": 38, "after": 187, "changes": {}}]
    text = Elements(page(report)).text
    assert "Fulgurite report of Validated2026-01-31 09:05 UTC, fulgurite " in text
    assert "fit300 batches in 3.46 s" in text
    assert "measured step397 µsmean of 298 steps" in text
    assert f"operations{len(training['entries'][-1]['operations'])}of 38 traced; " in text
    del training["fit"]
    assert "batches in " not in Elements(page(report)).text


def test_areas_stand_on_one_another() -> None:
    lower, upper = areas([[1.0, 3.0], [1.0, 0.0]], 4.0)
    assert (lower[0], upper[0]) == ("c1", "c2")
    heights = [HEIGHT - float(point.split(",")[1]) for point in lower[1].split()]
    assert heights[:4] == [HEIGHT / 4, HEIGHT / 4, 3 * HEIGHT / 4, 3 * HEIGHT / 4]
    heights = [HEIGHT - float(point.split(",")[1]) for point in upper[1].split()]
    assert heights[:4] == [HEIGHT / 2, HEIGHT / 2, 3 * HEIGHT / 4, 3 * HEIGHT / 4]
    assert heights[4:] == [3 * HEIGHT / 4, 3 * HEIGHT / 4, HEIGHT / 4, HEIGHT / 4]
    assert {float(p.split(",")[0]) for p in upper[1].split()} == {0, WIDTH / 2, WIDTH}


def test_what_the_pointer_shows_is_text_too() -> None:
    report = full(accumulated())
    for call in report["programs"][-1]["entries"][-1]["calls"]:
        call["kernel"] = "<second>"
    found = page(report)
    assert "<title>call 1: &lt;second&gt;, " in found
    assert "<second>" not in found


@pytest.mark.parametrize("number", [1, 3, 1000, 1025, 5e5, 123456789, 2.0**40, 2.0**40 + 1])
def test_a_picture_is_as_high_as_it_must_and_not_twice(number: float) -> None:
    assert number <= round_up(number) <= 2 * number


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (in_bytes(0), "0 B"),
        (in_bytes(1023), "1023 B"),
        (in_bytes(1536), "1.50 KiB"),
        (in_bytes(5 * 1024**3), "5.00 GiB"),
        (in_flops(0), "0"),
        (in_flops(999), "999 FLOP"),
        (in_flops(14336), "14.3 kFLOP"),
        (in_flops(2.5e15), "2.50 PFLOP"),
        (in_time(0), "0"),
        (in_time(2.5e-7), "250 ns"),
        (in_time(0.0123), "12.3 ms"),
        (in_time(75), "75.0 s"),
    ],
)
def test_numbers_have_three_digits_and_a_unit(told: str, expected: str) -> None:
    assert told == expected


def test_under_aggressive_it_says_what_was_tuned_or_why_nothing() -> None:
    """The full report has one call that was; the other has no batched products."""
    report, without = full(accumulated()), copy.deepcopy(accumulated())
    for one in (report, without):
        one["options"]["autogen_policy"] = "aggressive"
    told = page(report), page(without)
    assert "1 product<" in told[0]
    assert "batched products (bmm) alone have a template" in told[1]
    without["programs"][-1]["entries"][-1]["operations"][0]["kind"] = "bmm"
    assert "none of 1 batched products" in page(without)
    assert "tuned</dt>" not in page(accumulated())
