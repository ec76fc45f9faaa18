"""How many threads a program computes with, and that nobody else computes with so few or many."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import fit
from models import Classifier, loader, mlp
from torch import Tensor
from torch._inductor import config as inductor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fulgurite.backends.csx.compile.background import threads
from fulgurite.backends.csx.compile.background.threads import threads_for
from fulgurite.backends.csx.compile.fabric import Loaded
from fulgurite.backends.csx.compile.host import idle_threads
from fulgurite.backends.csx.compile.host.denormals import TORCH_CPU
from fulgurite.backends.csx.compile.host.host_fabric import HostFabric
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.graph.graph import Graph

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere programs use torch's number")


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> Graph:
    """The operations of a function; its inputs are nobody's."""
    mode = FakeTensorMode()
    with mode:
        fakes = [torch.empty(tensor.shape) for tensor in inputs]
        return Graph(module=make_fx(function)(*fakes), inputs=(), mode=mode)


def products(count: int, width: int) -> Graph:
    """So many products of square matrices, one after the other."""

    def function(x: Tensor) -> Tensor:
        for _ in range(count):
            x = x @ x
        return x

    return graph_of(function, torch.empty(width, width, device="meta"))


@pytest.fixture
def process_has(request: pytest.FixtureRequest) -> Iterator[Callable[[int], None]]:
    """Give torch so many threads."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@linux
@pytest.mark.parametrize(
    ("graph", "numbers"),
    [
        (products(8, 64), [1, 1, 1, 1]),
        (products(1000, 128), [1, 1, 1, 1]),  # long, but each operation is short
        (products(8, 384), [1, 2, 4, 7]),
        (products(2, 2048), [1, 2, 4, 64]),
        (graph_of(lambda x: x + 1, torch.empty(1 << 10, device="meta")), [1, 1, 1, 1]),
        (graph_of(lambda x: x + 1, torch.empty(1 << 24, device="meta")), [1, 2, 4, 8]),
        (graph_of(torch.linalg.inv, torch.empty(2000, 2000, device="meta")), [1, 2, 4, 64]),
        (graph_of(lambda x: x.view(-1), torch.empty(1 << 24, device="meta")), [1, 1, 1, 1]),
    ],
)
def test_a_program_uses_as_many_threads_as_its_operations_keep_busy(
    graph: Graph, numbers: list[int], process_has: Callable[[int], None]
) -> None:
    for most, number in zip((1, 2, 4, 64), numbers, strict=True):
        process_has(most)
        assert threads_for(graph) == number


@linux
def test_one_long_operation_among_many_short_ones_does_not_count(
    process_has: Callable[[int], None],
) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(500):
            x = x @ x
        return x, y @ y

    process_has(2)
    x, y = torch.empty(128, 128, device="meta"), torch.empty(400, 400, device="meta")
    assert threads_for(graph_of(function, x, y)) == 1


@linux
def test_the_compilers_own_number_is_the_most(process_has: Callable[[int], None]) -> None:
    process_has(4)
    with inductor.patch({"cpp.threads": 2}):
        assert threads_for(products(2, 2048)) == 2


def with_gradients(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def both(*inputs: Tensor) -> Any:
        inputs = tuple(x.requires_grad_() for x in inputs)
        return torch.autograd.grad(function(*inputs).sum(), inputs)

    return both


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, w: x @ w, [(5, 7), (7, 11)]),
        (lambda b, x, w: torch.addmm(b, x, w), [(11,), (5, 7), (7, 11)]),
        (lambda x, w: torch.bmm(x, w), [(3, 5, 7), (3, 7, 11)]),
        (lambda x, w: F.conv2d(x, w, stride=2), [(3, 4, 9, 9), (6, 4, 3, 3)]),
        (lambda x, w: F.conv_transpose2d(x, w), [(3, 4, 9, 9), (4, 6, 3, 3)]),
        (lambda x, w: F.conv1d(x, w), [(3, 4, 9), (6, 4, 3)]),
    ],
)
def test_products_are_counted_as_torch_counts_them(
    function: Callable[..., Tensor], shapes: list[tuple[int, ...]]
) -> None:
    inputs = [torch.randn(shape) for shape in shapes]
    for one in (function, with_gradients(function)):
        graph = graph_of(one, *inputs)
        ours = sum(
            threads._product(threads.operation_name(node.target), node)
            for node in graph.operations()
        )
        with FlopCounterMode(display=False) as counter:
            one(*inputs)
        assert ours == counter.get_total_flops()


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
    assert own == (3, 3 if explicit else int(os.environ.get("MKL_NUM_THREADS", "3")))
    for number in (1, 2, 3, 8):
        loaded = Loaded(
            call=program, compiled=True, built=True, seconds=0.0, how="", threads=number
        )
        fabric.run(loaded, [])
        assert numbers() == own
        with pytest.raises(ValueError, match="a step that fails"):
            fabric.run(loaded, [torch.ones(1)])
        assert numbers() == own
    assert [one for one, _ in seen] == [1, 1, 2, 2, 3, 3, 3, 3]
    assert [mkl for _, mkl in seen] == [1, 1, 2, 2, *[own[1]] * 4]
    assert elsewhere == [(3, 3)] * 8


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
    from fulgurite.backends.csx.program import announcements

    lines: list[str] = []
    monkeypatch.setattr(announcements, "rank_zero_info", lines.append)
    process_has(2)
    hooks = Hooks()
    run = fit(lambda: Classifier(mlp()), lambda: (loader(64),), static=True, callbacks=(hooks,))
    [executable] = run.trainer.strategy.step_functions["training"].executables()
    assert executable.loaded.threads == 1
    assert set(hooks.seen) == {2}
    [line] = [line for line in lines if line.startswith("CSX on")]
    assert re.search(r", 1 thread\): training program", line)


@linux
def test_the_line_says_each_number(process_has: Callable[[int], None]) -> None:
    process_has(4)
    small, large = products(1, 8), products(1, 2048)
    fabric = HostFabric(CSXBackend())
    assert fabric.describe([small]).endswith(", 1 thread)")
    assert fabric.describe([large, large]).endswith(", 4 threads)")
    assert fabric.describe([large, small]).endswith(", 1 or 4 threads)")


SLEEPING = """
import sys, time, torch
from fulgurite.backends.csx.compile.host.idle_threads import idle_threads
x = torch.randn(1 << 20)
def spun_ms():
    found = []
    for _ in range(15):
        x + 1
        began = time.process_time()
        time.sleep(0.03)
        found.append((time.process_time() - began) * 1e3)
    return sorted(found)[7]
