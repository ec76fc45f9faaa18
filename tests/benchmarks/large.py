"""Models whose compilation takes long: deep ones, long ones, and public ones without repetition.

    gpt-2 .. gpt-24   the class of examples/gpt_bytes.py with so many layers
    gru-20 .. gru-80  a cell over so many time steps, unrolled by Python, as people write them
    resnet18          He et al., arXiv:1512.03385, on 32 x 32 pictures
    unet              a small diffusion U-Net after Ho et al., arXiv:2006.11239: 3 levels, attention

Inputs are random; a step does the same work for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from gpt_bytes import CONTEXT, GPT, VOCABULARY
from models import Batch, Model
from torch import Tensor, nn

BATCHES = 4


def gpt(layers: int) -> Model:
    """8 windows of 64 bytes."""
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(0, VOCABULARY, (BATCHES, 8, CONTEXT + 1), generator=generator)
    batches = [(w[:, :-1].contiguous(), w[:, 1:].flatten()) for w in windows]
    net = lambda: nn.Sequential(GPT(layers=layers), nn.Flatten(0, 1))  # noqa: E731
    return Model(f"gpt-{layers}", net, VOCABULARY, batches)


class Recurrent(nn.Module):
    """A GRU cell over T steps of x [B, T, 32], then a classifier of its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(32, 64), nn.Linear(64, 10)

    def forward(self, x_BTD: Tensor) -> Tensor:
        state = x_BTD.new_zeros(len(x_BTD), 64)
        for t in range(x_BTD.shape[1]):
            state = self.cell(x_BTD[:, t], state)
        return self.head(state)


def gru(steps: int) -> Model:
    """16 sequences."""
    return Model(f"gru-{steps}", Recurrent, 10, _random((16, steps, 32)))


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            convolution = nn.Conv2d(inner, outer, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.net(x) + self.shortcut(x))


def resnet18_net() -> nn.Module:
    """The variant for small pictures: a 3 x 3 stem, no pooling before the first stage."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    inner = 64
    for outer in (64, 128, 256, 512):
        layers += [Residual(inner, outer, 1 if outer == inner else 2), Residual(outer, outer, 1)]
        inner = outer
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def resnet18() -> Model:
    """8 pictures."""
    return Model("resnet18", resnet18_net, 10, _random((8, 3, 32, 32)))


class TimedResidual(nn.Module):
    """Group norm, SiLU and convolution, twice, with the time's embedding between."""

    def __init__(self, inner: int, outer: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(8, inner), nn.SiLU(), nn.Conv2d(inner, outer, 3, 1, 1)
        )
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time, outer))
        self.second = nn.Sequential(
            nn.GroupNorm(8, outer), nn.SiLU(), nn.Conv2d(outer, outer, 3, 1, 1)
        )
        self.shortcut = nn.Identity() if inner == outer else nn.Conv2d(inner, outer, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(x) + self.time(time)[:, :, None, None]
        return self.second(y) + self.shortcut(x)


class PictureAttention(nn.Module):
    """Self-attention over the positions of a picture [B, C, H, W]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2)
        return x + self.out(y.reshape(x.shape))


class UNet(nn.Module):
    """Noisy digits [B, 1, 32, 32] to the classes' logits per picture, by way of a denoiser."""

    def __init__(self, width: int = 32, levels: int = 3, blocks: int = 2) -> None:
        super().__init__()
        time, widths = 4 * width, [width * 2**i for i in range(levels)]
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(1, width, 3, 1, 1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        kept, inner = [width], width
        for i, outer in enumerate(widths):
            for _ in range(blocks):
                self.down.append(TimedResidual(inner, outer, time))
                inner = outer
                kept.append(inner)
            if i + 1 < levels:
                self.down.append(nn.Conv2d(inner, inner, 3, 2, 1))
                kept.append(inner)
        self.middle = nn.ModuleList(
            [
                TimedResidual(inner, inner, time),
                PictureAttention(inner),
                TimedResidual(inner, inner, time),
            ]
        )
        for i, outer in reversed(list(enumerate(widths))):
            for _ in range(blocks + 1):
                self.up.append(TimedResidual(inner + kept.pop(), outer, time))
                inner = outer
            if i:
                self.up.append(nn.Upsample(scale_factor=2.0))
        self.out = nn.Sequential(nn.GroupNorm(8, inner), nn.SiLU(), nn.Conv2d(inner, 1, 3, 1, 1))
        self.head = nn.Linear(32 * 32, 10)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.exp(torch.arange(self.width // 2) * (-math.log(1e4) / (self.width // 2)))
        phase = x.mean((1, 2, 3))[:, None] * 1e3 * angles
        time = self.time(torch.cat([phase.sin(), phase.cos()], -1))
        x = self.stem(x)
        kept = [x]
        for layer in self.down:
            x = layer(x, time) if isinstance(layer, TimedResidual) else layer(x)
            kept.append(x)
        for layer in self.middle:
            x = layer(x, time) if isinstance(layer, TimedResidual) else layer(x)
        for layer in self.up:
            if isinstance(layer, TimedResidual):
                x = layer(torch.cat([x, kept.pop()], 1), time)
            else:
                x = layer(x)
        return self.head(self.out(x).flatten(1))


def unet() -> Model:
    """4 pictures."""
    return Model("unet", UNet, 10, _random((4, 1, 32, 32)))


def _random(shape: tuple[int, ...]) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(*shape, generator=generator),
            torch.randint(0, 10, shape[:1], generator=generator),
        )
        for _ in range(BATCHES)
    ]


LARGE: dict[str, Callable[[], Model]] = {
    **{f"gpt-{n}": lambda n=n: gpt(n) for n in (2, 4, 8, 12, 24)},  # type: ignore[misc]
    **{f"gru-{n}": lambda n=n: gru(n) for n in (20, 40, 80)},  # type: ignore[misc]
    "resnet18": resnet18,
    "unet": unet,
}
