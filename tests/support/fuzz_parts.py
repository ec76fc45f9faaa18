"""What the fuzzer builds modules of: tables of layers, losses, optimizers, schedulers and misuses.

A shape is [16, W] (rank 2), [16, T, W] (3) or [16, C, H, H] (4).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fulgurite.backends.csx.diagnostics.trace_errors import (
    ConditionalOnTensor,
    DynamicShape,
    ForeignState,
    HostRead,
    RandomStateSet,
    ScalarArgument,
    StateBornInStep,
    TensorPrinted,
    TraceError,
    UnsupportedDevice,
    UnsupportedDtype,
    UnsupportedState,
)

F = nn.functional
ROWS, CLASSES, WORDS, LENGTH = 16, 4, 12, 6
Shape = tuple[int, ...]


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class First(nn.Module):
    """The first result of a layer that returns several: a recurrent one's outputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)[0]


class Attend(nn.Module):
    """Self-attention, with a causal mask or without."""

    def __init__(self, width: int, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(width, 1, dropout, batch_first=True)
        self.causal = causal

    def forward(self, x: Tensor) -> Any:
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1) if self.causal else None
        return self.layer(x, x, x, attn_mask=mask, need_weights=False)[0]


class Residual(nn.Module):
    """x + layer(x)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)  # type: ignore[no-any-return]


class Tied(nn.Module):
    """Two layers with one weight, the second transposed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, 5, bias=False), nn.Linear(width, 5)
        self.up.weight = self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(x) + self.up(x)) @ self.down.weight


class Counted(nn.Module):
    """Centered by a running mean, a buffer written in the step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.flatten(0, -2).mean(0), 0.1)
        return x - self.mean


class Checkpointed(nn.Module):
    """A layer that is run again in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=False)


class Layer(NamedTuple):
    """Takes shapes of one rank (0: of any), with even sizes where it needs them."""

    rank: int
    make: Callable[[Shape, random.Random], nn.Module]
    fits: Callable[[Shape], bool] = lambda shape: True


def _wide(shape: Shape) -> bool:
    return shape[-1] >= 4


def _even(shape: Shape) -> bool:
    return shape[1] % 2 == 0


def _width(draw: random.Random) -> int:
    return draw.choice((4, 6, 8))


def _power(x: Tensor) -> Tensor:
    """Log-power of frequencies; not ``abs``, whose slope is noise where a mean is zero."""
    spectrum = torch.fft.rfft(x)
    return (spectrum * spectrum.conj()).real.log1p()


