"""Numbers in words, as the page and the terminal show them."""

from __future__ import annotations

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("", "k", "M", "G", "T", "P")


def in_bytes(count: float) -> str:
    """``1.5 MiB``; under 1 KiB whole."""
    for unit in _BINARY:
        if abs(count) < 1024 or unit == _BINARY[-1]:
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{_three(count)} {unit}"


def in_flops(count: float) -> str:
    """``1.23 GFLOP``; ``0`` where there are none."""
    if count == 0:
        return "0"
    for unit in _DECIMAL:
        if abs(count) < 1000 or unit == _DECIMAL[-1]:
            break
        count /= 1000
    return f"{_three(count)} {unit}FLOP"


def in_time(seconds: float) -> str:
    """``1.23 s``, ``45.6 ms``, ``789 µs``, ``12 ns``."""
    if seconds == 0:
        return "0"
    for unit, size_s in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= size_s:
            return f"{_three(seconds / size_s)} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def counted(number: int, what: str) -> str:
    """``1 kernel``, ``2,400 kernels``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def _three(number: float) -> str:
    """Three digits, or all before the point."""
    size = abs(number)
    return f"{number:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"
