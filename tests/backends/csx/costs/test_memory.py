"""What is alive call by call: by hand on tiny graphs, and beside what torch allocates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import graph_of
from harness import fit
from measured_memory import Measured, measured
from models import GAN, Classifier, Transformer, loader, mlp, pictures, tokens
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

import fulgurite
from fulgurite.backends.csx.compile.host.library import has
from fulgurite.backends.csx.compile.programs.kernels import KernelCall, Kernels, Maker, one_by_one
from fulgurite.backends.csx.compile.programs.steps import (
    Alias,
    Alloc,
    Extern,
    Free,
    Item,
    Kernel,
    Name,
    Program,
    View,
    calls,
)
from fulgurite.backends.csx.costs.memory import Memory, memory
from fulgurite.backends.csx.graph.graph import Graph


def alive(graph: Graph, kernels: Kernels | None = None) -> list[int]:
    """Elements of intermediates at each call, at four bytes."""
    found = memory(graph, kernels or one_by_one(graph, has))
    return [point.intermediates_bytes // 4 for point in found.timeline]


def trained(make: Any, *loaders: Any, **options: Any) -> list[Measured]:
    """The entry points of a training program, predicted and measured."""
    return measured(lambda: fit(make, lambda: loaders, static=True, **options))


def test_a_value_is_alive_until_it_is_read_last() -> None:
    graph = graph_of(lambda a: (a.exp().relu() + 1).sum(), torch.zeros(2, 3))
    assert alive(graph) == [6, 12, 12, 7]
    again = graph_of(lambda a: _later(a), torch.zeros(2, 3))
    assert alive(again) == [6, 12, 18]


def _later(a: Tensor) -> Tensor:
    first = a.exp()
    return first.relu() + first


def test_a_view_holds_what_it_looks_at() -> None:
    graph = graph_of(lambda a: a.exp()[0].relu(), torch.zeros(2, 3))
    assert alive(graph) == [6, 9]


def test_what_a_fused_region_makes_for_itself_is_no_intermediate() -> None:
    graph = graph_of(lambda a: (a.exp() + 1).relu().sum(), torch.zeros(2, 3))
    region = KernelCall(kernel="kernel_a", maker=Maker.GENERATED, operations=(0, 1, 2))
    total = KernelCall(kernel="aten.sum.default", maker=Maker.LIBRARY, operations=(3,))
    assert alive(graph, Kernels(calls=(region, total))) == [6, 7]


def test_results_live_to_the_end_and_state_is_no_intermediate() -> None:
    graph = graph_of(_updated, torch.zeros(2, 3))
    found = memory(graph, one_by_one(graph, has))
    assert [point.intermediates_bytes // 4 for point in found.timeline] == [6, 7, 7]
    assert found.peak_bytes == 4 * (6 + 7)
    assert found.resident_bytes == 4 * 6


def _updated(state: Tensor) -> Tensor:
    new = state.exp()
    loss = new.sum()
    state.copy_(new)
    return loss


BUF0, BUF1, BUF2, BUF3, BUF4, BUF5 = map(Name, [f"buf{i}" for i in range(6)])
LEFT, RIGHT, CONSTANT = map(Name, ["arg0_1", "arg1_1", "constant0"])
ONCE = (
    Alloc(BUF0, (2, 3), (3, 1), torch.float32),
    Alias(Name("view0"), View(BUF0, ((3, 2), (1, 3), 0))),
)
STEPS = (
    Kernel(kernel="kernel_a", args=(LEFT, BUF0)),
    Alloc(BUF1, (2, 2), (2, 1), torch.float32),
    Extern(
        function="torch.mm",
        args=(BUF0, Name("view0")),
        kwargs=(("out", BUF1),),
        kernel="aten.mm.out",
    ),
    Free(LEFT),
    Alias(BUF2, BUF1),
    Free(BUF1),
    Extern(function="torch.ops.aten.max.dim", args=(BUF2, 1), result=BUF3, kernel="aten.max.dim"),
    Item(BUF4, BUF3, (0,)),
    Free(BUF2),
    Extern(function="torch.clone", args=(RIGHT,), result=BUF5),
    Kernel(kernel="kernel_b", args=(BUF4, CONSTANT)),
    Free(BUF3),
)
PROGRAM = Program((LEFT, RIGHT), STEPS, (BUF4,), ONCE)


def kernels_of(program: Program) -> Kernels:
    """What runs a graph as a compiled program."""
    found = [
        KernelCall(kernel=one.kernel, maker=Maker.GENERATED, operations=one.at)
        for one in calls(program.steps)
    ]
    return Kernels(calls=tuple(found), steps=program, program="its Python")


def test_a_compiled_program_holds_what_its_steps_do() -> None:
    graph = graph_of(lambda a, b: a.sum() + b, torch.zeros(2, 3), torch.zeros(100))
    found = memory(graph, kernels_of(PROGRAM))
    maximum = 2 + 2 * 2  # two values, and their two numbers of eight bytes
    copied = 100  # between two calls
    assert alive(graph, kernels_of(PROGRAM)) == [
        *(6, 6 + 4, 6 + maximum + copied, 6 + maximum + copied),
    ]
    assert found.kept_bytes == 4 * 6
    assert found.resident_bytes == 4 * 106
    assert found.peak_bytes == 4 * (106 + 6 + maximum + copied)


def test_of_what_a_constant_goes_into_the_graph_knows_the_size() -> None:
    graph = graph_of(lambda a: a.exp(), torch.zeros(2, 3))
    exponential = Extern(
        function="torch.ops.aten.exp.default",
        args=(CONSTANT,),
        result=BUF0,
        kernel="aten.exp.default",
        at=(0,),
    )
    program = Program((LEFT,), (exponential,), (BUF0,))
    assert alive(graph, kernels_of(program)) == [6]


class Normalized(Classifier):
    """With buffers, and a metric's states."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
        self.accuracy = MulticlassAccuracy(4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y = self.net(batch[0])
        self.accuracy(y, batch[1])
        self.log("accuracy", self.accuracy)
        return nn.functional.cross_entropy(y, batch[1])


@pytest.mark.fits
@pytest.mark.long
def test_state_is_told_by_whose_it_is() -> None:
    [found] = trained(Normalized, loader(80))
    told = found.predicted
    weights = 4 * 8 + 4 + 4 + 4
    assert told.parameters_bytes == 4 * weights
    assert told.optimizer_bytes == 4 * (2 * weights + 4)  # AdamW's, and its four counts of steps
    assert told.buffers_bytes == 4 * 8 + 8
    assert told.batch_bytes == 16 * 8 * 4 + 16 * 8
    assert told.other_state_bytes > 0
    assert told.resident_bytes == found.resident_bytes


def wide(batch: int = 512) -> tuple[Any, Any]:
    """A net whose second layer has most of the activations, and a loader."""
    layers = nn.Linear(8, 16), nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 4)
    return (
        lambda: Classifier(nn.Sequential(*layers), torch.optim.SGD),
        loader(4 * batch, batch_size=batch),
    )


