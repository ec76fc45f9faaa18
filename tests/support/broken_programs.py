"""Compiled programs that are wrong, each in one way: a function that a right one is run by.

It gets the graph, the right program, the inputs, and a dict that lasts from call to call, and
returns what the wrong program does. The step is ``Broken``'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fulgurite
from fulgurite.backends.csx.graph.graph import Graph, Kind

Call = Callable[[list[Tensor]], list[Tensor]]
Wrong = Callable[[Graph, Call, list[Tensor], dict[str, Any]], list[Tensor]]


TABLE = torch.linspace(0.5, 1.5, 16)


class Broken(pl.LightningModule):
    """Momentum, second moments, running statistics, counts, an average, a mask, a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.register_buffer("hits", torch.zeros(16, dtype=torch.int64))
        self.register_buffer("average", torch.zeros(16))
        self.mask: Any = None
        self.rows: Any = None
        self.seen: Any = None
        self.count: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        h = torch.tanh(self.norm(self.first(x)))
        self.mask = torch.rand_like(h) < 0.7
        logits = self.last(h * self.mask) * TABLE
        self.hits += F.one_hot(logits.argmax(1), 16).sum(0)
        self.rows = F.cross_entropy(logits, y, reduction="none")
        self.average.lerp_(logits.mean(0).detach(), 0.1)
        self.seen = self.average.clone()
        self.count = fulgurite.global_step() * 2
        self.limit = torch.log(torch.relu(logits))  # minus infinity in places
        one, two = self.optimizers()  # type: ignore[misc]
        one.zero_grad()
        two.zero_grad()
        self.manual_backward(self.rows.mean())
        one.step()
        two.step()

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.SGD(self.first.parameters(), 0.1, momentum=0.9, weight_decay=0.01),
            torch.optim.Adam([*self.norm.parameters(), *self.last.parameters()], 1e-2),
        )


def loaders() -> tuple[Any, ...]:
    """Four batches of 8."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 6, generator=generator)
    y = torch.randint(0, 16, (32,), generator=generator)
    return (DataLoader(TensorDataset(x, y), batch_size=8),)


def state(graph: Graph, inputs: list[Tensor], *words: str) -> list[Tensor]:
    """The inputs whose names have all the words."""
    found = [
        tensor
        for item, tensor in zip(graph.inputs, inputs, strict=True)
        if all(word in item.name for word in words)
    ]
    assert found, (words, [item.name for item in graph.inputs])
    return found


def reading(change: Callable[[Tensor], Any], *words: str) -> Wrong:
    """Reads state as if it were another."""

    def wrong(
        graph: Graph, run: Call, inputs: list[Tensor], memory: dict[str, Any]
    ) -> list[Tensor]:
        for tensor in state(graph, inputs, *words):
            change(tensor)
        return run(inputs)

    return wrong


def writing(change: Callable[[Tensor, Tensor], Any], *words: str) -> Wrong:
    """Writes other values into state; ``change`` gets what it is after the step and was before."""

    def wrong(
        graph: Graph, run: Call, inputs: list[Tensor], memory: dict[str, Any]
    ) -> list[Tensor]:
        before = [tensor.clone() for tensor in state(graph, inputs, *words)]
        outputs = run(inputs)
        for tensor, was in zip(state(graph, inputs, *words), before, strict=True):
            change(tensor, was)
        return outputs

    return wrong


def giving(change: Callable[[Tensor], Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> Wrong:
    """Returns another result in the place of one."""

    def wrong(
        graph: Graph, run: Call, inputs: list[Tensor], memory: dict[str, Any]
    ) -> list[Tensor]:
        outputs = run(inputs)
        at = [i for i, one in enumerate(outputs) if (one.dtype, one.shape) == (dtype, shape)]
        assert at, [(one.dtype, one.shape) for one in outputs]
        for i in at:
            outputs[i] = change(outputs[i])
        return outputs

    return wrong


def remembering(kind: Kind | None, dtype: torch.dtype | None = None) -> Wrong:
    """Takes inputs of a kind, or all results of a dtype, from its first call."""

    def wrong(
        graph: Graph, run: Call, inputs: list[Tensor], memory: dict[str, Any]
    ) -> list[Tensor]:
        given = list(inputs)
        for i, item in enumerate(graph.inputs):
            if item.kind is kind:
                given[i] = memory.setdefault(f"{i}", inputs[i].clone())
        outputs = run(given)
        if dtype is None:
            return outputs
        kept = memory.setdefault("outputs", [one.clone() for one in outputs])
        return [old if one.dtype is dtype else one for one, old in zip(outputs, kept, strict=True)]

    return wrong


def in_one_place(graph: Graph, run: Call, inputs: list[Tensor], memory: Any) -> list[Tensor]:
    """Returns the same memory each time."""
    outputs = run(inputs)
    kept = memory.setdefault("outputs", [one.clone() for one in outputs])
    for old, new in zip(kept, outputs, strict=True):
        old.copy_(new)
    return list(kept)


def alias_of_state(graph: Graph, run: Call, inputs: list[Tensor], memory: Any) -> list[Tensor]:
    """Returns state where a copy of it is asked for."""
    outputs = run(inputs)
    [average] = state(graph, inputs, "average")
    return [average if torch.equal(one, average) else one for one in outputs]


def swapped(graph: Graph, run: Call, inputs: list[Tensor], memory: Any) -> list[Tensor]:
    """Each of two biases gets the update of the other."""
    one, two = state(graph, inputs, "self.norm.bias")[0], state(graph, inputs, "self.last.bias")[0]
    before = one.clone(), two.clone()
    outputs = run(inputs)
    moves = one - before[0], two - before[1]
    one.copy_(before[0] + moves[1])
    two.copy_(before[1] + moves[0])
    return outputs


def too_early(graph: Graph, run: Call, inputs: list[Tensor], memory: Any) -> list[Tensor]:
    """Returns the average as it was before the step wrote it."""
    [average] = state(graph, inputs, "average")
    before = average.clone()
    outputs = run(inputs)
    return [before if torch.equal(one, average) else one for one in outputs]


def without_last_row(graph: Graph, run: Call, inputs: list[Tensor], memory: Any) -> list[Tensor]:
    """Computes with zeros for the batch's last row."""
    given = list(inputs)
    for i, item in enumerate(graph.inputs):
        if item.kind is Kind.BATCH and inputs[i].is_floating_point():
            given[i] = inputs[i].clone()
            given[i][-1] = 0
    return run(given)


