"""``sync_batchnorm=True``: batches are normalized by the mean and variance of all processes' rows.

torch's SyncBatchNorm has kernels of its own, which CPUs do not have; this is the same in operations
of the program. As there the variance is put together of each process's own, so that nothing is lost
where the mean is large.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch import Tensor, nn

from fulgurite.backends.csx.graph.collectives import Processes


class SyncedBatchNorm(nn.SyncBatchNorm):
    """Torch's, whose training step is in operations."""

    processes: Processes

    def forward(self, input: Tensor) -> Tensor:
        """Normalize, by what all processes have in training.

        Args:
            input: (rows, channels, ...).
        """
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        mean, variance, rows = self._statistics(input)
        if self.track_running_stats:
            # running variances are unbiased, as BatchNorm's; the one that normalizes is not
            self._track(mean.detach(), variance.detach() * (rows / (rows - 1)))
        shape = [1, -1] + [1] * (input.dim() - 2)
        scale = (variance + self.eps).rsqrt()
        scale = scale if self.weight is None else scale * self.weight
        output = (input - mean.view(shape)) * scale.view(shape)
        if self.bias is not None:
            output = output + self.bias.view(shape)
        return output.to(input.dtype)

    def _statistics(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The mean and the biased variance of each channel, and how many numbers they are of."""
        numbers = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
        dims = [0, *range(2, input.dim())]
        variance, mean = torch.var_mean(numbers, dims, correction=0)
        count = torch.full((1,), numbers.numel() // numbers.shape[1], dtype=numbers.dtype)
        own = torch.cat([mean, variance, count])
        everyones = self.processes.gathered(own, with_gradient=own.requires_grad)
        means, variances, counts = torch.split(everyones, [len(mean), len(mean), 1], dim=1)
        rows = counts.sum()
        mean = (means * counts).sum(0) / rows
        variance = ((variances + (means - mean).square()) * counts).sum(0) / rows
        return mean, variance, rows.detach()

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        part = self.momentum
        weight = 1 / self.num_batches_tracked.to(mean.dtype) if part is None else part
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(variance.to(self.running_var.dtype), weight)


class SyncsBatchNorm(TorchSyncBatchNorm):
    """Lightning's plugin, for programs."""

    def __init__(self, processes: Processes) -> None:
        super().__init__()
        self._processes = processes

    def apply(self, model: nn.Module) -> nn.Module:
        """Replace the layers; ``revert`` gives ordinary ones back when the fit is over."""
        model = super().apply(model)
        for module in model.modules():
            if type(module) is nn.SyncBatchNorm:
                synced: Any = module
                synced.__class__, synced.processes = SyncedBatchNorm, self._processes
        return model