def assert_wide(told: Memory, batch: int) -> None:
    heavy = batch * 512 * 4
    assert told.at_peak[0] == ("net.2 (ReLU)", heavy)
    assert {"net.0 (Linear)": batch * 16 * 4}.items() <= dict(told.at_peak).items()
    assert heavy < told.activations_bytes < 1.2 * heavy
    most = max(told.timeline, key=lambda point: point.intermediates_bytes)
    assert most.activations_bytes == sum(size for _, size in told.at_peak)
    assert told.timeline[-1].activations_bytes == 0  # the optimizer's part reads none


@pytest.mark.fits
def test_the_layer_whose_activations_are_largest_is_named_at_the_peak() -> None:
    make, rows = wide()
    [found] = trained(make, rows)
    assert_wide(found.predicted, 512)
    assert found.ratio == pytest.approx(1, abs=0.01)


@pytest.mark.fits
@pytest.mark.compiler
def test_so_it_is_in_a_compiled_program() -> None:
    batch = 4096  # too large to be made once
    make, rows = wide(batch)
    [found] = trained(make, rows, policy="default")
    assert found.loaded.compiled
    assert_wide(found.predicted, batch)
    assert found.predicted.kept_bytes == found.kept_bytes
    assert found.ratio == pytest.approx(1, abs=0.02)


CASES: dict[str, Any] = {
    "an MLP": (lambda: Classifier(mlp()), loader(80), {}),
    "accumulation": (lambda: Classifier(mlp()), loader(160), {"accumulate_grad_batches": 2}),
    "a GAN by hand": (GAN, loader(80), {}),
    "a transformer": (Transformer, tokens(80), {}),
}


@pytest.mark.fits
@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_as_predicted(name: str) -> None:
    make, rows, options = CASES[name]
    found = trained(make, rows, **options)
    assert len(found) == (2 if name == "accumulation" else 1)
    for one in found:
        assert one.predicted.resident_bytes == one.resident_bytes
        assert one.ratio_of_intermediates == pytest.approx(1, abs=0.01)


def convolutions() -> Classifier:
    """Of 16 channels and 32: oneDNN fills up fewer to the 4, 8 or 16 of the processor's vectors."""
    first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2)
    return Classifier(nn.Sequential(first, nn.BatchNorm2d(16), nn.ReLU(), second, *head))


KERNELS: dict[str, Any] = {
    "convolutions": (convolutions, pictures(40), {}, 0.1),
    "products in 16 bits": (Transformer, tokens(80), {"precision": "bf16-mixed"}, 0.2),
}
"""Their kernels take memory for themselves: convolutions for copies in oneDNN's layout, products in
bfloat16 where the processor has AMX, for its layout.
"""


@pytest.mark.fits
@pytest.mark.parametrize("name", KERNELS)
def test_it_is_nearly_so_where_kernels_take_memory_for_themselves(name: str) -> None:
    make, rows, options, apart = KERNELS[name]
    [found] = trained(make, rows, **options)
    assert found.ratio == pytest.approx(1, abs=apart)


@pytest.mark.long
@pytest.mark.fits
@pytest.mark.compiler
@pytest.mark.parametrize("name", ["a transformer", "accumulation"])
def test_the_peak_of_compiled_programs_is_as_predicted(name: str) -> None:
    make, rows, options = CASES[name]
    for one in trained(make, rows, policy="default", **options):
        assert one.loaded.compiled
        assert one.predicted.kept_bytes == one.kept_bytes > 0
        assert one.ratio_of_intermediates == pytest.approx(1, abs=0.05)
        assert one.predicted.activations_bytes > 0


class Fused(Classifier):
    """Its loss is one generated kernel, whatever else is."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 100), torch.optim.SGD)
        self.loss = fulgurite.nn.CrossEntropyLoss(use_autogen=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(self.net(batch[0]), batch[1])
        return loss


@pytest.mark.long
@pytest.mark.fits
@pytest.mark.compiler
def test_a_fused_loss_among_operations_that_run_one_by_one() -> None:
    [found] = trained(Fused, loader(4 * 64, batch_size=64), policy="disabled")
    assert [call.maker for call in found.loaded.kernels().calls].count(Maker.GENERATED) == 2
    assert found.ratio_of_intermediates == pytest.approx(1, abs=0.02)
    assert found.predicted.at_peak[0] == ("loss (CrossEntropyLoss)", pytest.approx(64 * 400, 0.01))
