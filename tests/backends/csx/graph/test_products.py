"""What a step's products are counted as is what torch counts around the same eager step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpt3_flops import TABLE, model, training_flops
from harness import fit
from models import Classifier
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop, sdpa_flop

from fulgurite.backends.csx.graph.products import Product, by_module

pytestmark = pytest.mark.numbers

aten = torch.ops.aten
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop.__wrapped__,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop.__wrapped__,
}
"""torch's formulas for attention, under the names that its CPU kernels have."""


class Attention(nn.Module):
    """Causal self-attention [B, T, 16] -> [B, T, 16] in 4 heads, then a layer, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Tokens [B, T] -> logits [B, 4], with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(4, 16), nn.Sequential(Attention(), Attention())

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.blocks(self.embed(tokens)).mean(1), self.embed.weight)


class Recurrent(nn.Module):
    """[B, T, 8] -> [B, 4] by an LSTM and a GRU in two directions."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.gru = nn.GRU(8, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.lstm(x)[0])[0][:, -1])


class UNet(nn.Module):
    """[B, 2, 8, 8] -> [B, 4, 64]: down, up by a transposed convolution, across."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 6, 4, stride=2, padding=1, groups=2)
        self.out = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([x, self.up(self.down(x).relu())], 1)).flatten(2)


class Residual(nn.Module):
    """[B, 8, H, W] -> [B, 4]: a block of ResNet, and one whose forward runs again."""

    def __init__(self) -> None:
        super().__init__()
        block = [nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
        self.first, self.again = nn.Sequential(*block), nn.Conv2d(8, 8, 3, dilation=2, padding=2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        x = x + checkpoint(self.again, x, use_reentrant=False)
        return self.head(x.mean((2, 3)))


class ViT(nn.Module):
    """[B, 1, 8, 8] -> [B, 4]: patches, torch's attention, whose inner products are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 4, stride=4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head((x + self.attention(x, x, x, need_weights=True)[0]).mean(1))


