"""Results lie in memory as after eager kernels: the views that come next were traced on that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import graph_of
from harness import both
from models import Classifier, loader, mlp
from torch import Tensor, nn

from fulgurite.backends.csx.graph.passes.functionalize import functionalize

CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "after none": lambda x, none: torch.cat([none, x.transpose(1, 2)], dim=-2),
    "alone": lambda x, none: torch.cat([x.transpose(1, 2)]),
    "twice": lambda x, none: torch.cat([x.transpose(1, 2)] * 2, dim=1),
    "another type": lambda x, none: torch.cat([none.double(), x.transpose(1, 2)], dim=1),
    "channels last": lambda x, none: torch.cat([x.to(memory_format=torch.channels_last)]),
    "channels last, after none": lambda x, none: torch.cat(
        [none, x.to(memory_format=torch.channels_last)]
    ),
    "channels last, and no rows": lambda x, none: torch.cat(
        [y := x.to(memory_format=torch.channels_last), y[:0]]
    ),
    "enlarged": lambda x, none: nn.functional.interpolate(x[0].transpose(1, 2), scale_factor=2.0),
    "enlarged exactly": lambda x, none: nn.functional.interpolate(
        x[0].permute(1, 0, 2), scale_factor=2.0, mode="nearest-exact"
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_result_has_the_layout_of_its_kernel(case: str) -> None:
    x, none = torch.randn(2, 3, 4, 5), torch.tensor([])
    graph = functionalize(graph_of(lambda x, none: (CASES[case](x, none),), x, none))
    [made] = graph.module(x, none)
    wanted = CASES[case](x, none)
    assert made.stride() == wanted.stride()
    assert torch.equal(made, wanted)


class Heads(Classifier):
    """Attention of two heads, whose keys and values come after an empty cache, as in GPT-2's."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        heads = self.net[0](x).view(4, 4, 2, 8).transpose(1, 2)
        cached = torch.cat([torch.tensor([]), heads], dim=-2)
        seen = nn.functional.scaled_dot_product_attention(heads, cached, cached, dropout_p=0.1)
        return nn.functional.cross_entropy(self.net[1:](seen.transpose(1, 2).reshape(16, 16)), y)


@pytest.mark.numbers
def test_attention_after_an_empty_cache_gives_the_losses_of_stock() -> None:
    ours, stock = both(lambda: Heads(mlp()), lambda: (loader(160),))
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)


class Patches(Classifier):
    """Norms of the patches of a picture, as vision transformers have them: of what lies turned."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(mlp())
        self.patches, self.norm = nn.Conv1d(1, 8, 2, stride=2), norm

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        seen = self.norm(self.patches(x[:, None]).transpose(1, 2))
        return nn.functional.cross_entropy(self.net(seen.mean(1)), y)


@pytest.mark.numbers
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
@pytest.mark.parametrize(
    "norm", [lambda: nn.LayerNorm(8), lambda: nn.GroupNorm(2, 4), lambda: nn.BatchNorm1d(4)]
)
def test_norms_of_what_lies_turned_train_in_every_precision(
    norm: Callable[[], nn.Module], precision: Any
) -> None:
    """Their statistics are float32 under "bf16-mixed", where torch's fakes say bfloat16."""
    ours, stock = both(lambda: Patches(norm()), lambda: (loader(160),), precision=precision)
    within = {"32-true": 1e-5, "bf16-mixed": 1e-2, "bf16-true": 2e-2}[precision]
    assert ours.losses == pytest.approx(stock.losses, rel=within)
