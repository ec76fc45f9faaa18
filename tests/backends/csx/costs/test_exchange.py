"""What goes between processes, in the report of two and as it would be of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launched import SUPPORT, torchrun
from reported import SLEEPS_S, STEPS, net
from reports import built

from fulgurite.backends.csx.graph.collectives import FIRST_BUCKET_BYTES
from fulgurite.backends.csx.graph.votes import Votes
from fulgurite.backends.report.console import lines
from fulgurite.backends.report.difference import lines as differences
from fulgurite.backends.report.page import page

GRADIENTS = 4 * sum(parameter.numel() for parameter in net().parameters())
VOTES = Votes(2, bool).ballot.nbytes  # they travel with the last of them


@pytest.fixture(scope="module", params=["disabled", "default"])
def of_two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a fit of two processes, operation by operation and compiled."""
    folder = tmp_path_factory.mktemp("two")
    torchrun(2, SUPPORT / "reported.py", str(folder), request.param)
    return folder


def report_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def training(report: dict[str, Any]) -> dict[str, Any]:
    [program] = [one for one in report["programs"] if one["stage"] == "training"]
    entry: dict[str, Any] = program["entries"][-1]
    return entry


@pytest.mark.long
@pytest.mark.several
def test_a_collective_is_an_operation_with_its_bytes(of_two: Path) -> None:
    entry = training(report_in(of_two))
    assert entry["processes"] == 2
    kinds = [one["kind"] for one in entry["operations"] if one["maker"] == "collective"]
    assert sorted(kinds) == ["all_reduce"] * 2 + ["wait_tensor"] * 2
    calls = [one for one in entry["calls"] if one["maker"] == "collective"]
    begun = [one for one in calls if "all_reduce" in one["kernel"]]
    waits = [one for one in calls if "wait_tensor" in one["kernel"]]
    sent = sum(one["sent_bytes"] for one in begun)  # of two processes: what each puts in
    assert sent == GRADIENTS + VOTES
    assert {(one["read_bytes"], one["sent_bytes"]) for one in waits} == {(0, 0)}
    assert all(one["sent_bytes"] == 0 for one in entry["calls"] if one not in calls)
    points = {one["call"]: one["temporaries_bytes"] for one in entry["memory"]["timeline"]}
    assert all(points[entry["calls"].index(one)] >= one["sent_bytes"] for one in begun)


@pytest.mark.long
@pytest.mark.fits
@pytest.mark.several
def test_gradients_of_one_process_would_go_as_those_of_two_do(of_two: Path, tmp_path: Path) -> None:
    there = training(report_in(of_two))["messages"]
    alone = training(built(tmp_path, net(), policy="disabled"))["messages"]
    late = [one["begins"] - real["begins"] for one, real in zip(alone, there, strict=True)]
    assert 0 <= max(late) < 0.5  # the product for the input of one of three layers, at most
    assert min(late) == 0
    assert alone[0]["size_bytes"] == there[0]["size_bytes"] >= FIRST_BUCKET_BYTES
    assert sum(one["size_bytes"] for one in alone) == GRADIENTS


@pytest.mark.long
@pytest.mark.several
def test_how_long_a_process_waited_is_measured(of_two: Path) -> None:
    waited_s = [float((of_two / f"waited_{rank}.txt").read_text()) for rank in range(2)]
    assert waited_s[0] >= 0.8 * SLEEPS_S * (STEPS - 1)
    measured = training(report_in(of_two))["measured"]
    assert 0 < measured["steps"] < STEPS
    assert 0.8 * SLEEPS_S <= measured["waits_s"] <= measured["step_s"]


@pytest.mark.long
@pytest.mark.several
def test_the_page_and_the_terminal_tell_of_it(of_two: Path) -> None:
    report = report_in(of_two)
    text = "\n".join(lines(report))
    assert "  2 collectives of 2 processes, each sends 1.4" in text
    assert "    on more systems" in text
    shown = page(report)
    for said in ("On more systems", "<code>all_reduce</code>", "that each waited for other"):
        assert said in shown, said


@pytest.mark.long
@pytest.mark.fits
@pytest.mark.several
def test_what_collectives_a_change_brings_is_told(of_two: Path, tmp_path: Path) -> None:
    told = "\n".join(differences(built(tmp_path, net(), policy="disabled"), report_in(of_two)))
    for line in ("processes: 1 -> 2", "collectives: 0 -> 2", "bytes sent by a process: 0 B -> 1.4"):
        assert f"  {line}" in told, line


@pytest.mark.fits
def test_of_one_process_the_step_is_told_on_more_systems_too(tmp_path: Path) -> None:
    report = built(tmp_path, policy="disabled")
    entry = training(report)
    assert entry["measured"]["steps"] > 0
    assert entry["measured"]["waits_s"] == 0
    [message] = entry["messages"]
    assert (message["kind"], message["begins"]) == ("all_reduce", 1.0)
    assert message["size_bytes"] == entry["memory"]["parameters_bytes"]
    assert 0 < entry["backward_share"] < 1
    [validation] = [one for one in report["programs"] if one["stage"] == "validation"]
    assert validation["entries"][0]["messages"] == []
    shown = page(report)
    for name in ("hosts, 25 Gb/s Ethernet", "H200, nodes of 8", "CS-3, SwarmX"):
        assert name in shown, name
    assert "Collectives" not in shown
