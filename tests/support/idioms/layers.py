"""torch's layers, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from idioms.base import Example, F, Idiom, OneLayer
from models import CLASSES, loader
from torch import Tensor, nn


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
    "RNN(batch_first=False)": (lambda: nn.RNN(2, 6), 6),
}


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
    "Conv2d under channels_last": (
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
            nn.Conv2d(2, 2, 1),
            nn.ReflectionPad2d(1),
            nn.ReplicationPad2d(1),
            nn.ConstantPad2d(1, 2.0),
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
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 1), nn.PReLU(4), nn.RReLU(), nn.GLU(1), nn.Softmax2d()
        ),
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
            text=f"`{name}`",
            make=lambda layer=layer, prepare=prepare: OneLayer(layer(), prepare),  # type: ignore[misc]
            batches=batches,
        )
        for name, (layer, prepare) in LAYERS.items()
    ]
    return recurrent + layers
