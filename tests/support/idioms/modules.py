"""Modules: shared, tied, parametrized, carried state, attention."""

from __future__ import annotations

import copy
import functools
import math
from types import SimpleNamespace
from typing import Any

import torch
from idioms.base import Example, F, optimizer
from idioms.layers import picture
from models import CLASSES
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize


class SharedModule(Example):
    """One module under two parents"""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(8, 8)
        self.left = nn.Sequential(shared, nn.ReLU())
        self.right = nn.ModuleDict({"first": shared, "then": nn.Linear(8, CLASSES)})

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.left(x)
        return self.right["then"](self.right["first"](hidden))  # type: ignore[no-any-return]


class SharedNorm(Example):
    """A BatchNorm used twice in a step: its statistics move twice"""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.again = nn.Sequential(self.norm, nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.norm(x)))  # type: ignore[no-any-return]


class TiedWeights(Example):
    """Tied weights: one parameter in two layers, and a transposed use"""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 6), nn.Linear(8, 6)
        self.decode.weight = self.encode.weight

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.encode(x).tanh() + self.decode(x)
        return F.mse_loss(hidden @ self.encode.weight, x)


class MovedInTheStep(Example):
    """`self.net.to(self.device)` in the step, where it is there already"""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.net.to(self.device)(self.norm.to(x).float()(x))  # type: ignore[no-any-return]


class WeightNorm(Example):
    """`parametrizations.weight_norm`"""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.net[0])
        parametrizations.weight_norm(self.net[2], dim=None)


class OldWeightNorm(Example):
    """`nn.utils.weight_norm` and `nn.utils.spectral_norm`, the older forms"""

    def __init__(self) -> None:
        super().__init__()
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # both are deprecated, and in use
            nn.utils.weight_norm(self.net[0])
            nn.utils.spectral_norm(self.net[2])


class SpectralNorm(Example):
    """`parametrizations.spectral_norm`: its power iteration moves buffers"""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.net[0])
        parametrizations.spectral_norm(self.net[2], n_power_iterations=2)


class Orthogonal(Example):
    """`parametrizations.orthogonal`: `matrix_exp`, `cayley` and `householder`"""

    def __init__(self) -> None:
        super().__init__()
        layers = []
        for map_ in ("matrix_exp", "cayley", "householder"):
            layers += [parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map=map_), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(8, CLASSES))


class Symmetric(nn.Module):
    """The upper triangle, mirrored."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


class Parametrization(Example):
    """A parametrization of one's own, several on one weight, `parametrize.cached()` in the step"""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(8, 8)
        parametrize.register_parametrization(self.square, "weight", Symmetric())
        parametrize.register_parametrization(self.square, "weight", nn.Tanh())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with parametrize.cached():
            return super().loss(self.square(self.square(x)), y)


class Pruned(Example):
    """`nn.utils.prune`: a mask and a forward hook"""

    def __init__(self) -> None:
        super().__init__()
        from torch.nn.utils import prune

        prune.l1_unstructured(self.net[0], "weight", amount=0.3)


class LowRank(Example):
    """LoRA: frozen base, two small trained factors around it"""

    def __init__(self) -> None:
        super().__init__()
        self.net.requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.up(self.down(x))  # type: ignore[no-any-return]


class Containers(Example):
    """`ParameterList`, `ParameterDict`, `ModuleList` and `ModuleDict`, looped over"""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(8), torch.ones(8)])
        self.shifts = nn.ParameterDict({"one": torch.zeros(8), "two": torch.zeros(8)})
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.acts = nn.ModuleDict({"relu": nn.ReLU(), "gelu": nn.GELU()})

    def forward(self, x: Tensor) -> Tensor:
        for scale, shift in zip(self.scales, self.shifts.values(), strict=True):
            x = x * scale + shift
        for i, block in enumerate(self.blocks):
            x = x + self.acts["relu" if i % 2 else "gelu"](block(x))
        return self.net(x)  # type: ignore[no-any-return]


class Experts(Example):
    """A mixture of experts, `topk` gates and `scatter`; every expert runs"""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.gate(x).topk(2, dim=1)
        gates = torch.zeros(len(x), 3).scatter(1, chosen, scores.softmax(1))
        out = torch.stack([expert(x) for expert in self.experts], 1)
        return torch.einsum("be,bec->bc", gates, out)


