"""Several processes train as stock Lightning's DDP does, on the same ranks."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import QUIET, Recorder, assert_close
from launched import torchrun_once
from models import Classifier, convnet, pictures
from several import CASES, STEPS
from torch.utils.data import DataLoader, DistributedSampler

SUPPORT = Path(__file__).parents[1] / "support"
TOLERANCES = {"16-mixed": 2**-9}  # of compiled code, which rounds to float16 at other places
NOISE = {  # gradients that are zero but for rounding, and what follows them
    "convnet": ("net.0.bias", "net.1.running_mean"),  # see models.CONV_NOISE
    "transformer": tuple(f"encoder.layers.{i}.self_attn.in_proj_bias" for i in (0, 1)),  # of keys
}
BUFFERS = {"convnet": ("net.1.running_var",)}
"""Which stock's other ranks take over from the first in the next forward pass."""
OWN = {"manual norm": tuple(f"net.1.running_{what}" for what in ("mean", "var"))}
"""Buffers of which each rank has its own, here as in stock."""

MISCONFIGURED = "lightning.fabric.utilities.exceptions.MisconfigurationException: "

pytestmark = pytest.mark.several


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank's fits gave, by case: all of a number of processes and a policy at once."""

    @functools.cache
    def fit(count: int, policy: str) -> list[dict[str, Any]]:
        folder = torchrun_once(tmp_path_factory, count, SUPPORT / "several.py", policy, *CASES)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]

    return fit


def agree(ranks: list[dict[str, Any]], name: str, tolerance: float = 1e-5) -> None:
    """Each rank has what stock's has; buffers of the others than the first are its own here."""
    for rank, found in enumerate(ranks):
        ours, stock = (dict(found[name][who]) for who in ("ours", "stock"))
        assert stock["losses"]
        ignored = NOISE.get(name, ()) + (BUFFERS.get(name, ()) if rank else ())
        for one in (ours, stock):
            weights: dict[str, Any] = one["weights"]
            one["weights"] = {k: torch.tensor(v) for k, v in weights.items() if k not in ignored}
        assert_close(ours, stock, tolerance)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_give_the_numbers_of_stock(trained: Any, name: str) -> None:
    agree(trained(2, "disabled"), name)


@pytest.mark.parametrize("name", CASES)
def test_weights_and_buffers_are_the_same_in_all_processes(trained: Any, name: str) -> None:
    first, second = (rank[name]["ours"]["weights"] for rank in trained(2, "disabled"))
    assert {key for key in first if first[key] != second[key]} == set(OWN.get(name, ()))


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_four_processes_give_the_numbers_of_stock(trained: Any, name: str) -> None:
    agree(trained(4, "disabled"), name)


@pytest.mark.compiler
@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_compiled_they_give_the_numbers_of_stock(trained: Any, name: str) -> None:
    ranks = trained(2, "default")
    agree(ranks, name, TOLERANCES.get(name, 1e-5))
    first, second = (rank[name]["ours"]["weights"] for rank in ranks)
    assert {key for key in first if first[key] != second[key]} == set(OWN.get(name, ()))


