"""Trainings of several processes beside stock Lightning's DDP on the same ranks, by torchrun.

    torchrun --nproc_per_node=2 tests/support/several.py FOLDER POLICY[:EXECUTION[:large]] CASE ...

"large": no tensor counts as a small one, which is held for the whole step.

Each rank fits every case on CSX and in stock Lightning, and writes ``rank.json`` into the folder:
what each case gave.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from harness import QUIET, Recorder
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from models import (
    GAN,
    Classifier,
    Measured,
    Transformer,
    convnet,
    loader,
    mlp,
    pictures,
    rows,
    tokens,
)
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

import fulgurite
from fulgurite.backends.csx.graph.passes import gathers

Case = tuple[Callable[[], pl.LightningModule], Callable[[], tuple[Any, ...]], dict[str, Any]]


class Logged(Classifier):
    """Logs what all processes have, at steps and at the epoch's end."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("both", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("largest", loss, sync_dist=True, reduce_fx="max", on_step=True)
        self.log("own", loss.detach() * 2, rank_zero_only=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)


class Gathers(Classifier):
    """Trains on what all processes computed, with its gradients, and tells its own rows of them."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (*batch, torch.tensor(self.global_rank))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, rank = batch
        outputs = self.net(x)
        everyones = self.all_gather(outputs, sync_grads=True)
        assert everyones.shape == (self.trainer.world_size, *outputs.shape)
        own = torch.arange(len(x)) + rank * len(x)  # of everyones' rows
        alike = nn.functional.cross_entropy(outputs @ everyones.flatten(0, 1).T, own)
        loss = nn.functional.cross_entropy(outputs, y) + everyones.square().mean() + alike
        self.log("sum", self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="sum"))
        return loss


class Unused(Classifier):
    """A parameter that no loss reaches."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.more = nn.Linear(3, 3)


class Scaled(Classifier):
    """Weights that the step makes of parameters: by their norms, and by a trained factor."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(spectral_norm(nn.Linear(8, 15)), nn.Tanh()))
        self.weight, self.gain = nn.Parameter(torch.randn(4, 15)), nn.Parameter(torch.tensor(3.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = self.gain * self.weight / self.weight.norm()
        return nn.functional.cross_entropy(self.net(batch[0]) @ weight.t(), batch[1])


def clamp(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.clamp_(-0.01, 0.01)


class Hooked(Classifier):
    """Gradients are changed as they come: each process's own. And what no weight is part of."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 4)))
        self.net[0].weight.register_post_accumulate_grad_hook(clamp)
        self.net[2].weight.register_hook(lambda grad: grad.clamp(-0.02, 0.02))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        w = self.net[0].weight
        near = (w @ w.t() - torch.eye(300)).square().mean()
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1]) + 0.1 * near


class FineTuned(Classifier):
    """Its first layer is frozen, and one that its gradients pass through."""

    def __init__(self) -> None:
        layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 16)]
        super().__init__(nn.Sequential(*layers, nn.ReLU(), nn.Linear(16, 4)))
        for frozen in (self.net[0], self.net[3]):
            frozen.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Shards(IterableDataset[Any]):
    """A stream of which each rank takes its own rows; it does not say how many there are."""

    def __iter__(self) -> Iterator[Any]:
        data = rows(160)
        return (data[i] for i in range(dist.get_rank(), len(data), dist.get_world_size()))


class Batches(BatchSampler):
    """A batch sampler of the user's, which Lightning makes again for each rank's rows."""


def in_own_batches() -> DataLoader[Any]:
    data = rows(160)
    return DataLoader(data, batch_sampler=Batches(RandomSampler(data), 16, drop_last=False))


SIZES = ((16, 16, 10, 16, 10), (12, 16, 15, 14, 10), (16, 12, 12, 12, 12), (10, 16, 10, 16, 12))


def of_own_sizes() -> tuple[Any, ...]:
    """Batches of which each rank has its own sizes, and rank 1 more than are compiled."""
    data = rows(160)
    ends = list(itertools.accumulate(SIZES[dist.get_rank()], initial=20 * dist.get_rank()))
    batches = [[*range(*pair)] for pair in itertools.pairwise(ends)]
    return DataLoader(data, batch_sampler=batches), DataLoader(data, batch_sampler=batches[1:])


