"""Weight streaming in one process: a budget of memory, and files for what is beyond it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from budget import MEASURED, Tower, state_bytes, trained
from launched import SUPPORT

import fulgurite
from fulgurite.backends.csx.program import announcements
from fulgurite.backends.csx.streaming.residency import residency
from fulgurite.backends.report.page import _intermediates, page
from fulgurite.backends.report.report_file import read

MIB = 2**20


def found(folder: Path, *names: str) -> dict[str, Any]:
    """What the cases of ``budget.py`` found, each process its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SUPPORT / "budget.py"), str(folder), *names]
    subprocess.run(command, check=True, env=environment, timeout=600, cwd=SUPPORT)
    read: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return read


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found(tmp_path_factory.mktemp("kinds"), "equal", "resumed", "refused")


KINDS = ("tower", "tied", "views", "frozen", "two optimizers")
RUNS = ("accumulated", "clipped", "validated", "bf16")


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("name", [*KINDS, *RUNS])
def test_losses_and_weights_are_those_of_pipeline_to_the_bit(
    name: str, kinds: dict[str, Any]
) -> None:
    one = kinds["equal"][name]
    assert one["steps"] == 12
    assert one["budget"] == one["pipeline"]
    assert one["files"] >= 7  # of the 8 large weights
    assert one["read"] > 12 * MIB
    assert one["left"] == []  # files have no name


@pytest.mark.process
def test_a_run_goes_on_from_its_checkpoint_to_the_bit_and_so_does_pipeline(
    kinds: dict[str, Any],
) -> None:
    runs = kinds["resumed"]
    assert len(runs["later"]) == 12
    assert runs["whole"][12:] == runs["later"] == runs["stock"]


@pytest.mark.process
def test_a_second_fit_of_a_module_in_files_is_that_of_one_in_memory(kinds: dict[str, Any]) -> None:
    assert kinds["resumed"]["again"] == kinds["resumed"]["again in memory"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("two layers", "ValueError: max_resident_bytes=634070 is less than two layers: net.12.wei"),
        ("no folder", "FileNotFoundError: [Errno 2] max_resident_bytes: 262,144 bytes of state do"),
        ("no mmap", "OSError: [Errno 19] max_resident_bytes: 262,144 bytes of state do not go "),
        ("full disk", "OSError: [Errno 28] max_resident_bytes: 262,144 bytes of state do not go "),
    ],
)
def test_what_cannot_be_is_an_error_before_the_first_step(
    name: str, told: str, kinds: dict[str, Any]
) -> None:
    error, steps = kinds["refused"][name]
    assert error.startswith(told)
    assert "emedy" in error or "Give" in error
    assert steps == 0


@pytest.mark.process
def test_where_all_fits_nothing_is_moved(kinds: dict[str, Any]) -> None:
    assert kinds["refused"]["fits"] == ["trains", 12]


@pytest.mark.process
@pytest.mark.long
@pytest.mark.parametrize("policy", ["disabled", "default"])
def test_memory_is_the_budget_and_what_a_step_needs(policy: str, tmp_path: Path) -> None:
    runs = {}
    for name in ("small", "pipeline", "budget"):
        case = f"{policy} {name}"
        assert case in MEASURED
        (folder := tmp_path / name).mkdir()
        (folder / "compiled").symlink_to(tmp_path / "compiled")
        runs[name] = found(folder, case)[case]
    small, pipeline, budget = runs["small"], runs["pipeline"], runs["budget"]
    assert budget["compiled"] == (policy == "default")
    assert len(budget["losses"]) == 24
    assert budget["losses"] == pipeline["losses"]
    assert budget["state"] > 240 * MIB
    limit = budget["state"] / 2
    took = budget["peak"] - small["peak"]  # of a process without state
    assert took < 1.15 * (limit + budget["needs"])
    assert budget["read"] > 24 * limit / 2
    # so that the test would see it: the other one has all of it
    assert pipeline["peak"] - small["peak"] > 0.95 * budget["state"]


