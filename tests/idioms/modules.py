"""Modules: shared, tied, parametrized, recurrent, with attention; torch's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from idioms.base import Example, F, Idiom, examples_in
from models import CLASSES, loader
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


class Sequences(Example):
    """`nn.LSTM(...)` and its kin over [16, 4, 2]; the last output decides"""

    def __init__(self, layer: Any = None, width: int = 6) -> None:
        super().__init__()
        self.layer = layer or nn.LSTM(2, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x.view(len(x), 4, 2))
        out = out[0] if isinstance(out, tuple) else out
        return self.head(out[:, -1])  # type: ignore[no-any-return]


RECURRENT: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "LSTM(bidirectional=True)": (lambda: nn.LSTM(2, 3, bidirectional=True, batch_first=True), 6),
    "LSTM(num_layers=2, dropout=0.3)": (lambda: nn.LSTM(2, 6, 2, dropout=0.3, batch_first=True), 6),
    "LSTM(proj_size=4)": (lambda: nn.LSTM(2, 6, proj_size=4, batch_first=True), 4),
    "LSTM(bias=False)": (lambda: nn.LSTM(2, 6, bias=False, batch_first=True), 6),
    "GRU(num_layers=2, bidirectional=True)": (
        lambda: nn.GRU(2, 3, 2, bidirectional=True, batch_first=True),
        6,
    ),
    "GRU(num_layers=2, dropout=0.3)": (lambda: nn.GRU(2, 6, 2, dropout=0.3, batch_first=True), 6),
    'RNN(nonlinearity="relu")': (lambda: nn.RNN(2, 6, nonlinearity="relu", batch_first=True), 6),
    "RNN, tanh, time first": (lambda: nn.RNN(2, 6), 6),
}


class Attention(Example):
    """`nn.MultiheadAttention` with `attn_mask`, `key_padding_mask`, weights returned"""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, CLASSES)

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
    """`nn.Transformer`, encoder and decoder, causal masks, `norm_first`"""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(4, 2, 1, 1, 8, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), 2, 4)
        mask = self.body.generate_square_subsequent_mask(2)
        out = self.body(x, x.flip(1), src_mask=mask, tgt_mask=mask, tgt_is_causal=True)
        return self.head(out.mean(1))  # type: ignore[no-any-return]


class PaddedEncoder(Example):
    """`nn.TransformerEncoder` with `src_key_padding_mask`"""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), 2, 4)
        padding = torch.stack([torch.zeros(len(x)).bool(), x[:, 1, 0] > 1], 1)
        return self.head(self.encoder(x, src_key_padding_mask=padding)[:, 0])  # type: ignore[no-any-return]


class OneLayer(Example):
    """``prepare`` -> one layer -> mean over all but the batch -> logits"""

    def __init__(self, layer: nn.Module, prepare: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.prepare = layer, prepare
        self.head = nn.Linear(1, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        given = self.prepare(x)
        out = self.net(*given) if isinstance(given, tuple) else self.net(given)
        return self.head(out.reshape(len(x), -1).square().mean(1, keepdim=True))  # type: ignore[no-any-return]


def picture(x: Tensor) -> Tensor:
    """[16, 8] -> [16, 2, 4, 4], contiguous, of all values."""
    return torch.cat([x, x.flip(1), 2 * x, x * x], 1).view(len(x), 2, 4, 4)


def words(x: Tensor) -> Tensor:
    """[16, 8] -> numbers of words [16, 8] below 6."""
    return (x * 2).long().clamp(-3, 2) + 3


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Any]]] = {
    "Conv1d(padding='same', dilation=2)": (
        lambda: nn.Conv1d(2, 3, 3, padding="same", dilation=2),
        lambda x: x.view(-1, 2, 4),
    ),
    "Conv2d(groups=2, padding_mode='circular')": (
        lambda: nn.Conv2d(2, 4, 3, padding=1, groups=2, padding_mode="circular"),
        picture,
    ),
    "Conv3d": (lambda: nn.Conv3d(2, 2, 2), lambda x: picture(x).view(-1, 2, 2, 2, 4)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(2, 3, 2, 2), lambda x: x.view(-1, 2, 4)),
    "ConvTranspose2d(output_padding=1)": (
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=1),
        picture,
    ),
    "channels_last": (
        lambda: nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last),
        lambda x: picture(x).to(memory_format=torch.channels_last),
    ),
    "LayerNorm(elementwise_affine=False)": (
        lambda: nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6, elementwise_affine=False)),
        lambda x: x,
    ),
    "RMSNorm": (lambda: nn.Sequential(nn.Linear(8, 6), nn.RMSNorm(6)), lambda x: x),
    "GroupNorm": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), picture),
    "InstanceNorm2d(track_running_stats=True)": (
        lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
        picture,
    ),
    "BatchNorm2d(momentum=None)": (lambda: nn.BatchNorm2d(2, momentum=None), picture),
    "LocalResponseNorm": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.LocalResponseNorm(2)),
        picture,
    ),
    "AdaptiveAvgPool2d((2, 3))": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.AdaptiveAvgPool2d((2, 3))),
        picture,
    ),
    "AdaptiveMaxPool1d(3)": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 1), nn.AdaptiveMaxPool1d(3)),
        lambda x: x.view(-1, 2, 4),
    ),
    "AvgPool2d, LPPool2d": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.AvgPool2d(2, 1, 1), nn.LPPool2d(2, 2)),
        picture,
    ),
    "FractionalMaxPool2d": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.FractionalMaxPool2d(2, output_size=2)),
        picture,
    ),
    "PixelShuffle, PixelUnshuffle": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.PixelShuffle(2), nn.PixelUnshuffle(4)),
        picture,
    ),
    "Upsample(mode='bilinear'), 'bicubic', 'nearest'": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 2, 1),
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
            nn.Upsample(scale_factor=2, mode="bicubic"),
            nn.Upsample(scale_factor=1.5),
        ),
        picture,
    ),
    "ReflectionPad2d, ReplicationPad2d, ConstantPad2d": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 2, 1), nn.ReflectionPad2d(1), nn.ReplicationPad2d(1), nn.ConstantPad2d(1, 2.0)
        ),
        picture,
    ),
    "Unfold, Fold": (
        lambda: nn.Sequential(nn.Conv2d(2, 2, 1), nn.Unfold(2), nn.Fold((4, 4), 2)),
        picture,
    ),
    "Dropout, Dropout1d, AlphaDropout, FeatureAlphaDropout": (
        lambda: nn.Sequential(
            nn.Linear(8, 8), nn.Dropout(0.2), nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.1)
        ),
        lambda x: x,
    ),
    "Dropout2d": (lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.Dropout2d(0.3)), picture),
    "Embedding(padding_idx=0)": (lambda: nn.Embedding(6, 4, padding_idx=0), words),
    "Embedding(max_norm=1)": (lambda: nn.Embedding(6, 4, max_norm=1.0), words),
    "Embedding(scale_grad_by_freq=True)": (
        lambda: nn.Embedding(6, 4, scale_grad_by_freq=True),
        words,
    ),
    "EmbeddingBag(mode='mean')": (lambda: nn.EmbeddingBag(6, 4), words),
    "EmbeddingBag(mode='sum'), per_sample_weights": (
        lambda: nn.EmbeddingBag(6, 4, mode="sum"),
        lambda x: (words(x), None, x),
    ),
    "EmbeddingBag(mode='max')": (lambda: nn.EmbeddingBag(6, 4, mode="max"), words),
    "EmbeddingBag, offsets": (
        lambda: nn.EmbeddingBag(6, 4),
        lambda x: (words(x).flatten(), torch.arange(len(x)) * 8),
    ),
    "Bilinear": (lambda: nn.Bilinear(8, 8, 3), lambda x: (x, x.flip(1))),
    "PReLU, RReLU, GLU, Softmax2d": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.PReLU(4), nn.RReLU(), nn.GLU(1), nn.Softmax2d()),
        picture,
    ),
    "CosineSimilarity, PairwiseDistance": (
        lambda: Both(),
        lambda x: x,
    ),
    "Threshold, Hardtanh, Hardswish, Mish, SELU, CELU, Softshrink": (
        lambda: nn.Sequential(
            nn.Linear(8, 8),
            *(nn.Threshold(-0.5, 0.1), nn.Hardtanh(), nn.Hardswish(), nn.Mish()),
            *(nn.SELU(), nn.CELU(), nn.Softshrink(0.01)),
        ),
        lambda x: x,
    ),
    "AdaptiveLogSoftmaxWithLoss": (
        lambda: OwnLoss(),
        lambda x: x,
    ),
}


class Both(nn.Module):
    """Similarity and distance of two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.one(x), self.two(x)
        return torch.stack([F.cosine_similarity(a, b), F.pairwise_distance(a, b)], 1)


class OwnLoss(nn.Module):
    """The log-probabilities of an adaptive softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(8, 6, cutoffs=[2])

    def forward(self, x: Tensor) -> Tensor:
        return self.softmax.log_prob(x)  # type: ignore[no-any-return]


def tables() -> list[Idiom]:
    """The recurrent layers and the layers as idioms."""

    def batches() -> Any:
        return loader(64)

    recurrent = [
        Idiom(
            name=name,
            text=f"`nn.{name}`",
            make=lambda layer=layer, width=width: Sequences(layer(), width),  # type: ignore[misc]
            batches=batches,
        )
        for name, (layer, width) in RECURRENT.items()
    ]
    layers = [
        Idiom(
            name=name,
            text=f"`nn.{name}`",
            make=lambda layer=layer, prepare=prepare: OneLayer(layer(), prepare),  # type: ignore[misc]
            batches=batches,
        )
        for name, (layer, prepare) in LAYERS.items()
    ]
    return recurrent + layers