class Sized(Logged):
    """Logs with and without the others, at steps of the training and the validation."""

    def train_dataloader(self) -> Any:
        return of_own_sizes()[0]

    def val_dataloader(self) -> Any:
        return of_own_sizes()[1]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val", loss, sync_dist=True, on_step=True, on_epoch=True)


def with_validation() -> tuple[Any, ...]:
    return loader(160), loader(50)  # 50 of 16 rows: uneven, and its last batch is smaller


def scaled() -> MixedPrecision:
    """A scale that is too high at first, and grows often."""
    scaler = GradScaler("cpu", init_scale=2.0**22, growth_interval=5)
    return MixedPrecision("16-mixed", "cpu", scaler)


class Unreached(Classifier):
    """A layer that the last batch of a window does not reach: its sum is averaged all the same."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.other = torch.nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        head = self.net if batch_idx % 2 else self.other
        return torch.nn.functional.cross_entropy(head(batch[0]), batch[1])


class ManualNorm(Classifier):
    """BatchNorm under manual optimization, where DDP leaves each rank its own statistics."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 4))
        )
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)


CASES: dict[str, Case] = {
    "mlp": (lambda: Classifier(mlp()), lambda: (loader(160, shuffle=True),), {}),
    "convnet": (lambda: Classifier(convnet()), lambda: (pictures(160),), {}),
    "transformer": (
        Transformer,
        lambda: (tokens(160),),
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
    "gan": (GAN, lambda: (loader(160),), {}),
    "metrics": (Measured, with_validation, {}),
    "logged": (lambda: Logged(mlp()), with_validation, {}),
    "gathers": (lambda: Gathers(mlp()), lambda: (loader(160),), {}),
    "batch sampler": (lambda: Classifier(mlp()), lambda: (in_own_batches(),), {}),
    "stream": (
        lambda: Classifier(mlp()),
        lambda: (DataLoader(Shards(), batch_size=16),),
        {"use_distributed_sampler": False},
    ),
    "sizes": (lambda: Sized(mlp()), tuple, {"use_distributed_sampler": False}),
    "unused": (Unused, lambda: (loader(160),), {}),
    "unreached": (Unreached, lambda: (loader(160),), {"accumulate_grad_batches": 2}),
    "scaled": (Scaled, lambda: (loader(160),), {}),
    "manual norm": (ManualNorm, with_validation, {}),
    "hooked": (Hooked, lambda: (loader(160),), {}),
    "finetuned": (FineTuned, lambda: (loader(160),), {}),
    "bf16-mixed": (
        lambda: Classifier(mlp()),
        lambda: (loader(160),),
        {"precision": "bf16-mixed"},
    ),
    "16-mixed": (lambda: Classifier(mlp()), lambda: (loader(160),), {"plugins": scaled}),
}
STEPS = {"max_epochs": -1, "max_steps": 50}


def fitted(case: Case, policy: str | None, devices: int) -> dict[str, Any]:
    """What a fit gave on this rank, as numbers: on CSX under a policy, or in stock Lightning."""
    make, loaders, options = case
    torch.manual_seed(0)
    module, recorder = make(), Recorder()
    options = {**QUIET, **STEPS, **options, "callbacks": [recorder]}
    if "plugins" in options:
        options["plugins"] = [options["plugins"]()]
    if policy is None:
        strategy = DDPStrategy(find_unused_parameters=True)
        trainer = pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **options)
    else:
        name, execution, *large = f"{policy}:pipeline".split(":")[:3]
        if "large" in large:
            gathers.HELD_SHARE = gathers.HELD_BYTES = 0
        options_of_backend = {"autogen_policy": name, "execution": execution}
        # with it 50 steps would be over before the code is there
        background = execution == "pipeline"
        backend = fulgurite.backend("CSX", background=background, **options_of_backend)
        trainer = fulgurite.Trainer(backend=backend, **options)
    torch.manual_seed(7)
    trainer.fit(module, *loaders())
    assert trainer.world_size == devices
    return {
        "losses": recorder.losses,
        "metrics": recorder.metrics,
        "weights": {name: value.tolist() for name, value in module.state_dict().items()},
        "final": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
        "scale": 0.0 if trainer.scaler is None else trainer.scaler.get_scale(),
    }


def main() -> None:
    """Fit every case, and write what came of it."""
    folder, policy, *names = sys.argv[1:]
    warnings.simplefilter("ignore")
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = {
        name: {
            who: fitted(CASES[name], given, count)
            for who, given in (("stock", None), ("ours", policy))
        }
        for name in names
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
