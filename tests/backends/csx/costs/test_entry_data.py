"""A program as plain data: numbers that are known by hand, and a place for every operation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import mlp
from reports import accumulated, built

from fulgurite.backends.report.report_file import FORMAT, SHAPE, misfit

pytestmark = pytest.mark.fits

FORWARD = {"net.0 (Linear)": 2 * 16 * 8 * 16, "net.3 (Linear)": 2 * 16 * 16 * 4}
"""FLOPs of 16 samples through 8-16-4."""
BACKWARD = {"net.0 (Linear)": FORWARD["net.0 (Linear)"], "net.3 (Linear)": 2 * 2 * 16 * 16 * 4}
"""The first layer's input needs no gradient."""


@pytest.fixture
def report() -> dict[str, Any]:
    """Of a fit whose gradients accumulate."""
    return accumulated()


def entry_of(report: dict[str, Any], stage: str = "training", name: str = "step") -> Any:
    [program] = [one for one in report["programs"] if one["stage"] == stage]
    return next(one for one in program["entries"] if one["name"] == name)


def test_a_report_has_the_form_that_readers_check(report: dict[str, Any]) -> None:
    assert report["format"] == FORMAT
    assert misfit(report, SHAPE, "") == ""
    assert {one["stage"] for one in report["programs"]} == {"training", "validation"}
    assert report["options"]["autogen_policy"] == "disabled"
    assert report["versions"]["torch"].startswith("2.")


@pytest.mark.parametrize("name", ["accumulate", "step"])
def test_flops_are_those_of_the_layers(report: dict[str, Any], name: str) -> None:
    entry = entry_of(report, name=name)
    rows = {row["module"]: row for row in entry["modules"]}
    for module in FORWARD:
        assert rows[module]["forward_flops"] == FORWARD[module]
        assert rows[module]["backward_flops"] == BACKWARD[module]
    assert entry["flops"] == sum(FORWARD.values()) + sum(BACKWARD.values())


def test_the_optimizer_is_in_the_entry_point_that_steps(report: dict[str, Any]) -> None:
    modules = {
        name: {one["module"] for one in entry_of(report, name=name)["operations"]}
        for name in ("accumulate", "step")
    }
    assert modules["step"] - modules["accumulate"] == {"configure_optimizers()"}
    assert {"training_step()", "net.0 (Linear)", "net.1 (ReLU)"} <= modules["accumulate"]


def test_modules_have_together_what_all_calls_have(report: dict[str, Any]) -> None:
    for program in report["programs"]:
        for entry in program["entries"]:
            assert entry["calls"]
            for key in ("read_bytes", "written_bytes", "seconds"):
                calls = sum(call[key] for call in entry["calls"])
                assert calls > 0
                assert sum(row[key] for row in entry["modules"]) == pytest.approx(calls)
            counted = sum(row["operations"] for row in entry["modules"])
            assert counted == len(entry["operations"])


def test_every_operation_has_its_maker_and_the_users_line(report: dict[str, Any]) -> None:
    entry = entry_of(report)
    assert {one["maker"] for one in entry["operations"]} == {"library", "view"}
    [relu] = [one for one in entry["operations"] if one["kind"] == "relu"]
    assert relu["module"] == "net.1 (ReLU)"
    assert relu["line"].endswith(" in training_step")
    assert "models.py:" in relu["line"]
    assert "cross_entropy" in relu["source"]
    assert relu["result"] == "float32[16, 16]"
    called = {i for call in entry["calls"] for i in call["operations"]}
    views = {i for i, one in enumerate(entry["operations"]) if one["maker"] == "view"}
    assert called | views == set(range(len(entry["operations"])))


def test_memory_has_the_bytes_of_weights_and_optimizer_state(report: dict[str, Any]) -> None:
    weights_bytes = 4 * sum(p.numel() for p in mlp().parameters())
    memory = entry_of(report)["memory"]
    assert memory["parameters_bytes"] == weights_bytes
    steps = 4 * len(list(mlp().parameters()))  # AdamW counts in a float32 for each
    assert memory["optimizer_bytes"] == 2 * weights_bytes + steps
    assert len(memory["timeline"]) == len(entry_of(report)["calls"])
    highest = max(one["activations_bytes"] + one["temporaries_bytes"] for one in memory["timeline"])
    assert memory["peak_bytes"] >= 3 * weights_bytes + highest
    assert entry_of(report, "validation")["memory"]["optimizer_bytes"] == 0


def test_passes_tell_what_they_changed(report: dict[str, Any]) -> None:
    for name in ("accumulate", "step"):
        entry = entry_of(report, name=name)
        names = [one["name"] for one in entry["passes"]]
        assert names[0] == "write_updates_out"
        assert names[-1] == "hold_state"
        for before, after in zip(entry["passes"], entry["passes"][1:], strict=False):
            assert before["after"] == after["before"]
        for one in entry["passes"]:
            changed = sum(after - before for before, after in one["changes"].values())
            assert changed == one["after"] - one["before"]
        [lowered] = [one for one in entry["passes"] if one["name"] == "functionalize"]
        assert lowered["changes"]["_log_softmax"] == [1, 0]


def test_without_kernels_the_rest_is_told(tmp_path: Path) -> None:
    backend = {"validate_only": True}
    entry = entry_of(built(tmp_path, backend=backend, policy="default"))
    assert (entry["how"], entry["calls"], entry["memory"]) == ("checked", [], None)
    assert entry["flops"] == sum(FORWARD.values()) + sum(BACKWARD.values())
    assert {one["maker"] for one in entry["operations"]} == {"", "view"}


@pytest.mark.long
@pytest.mark.compiler
def test_a_compiled_program_has_its_kernels_with_source(tmp_path: Path) -> None:
    report = built(tmp_path / "out", policy="default", backend={"compile_dir": tmp_path / "cache"})
    entry = entry_of(report)
    assert misfit(report, SHAPE, "") == ""
    assert entry["compiled"]
    made = {call["maker"] for call in entry["calls"]}
    assert made >= {"library", "generated"}
    generated = {call["kernel"] for call in entry["calls"] if call["maker"] == "generated"}
    assert generated == set(entry["sources"])
    assert all(name in entry["calling"] for name in generated)
    assert {"generate", "compile"} <= set(entry["seconds"])
    names = [one["name"] for one in entry["passes"]]
    assert "realize_scalars" in names
    assert "use_kernels" not in names
    computed = {i for call in entry["calls"] for i in call["operations"]}
    kinds = {entry["operations"][i]["kind"] for i in computed}
    assert {"addmm", "relu", "sqrt"} <= kinds
