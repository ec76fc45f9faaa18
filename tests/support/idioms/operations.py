"""Operations in a step, forms of batches, distributions, and a few more losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from idioms.base import Example, F, Idiom, OneOperation
from models import CLASSES, loader
from torch import Tensor, distributions, nn
from torch.utils.data import DataLoader


def in_place(x: Tensor) -> Tensor:
    y = x * 2
    y[:, :4] = 0
    y[0] += 1
    y.mul_(3).clamp_(max=1).sub_(x)
    y[:, 5].copy_(x[:, 0])
    y[x > 0.9] = 0
    return y.relu_()


def filled(x: Tensor) -> Tensor:
    out = torch.empty(16, 16)
    for i, row in enumerate(x):
        out[i] = row * i
    return out


def gathered(x: Tensor) -> Tensor:
    places = x.argsort(1)
    rows = torch.arange(16)
    return (
        x.gather(1, places).cumsum(1)
        + torch.take_along_dim(x, places.flip(1), 1)
        + x[rows, places[:, 0]][:, None]
        + x.index_select(0, rows.flip(0))
    )


def scattered(x: Tensor) -> Tensor:
    group = x[:, :3].argmax(1)
    zero = torch.zeros(3, 16)
    summed = zero.index_add(0, group, x)
    mean = zero.scatter_reduce(0, group[:, None].expand(-1, 16), x, "mean", include_self=False)
    largest = zero.scatter_reduce(0, group[:, None].expand(-1, 16), x, "amax", include_self=False)
    put = zero.index_put((group, group), x[:, 0], accumulate=True)
    return summed + mean + largest + put


def segments(x: Tensor) -> Tensor:
    """Messages of a graph: nodes gather along edges, and sum what arrives."""
    edges = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 0, 0, 1]])
    arrived = torch.zeros(16, 16).index_add(0, edges[1], x[edges[0]])
    degree = torch.zeros(16).scatter_add(0, edges[1], torch.ones(5)).clamp(min=1)
    return arrived / degree[:, None]


def masked(x: Tensor) -> Tensor:
    kept = torch.where(x > 0, x, torch.full_like(x, 0.1))
    return (
        kept.masked_fill(x > 0.5, 0.0)
        + torch.nan_to_num(torch.where(x > 0, x, torch.nan))
        + x.clamp(-0.1, 0.2)
    )


def padded(x: Tensor) -> Tensor:
    """`pad_sequence` of rows of one length each, and a mask made of lengths."""
    rows = nn.utils.rnn.pad_sequence(list(x.unbind(0)), batch_first=True)
    lengths = (x > 0).sum(1)
    valid = torch.arange(16)[None, :] < lengths[:, None]
    return (rows * valid).sum(1) / lengths.clamp(min=1)


def spectra(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x)
    filtered = torch.fft.irfft(spectrum * torch.exp(-torch.arange(9)), n=16)
    two = torch.fft.fftshift(torch.fft.fft2(x)).abs()
    return (
        filtered
        + two
        + torch.stft(x, 4, window=torch.hann_window(4), return_complex=True).abs().mean()
    )


def solved(x: Tensor) -> Tensor:
    square = x @ x.T + 2 * torch.eye(16)
    values = torch.linalg.eigvalsh(square)
    return (
        torch.linalg.solve(square, x)
        + torch.linalg.inv(square)
        + torch.linalg.cholesky(square)
        + torch.logdet(square)
        + torch.linalg.svdvals(x)
        + torch.linalg.qr(square)[1]
        + torch.linalg.matrix_exp(0.1 * x)
        + values
    )


def loops(x: Tensor) -> Tensor:
    state = torch.zeros_like(x)
    states: list[Tensor] = []
    for step, part in enumerate(x.split(4, dim=1)):
        state = torch.tanh(state + part.repeat(1, 4) * step)
        states.append(state)
    return torch.cat([torch.stack(states).mean(0), *reversed(states)], 1)


def compared(x: Tensor) -> Tensor:
    values, places = x.topk(3, dim=1)
    ordered = x.sort(0, descending=True).values
    median, smallest = x.median(1).values, x.kthvalue(2, dim=1).values
    return values.sum() * ordered + median + smallest + x.cummax(1).values + places.sum() * 1e-3


def sampled(x: Tensor) -> Tensor:
    noise = torch.randn_like(x) + torch.rand(16, 16) + torch.randint(0, 3, (16, 16))
    chosen = torch.multinomial(x.softmax(1), 4)
    coins = torch.bernoulli(x.sigmoid())
    order = torch.randperm(16)
    return x[order] * noise + coins * x + x.gather(1, chosen).mean() + torch.normal(x.detach(), 0.1)


def normal(x: Tensor) -> Tensor:
    posterior = distributions.Normal(x, F.softplus(x) + 0.1, validate_args=True)
    prior = distributions.Normal(torch.zeros(16), torch.ones(16))
    z = posterior.rsample()
    prior._validate_sample(z)
    return distributions.kl_divergence(posterior, prior) - prior.log_prob(z) + posterior.entropy()


def combined(x: Tensor) -> Tensor:
    gaussian = distributions.MultivariateNormal(x, torch.eye(16))
    mixture = distributions.MixtureSameFamily(
        distributions.Categorical(logits=x), distributions.Normal(x, 1.0)
    )
    squashed = distributions.TransformedDistribution(
        distributions.Normal(x, 0.5), [distributions.TanhTransform(cache_size=1)]
    )
    relaxed = distributions.RelaxedOneHotCategorical(torch.tensor(0.5), logits=x)
    action = squashed.rsample()
    return (
        gaussian.log_prob(gaussian.rsample())[:, None]
        + mixture.log_prob(x[:, 0])[:, None]
        + squashed.log_prob(action)
        + relaxed.rsample()
        + distributions.Laplace(x, 1.0).rsample()
        + distributions.Beta(x.exp(), 2.0).log_prob(torch.tensor(0.3))
    )


def weighted_losses(x: Tensor) -> Tensor:
    y, weight = x.argmax(1).clamp(max=3), torch.linspace(0.5, 1, 16)
    entropy = F.cross_entropy(x, y, weight=weight, label_smoothing=0.1, ignore_index=2)
    signs, positive = (x > 0).float(), torch.tensor(2.0)
    gaussian = F.gaussian_nll_loss(x[:, 0], y.float(), F.softplus(x[:, 1]))
    return entropy + F.binary_cross_entropy_with_logits(x, signs, pos_weight=positive) + gaussian


def quantized(x: Tensor) -> Tensor:
    fake = torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)
    return fake * ((x * 8).to(torch.int8) & 3 | 1)


def policy(x: Tensor) -> Tensor:
    """REINFORCE: a sampled action, its log-probability times a reward."""
    actions = distributions.Categorical(logits=x)
    action = actions.sample()
    return -actions.log_prob(action) * (action % 3) + 0.01 * actions.entropy()


OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "In-place changes of activations, slices and masked places": in_place,
    "Rows written into an empty tensor in a loop": filled,
    "`gather`, `take_along_dim`, `index_select`, indices by tensors, `cumsum`": gathered,
    "`index_add`, `scatter_reduce`, `index_put(accumulate=True)`": scattered,
    "Messages of a graph by `index_add` and `scatter_add`": segments,
    "`torch.where`, `masked_fill`, `nan_to_num`, `clamp`": masked,
    "`pad_sequence`, masks made of lengths": padded,
    "`torch.fft`, `stft`, complex numbers": spectra,
    "`torch.polar`, `view_as_complex`, `angle`": lambda x: (
        torch.polar(x.abs(), x) * torch.view_as_complex(x.view(16, 8, 2)).angle()[:, :1]
    ),
    "`torch.linalg`: `solve`, `inv`, `cholesky`, `eigvalsh`, `svdvals`, `qr`, `matrix_exp`": solved,
    "`torch.einsum`, `tensordot`, `bmm`, `kron`": lambda x: (
        torch.einsum("bi,bj,ij->b", x, x, x)
        + torch.tensordot(x, x, 1)
        + torch.bmm(x[None], x[None])[0]
        + torch.kron(x[:4, :4], x[:4, :4])
    ),
    "Python loops over tensors: `split`, `unbind`, `stack`, `cat`, lists": loops,
    "`sort`, `topk`, `median`, `kthvalue`, `cummax`": compared,
    "`cumprod`, `logcumsumexp`, `diff`, `searchsorted`, `bucketize`": lambda x: (
        (
            x.cumprod(1)
            + x.logcumsumexp(1)
            + torch.searchsorted(x.sort(1).values.detach(), x.detach().contiguous())
            + torch.bucketize(x.detach(), torch.linspace(-1, 1, 5))
        )[:, 1:]
        + x.diff(dim=1)
    ),
    "`cdist`, `pairwise_distance`, `cosine_similarity`": lambda x: (
        torch.cdist(x, x + 1) + F.cosine_similarity(x[:, None], x[None], dim=-1)
    ),
    "`grid_sample`, `affine_grid`, `interpolate`": lambda x: F.grid_sample(
        F.interpolate(x.view(4, 4, 4, 4), size=(6, 6), mode="bilinear"),
        F.affine_grid(x[:4, :6].view(4, 2, 3), [4, 4, 3, 3], align_corners=False),
        align_corners=False,
    ),
    "`one_hot` with `num_classes`, `bincount` with `minlength`, `argmax`": lambda x: (
        x * F.one_hot(x.argmax(1), num_classes=16) * torch.bincount(x.argmax(1), minlength=16)
    ),
    "`tril_indices`, `meshgrid`, `roll`, `rot90`, `flip`, `unfold`": lambda x: (
        x[torch.tril_indices(16, 16).unbind()].sum()
        + x.roll(3, 1).rot90().flip(0)
        * torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")[0]
        + x.unfold(1, 4, 4).sum(2).repeat(1, 4)
    ),
    "Random draws: `randn_like`, `multinomial`, `bernoulli`, `randperm`, `normal`": sampled,
    "`Normal(validate_args=True).rsample`, `log_prob`, `kl_divergence`, `entropy`: a VAE": normal,
    "`MultivariateNormal`, mixtures, `TransformedDistribution`, relaxed and `Beta`": combined,
    "`Categorical.sample`, `log_prob`: a policy gradient": policy,
    "`logsumexp`, `log_softmax`, `normalize`: InfoNCE": lambda x: F.cross_entropy(
        F.normalize(x) @ F.normalize(x.flip(1)).T / 0.1, torch.arange(16)
    ),
    "`float()`, `int()` of shapes, `len`, `numel`, `x.shape[0]`": lambda x: (
        x / float(x.shape[0]) * len(x) / x.numel()
    ),
    "`as_strided`, `view`, `expand`, `movedim`, `squeeze`, transposed products": lambda x: (
        x.as_strided((4, 4), (16, 2)) @ x.view(4, 4, 16).movedim(0, 2)[0, :4]
    ).T.expand(2, 4, 4),
    "`torch.utils._pytree`, `zip`, sorting by Python keys, comprehensions": lambda x: sum(
        part for _, part in sorted(zip("ba", x.chunk(2), strict=True))
    ),
    "Losses: weights, `label_smoothing`, `ignore_index`, `gaussian_nll_loss`": weighted_losses,
    "`chunk`ed computation with `torch.vmap(chunk_size=...)`": lambda x: torch.vmap(
        lambda row: row.softmax(0).cumsum(0), chunk_size=4
    )(x),
    "`eigvals`, `matrix_rank`, `det`, `pinv`": lambda x: (
        torch.linalg.eigvals(x.T @ x).abs() * torch.linalg.matrix_rank(x)
        + torch.linalg.det(x)
        + torch.linalg.pinv(x)
    ),
    "`fake_quantize`, `bitwise` and integer arithmetic": quantized,
    "Constants from numpy and Python lists": lambda x: (
        x * torch.from_numpy(np.linspace(0, 1, 16, dtype=np.float32))
        + torch.tensor([[0.1], [0.2]]).repeat(8, 1)
    ),
    "`autocast` for a part of the step": lambda x: autocasted(x),
}


def autocasted(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x.T
    with torch.autocast("cpu", enabled=False):
        return y.float()


class Pair(NamedTuple):
    """A named tuple as batch."""

    x: Tensor
    y: Tensor


@dataclass
class Sample:
    """A dataclass made in the step."""

    x: Tensor
    y: Tensor
    weight: float = 1.0


class DictBatch(Example):
    """Batches of dicts, lists and tuples in each other, with strings and numbers in them"""

    @staticmethod
    def batches() -> Any:
        batches = [
            {"in": {"x": x, "more": [x * 2, (x, None)]}, "y": y, "name": "train", "scale": 0.5}
            for x, y in loader(64)
        ]
        return DataLoader(batches, batch_size=None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch["in"]["x"] + batch["in"]["more"][1][0] * batch["scale"]
        return self.loss(x, batch["y"])


class NamedTupleBatch(Example):
    """Named tuples as batch, dataclasses made in the step"""

    @staticmethod
    def batches() -> Any:
        return DataLoader([Pair(x, y) for x, y in loader(64)], batch_size=None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        sample = Sample(**batch._asdict(), weight=0.5)
        return self.loss(sample.x, sample.y) * sample.weight


class SharedMemoryBatch(Example):
    """Tensors of a batch that share memory, `d[:, :-1], d[:, 1:]`"""

    @staticmethod
    def batches() -> Any:
        return DataLoader([(x[:, :-1], x[:, 1:], y) for x, y in loader(64)], batch_size=None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(torch.cat([batch[0], batch[1][:, -1:]], 1), batch[2])


class BytesBatch(Example):
    """Batches of bytes, 16-bit integers and booleans"""

    @staticmethod
    def batches() -> Any:
        def coarse(x: Tensor) -> Tensor:
            return (x * 50 + 128).clamp(0, 255).to(torch.uint8)

        batches = [(coarse(x), y.to(torch.int16), x > 0) for x, y in loader(64)]
        return DataLoader(batches, batch_size=None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch[0].float() / 255 * batch[2], batch[1].long())


class AugmentedBatch(Example):
    """Augmentation on the host in `on_after_batch_transfer`, and in the step"""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        share = torch.rand(len(x), 1)
        mixed = share * x + (1 - share) * x[torch.randperm(len(x))]
        return super().loss(mixed * (torch.rand(1, 8) > 0.1), y)


class ResultOfDict(Example):
    """A dict as the step's result, `self.log` of tensors, floats and metrics"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"size": float(len(logits)), "max": logits.max()})
        return {"loss": loss, "logits": logits.detach(), "more": [batch[1]]}


class LossModule(Example):
    """A loss module with weights and parameters of its own"""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.zeros(2))
        self.entropy = nn.CrossEntropyLoss(torch.linspace(0.5, 1, CLASSES), label_smoothing=0.1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        parts = torch.stack([self.entropy(logits, y), logits.square().mean()])
        return (parts * torch.exp(-self.scales) + self.scales).sum()


WIDER = {"`eigvals`, `matrix_rank`, `det`, `pinv`": 5e-5}
"""Tolerances where weights moved in their last bit move stock's gradients by as much."""


def tables() -> list[Idiom]:
    """The operations as idioms."""
    return [
        Idiom(
            name=text.replace("`", ""),
            text=text,
            make=lambda operation=operation: OneOperation(operation),  # type: ignore[misc]
            batches=lambda: loader(64),
            tolerance=WIDER.get(text, 1e-5),
        )
        for text, operation in OPERATIONS.items()
    ]
