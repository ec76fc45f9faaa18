"""What torch's compiler is made to do: it is imported whole, and keeps the factors of sums."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_same_run, both
from models import CLASSES, Classifier, loader, mlp
from torch import Tensor, nn
from torch._inductor import lowering

INTERRUPTED = """
import signal
import sys

from fulgurite.backends.csx.compile.inductor import generate as inductor


class PressesCtrlC:
    pressed = 0

    def find_spec(self, name, *rest):
        if name == "torch._inductor.fx_passes.post_grad" and not self.pressed:
            self.pressed += 1
            signal.raise_signal(signal.SIGINT)


sys.meta_path.insert(0, keyboard := PressesCtrlC())
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    inductor._import_compiler()
except KeyboardInterrupt:
    print(keyboard.pressed, "torch._inductor.compile_fx" in sys.modules)
inductor._import_compiler()
from torch._inductor.lowering import lowerings

print(sorted(str(operation) for operation in lowerings if str(operation).startswith("fulgurite")))
"""


@pytest.mark.long
@pytest.mark.process
def test_a_ctrl_c_while_the_compiler_is_imported_leaves_it_whole() -> None:
    """Half imported it would be lost to this process: what it registers, it registers once."""
    command = [sys.executable, "-W", "ignore", "-c", INTERRUPTED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "1 True",
        "['fulgurite.cbfloat16.default', 'fulgurite.realize.default']",
    ], done.stderr


class Adapter(pl.LightningModule):
    """Products in sums with factors, which are all zero in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, CLASSES)
        self.low = nn.Linear(8, 4, bias=False)
        self.b = nn.Parameter(torch.zeros(4, CLASSES))
        self.c = nn.Parameter(torch.zeros(4, CLASSES))
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(4, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        low = self.low(x)
        out = self.base(x).add(low @ self.b, alpha=0.25)
        out = out + (low @ self.b).add(low @ self.c, alpha=0.5).sub(low @ self.c, alpha=3)
        self.mean.mul_(0.9).add_(low.detach().T @ (low @ self.b).detach(), alpha=0.1)
        loss = nn.functional.cross_entropy(out, y) + self.mean.square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.5)


@pytest.mark.numbers
@pytest.mark.process
def test_factors_of_sums_with_products_are_kept() -> None:
    ours, stock = both(Adapter, lambda: (loader(64),), policy="default", max_epochs=2)
    assert_same_run(ours, stock)


class Enlarging(Classifier):
    """Its step enlarges pictures: torch could decompose it, and the library does it at once."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        wide = nn.functional.interpolate(x[:, None, None], size=(2, 8), mode="bilinear")
        return nn.functional.cross_entropy(self.net(wide.flatten(2).mean(1)[:, 8:]), y)


@pytest.mark.core
@pytest.mark.numbers
@pytest.mark.compiler
def test_what_has_no_rule_is_the_librarys_in_a_ci_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.delitem(lowering.lowerings, torch.ops.aten.upsample_bilinear2d.default, False)
    assert_compiled_as_stock(Enlarging, tmp_path)


def assert_compiled_as_stock(kind: type[Classifier], folder: Path) -> None:
    """Its step is compiled into an empty folder, and trains as stock Lightning's."""
    ours, stock = both(
        lambda: kind(mlp()),
        lambda: (loader(64),),
        policy="default",
        backend={"compile_dir": folder},
    )
    assert_same_run(ours, stock)
    [executable] = ours.trainer.strategy.step_functions["training"].executables()
    assert executable.loaded.compiled, executable.loaded.how


class Masked(Classifier):
    """A mask that is written in place, and a softmax that reads it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        mask = torch.full((16, 8), -10000.0)
        mask[torch.arange(16)[:, None], torch.arange(8)[None]] = 0
        return nn.functional.cross_entropy(self.net((x + mask).softmax(1)), y)


@pytest.mark.numbers
@pytest.mark.compiler
def test_what_was_written_in_place_is_read_from_memory(tmp_path: Path) -> None:
    assert_compiled_as_stock(Masked, tmp_path)


class Graph(Classifier):
    """Sums messages along edges, as graph networks do, and rows of a table, as embeddings do.

    The gradient of the table and that of the norm behind it share their outer loop.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.table, self.norm = nn.Embedding(8, 128), nn.LayerNorm(128)
        self.narrow = nn.Linear(128, 8)
        made = torch.Generator().manual_seed(0)
        self.edges: Tensor
        self.register_buffer("edges", torch.randint(0, 128, (2, 4096), generator=made))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        nodes = self.narrow(self.norm(self.table(x.abs().long().clamp(max=7)))).flatten(0, 1)
        sources, targets = self.edges
        sums = torch.zeros_like(nodes).index_add(0, targets, nodes[sources])
        rows = targets[:, None].expand_as(nodes[sources])
        sums = sums + torch.zeros_like(nodes).scatter_reduce(0, rows, nodes[sources], "sum")
        return nn.functional.cross_entropy(self.net(sums[:16] / 64), y)


@pytest.mark.numbers
@pytest.mark.compiler
def test_sums_at_indices_are_in_order_in_code_for_several_threads(tmp_path: Path) -> None:
    """Added atomically they were others each time; in one thread they took twice as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_compiled_as_stock(Graph, tmp_path)
    finally:
        torch.set_num_threads(threads)
    sources = "".join(one.read_text() for one in tmp_path.rglob("kernels.json"))
    assert "num_threads(2)" in sources
    assert "atomic_add" not in sources
    sums = [*re.finditer(r"\.store\(out_ptr\d+ \+ [^;]*tmp", sources)]
    assert len(sums) > 2
    for one in sums:  # none in a loop that threads divide among themselves
        loops = re.findall(
            r"#pragma omp for|#pragma omp single|void  kernel", sources[: one.start()]
        )
        assert loops[-1] != "#pragma omp for", sources[one.start() - 5000 : one.end()]
