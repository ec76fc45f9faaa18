"""Weight streaming over several processes: each holds a part of all state."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
from harness import QUIET, Recorder
from launched import SUPPORT, torchrun
from models import loader
from parts import GLOBAL_BATCH, ROWS
from several import CASES
from streaming import CASES as OURS
from streaming import Wide
from torch import nn

import fulgurite
from fulgurite import Trainer
from fulgurite.backends.checkpoints.conversion import to_file

pytestmark = pytest.mark.several
NOISE = ("convnet", "transformer")
"""Biases before a normalization get rounding as gradients, of which Adam makes steps."""


def of_ranks(folder: Path, count: int) -> list[Any]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each case what stock DDP gave, and weights in parts, on rank 1 of two."""
    folder = tmp_path_factory.mktemp("parts")
    torchrun(
        2, SUPPORT / "several.py", str(folder), "disabled:weight_streaming", *CASES, seconds=600
    )
    found: dict[str, Any] = of_ranks(folder, 2)[1]
    return found


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank found in the cases of ``streaming.py``."""
    folder = tmp_path_factory.mktemp("found")
    torchrun(request.param, SUPPORT / "streaming.py", str(folder), *OURS, seconds=600)
    return of_ranks(folder, request.param)


def flat(value: Any) -> list[float]:
    return [one for item in value for one in flat(item)] if isinstance(value, list) else [value]


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_distributed_data_parallel(name: str, fits: dict[str, Any]) -> None:
    ours, stock = fits[name]["ours"], fits[name]["stock"]
    assert ours["losses"] == pytest.approx(stock["losses"], abs=1e-5)
    assert ours["final"] == pytest.approx(stock["final"], abs=1e-5)
    assert (ours["steps"], ours["scale"]) == (stock["steps"], stock["scale"])
    for key, value in stock["weights"].items() if name not in NOISE else ():
        assert flat(ours["weights"][key]) == pytest.approx(flat(value), abs=1e-5), key


def test_each_process_holds_its_part_of_weights_and_optimizer_state(found: list[Any]) -> None:
    held = [one["part_bytes"][0] for one in found]
    total = found[0]["part_bytes"][1]
    assert max(held) == pytest.approx(total / len(found), rel=0.01)


def test_a_run_goes_on_from_a_checkpoint_to_the_bit(found: list[Any]) -> None:
    for one in found:
        whole, later = one["resumed"]
        assert later
        assert later == whole


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints that 1, 2 and 4 processes have written, and their losses."""
    folder = tmp_path_factory.mktemp("saved")
    for count in (1, 2, 4):
        (folder / str(count)).mkdir()
        torchrun(count, SUPPORT / "parts.py", str(folder / str(count)), "save", seconds=600)
    return folder


def means(folder: Path, count: int, case: str) -> dict[str, list[float]]:
    """The losses of all processes' batches, by the moment that a checkpoint was written at."""
    ranks = [one[case] for one in of_ranks(folder, count)]
    return {
        kind: [sum(losses) / count for losses in zip(*(one[kind] for one in ranks), strict=True)]
        for kind in ranks[0]
    }


@pytest.mark.long
@pytest.mark.parametrize(
    ("writers", "readers", "case"),
    [
        *((2, 2, "streamed"), (2, 4, "streamed"), (1, 2, "streamed"), (4, 2, "streamed")),
        *((4, 1, "pipeline"), (2, 2, "pipeline"), (2, 4, "pipeline")),
    ],
)
def test_a_checkpoint_in_parts_is_gone_on_from_by_other_processes(
    writers: int, readers: int, case: str, saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved / str(writers), folder)
    torchrun(readers, SUPPORT / "parts.py", str(folder), case, seconds=600)
    whole, later = means(saved / str(writers), writers, "save"), means(folder, readers, case)
    alone = means(saved / "1", 1, "save")["epoch"]
    for kind, losses in later.items():
        before = whole[kind][-len(losses) :]
        assert losses == (before if readers == writers and case == "streamed" else near(before))
    assert {kind: len(losses) for kind, losses in later.items()} == {
        **{"epoch": 6, "middle": 4, "window": 3}
    }
    assert later["epoch"] == near(alone[-6:])