for _ in range(2):
    idle_threads.sleep()
    time.sleep(0.1)
    assert spun_ms() < 1, spun_ms()
    idle_threads.spin()
    ends = time.monotonic() + 20  # on a busy machine the pool's thread takes its time to end
    while spun_ms() < 1:
        assert time.monotonic() < ends
"""


@pytest.mark.long
@pytest.mark.process
@linux
def test_idle_threads_sleep_or_spin_as_they_are_told() -> None:
    """They spin for 5 ms, where there are as many threads as processors."""
    processors = len(os.sched_getaffinity(0))
    if processors == 1:
        pytest.skip("on one processor no thread is idle: a program has one")
    environment = {k: v for k, v in os.environ.items() if k not in idle_threads.POLICIES}
    subprocess.run(
        [sys.executable, "-c", SLEEPING],
        env={**environment, "OMP_NUM_THREADS": str(processors)},
        check=True,
    )


class Used:
    """What the system says of a process: a second of processor time at each look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, switches: list[int]) -> None:
        self.now, self._switches = 100.0, iter(switches)
        self.ru_utime = self.ru_nivcsw = self.ru_stime = 0
        monkeypatch.setattr(idle_threads, "perf_counter", lambda: self.now)
        monkeypatch.setattr(idle_threads.resource, "getrusage", self._used)

    def _used(self, of: int) -> Used:
        self.ru_utime += 1
        self.ru_nivcsw += next(self._switches)
        return self


@linux
def test_they_sleep_where_other_processes_need_the_cores_and_try_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idle_threads, "_pool_maker", lambda: lambda: None)
    used = Used(monkeypatch, [5000, 20, 200, 0, 200, 0, 20, 200, 0])
    waiting, told = idle_threads.IdleThreads(), []
    for after_s in (0.0, 0.25, 0.25, 2.0, 0.25, 4.0, 0.25, 0.25, 1.9):
        used.now += after_s
        waiting.adapt()
        told.append(waiting.asleep)
    assert told == [False, False, True, False, True, False, False, True, True]
    waiting.spin()