LAYERS: dict[str, Layer] = {
    **{
        kind.__name__: Layer(0, lambda shape, draw, kind=kind: kind())  # type: ignore[misc]
        for kind in (
            *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Softplus),
            *(nn.Hardswish, nn.Mish, nn.SELU, nn.Softsign, nn.LogSigmoid, nn.PReLU, nn.Tanhshrink),
        )
    },
    "ReLU(inplace)": Layer(0, lambda s, d: nn.Sequential(Apply(lambda x: x * 1), nn.ReLU(True))),
    "Dropout": Layer(0, lambda s, d: nn.Dropout(d.choice((0.1, 0.5)))),
    "Dropout(inplace)": Layer(
        0, lambda s, d: nn.Sequential(Apply(lambda x: x * 1), nn.Dropout(0.3, inplace=True))
    ),
    "AlphaDropout": Layer(0, lambda s, d: nn.AlphaDropout(0.2)),
    "FeatureAlphaDropout": Layer(0, lambda s, d: nn.FeatureAlphaDropout(0.2)),
    "RReLU": Layer(0, lambda s, d: nn.RReLU()),
    "gumbel_softmax": Layer(
        0, lambda s, d: Apply(lambda x: F.gumbel_softmax(x, tau=2.0, hard=s[-1] % 2 == 1))
    ),
    "randn_like": Layer(0, lambda s, d: Apply(lambda x: x + 0.1 * torch.randn_like(x))),
    "rand": Layer(0, lambda s, d: Apply(lambda x: x * torch.rand(x.shape[-1]))),
    "randint": Layer(0, lambda s, d: Apply(lambda x: x + 0.1 * torch.randint(0, 3, x.shape))),
    "bernoulli": Layer(0, lambda s, d: Apply(lambda x: x * torch.bernoulli(x.detach().sigmoid()))),
    "uniform_": Layer(0, lambda s, d: Apply(lambda x: x + torch.empty_like(x).uniform_(-0.1, 0.1))),
    "exponential_": Layer(
        0, lambda s, d: Apply(lambda x: x * torch.empty(x.shape).exponential_(2.0))
    ),
    "normal": Layer(0, lambda s, d: Apply(lambda x: torch.normal(x.detach(), 0.1) + x)),
    "randperm": Layer(0, lambda s, d: Apply(lambda x: x + 0.1 * x[torch.randperm(len(x))])),
    "LayerNorm": Layer(0, lambda s, d: nn.LayerNorm(s[-1]), _wide),
    "RMSNorm": Layer(0, lambda s, d: nn.RMSNorm(s[-1]), _wide),
    "Softmax": Layer(0, lambda s, d: nn.Softmax(-1)),
    "GroupNorm": Layer(0, lambda s, d: nn.GroupNorm(2, s[1]), lambda s: _even(s) and len(s) > 2),
    "Counted": Layer(0, lambda s, d: Counted(s[-1])),
    # without a step at 0, to either side of which roundings put a Tanhshrink of little
    "where": Layer(0, lambda s, d: Apply(lambda x: torch.where(x > 0, x, 0.1 * x.expm1()))),
    "straight through": Layer(0, lambda s, d: Apply(lambda x: x + (x.round() - x).detach())),
    "Linear": Layer(0, lambda s, d: nn.Linear(s[-1], _width(d))),
    "Linear without bias": Layer(0, lambda s, d: nn.Linear(s[-1], _width(d), bias=False)),
    "Residual": Layer(
        0, lambda s, d: Residual(nn.Linear(s[-1], 8), nn.GELU(), nn.Linear(8, s[-1]))
    ),
    "Tied": Layer(0, lambda s, d: Tied(s[-1])),
    "Checkpointed": Layer(0, lambda s, d: Checkpointed(nn.Linear(s[-1], s[-1]))),
    "weight_norm": Layer(0, lambda s, d: parametrizations.weight_norm(nn.Linear(s[-1], 6))),
    "spectral_norm": Layer(2, lambda s, d: parametrizations.spectral_norm(nn.Linear(s[-1], 6))),
    "BatchNorm1d": Layer(2, lambda s, d: nn.BatchNorm1d(s[1], momentum=d.choice((0.1, None)))),
    "GLU": Layer(0, lambda s, d: nn.GLU(1), _even),
    "outer": Layer(2, lambda s, d: Apply(lambda x: torch.einsum("bi,bj->bij", x, x))),
    "fft": Layer(2, lambda s, d: Apply(_power)),
    "sort": Layer(2, lambda s, d: Apply(lambda x: x.sort(1).values)),
    "as sequence": Layer(2, lambda s, d: nn.Unflatten(1, (2, s[1] // 2)), _even),
    "LSTM": Layer(3, lambda s, d: First(nn.LSTM(s[2], 4, d.choice((1, 2)), batch_first=True))),
    "LSTM, both ways": Layer(
        3, lambda s, d: First(nn.LSTM(s[2], 3, batch_first=True, bidirectional=True))
    ),
    "LSTM, dropout": Layer(
        3, lambda s, d: First(nn.LSTM(s[2], 4, 2, batch_first=True, dropout=0.3))
    ),
    "GRU, dropout": Layer(3, lambda s, d: First(nn.GRU(s[2], 4, 2, dropout=0.3))),
    "GRU": Layer(3, lambda s, d: First(nn.GRU(s[2], 4, batch_first=True))),
    "RNN": Layer(3, lambda s, d: First(nn.RNN(s[2], 4))),
    "attention": Layer(3, lambda s, d: Attend(s[2], d.random() < 0.5)),
    "attention, dropout": Layer(3, lambda s, d: Attend(s[2], d.random() < 0.5, 0.2)),
    "TransformerEncoderLayer": Layer(
        3,
        lambda s, d: nn.TransformerEncoderLayer(
            s[2], 1, 8, d.choice((0.0, 0.1)), batch_first=True, norm_first=d.random() < 0.5
        ),
        _wide,
    ),
    "Dropout1d": Layer(3, lambda s, d: nn.Dropout1d(0.3)),
    "Conv1d": Layer(3, lambda s, d: nn.Conv1d(s[1], d.choice((3, 4)), 3, padding=1)),
    "InstanceNorm1d": Layer(3, lambda s, d: nn.InstanceNorm1d(s[1], affine=True), _wide),
    "AvgPool1d": Layer(3, lambda s, d: nn.AvgPool1d(2), _wide),
    "cumsum": Layer(3, lambda s, d: Apply(lambda x: x.cumsum(1) / x.shape[1])),
    "mean over time": Layer(3, lambda s, d: Apply(lambda x: x.mean(1))),
    "last of time": Layer(3, lambda s, d: Apply(lambda x: x[:, -1])),
    "transposed": Layer(3, lambda s, d: Apply(lambda x: x.transpose(1, 2)), lambda s: s[1] >= 4),
    "Flatten": Layer(0, lambda s, d: nn.Flatten()),
    "Conv2d": Layer(4, lambda s, d: nn.Conv2d(s[1], d.choice((3, 4)), 3, padding=1)),
    "depthwise": Layer(4, lambda s, d: nn.Conv2d(s[1], s[1], 3, padding=1, groups=s[1])),
    "ConvTranspose2d": Layer(4, lambda s, d: nn.ConvTranspose2d(s[1], 2, 2, stride=2)),
    "BatchNorm2d": Layer(4, lambda s, d: nn.BatchNorm2d(s[1])),
    "InstanceNorm2d": Layer(4, lambda s, d: nn.InstanceNorm2d(s[1]), _wide),
    "MaxPool2d": Layer(4, lambda s, d: nn.MaxPool2d(2), _wide),
    "AvgPool2d": Layer(4, lambda s, d: nn.AvgPool2d(2), _wide),
    "AdaptiveAvgPool2d": Layer(4, lambda s, d: nn.AdaptiveAvgPool2d(2)),
    "Upsample": Layer(4, lambda s, d: nn.Upsample(scale_factor=2, mode="bilinear")),
    "PixelUnshuffle": Layer(4, lambda s, d: nn.PixelUnshuffle(2), lambda s: s[2] in (4, 8)),
    "Dropout2d": Layer(4, lambda s, d: nn.Dropout2d(0.2)),
    "FractionalMaxPool2d": Layer(
        4, lambda s, d: nn.FractionalMaxPool2d(2, output_ratio=0.6), lambda s: s[2] >= 6
    ),
    "channels_last": Layer(
        4, lambda s, d: Apply(lambda x: x.to(memory_format=torch.channels_last))
    ),
}

STARTS: dict[str, tuple[Callable[[], Tensor], Callable[[], nn.Module]]] = {
    "rows": (lambda: torch.randn(ROWS, 8), nn.Identity),
    "sequences": (lambda: torch.randn(ROWS, LENGTH, 4), nn.Identity),
    "pictures": (lambda: torch.randn(ROWS, 2, 8, 8), nn.Identity),
    "words": (
        lambda: torch.randint(0, WORDS, (ROWS, LENGTH)),
        lambda: nn.Embedding(WORDS, 6, padding_idx=0),
    ),
    "bags of words": (
        lambda: torch.randint(0, WORDS, (ROWS, LENGTH)),
        lambda: nn.EmbeddingBag(WORDS, 8),
    ),
}
"""What a batch holds, and the layer that takes it."""


def _unit(y: Tensor) -> Tensor:
    """Targets -1 and 1 of labels."""
    return (y % 2) * 2.0 - 1


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "label_smoothing": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "weighted": lambda x, y: F.cross_entropy(x, y, torch.linspace(1, 2, CLASSES), ignore_index=0),
    "nll": lambda x, y: F.nll_loss(x.log_softmax(1), y),
    "mse": lambda x, y: F.mse_loss(x, F.one_hot(y, CLASSES).float()),
    "l1": lambda x, y: F.l1_loss(x, F.one_hot(y, CLASSES).float()),
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x[:, 0], y.float()),
    "huber": lambda x, y: F.huber_loss(x[:, 0], y.float(), delta=0.5),
    "bce": lambda x, y: F.binary_cross_entropy(x.sigmoid(), F.one_hot(y, CLASSES).float()),
    "bce_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x[:, 0], y % 2.0),
    "kl_div": lambda x, y: F.kl_div(
        x.log_softmax(1), (y[:, None] - torch.arange(CLASSES)).float().softmax(1), reduction="sum"
    ),
    "multi_margin": F.multi_margin_loss,
    "multilabel_soft_margin": lambda x, y: F.multilabel_soft_margin_loss(x, F.one_hot(y, CLASSES)),
    "soft_margin": lambda x, y: F.soft_margin_loss(x[:, 0], _unit(y)),
    "margin_ranking": lambda x, y: F.margin_ranking_loss(x[:, 0], x[:, 1], _unit(y), margin=0.5),
    "hinge_embedding": lambda x, y: F.hinge_embedding_loss(x[:, 0].square(), _unit(y)),
    "cosine_embedding": lambda x, y: F.cosine_embedding_loss(x + 1, x.roll(1, 0) + 1, _unit(y)),
    "gaussian_nll": lambda x, y: F.gaussian_nll_loss(x[:, 0], y.float(), F.softplus(x[:, 1]) + 0.1),
    "poisson_nll": lambda x, y: F.poisson_nll_loss(x[:, 0], y.float(), full=True),
    "triplet_margin": lambda x, y: F.triplet_margin_loss(x, x.roll(1, 0) + 1, x.roll(2, 0)),
}

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "Adam, amsgrad": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.01}),
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "SGD, nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD, dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "ASGD": (torch.optim.ASGD, {}),
}

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 0.9**k),
}