def near(losses: list[float]) -> Any:
    return pytest.approx(losses, abs=1e-6)


@pytest.mark.long
@pytest.mark.fits
def test_stock_goes_on_from_what_its_own_tool_or_ours_makes_of_parts(
    saved: Path, tmp_path: Path
) -> None:
    folder, ours = saved / "2" / "epoch.ckpt", tmp_path / "ours.ckpt"
    stock = tmp_path / "stock.ckpt"
    module = "lightning.pytorch.utilities.consolidate_checkpoint"
    run = [sys.executable, "-m", module, str(folder), "--output_file", str(stock)]
    subprocess.run(run, check=True)
    to_file(folder, ours)
    before = means(saved / "1", 1, "save")["epoch"][-6:]
    for path in (stock, ours):
        recorder = Recorder()
        trainer = lightning.Trainer(
            **{**QUIET, "accelerator": "cpu", "max_epochs": 2, "callbacks": [recorder]}
        )
        trainer.fit(Wide(), loader(ROWS, GLOBAL_BATCH), ckpt_path=path)
        assert recorder.losses == pytest.approx(before, abs=1e-5)
        assert isinstance(Wide.load_from_checkpoint(path).net[0].weight, nn.Parameter)


@pytest.mark.long
def test_callbacks_save_remove_and_find_folders(tmp_path: Path) -> None:
    torchrun(2, SUPPORT / "parts.py", str(tmp_path), "callbacks", seconds=600)
    for one in of_ranks(tmp_path, 2):
        found = one["callbacks"]
        assert found["found"] == {
            "best": ["last.ckpt", "step=10.ckpt", "step=12.ckpt"],
            "own": [
                *("checkpoint_12.ckpt", "checkpoint_9.ckpt"),
                *("model_checkpoint_12.ckpt", "model_checkpoint_6.ckpt"),
            ],
            "weights": ["w.ckpt"],
        }
        assert (found["begins"], found["last"], found["newest"]) == (2, 6, 6)


def test_a_second_fit_goes_on_from_the_parts(found: list[Any]) -> None:
    for one in found:
        first, second, parts, whole = one["fitted_twice"]
        assert second < first
        assert parts == pytest.approx(whole, rel=1e-6)


def test_host_code_reads_a_gathered_copy_and_is_told_where_it_would_change_a_part(
    found: list[Any],
) -> None:
    for one in found:
        read = one["read"]
        assert read == found[0]["read"]
        assert (read["type"], read["shape"], read["copied"]) == (True, [256, 8], 256 * 8)
        assert read["array"] == pytest.approx(read["sum"], abs=1e-4)
        for name, done in (("mul_", "mul_"), ("item", "fill_")):
            assert read[name].startswith(f"StateChanged: {done} would change a tensor in place of")
        assert read["row"]
        assert "Remedy: p.copy_(value) with a whole value" in read["mul_"]
        assert read["pickle"].startswith("UnsupportedState: A tensor of [256, 8] would be pickled")


def test_an_optimizer_that_needs_whole_parameters_is_refused_by_name(found: list[Any]) -> None:
    for one in found:
        told = one["optimizers"]
        refused = told.pop("Adafactor")
        assert refused.startswith("Adafactor keeps state that depends on the shape of its param")
        assert set(told.values()) == {"trains"}


@pytest.mark.fits
def test_one_process_has_nobody_to_share_with() -> None:
    backend = fulgurite.backend("CSX", execution="weight_streaming")
    trainer = Trainer(backend=backend, logger=False, enable_checkpointing=False, max_epochs=1)
    with pytest.raises(NotImplementedError, match="this is the only one"):
        trainer.fit(Wide())
