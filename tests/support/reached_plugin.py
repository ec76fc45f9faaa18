"""A plugin of pytest for ``tests/tools/mutants.py``: which tests run, which fail, what they take.

Where ``MUTANTS_ORDER`` names a file with a list of tests, these run, in this order, and no others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from reached import note


def _cpu_s() -> float:
    """Seconds of CPU time of this process, and of those that it started and that ended."""
    return sum(os.times()[:4])


def _order() -> list[str] | None:
    path = os.environ.get("MUTANTS_ORDER")
    return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))


def pytest_configure(config: pytest.Config) -> None:
    """Collect no other files than those of the tests that are to run."""
    order = _order()
    if order is not None:
        config.args[:] = dict.fromkeys(test.partition("::")[0] for test in order)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests into their order."""
    order = _order()
    if order is not None:
        place = {test: i for i, test in enumerate(order)}
        found = (item for item in items if item.nodeid in place)
        items[:] = sorted(found, key=lambda item: place[item.nodeid])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note that a test begins, and what it took."""
    note(begun=item.nodeid)
    before = _cpu_s()
    try:
        return (yield)  # type: ignore[return-value]
    finally:
        note(test=item.nodeid, seconds=_cpu_s() - before)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test that fails."""
    if report.failed:
        note(failed=report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that cannot be collected."""
    if report.failed:
        note(failed=report.nodeid)