class Products(nn.Module):
    """[B, 6] -> [B, 4]: products that a compiler writes as sums, and others by name."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(torch.ones(6, 1)), nn.Parameter(torch.ones(1, 4))
        self.core = nn.Bilinear(6, 6, 4)
        self.batched = nn.Parameter(torch.ones(3, 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        outer = x @ self.u @ self.v  # the inner dimension of the second is 1
        parts = torch.einsum("bik,ikj->bj", x.view(-1, 3, 2), self.batched)
        last = torch.baddbmm(outer[None], x[None], (x.T @ outer)[None])[0]
        return outer + parts + self.core(x, x) + last


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(stack, nn.Flatten(), nn.LazyLinear(4))


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, stride=2, groups=2),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Flatten(),
        nn.LazyLinear(4),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (16, 8)),
    "one row, one column": (
        lambda: nn.Sequential(nn.Linear(8, 1), nn.Tanh(), nn.Linear(1, 4)),
        (1, 8),
    ),
    "autoencoder": (
        lambda: nn.Sequential(nn.Linear(12, 3), nn.GELU(), nn.Linear(3, 12), nn.Linear(12, 4)),
        (5, 12),
    ),
    "ConvNet in groups": (grouped, (3, 4, 9, 9)),
    "convolutions of one dimension and of three": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.Unflatten(2, (2, 3, 2)), nn.Conv3d(4, 4, 2), nn.Flatten(2)
        ),
        (3, 2, 14),
    ),
    "U-Net": (UNet, (2, 2, 8, 8)),
    "ResNet": (Residual, (2, 8, 6, 6)),
    "ViT": (ViT, (3, 1, 8, 8)),
    "transformer encoder": (encoder, (3, 5, 8)),
    "recurrent": (Recurrent, (3, 5, 8)),
    "products": (Products, (7, 6)),
    "GPT": (GPT, (3, 7)),
}


def steps(
    net: Callable[[], nn.Module], shape: tuple[int, ...], mapping: Any = ATTENTION, **options: Any
) -> tuple[tuple[Product, ...], dict[str, int]]:
    """The products of a training program, and torch's count around the step of stock Lightning.

    Args:
        net: makes it.
        shape: of its inputs, which are tokens for a GPT; targets are one for each logits.
        mapping: formulas that torch's counter is given.
        options: of the classifier.
    """

    def module() -> Classifier:
        return Classifier(made(), **options)

    def made() -> nn.Module:
        torch.manual_seed(0)
        one = net()
        with torch.no_grad():
            targets.append(one(x))  # and its lazy layers have their shapes
        return one

    torch.manual_seed(3)
    x, targets = torch.randn(shape), list[Tensor]()
    x = torch.randint(0, 4, shape) if net is GPT else x
    made()
    y = torch.zeros(targets[0].shape[0], *targets[0].shape[2:], dtype=torch.int64)
    loader: DataLoader[Any] = DataLoader([(x, y)], batch_size=None)  # type: ignore[arg-type]
    run = fit(module, lambda: (loader,), static=True)
    [program] = run.trainer.strategy.programs  # type: ignore[attr-defined]
    [entry] = program.entries
    reference = module()
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        fit(lambda: reference, lambda: (loader,), static=False)
    counts = counter.get_flop_counts()["Global"]
    return entry.products, {str(name): flops for name, flops in counts.items()}


def by_operation(products: tuple[Product, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for product in products:
        name = product.operation.rpartition(".")[0]
        found[name] = found.get(name, 0) + product.flops
    return found


@pytest.fixture
def without_onednn() -> Iterator[None]:
    """oneDNN runs an LSTM by an operation of its own, for which torch has no formula."""
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(True)


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("name", MODELS)
def test_the_products_of_a_training_program_are_torchs_count_of_the_eager_step(name: str) -> None:
    products, counted = steps(*MODELS[name])
    assert by_operation(products) == counted
    assert sum(product.flops for product in products) > 0


def test_attention_is_counted_where_torch_has_no_formula_for_the_cpus() -> None:
    products, counted = steps(*MODELS["GPT"], mapping={})
    ours = by_operation(products)
    missing = ATTENTION.keys() - flop_registry.keys()  # since torch 2.15 none
    assert ours.keys() - counted.keys() == {str(packet) for packet in missing}
    assert {name: ours[name] for name in counted} == counted
    forward = 2 * 2 * 2 * 3 * 4 * 7 * 7 * 4  # layers, products, flops; B, heads, T, T, width
    assert ours["aten._scaled_dot_product_flash_attention_for_cpu"] == forward


def test_an_optimizers_products_count() -> None:
    products, counted = steps(
        lambda: nn.Linear(8, 4, bias=False), (16, 8), optimizer=torch.optim.Muon
    )
    assert sum(product.flops for product in products) == sum(counted.values())
    assert set(by_module(products)) == {"net (Linear)", ""}


def test_a_modules_products_are_those_of_its_forward_and_its_backward_pass() -> None:
    products, _ = steps(*MODELS["MLP"])
    assert all("training_step" in product.line for product in products)
    first, last = 2 * 16 * 8 * 16, 2 * 16 * 16 * 4
    assert by_module(products) == {"net.0 (Linear)": 2 * first, "net.2 (Linear)": 3 * last}
    passes = {product.module: product.flops for product in products}
    assert passes["net.0 (Linear)"] == passes["the backward pass of net.0 (Linear)"] == first


@pytest.mark.fits
@pytest.mark.long
def test_the_training_of_gpt3_small_takes_the_published_flops() -> None:
    row = TABLE[0]
    made = model(row.layers, row.width, row.heads)
    parameters = sum(p.numel() for p in made.parameters())
    counted, attention = training_flops(row)
    assert parameters == pytest.approx(1e6 * row.parameters_millions, rel=0.01)
    assert counted == pytest.approx(row.flops, rel=0.02)
    assert attention > 0.1 * counted, "which the paper leaves out"
