"""How many threads a program computes with, and that nobody else computes with so few or many."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import fit
from models import Classifier, loader, mlp
from torch import Tensor
from torch._inductor import config as inductor

from fulgurite.backends.csx.compile import threads
from fulgurite.backends.csx.compile.fabric import Loaded
from fulgurite.backends.csx.compile.host.host_fabric import HostFabric
from fulgurite.backends.csx.compile.threads import (
    TORCH_CPU,
    Threads,
    counted,
    reset_threads,
    set_threads,
)
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.program import announcements

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere programs use torch's number")


@pytest.fixture
def process_has(request: pytest.FixtureRequest) -> Iterator[Callable[[int], None]]:
    """Give torch so many threads."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def choice(process_has: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> Threads:
    """A choice of torch's two threads, which nobody has set, or one."""
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_by_default", lambda processors: {2})
    process_has(2)
    return Threads()


def run(choice: Threads, took_s: dict[int, float], seconds: float = 0.0) -> list[int]:
    """Runs that take so long with each number of threads: until one is chosen, or for a time."""
    numbers = []
    while not choice.is_chosen or seconds > 0:
        numbers.append(choice.number)
        seconds -= took_s[choice.number]
        choice.note(took_s[choice.number])
    return numbers


@linux
@pytest.mark.parametrize(
    ("took_s", "number"),
    [({1: 0.02, 2: 0.012}, 2), ({1: 0.02, 2: 0.0195}, 1), ({1: 0.02, 2: 0.03}, 1)],
    ids=["two are faster", "hardly", "one is faster"],
)
def test_the_number_that_takes_less_is_kept(
    choice: Threads, took_s: dict[int, float], number: int
) -> None:
    told: list[str] = []
    choice.tell = told.append
    assert run(choice, took_s) == [1, 1, 2, 1, 2, 1, 2]
    assert choice.number == number
    assert choice.run_s == pytest.approx(took_s)
    kept, other = (f"{took_s[n] * 1e3:.0f} ms" for n in (number, 3 - number))
    assert told == [f"{counted(number)}: {kept} a step ({counted(3 - number)}: {other})"]


@linux
def test_short_runs_are_compared_more_often_and_long_ones_less(choice: Threads) -> None:
    assert len(run(choice, {1: 0.0001, 2: 0.0002})) == 1 + 2 * 16
    choice.begin()
    assert len(run(choice, {1: 1.0, 2: 2.0})) == 1 + 2


@linux
def test_a_choice_is_made_again_now_and_then_for_a_hundredth_of_the_time(choice: Threads) -> None:
    took_s = {1: 0.02, 2: 0.03}
    run(choice, took_s)
    numbers = run(choice, took_s, seconds=30.0)
    assert 0.002 < sum(numbers) / len(numbers) - 1 < 0.012
    assert run(choice, {1: 0.02, 2: 0.01}, seconds=30.0)[-1] == 2


@linux
def test_steps_that_become_slow_are_compared_at_once(choice: Threads) -> None:
    run(choice, {1: 0.02, 2: 0.012})
    numbers = run(choice, {1: 0.02, 2: 0.3}, seconds=1.0)
    assert numbers[:4] == [2, 2, 2, 1]
    assert choice.number == 1