@pytest.mark.fits
@pytest.mark.parametrize("name", ["unused", "logged", "transformer"])
def test_they_give_the_numbers_of_one_process_with_the_global_batch(
    trained: Any, name: str
) -> None:
    make, loaders, options = CASES[name]
    train, *rest = loaders()
    seed = int(os.environ.get("PL_GLOBAL_SEED", 0))  # as Lightning's own sampler has it
    sampler = DistributedSampler[Any](train.dataset, num_replicas=1, rank=0, seed=seed)
    wide = DataLoader(train.dataset, batch_size=2 * train.batch_size, sampler=sampler)
    torch.manual_seed(0)
    module, recorder = make(), Recorder()
    alone = pl.Trainer(accelerator="cpu", **QUIET, **STEPS, **options, callbacks=[recorder])
    alone.fit(module, wide, *rest)
    ranks = [rank[name]["ours"] for rank in trained(2, "disabled")]
    means = [sum(losses) / 2 for losses in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert_close(means, recorder.losses, 1e-5)
    wanted = {k: v for k, v in module.state_dict().items() if k not in NOISE.get(name, ())}
    assert_close({k: torch.tensor(ranks[0]["weights"][k]) for k in wanted}, wanted, 1e-5)


def run_script(
    what: str, rank: int, folder: Path, *more: str, seconds: float = 240
) -> tuple[int, str]:
    """Run ``several_ends.py``, which Lightning starts again as rank 1: its status, what it said."""
    script = SUPPORT / "several_ends.py"
    with subprocess.Popen(
        [sys.executable, str(script), what, str(rank), str(folder), *more],
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=seconds)
        finally:
            until = time.monotonic() + 5
            while (left := _session(process.pid)) and time.monotonic() < until:
                time.sleep(0.1)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
    assert left == []
    return process.returncode, printed


def of_ranks(folder: Path) -> list[Any]:
    """What both processes have written."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def _session(leader: int) -> list[int]:
    """The processes of a session that still are there."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (folder / "stat").read_text().rpartition(") ")[2].split()[:4]
        except OSError:
            continue
        if int(session) == leader and state not in "ZX":
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize(
    ("what", "rank", "said"),
    [
        ("raises", 1, "rank 1 ended: ValueError: a hook of the user's"),
        ("raises", 0, "rank 0 ended: ValueError: a hook of the user's"),
        ("killed", 1, "rank 1 gave no sign of life"),
        pytest.param("killed", 0, "rank 0 is gone", marks=pytest.mark.long),
        pytest.param("stopped", 1, "rank 1 gave no sign of life", marks=pytest.mark.long),
    ],
)
def test_where_one_process_ends_all_do_and_say_why(
    what: str, rank: int, said: str, tmp_path: Path
) -> None:
    status, printed = run_script(what, rank, tmp_path, seconds=60)
    assert status != 0
    assert said in printed
    assert not list(tmp_path.glob("done*"))


@pytest.mark.long
def test_a_long_hook_of_one_process_ends_nothing(tmp_path: Path) -> None:
    status, printed = run_script("sleeps", 1, tmp_path)
    assert status == 0, printed
    assert len(list(tmp_path.glob("done*"))) == 2


def test_another_step_on_one_process_is_an_error_on_all_that_names_both_lines(
    tmp_path: Path,
) -> None:
    status, printed = run_script("differs", 1, tmp_path)
    assert status != 0
    for rank in (0, 1):
        text = f"[rank{rank}]: fulgurite.errors.GraphsDiffer: The training step is another one on"
        assert f"{text} rank 1 than on rank 0." in printed
    assert "return loss * 2 if self.global_rank" in printed


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("freezes", "rank 0: averages the gradient of net.2.weight"),
        ("slows", "rank 1: optimizers[0].param_groups[0]['lr'] is"),
        ("scales", "self.net.0.weight is another one on rank 1 than on rank 0"),
        pytest.param("freezes_one", "averages the gradient of net.0", marks=pytest.mark.long),
    ],
)
def test_what_one_process_changes_in_the_middle_of_a_run_ends_it_with_its_name(
    what: str, said: str, tmp_path: Path
) -> None:
    status, printed = run_script(what, 1, tmp_path)
    assert status != 0
    assert "fulgurite.errors.GraphsDiffer" in printed
    assert said in printed
    assert not list(tmp_path.glob("done*"))
    # what is told with the gradients is known before anything is updated
    as_before = [f"rank {rank} ended with weights as before" in printed for rank in (0, 1)]
    assert all(as_before) == (what != "scales") or what == "freezes_one"  # gloo ends one of them


@pytest.mark.compiler
@pytest.mark.parametrize("what", ["freezes", "slows"])
def test_a_compiled_step_that_differs_between_processes_updates_nothing(
    what: str, tmp_path: Path
) -> None:
    status, printed = run_script(what, 1, tmp_path, "default")
    assert status != 0
    assert "run operation by operation" not in printed
    assert "fulgurite.errors.GraphsDiffer: The training step is another one on" in printed
    for rank in (0, 1):
        assert f"rank {rank} ended with weights as before" in printed


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "skips",
            "fulgurite.errors.BatchesDiffer: Rank 1 trains batch 1 of epoch 1, and rank 0 batch 4"
            " of epoch 0.",
        ),
        ("shorter", "fulgurite.errors.BatchesDiffer: The epoch's data ends on some ranks before"),
        ("uneven", "fulgurite.errors.BatchesDiffer: The validation step takes values of all ranks"),
        (
            "validates",
            "fulgurite.errors.GraphsDiffer: The validation step is another one on rank 1",
        ),
        ("unbiased", "fulgurite.errors.GraphsDiffer: The model is another one on rank 1 than on"),
        ("other", "Rank 1 runs with accumulate_grad_batches=2, and rank 0 with"),
    ],
)
def test_what_differs_between_processes_is_an_error_on_all(
    what: str, said: str, tmp_path: Path
) -> None:
    status, printed = run_script(what, 1, tmp_path)
    assert status != 0
    assert f"[rank0]: {said}" in printed or f"[rank0]: {MISCONFIGURED}{said}" in printed
    assert printed.count(said) >= 2


