"""Two reports side by side: what changed in the code is what is told."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from models import CLASSES, mlp
from reports import accumulated, built, full
from torch import nn

from fulgurite.backends.report.difference import lines

pytestmark = pytest.mark.fits


def changed(net: nn.Module, folder: Path) -> list[str]:
    """What differs between ``mlp(0.1)`` and another net."""
    before, after = (
        built(folder / name, one) for name, one in (("before", mlp(0.1)), ("after", net))
    )
    return lines(before, after)


def test_programs_that_are_equal_are_said_to_be(tmp_path: Path) -> None:
    assert changed(mlp(0.1), tmp_path) == ["equal: 2 programs, validation, training"]


def test_another_nonlinearity_is_operations_and_kernels_of_its_module(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, CLASSES))
    told = changed(net, tmp_path)
    assert "  - 1 operation relu in net.1 (ReLU)" in told
    assert "  + 1 operation tanh in net.1 (Tanh)" in told
    assert any(line.startswith("  - kernel aten.relu.default (library)") for line in told)
    assert any(line.startswith("  + kernel aten.tanh.default (library)") for line in told)
    assert "  - 1 operation threshold_backward in the backward pass of net.1 (ReLU)" in told
    assert not any("FLOPs" in line or "net.3" in line or "state" in line for line in told)


def test_another_width_is_shapes_state_and_costs(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, CLASSES))
    told = changed(net, tmp_path)
    training = told[told.index("training program") :]
    assert "  ~ relu in net.1 (ReLU): float32[16, 16] -> float32[16, 32]" in training
    assert "  ~ state self.net.0.bias: float32[16] -> float32[32]" in training
    assert "  FLOPs: 14.3 kFLOP -> 28.7 kFLOP (+100.0%)" in training
    assert any(line.startswith("  parameters memory: 848 B -> 1.64 KiB") for line in training)
    assert any(line.startswith("  peak memory: ") for line in training)
    assert any(line.startswith("  bytes: ") for line in training)
    assert not any(line.startswith(("  - kernel", "  + kernel")) for line in training)


def test_a_program_or_entry_point_that_came_or_went_is_told() -> None:
    report = accumulated()
    fewer = {**report, "programs": [p for p in report["programs"] if p["stage"] == "training"]}
    assert lines(report, fewer) == ["- validation program"]
    [line] = lines(fewer, report)
    assert line.startswith("+ validation program: CSX on host fabric")
    one = copy.deepcopy(fewer)
    del one["programs"][0]["entries"][0]
    assert lines(fewer, one) == ["training program", "  - entry point accumulate"]


def step_of(report: dict[str, Any]) -> Any:
    return report["programs"][-1]["entries"][-1]


def test_kernels_are_compared_by_their_source_and_not_by_their_name() -> None:
    before, after = full(accumulated()), full(accumulated())
    name = step_of(before)["calls"][2]["kernel"]
    source = step_of(after)["sources"].pop(name).replace(name, "kernel_fedcba9876543210")
    step_of(after)["sources"]["kernel_fedcba9876543210"] = source
    step_of(after)["calls"][2]["kernel"] = "kernel_fedcba9876543210"
    assert [line for line in lines(before, after) if "equal" not in line] == []
    step_of(after)["sources"]["kernel_fedcba9876543210"] = source.replace("16", "32")
    [told] = [line for line in lines(before, after) if "kernel" in line]
    assert told.strip().startswith("~ kernel kernel_012345 (generated, CrossEntropyLoss forward, ")
    assert " -> kernel_fedcba (generated" in told


def test_options_and_versions_that_differ_are_told_first() -> None:
    report = accumulated()
    other = {
        **report,
        "options": {"autogen_policy": "aggressive"},
        "versions": {**report["versions"], "torch": "2.12.0"},
    }
    told = lines(report, other)
    assert told[0] == "audit: False -> default"
    assert "autogen_policy: disabled -> aggressive" in told
    assert any(line.startswith(f"torch: {report['versions']['torch']} -> 2.12.0") for line in told)


def test_predicted_times_alone_are_no_difference() -> None:
    after = copy.deepcopy(accumulated())
    for call in step_of(after)["calls"]:
        call["seconds"] *= 1.1
    step_of(after)["seconds"] = {"compile": 3.0}
    assert lines(accumulated(), after) == ["equal: 2 programs, validation, training"]


@pytest.mark.parametrize("key", ["read_bytes", "written_bytes"])
def test_bytes_are_a_difference(key: str) -> None:
    after = copy.deepcopy(accumulated())
    step_of(after)["calls"][0][key] += 1 << 20
    told = lines(accumulated(), after)
    assert any("bytes: " in line for line in told)
    assert any("predicted time" in line for line in told) is False


def test_of_a_program_that_was_only_checked_nothing_is_said_that_is_not_known() -> None:
    checked = copy.deepcopy(accumulated())
    for entry in (entry for program in checked["programs"] for entry in program["entries"]):
        entry |= {"calls": [], "memory": None, "how": "checked"}
    told = "\n".join(lines(accumulated(), checked))
    assert "kernel calls: " in told
    assert not any(word in told for word in ("memory", "bytes: ", "predicted"))
