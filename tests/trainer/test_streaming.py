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
from launched import SUPPORT, torchrun, torchrun_once
from models import loader
from saving_in_parts import GLOBAL_BATCH, ROWS
from several import CASES
from streaming import CASES as OURS
from streaming import Wide
from torch import nn

from fulgurite.backends.checkpoints.conversion import to_file
from fulgurite.backends.report.scaling import SENT

pytestmark = pytest.mark.several
SCRIPT = SUPPORT / "saving_in_parts.py"
NOISE = ("convnet", "transformer")
"""Biases before a normalization get rounding as gradients, of which Adam makes steps."""


def of_ranks(folder: Path, count: int) -> list[Any]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


LARGE = ("transformer", "gan", "unused", "scaled", "hooked", "finetuned", "bf16-mixed")
WAYS = {
    "disabled:weight_streaming": tuple(CASES),
    "disabled:weight_streaming:large": LARGE,
    "default:weight_streaming:large": ("mlp", "scaled", "hooked", "transformer"),
}
"""Policy and execution, and the cases; "large": no tensor is small enough to be held."""


@pytest.fixture(scope="module", params=WAYS)
def fits(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Of each case what stock DDP gave, and weights in parts, on rank 1 of two."""
    script, names = SUPPORT / "several.py", WAYS[request.param]
    folder = torchrun_once(tmp_path_factory, 2, script, request.param, *names, seconds=600)
    found: dict[str, Any] = of_ranks(folder, 2)[1]
    return found


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank found in the cases of ``streaming.py``."""
    count: int = request.param
    folder = torchrun_once(tmp_path_factory, count, SUPPORT / "streaming.py", *OURS, seconds=1200)
    return of_ranks(folder, count)


def flat(value: Any) -> list[float]:
    return [one for item in value for one in flat(item)] if isinstance(value, list) else [value]


@pytest.mark.long
def test_it_trains_as_distributed_data_parallel(fits: dict[str, Any]) -> None:
    for name, found in fits.items():
        ours, stock = found["ours"], found["stock"]
        assert ours["losses"] == pytest.approx(stock["losses"], abs=1e-5), name
        assert ours["final"] == pytest.approx(stock["final"], abs=1e-5), name
        assert (ours["steps"], ours["scale"]) == (stock["steps"], stock["scale"]), name
        for key, value in stock["weights"].items() if name not in NOISE else ():
            close = pytest.approx(flat(value), abs=1e-5)
            assert flat(ours["weights"][key]) == close, f"{name} {key}"


def test_it_trains_as_fully_sharded_data_parallel(found: list[Any]) -> None:
    for one in found:
        ours, stock = one["fsdp"]
        assert len(ours) == len(stock) > 30
        assert ours == pytest.approx(stock, abs=1e-5)


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
        torchrun(count, SCRIPT, str(folder / str(count)), "save", seconds=600)
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
    torchrun(readers, SCRIPT, str(folder), case, seconds=600)
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
    torchrun(2, SCRIPT, str(tmp_path), "callbacks", seconds=600)
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
        assert read["changed"] == pytest.approx(2 * read["sum"] + 256 * 8, abs=1e-3)
        assert read["state"] == [256, 8]
        for name, done in (("normal_", "normal_"), ("item", "fill_")):
            assert read[name].startswith(f"StateChanged: {done} would change a tensor in place of")
        assert read["row"]
        assert not read["writeable"]  # what is written into a copy would be lost
        assert read["assigned"] == 2
        assert "Remedy: p.copy_(value) with a whole value" in read["normal_"]
        assert read["pickle"].startswith("UnsupportedState: A tensor of [256, 8] would be pickled")


def test_averages_of_weights_are_those_of_whole_ones(found: list[Any]) -> None:
    for one in found:
        parts, wholes = one["averaged"]
        assert parts == pytest.approx(wholes, abs=1e-4)


def test_optimizers_work_on_parts_or_are_refused_by_name(found: list[Any]) -> None:
    refusing = {
        **dict.fromkeys(("Adafactor", "Muon"), "needs its parameters in their shape"),
        "LBFGS": "evaluates the step again and again",
    }
    for one in found:
        told = one["optimizers"]
        for name, why in refusing.items():
            assert told.pop(name).startswith(f"{name} {why}")
        assert {"AdamW", "SGD", "Rprop", "ASGD", "Lamb", "OfShape"} < told.keys()  # Lamb has norms
        assert len(told) == 14
        assert max(told.values()) < 1e-6


def test_a_module_is_built_in_parts_with_the_numbers_of_one_that_was_whole(
    found: list[Any],
) -> None:
    for one in found:
        built = one["built"]
        assert built["configured"] == pytest.approx(built["before"], rel=1e-6)
        assert all(loss > 0 for loss in built["meta"])
        assert built["meta"] != built["before"]  # reset_parameters() began its weights
        assert built["buffer"].startswith(
            "net.1.extra was made on the meta device, and BatchNorm1d.reset_parameters() gives it"
        )


def test_memory_is_that_of_the_parts_and_two_layers_and_as_predicted(found: list[Any]) -> None:
    whole, layer, _, predicted, _ = found[0]["memory"]
    most = max(one["memory"][2] for one in found)
    # gloo works on a copy of what is on its way
    assert predicted < 1.1 * whole / len(found) + (2 + 1) * layer
    assert most == pytest.approx(predicted, rel=0.1)


def test_a_report_tells_what_is_held_and_what_is_sent(found: list[Any]) -> None:
    entry, count = found[0]["memory"][-1], len(found)
    layers = [one for one in entry["gathered"] if one["size_bytes"] == 4 * 1024**2]
    small = [one for one in entry["gathered"] if one not in layers]
    assert [(one["gathers"], one["held"]) for one in layers] == [(2, False)] * 8
    assert [(one["gathers"], one["held"]) for one in small] == [(1, True)] * 14
    assert entry["line"] == (
        "in parts: 14 tensors of 92.0 KiB held for the backward pass,"
        " 8 tensors of 32.0 MiB gathered for each pass"
    )
    sent = sum(one["size_bytes"] * SENT[one["kind"]](count) for one in entry["messages"])
    assert sum(one["sent_bytes"] for one in entry["calls"]) == pytest.approx(sent, rel=0.01)


def test_messages_are_few_and_under_way_while_the_step_computes(found: list[Any]) -> None:
    steps = found[0]["messages"]
    layers, kinds = 3, [kind for kind, *_ in steps]
    gathered = [size for kind, *_, size in steps if kind == "all_gather_into_tensor"]
    # each layer for both passes, the first one, without a gradient of its input, once; and a
    # message with all that is small
    assert sorted(gathered)[-2 * layers :] == [64 * 64] * 2 * layers
    assert len(gathered) == 2 * layers + 2
    assert kinds.count("reduce_scatter_tensor") == layers + 2
    # votes, ahead of all; what travels with the last gradient; sums that gradients are clipped by
    assert kinds.count("all_reduce") == 3
    begun = {name: i for i, (_, name, _, _) in enumerate(steps)}
    waited = {sent: i for i, (kind, _, sent, _) in enumerate(steps) if kind == "wait_tensor"}
    products = [i for i, kind in enumerate(kinds) if kind in ("mm", "addmm")]
    meanwhile = [
        any(begun[name] < i < waited[name] for i in products)
        for kind, name, _, size in steps
        if kind in ("all_gather_into_tensor", "reduce_scatter_tensor") and size >= 64 * 32
    ]
    assert meanwhile.count(True) >= len(meanwhile) - 1