@pytest.mark.long
def test_a_run_that_ends_on_one_rank_alone_ends_on_all_with_a_reason(tmp_path: Path) -> None:
    status, printed = run_script("stops", 1, tmp_path)
    assert status != 0
    assert "rank 1 has ended its run after 4 steps" in printed


@pytest.mark.long
def test_processes_that_wait_for_each_other_end_and_say_for_what(tmp_path: Path) -> None:
    status, printed = run_script("halts", 1, tmp_path, seconds=90)
    assert status != 0
    assert "waits for all in" in printed  # whichever says it first
    assert "in training step 5" in printed
    assert "in the beginning of an evaluation, after 4 training steps" in printed
    assert "whatever ends an epoch or a run (data, should_stop) has to end it on all" in printed


@pytest.mark.compiler
def test_compiled_code_takes_over_at_one_step_in_all_processes(tmp_path: Path) -> None:
    status, printed = run_script("swaps", 1, tmp_path)
    assert status == 0, printed
    first, second = of_ranks(tmp_path)
    assert first == second
    assert first["since"] > 2
    assert first["how"] == "compiled"


@pytest.mark.compiler
def test_where_one_process_cannot_compile_none_runs_compiled_code(tmp_path: Path) -> None:
    status, printed = run_script("fails", 1, tmp_path)
    assert status == 0, printed
    first, second = of_ranks(tmp_path)
    assert first["weights"] == second["weights"]
    assert first["since"] is second["since"] is None
    assert "one of the processes cannot run compiled code" in first["how"]
    assert "no C++ compiler was found" in second["how"]


@pytest.mark.compiler
def test_code_that_is_wrong_in_one_process_is_told_in_all_and_run_by_none(tmp_path: Path) -> None:
    status, printed = run_script("wrong", 1, tmp_path)
    assert status == 0, printed
    first, second = of_ranks(tmp_path)
    assert first["weights"] == second["weights"]
    assert "another process, whose warning says where" in first["warned"][0]
    assert "ValueError: broken" in second["warned"][0]
    assert len(first["warned"]) == len(second["warned"]) == 1


@pytest.mark.fits
def test_synchronized_batchnorm_gives_the_numbers_of_one_process_with_the_global_batch(
    tmp_path: Path,
) -> None:
    pl.seed_everything(3, verbose=False)
    module = Classifier(convnet())
    alone = pl.Trainer(accelerator="cpu", **QUIET, max_epochs=2)
    alone.fit(module, DataLoader(pictures(160).dataset, batch_size=16))
    wanted = {k: v for k, v in module.state_dict().items() if k not in NOISE["convnet"]}
    status, printed = run_script("synced", 0, tmp_path)
    assert status == 0, printed
    for found in of_ranks(tmp_path):
        assert_close({name: torch.tensor(found[name]) for name in wanted}, wanted, 1e-5)


@pytest.mark.parametrize("ended", ["resumed", "signalled"])
def test_a_run_goes_on_in_each_process_where_that_one_was(ended: str, tmp_path: Path) -> None:
    status, printed = run_script(ended, 0, tmp_path)
    assert status == 0, printed
    assert len(list(tmp_path.glob("same*"))) == 2


def test_all_processes_audit_the_same_steps(tmp_path: Path) -> None:
    status, printed = run_script("audited", 0, tmp_path)
    assert status == 0, printed
    first, second = of_ranks(tmp_path)
    assert first == second
    assert len(first) > 2


def test_lightnings_own_trainer_trains_in_several_processes(tmp_path: Path) -> None:
    status, printed = run_script("lightnings", 0, tmp_path)
    assert status == 0, printed
    first, second = of_ranks(tmp_path)
    assert first == second
    assert first[0] == first[1]


def test_logged_means_and_buffers_travel_with_the_gradients(tmp_path: Path) -> None:
    status, printed = run_script("messages", 0, tmp_path)
    assert status == 0, printed
    logged, batchnorm = of_ranks(tmp_path)[0]
    assert batchnorm == ["_c10d_functional.all_reduce.default"]
    assert logged == batchnorm * 2  # and a maximum