class HyperNetwork(Example):
    """A network that makes the weights of another"""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8 * CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bco,bo->bc", self.net(x).view(len(x), CLASSES, 8), x)


class EvalInStep(Example):
    """`eval()` and `train()` around a part of the step, with BatchNorm and dropout"""

    noise = ("net.0.bias",)

    def __init__(self) -> None:
        super().__init__()
        layers = nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, CLASSES)
        self.net = nn.Sequential(nn.Linear(8, 6), *layers)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.net.eval()
        target = self.net(x).softmax(1).detach()
        self.net.train()
        return super().loss(x, y) + F.mse_loss(self.net(x), target)


class ChannelsLast(Example):
    """A ConvNet under `channels_last`"""

    noise = ("net.0.bias", "net.1.running_mean")

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)
        net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES))
        self.net = net.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(picture(x).to(memory_format=torch.channels_last))  # type: ignore[no-any-return]


class MadeInStep(Example):
    """Modules made or copied in the step, `copy.deepcopy(self.net)`"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        fresh, old = nn.Linear(8, 8), copy.deepcopy(self.net)
        target = old(x + 0.1 * fresh(x)).detach()
        return super().loss(x, y) + F.mse_loss(self.net(0.9 * x), target)


@functools.partial(torch.compile, backend="eager")
def halved(x: Tensor) -> Tensor:
    """A function that is compiled when it stands alone."""
    return x / 2


class CompiledParts(Example):
    """`torch.compile` of a function or module, `module.compile()`: they run as they are written"""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.compile(nn.Linear(8, 8), backend="eager")
        self.net.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.first(halved(x)))  # type: ignore[no-any-return]


class ComplexWeights(Example):
    """Complex parameters and buffers: a filter of frequencies"""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.cfloat))
        self.register_buffer("turn", torch.polar(torch.ones(5), torch.arange(5.0)))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(torch.fft.irfft(torch.fft.rfft(x) * self.filter * self.turn, n=8))  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class UnrolledCell(Example):
    """`LSTMCell` and `GRUCell` in a Python loop"""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.head = nn.LSTMCell(2, 6), nn.GRUCell(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden, cell, state = torch.zeros(len(x), 6), torch.zeros(len(x), 6), None
        for part in x.view(len(x), 4, 2).unbind(1):
            hidden, cell = self.lstm(part, (hidden, cell))
            state = self.gru(hidden, state)
        return self.head(state)  # type: ignore[no-any-return]


class CarriedState(Example):
    """Truncated back-propagation: an LSTM's state kept in buffers for the next batch"""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 6, batch_first=True), nn.Linear(6, CLASSES)
        self.hidden = (torch.zeros(1, 16, 6), torch.zeros(1, 16, 6))

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, cell) = self.lstm(x.view(len(x), 4, 2), self.hidden)
        self.hidden = (hidden.detach(), cell.detach())
        return self.head(out[:, -1])  # type: ignore[no-any-return]


class Attention(Example):
    """`nn.MultiheadAttention` with `attn_mask`, `key_padding_mask`, weights returned"""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.head = (
            nn.MultiheadAttention(4, 2, batch_first=True),
            nn.Linear(4, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), 2, 4)
        mask = torch.ones(2, 2, dtype=torch.bool).triu(1)
        padding = torch.stack([torch.zeros(len(x)).bool(), x[:, 1, 0] > 1], 1)
        out, weights = self.attend(x, x, x, attn_mask=mask, key_padding_mask=padding)
        return self.head(out.mean(1)) * weights.sum()  # type: ignore[no-any-return]

    noise = ("attend.in_proj_bias",)


class AttentionFast(Example):
    """`nn.MultiheadAttention(need_weights=False)`, `kdim`, `vdim`, `add_bias_kv`, `dropout`"""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(
            4, 2, dropout=0.2, add_bias_kv=True, kdim=2, vdim=2, batch_first=True
        )
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        query, key = x.view(len(x), 2, 4), x.view(len(x), 4, 2)
        out, _ = self.attend(query, key, key, need_weights=False)
        return self.head(out.sum(1))  # type: ignore[no-any-return]

    noise = ("attend.in_proj_bias",)


