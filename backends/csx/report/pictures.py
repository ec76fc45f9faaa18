"""Pictures in SVG, by hand: they stretch with their box, so what is written stands beside them.

Colours are classes of the page's style sheet, ``c1`` to ``c7``.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, log10

WIDTH, HEIGHT = 1000, 240


def stacked(layers: Sequence[Sequence[float]], titles: Sequence[str], top: float) -> str:
    """Areas over one another, as steps of equal width.

    Args:
        layers: a number for each step, the lowest layer first.
        titles: what the pointer shows over each step.
        top: the number at the upper edge.
    """
    count = len(titles)
    below = [0.0] * count
    parts = []
    for i, layer in enumerate(layers):
        above = [a + b for a, b in zip(below, layer, strict=True)]
        if any(layer):
            upper, lower = _edge(above, top), _edge(below, top)[::-1]
            points = " ".join(f"{x:g},{y:g}" for x, y in [*upper, *lower])
            parts.append(f'<polygon class="c{i + 1}" points="{points}"/>')
        below = above
    width = WIDTH / count
    for i, title in enumerate(titles):
        parts.append(
            f'<rect class="over" x="{i * width:g}" y="0" width="{width:g}" height="{HEIGHT}">'
            f"<title>{escape(title)}</title></rect>"
        )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img"'
        f' aria-label="memory over the program">{"".join(parts)}</svg>'
    )


def _edge(heights: Sequence[float], top: float) -> list[tuple[float, float]]:
    width = WIDTH / len(heights)
    points = []
    for i, height in enumerate(heights):
        y = HEIGHT * (1 - height / top)
        points += [(round(i * width, 2), round(y, 2)), (round((i + 1) * width, 2), round(y, 2))]
    return points


def round_up(number: float) -> float:
    """The next of 1, 1.5, 2, 3, 4, 6, 8 times a power of two that is at least so much."""
    if number <= 1:
        return 1.0
    power = 2.0 ** (int(log10(number) / log10(2)))
    return next(power * step for step in (1, 1.25, 1.5, 1.75, 2, 4) if power * step >= number)


def bar(share: float, kind: str = "c1") -> str:
    """A bar as long as a share of its box, from 0 to 1."""
    length = ceil(1000 * min(max(share, 0.0), 1.0)) / 10
    return (
        '<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="rail" width="100" height="8"/>'
        f'<rect class="{kind}" width="{length:g}" height="8"/></svg>'
    )


def parts_of(shares: Sequence[tuple[str, float]]) -> str:
    """One bar cut into parts, each a class and a share of the whole."""
    at, parts = 0.0, []
    for kind, share in shares:
        parts.append(
            f'<rect class="{kind}" x="{100 * at:.2f}" width="{100 * share:.2f}" height="8"/>'
        )
        at += share
    return (
        '<svg class="parts" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(parts)}</svg>"
    )