SEEN = torch.zeros(())
"""A tensor that no module holds."""


def _branch(module: Any, x: Tensor) -> Tensor:
    return x if x.mean() > 0 else -x


def _sized(module: Any, x: Tensor) -> Tensor:
    return x * torch.zeros(int(x.argmax())).shape[0]


def _formatted(module: Any, x: Tensor) -> Tensor:
    return x * len(f"{x.mean():.3f}")


def _born(module: Any, x: Tensor) -> Tensor:
    module.window = [*module.window, x.detach().mean()]
    return x - sum(module.window)


def _foreign(module: Any, x: Tensor) -> Tensor:
    SEEN.add_(x.detach().mean())
    return x


def _seeded(module: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x + torch.randn_like(x)


def _resized(module: Any, x: Tensor) -> Tensor:
    weight = next(module.parameters())
    weight.data = torch.zeros(3, 3, 3)
    return x


MISUSES: dict[str, tuple[type[TraceError], Callable[[Any, Tensor], Tensor]]] = {
    "if tensor": (ConditionalOnTensor, _branch),
    "assert tensor": (ConditionalOnTensor, lambda module, x: x * bool(x.isfinite().all())),
    "max(a, b)": (ConditionalOnTensor, lambda module, x: x * max(x.mean(), x.std())),
    "item": (HostRead, lambda module, x: x * x.mean().item()),
    "float": (HostRead, lambda module, x: x / float(x.std())),
    "int": (HostRead, _sized),
    "tolist": (HostRead, lambda module, x: x * x.mean(0).tolist()[0]),
    "numpy": (HostRead, lambda module, x: x * x.detach().numpy().mean()),
    "cpu": (HostRead, lambda module, x: x.cpu()),
    "format": (TensorPrinted, _formatted),
    "str": (TensorPrinted, lambda module, x: x * len(str(x.mean()))),
    "x[x > 0]": (DynamicShape, lambda module, x: x * x[x > 0].mean()),
    "nonzero": (DynamicShape, lambda module, x: x * x.nonzero().shape[0]),
    "unique": (DynamicShape, lambda module, x: x * torch.unique(x.argmax(1)).shape[0]),
    "masked_select": (DynamicShape, lambda module, x: x + x.masked_select(x > 0).sum()),
    "alpha=t": (ScalarArgument, lambda module, x: torch.add(x, x, alpha=x.mean())),
    "value=t": (ScalarArgument, lambda module, x: torch.addcmul(x, x, x, value=x.mean())),
    "float64": (UnsupportedDtype, lambda module, x: x.double().cumsum(1).float()),
    "cuda": (UnsupportedDevice, lambda module, x: x.to("cuda")),
    "manual_seed": (RandomStateSet, _seeded),
    "a generator": (
        RandomStateSet,
        lambda module, x: x + torch.randn(x.shape, generator=torch.Generator().manual_seed(1)),
    ),
    "state born in the step": (StateBornInStep, _born),
    "a global changed": (ForeignState, _foreign),
    "data of another shape": (UnsupportedState, _resized),
}
"""Name -> (the error that must come, what is done with the hidden tensor in the step)."""