class DotProductAttention(Example):
    """`scaled_dot_product_attention`: `is_causal`, bool and float masks, `scale`, `enable_gqa`"""

    def forward(self, x: Tensor) -> Tensor:
        q = self.net[0](x).view(len(x), 2, 4, 2)
        causal = F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.5)
        masked = F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(4, 4).tril().bool())
        biased = F.scaled_dot_product_attention(q, q, q, attn_mask=torch.randn(4, 4))
        grouped = F.scaled_dot_product_attention(q, q[:, :1], q[:, 1:], enable_gqa=True)
        return self.net[2]((causal + masked + biased + grouped).flatten(1))  # type: ignore[no-any-return]


class DotProductDropout(Example):
    """`scaled_dot_product_attention(dropout_p=...)`"""

    def forward(self, x: Tensor) -> Tensor:
        q = self.net[0](x).view(len(x), 2, 4, 2)
        return self.net[2](F.scaled_dot_product_attention(q, q, q, dropout_p=0.2).flatten(1))  # type: ignore[no-any-return]


class FullTransformer(Example):
    """`nn.Transformer`, encoder and decoder, causal masks"""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(4, 2, 1, 1, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), 2, 4)
        mask = self.body.generate_square_subsequent_mask(2)
        out = self.body(x, x.flip(1), src_mask=mask, tgt_mask=mask, tgt_is_causal=True)
        return self.head(out.mean(1))  # type: ignore[no-any-return]


class MaskInABuffer(Example):
    """`nn.TransformerEncoder` with `mask=self.mask`, a buffer, of bools or floats"""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(4, CLASSES)
        self.register_buffer("mask", torch.ones(2, 2).triu(1).bool())
        self.register_buffer("added", torch.full((2, 2), -math.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x.view(len(x), 2, 4), mask=self.mask)
        return self.head(self.encoder(x, mask=self.added).mean(1))  # type: ignore[no-any-return]


class AskedOfWhatIsFrozen(Example):
    """A condition on a parameter that nobody trains: `if self.scale > 1`"""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        return self.net(x) * self.scale if self.scale > 1 else self.net(x)

    def configure_optimizers(self) -> Any:
        return optimizer(self.net.parameters())


class PaddedEncoder(Example):
    """`nn.TransformerEncoder` with `src_key_padding_mask`"""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            4, 2, 8, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), 2, 4)
        padding = torch.stack([torch.zeros(len(x)).bool(), x[:, 1, 0] > 1], 1)
        return self.head(self.encoder(x, src_key_padding_mask=padding)[:, 0])  # type: ignore[no-any-return]


class StateBornInTheFirstStep(Example):
    """State that the first step makes: `if self.mean is None`, by a flag, in a dict, an object"""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor | None = None
        self.is_centered = False
        self.sums: dict[str, Tensor] = {}
        self.meter = SimpleNamespace(value=0.0)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        value = loss.detach()
        self.mean = value if self.mean is None else self.mean.lerp(value, 0.1)
        if not self.is_centered:
            self.center, self.is_centered = x.mean(0), True
        self.center = self.center.lerp(x.mean(0), 0.1)
        self.sums["loss"] = self.sums.get("loss", 1.0) + value
        self.meter.value += value
        pull = (self.mean + self.sums["loss"] + self.meter.value) * self.center.mean()
        return loss + 0.1 * pull * self.net[0].weight.mean()


class HeldTensors(Example):
    """Tensors in a tuple, a dict and an object of the module, read and replaced in the step"""

    def __init__(self) -> None:
        super().__init__()
        self.past, self.sums = (torch.zeros(()), torch.zeros(())), {"loss": torch.zeros(())}
        self.ema = SimpleNamespace(shadow=[p.detach().clone() for p in self.net.parameters()])

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        self.sums["loss"] = self.sums["loss"] + loss.detach()
        for mean, p in zip(self.ema.shadow, self.net.parameters(), strict=True):
            mean.lerp_(p.detach(), 0.1)
        pull = sum(mean.square().sum() for mean in self.ema.shadow)
        self.past = (self.past[1], loss.detach())
        return loss / (1 + self.sums["loss"]) + 0.1 * self.past[0] + 0.1 * pull