class Ends(pl.Callback):
    """Ends a fit in the middle."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_train_batch_end(self, *given: Any) -> None:
        raise self.error


@pytest.mark.fits
@pytest.mark.parametrize(
    "error", [ValueError("mine"), KeyboardInterrupt()], ids=["error", "ctrl-c"]
)
def test_a_fit_that_ends_in_the_middle_leaves_an_ordinary_module(
    error: BaseException, tmp_path: Path
) -> None:
    module = Tower()
    with pytest.raises((ValueError, SystemExit)):
        trained(module, 0.5, Ends(error), model_dir=tmp_path)
    assert not residency.is_open
    weight = module.net[0].weight
    assert residency.is_in_file(weight)
    with torch.no_grad():
        weight.mul_(2.0)
    other = Tower()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.net[0].weight, weight)


@pytest.mark.fits
def test_weights_that_others_hold_too_stay_where_they_are(tmp_path: Path) -> None:
    module = Tower()
    alias = module.net[0].weight.detach()
    trained(module, 0.5, model_dir=tmp_path)
    assert not residency.is_in_file(alias)
    assert torch.equal(alias, module.net[0].weight.detach())
    assert residency.is_in_file(module.net[2].weight)


@pytest.mark.fits
@pytest.mark.process
def test_what_a_forked_process_writes_is_its_own(tmp_path: Path) -> None:
    module = Tower()
    trained(module, 0.5, model_dir=tmp_path)
    weights = [module.net[2].weight.detach(), module.net[4].weight.detach()]
    weights.append(torch.empty(0).set_(residency.storage(1 << 20), 0, (1 << 18,)).fill_(3))
    assert all(map(residency.is_in_file, weights))
    before = [float(one.sum()) for one in weights]
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        torch.set_num_threads(1)  # as DataLoader's workers do: OpenMP's threads stay in the parent
        weights[0].zero_()
        del weights[2]  # its range of the file is the parent's
        os.write(writes, str(float(weights[0].sum())).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert float(os.read(reads, 100)) != before[0]
    assert [float(one.sum()) for one in weights] == before


@pytest.mark.fits
def test_the_table_says_what_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(announcements, "rank_zero_info", lines.append)
    trained(Tower(), 0.5, model_dir=tmp_path)
    said = " ".join("\n".join(lines).split())
    limit = state_bytes(Tower()) // 2
    assert f"MiB a batch, of 6 MiB in files; within max_resident_bytes={limit:,}" in said
    assert "steps waited " in said


@pytest.mark.fits
def test_a_report_has_what_is_in_memory_at_a_time(tmp_path: Path) -> None:
    module = Tower()
    trained(module, 0.5, model_dir=tmp_path, steps=2, backend={"artifact_dir": str(tmp_path)})
    report = read(tmp_path)
    memory = report["programs"][0]["entries"][0]["memory"]
    state, most = state_bytes(module), max(map(_intermediates, memory["timeline"]))
    assert memory["parameters_bytes"] + memory["optimizer_bytes"] == pytest.approx(state, rel=0.01)
    assert memory["files_bytes"] == pytest.approx(state / 2, rel=0.01)
    assert memory["peak_bytes"] == pytest.approx(state / 2 + most, rel=0.05)
    assert "are in files, others as the step goes on" in " ".join(page(report).split())


@pytest.mark.parametrize(
    ("devices", "options", "told"),
    [
        (1, {}, "beyond max_resident_bytes, which is None"),
        (2, {"max_resident_bytes": 1 << 30}, "Leave max_resident_bytes out, or train in one"),
    ],
)
def test_one_process_needs_a_budget_to_stream_and_several_have_none(
    devices: int, options: dict[str, Any], told: str
) -> None:
    backend = fulgurite.backend("CSX", execution="weight_streaming", **options)
    with pytest.raises((ValueError, NotImplementedError), match=told):
        fulgurite.Trainer(backend=backend, devices=devices, logger=False)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_resident_bytes": 0}, "must be a positive integer or None; got 0"),
        ({"max_resident_bytes": 1e9}, "must be a positive integer or None; got 1000000000.0"),
        ({"max_resident_bytes": 1 << 30}, "Give both, or neither"),
    ],
)
def test_a_budget_is_a_number_of_bytes_and_of_weight_streaming(
    options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        fulgurite.backend("CSX", **options)


def test_a_function_traced_by_itself_does_not_stream() -> None:
    backend = fulgurite.backend("CSX", execution="weight_streaming", max_resident_bytes=1 << 30)
    model = fulgurite.compile(torch.nn.Linear(2, 2), backend)
    with pytest.raises(NotImplementedError, match="needs a Trainer"):
        fulgurite.trace(lambda x: model(x))(torch.zeros(1, 2))