def no_draws(graph: Graph, run: Call, inputs: list[Tensor], memory: Any) -> list[Tensor]:
    """Leaves the random state as it was."""
    before = torch.get_rng_state()
    outputs = run(inputs)
    torch.set_rng_state(before)
    return outputs


def _last(tensor: Tensor, was: Tensor) -> None:
    tensor.view(-1)[-1] = was.view(-1)[-1]


def _nan_for_inf(x: Tensor) -> Tensor:
    return torch.where(x.isinf(), torch.nan, x)


FLOAT, BOOL, INT = torch.float32, torch.bool, torch.int64
BROKEN: dict[str, Wrong] = {
    "half of the momentum is read": reading(lambda x: x.mul_(0.5), "momentum_buffer"),
    "the momentum is taken for zero": reading(lambda x: x.zero_(), "momentum_buffer"),
    "the second moment is read twice": reading(lambda x: x.mul_(2), "exp_avg_sq"),
    "the first moment is taken for zero": reading(lambda x: x.zero_(), "exp_avg"),
    "a buffer that begins at zero is taken for zero": reading(lambda x: x.zero_(), "average"),
    "a count that begins at zero is taken for zero": reading(lambda x: x.zero_(), "hits"),
    "a mean that begins at zero is taken for zero": reading(lambda x: x.zero_(), "running_mean"),
    "a variance that begins at one is taken for one": reading(lambda x: x.fill_(1), "running_var"),
    "a weight that begins at one is taken for one": reading(lambda x: x.fill_(1), "norm.weight"),
    "the numbers of the groups are constants": remembering(Kind.NUMBERS),
    "the number of steps is a constant": remembering(Kind.COUNTER),
    "a tensor that nobody holds is a constant": remembering(Kind.CONSTANT),
    "the batch is a constant": remembering(Kind.BATCH),
    "results are the first step's": remembering(None, FLOAT),
    "the mask is the first step's": remembering(None, BOOL),
    "results lie in one place": in_one_place,
    "a result is memory of state": alias_of_state,
    "two updates are swapped": swapped,
    "a result is computed before a write": too_early,
    "the last row is left out": without_last_row,
    "the last element of a weight stays": writing(_last, "self.last.weight"),
    "the last element of a moment stays": writing(_last, "exp_avg_sq"),
    "a weight is not updated": writing(lambda x, was: x.copy_(was), "self.first.bias"),
    "a weight is updated twice": writing(lambda x, was: x.add_(x - was), "self.first.weight"),
    "a step is not counted": writing(lambda x, was: x.copy_(was), "num_batches_tracked"),
    "a weight is rounded": writing(lambda x, was: x.copy_(x.bfloat16()), "self.last.weight"),
    "a mask is off by one": giving(lambda x: x.roll(1, 1), BOOL, (8, 16)),
    "a mask is of integers": giving(lambda x: x.to(torch.uint8), BOOL, (8, 16)),
    "a count is of 32 bits": giving(lambda x: x.to(torch.int32), INT, ()),
    "losses are of 64 bits": giving(lambda x: x.double(), FLOAT, (8,)),
    "losses are a column": giving(lambda x: x[:, None], FLOAT, (8,)),
    "losses are in another order": giving(lambda x: x.flip(0), FLOAT, (8,)),
    "NaN instead of infinity": giving(_nan_for_inf, FLOAT, (8, 16)),
    "the random state stays": no_draws,
}