@linux
@pytest.mark.parametrize("how", ["environment", "torch", "options", "exactly"])
def test_a_number_that_is_set_is_kept(
    how: str,
    choice: Threads,
    process_has: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not choice.is_fixed
    if how == "environment":
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
    if how == "torch":
        process_has(3)
    with inductor.patch({"cpp.threads": 2} if how == "options" else {}):
        fixed = Threads(is_fixed=how == "exactly")
    assert fixed.is_fixed
    assert fixed.is_chosen
    assert fixed.number == torch.get_num_threads()
    fixed.begin()
    fixed.note(10.0)
    assert fixed.is_chosen


@pytest.mark.process
@linux
def test_torch_has_by_default_as_many_as_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from fulgurite.backends.csx.compile.threads import is_set; print(is_set())"
    unset = {k: v for k, v in os.environ.items() if k not in threads.VARIABLES}
    for given, said in (({}, "False"), ({"OMP_NUM_THREADS": "1"}, "True")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**unset, **given},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == said


PARALLEL = """
#include <omp.h>
extern "C" int team() {
    int count = 0;
    #pragma omp parallel num_threads(2)
    { if (omp_get_thread_num() == 0) count = omp_get_num_threads(); }
    return count;
}
"""


@linux
@pytest.mark.compiler
def test_compiled_loops_run_in_one_thread_or_in_those_they_were_compiled_for(
    tmp_path: Path, process_has: Callable[[int], None]
) -> None:
    source, library = tmp_path / "team.cpp", tmp_path / "team.so"
    source.write_text(PARALLEL)
    command = ["g++", "-shared", "-fPIC", "-fopenmp", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    process_has(2)
    team = ctypes.CDLL(str(library)).team
    assert team() == 2
    mkl = set_threads(1)
    assert team() == 1
    reset_threads(2, mkl)
    assert team() == 2


def numbers() -> tuple[int, int]:
    """Torch's number of threads in this Python thread, and MKL's."""
    library = ctypes.CDLL(TORCH_CPU)
    mkl = getattr(library, "MKL_Get_Max_Threads", torch.get_num_threads)
    return torch.get_num_threads(), mkl()


@linux
@pytest.mark.parametrize("explicit", [True, False], ids=["torch.set_num_threads", "OpenMP's"])
def test_only_the_program_computes_with_its_number(
    explicit: bool, process_has: Callable[[int], None]
) -> None:
    elsewhere: list[tuple[int, int]] = []
    seen: list[tuple[int, int]] = []

    def program(inputs: list[Tensor]) -> list[Tensor]:
        seen.append(numbers())
        thread = threading.Thread(target=lambda: elsewhere.append(numbers()))
        thread.start()
        thread.join()
        if inputs:
            raise ValueError("a step that fails")
        return []

    fabric = HostFabric(CSXBackend())
    process_has(3)
    if not explicit:  # MKL has no number of its own then
        getattr(ctypes.CDLL(TORCH_CPU), "MKL_Set_Num_Threads_Local", int)(0)
    own = numbers()
    assert own == (3, 3)
    for number in (1, 2, 3, 8):
        loaded = Loaded(call=program, compiled=True, built=True, seconds=0.0, how="")
        loaded.threads.number = number
        fabric.run(loaded, [])
        assert numbers() == own
        with pytest.raises(ValueError, match="a step that fails"):
            fabric.run(loaded, [torch.ones(1)])
        assert numbers() == own
    assert [one for one, _ in seen] == [mkl for _, mkl in seen] == [1, 1, 2, 2, 3, 3, 3, 3]
    assert elsewhere == [own] * 8


class Hooks(pl.Callback):
    """The number of threads in hooks, and the lines above the progress bar."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.seen.append(torch.get_num_threads())

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(torch.get_num_threads())


@pytest.mark.fits
@linux
def test_hooks_have_the_users_number_and_the_line_the_programs(
    process_has: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(announcements, "rank_zero_info", lines.append)
    process_has(3)
    hooks = Hooks()
    run = fit(lambda: Classifier(mlp()), lambda: (loader(64),), static=True, callbacks=(hooks,))
    [executable] = run.trainer.strategy.step_functions["training"].executables()
    assert executable.loaded.threads.number == 3
    assert set(hooks.seen) == {3}
    [line] = [line for line in lines if line.startswith("CSX on")]
    assert re.search(r", 3 threads\): training program", line)


@pytest.mark.fits
@linux
def test_the_training_says_which_number_it_takes(
    choice: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(announcements, "rank_zero_info", lines.append)
    fit(lambda: Classifier(mlp()), lambda: (loader(640, batch_size=8),), static=True)
    [line] = [line for line in lines if line.startswith("CSX on")]
    assert ", 1 or 2 threads): training program" in line
    [line] = [line for line in lines if line.startswith("CSX: training uses")]
    assert re.search(r"uses (1|2) threads?: [\d.]+ ms a step \((1|2) threads?: ", line)
