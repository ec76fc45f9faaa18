"""Random numbers: every layer and function that draws draws stock's numbers, compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from harness import assert_same_run, both
from models import SiluDropout
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.numbers

POLICIES = ("disabled", pytest.param("default", marks=pytest.mark.compiler))


def dropouts(x: Tensor) -> Tensor:
    """Of every kind. x: 8 x 16."""
    y = x.view(8, 4, 4)
    out = F.dropout(x, 0.2) + F.alpha_dropout(x, 0.2, training=True)
    out = out + F.feature_alpha_dropout(y, 0.2, training=True).flatten(1)
    out = out + F.dropout1d(y, 0.3).flatten(1)
    out = out + F.dropout2d(x.view(8, 4, 2, 2), 0.3).flatten(1)
    out = out + F.dropout3d(x.view(8, 4, 2, 2, 1), 0.3).flatten(1)
    return out + F.rrelu(x, training=True)


def layouts(x: Tensor) -> Tensor:
    """Dropout of what is not contiguous."""
    out = F.dropout(x.t(), 0.3).t()
    out = out + F.dropout(x[:, ::2], 0.3).repeat(1, 2)
    out = out + F.dropout(x[:, :1].expand(8, 16), 0.3)
    y = x.view(8, 4, 2, 2)
    out = out + F.dropout(y.to(memory_format=torch.channels_last) * 2, 0.3).flatten(1)
    out = out + F.dropout(y.permute(2, 0, 3, 1), 0.3).permute(1, 3, 0, 2).flatten(1)
    out = out + F.dropout(x.view(2, 4, 16).transpose(0, 1), 0.3).transpose(0, 1).reshape(8, 16)
    return out + torch.rand_like(x.t()).t() * x + torch.randn_like(y.transpose(1, 3)).reshape(8, 16)


def functions(x: Tensor) -> Tensor:
    """Functions that draw."""
    out = F.gumbel_softmax(x) + F.gumbel_softmax(x.t(), hard=True, dim=0).t()
    out = out + torch.rand_like(x) * x + torch.randn_like(x)
    out = out + torch.bernoulli(x.detach().sigmoid()) * x + torch.bernoulli(x.detach(), 0.3) * x
    out = out + torch.normal(x, 0.5) + torch.normal(0.0, x.detach().abs() + 0.1)
    out = out + torch.normal(0.0, 1.0, (8, 16)) + torch.normal(x, x.detach().abs() + 0.1)
    out = out + torch.normal(x.detach(), torch.ones(16).expand(8, 16)) * x
    out = out + torch.randint_like(x, 3) + torch.randint_like(x.t(), 1, 3).t()
    return out + torch.rand(8, 16) * x + torch.randn(8, 16) + torch.randint(0, 3, (8, 16)) * x


def in_place(x: Tensor) -> Tensor:
    """Operations that overwrite a tensor, parts of one, and what was read before."""
    y = x.detach().clone()
    out = x * y.clone() + y.uniform_().clone() * x + y.t().exponential_().t().clone() * x
    y[:, 2:5].normal_(0.0, 0.1)
    y[3].bernoulli_(0.5)
    out = out + y.clone() * x + y.geometric_(0.4) * 0.1 + y.cauchy_().clamp(-1, 1)
    y.log_normal_()
    torch.rand(3)  # unused, and yet drawn
    torch.zeros_like(x).uniform_()
    out = out + y.clamp(max=2) * x + torch.empty_like(x).random_(1, 3) * x * 0.1
    return out + torch.empty(16, 8).bernoulli_(x.detach().t().sigmoid()).t() * x


def choices(x: Tensor) -> Tensor:
    """Indices that are drawn."""
    out = x[torch.randperm(8)] + x[torch.randint(8, (8,))]
    drawn = torch.multinomial(x.detach().softmax(1), 4)
    drawn = drawn + torch.multinomial(x.detach().t().softmax(0).t(), 4, replacement=True)
    return out + torch.gather(x, 1, drawn % 16).repeat(1, 4)


class Steps(pl.LightningModule):
    """What a function makes of a linear layer's output."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.first, self.last = function, nn.Linear(12, 16), nn.Linear(16, 1)
        self.register_buffer("noise", torch.zeros(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.noise.t().uniform_(-1.0, 1.0)
        hidden = self.function(self.first(x)) + self.noise.sum(1)
        return F.mse_loss(self.last(hidden), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def rows(*shape: int) -> Callable[[], tuple[Any, ...]]:
    def loaders() -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(24, *shape, generator=generator)
        y = torch.randn(24, 1, generator=generator)
        return (DataLoader(TensorDataset(x, y), batch_size=8),)

    return loaders


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("function", [dropouts, layouts, functions, in_place, choices])
def test_functions_draw_stocks_numbers(function: Callable[[Tensor], Tensor], policy: str) -> None:
    ours, stock = both(lambda: Steps(function), rows(12), policy=policy)
    assert_same_run(ours, stock)


class Transformer(pl.LightningModule):
    """Encoder, decoder, attention by itself, LSTM and GRU, all with dropout. Batches are 8 x 6."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 16)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True), 2
        )
        self.decoder = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.2)
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.3, batch_first=True)
        self.lstm = nn.LSTM(16, 8, num_layers=2, dropout=0.3, batch_first=True)
        self.gru = nn.GRU(16, 8, num_layers=2, dropout=0.3)
        self.last = nn.Linear(16, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.encoder(self.embed(x[..., None]))
        h = self.decoder(h.transpose(0, 1), h.transpose(0, 1)).transpose(0, 1)
        h = h + self.attention(h, h, h)[0] + self.attention(h, h, h, need_weights=False)[0]
        q = h.view(8, 6, 4, 4).transpose(1, 2)
        sdpa = F.scaled_dot_product_attention(q, q, q, dropout_p=0.2, is_causal=True)
        h = h + sdpa.transpose(1, 2).reshape(8, 6, 16)
        h = torch.cat([self.lstm(h)[0], self.gru(h.transpose(0, 1))[0].transpose(0, 1)], -1)
        return F.mse_loss(self.last(h.mean(1)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.long
def test_attention_and_recurrent_layers_draw_stocks_masks() -> None:
    """Compiled it takes two minutes: by ``tests/tools/compiled.py`` alone."""
    ours, stock = both(Transformer, rows(6))
    assert_same_run(ours, stock)


@pytest.mark.compiler
def test_a_mask_is_drawn_before_it_is_read() -> None:
    ours, stock = both(SiluDropout, rows(12), policy="default")
    assert_same_run(ours, stock, noise=("net.0.bias", "net.1.running_mean"))


@pytest.mark.long
@pytest.mark.compiler
def test_masks_under_mixed_precision_are_stocks() -> None:
    ours, stock = both(
        lambda: Steps(lambda x: dropouts(x) + layouts(x)),
        rows(12),
        policy="default",
        precision="bf16-mixed",
    )
    assert_same_run(ours, stock, losses=1e-2, weights=1e-2)
