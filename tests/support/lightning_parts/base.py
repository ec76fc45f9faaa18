"""What a row is, how it runs, and what is compared.

A row is a training: Trainer arguments, a module and loaders. From outside the two runs may not be
told apart: the host hooks in order with their counters, losses, logged names and values, the
weights, the optimizer's state, and what the part itself found out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import make_trainer, numbers
from models import CLASSES, loader
from torch import Tensor, nn

HOST_HOOKS = (
    *("setup", "on_fit_start", "on_sanity_check_start", "on_sanity_check_end", "on_train_start"),
    *("on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start"),
    *("on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"),
    *("on_train_end", "on_fit_end", "on_exception", "teardown"),
)


class Diary(pl.Callback):
    """Writes down each host hook with the trainer's counters, and the losses."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.losses: list[float] = []
        self.metrics: list[dict[str, float]] = []

    def note(self, hook: str, trainer: Any, *args: Any) -> None:
        index = args[-1] if isinstance(args[-1], int) else ""
        loop = trainer.fit_loop
        self.entries.append(
            f"{hook}({index}) epoch={trainer.current_epoch} step={trainer.global_step}"
            f" seen={loop.total_batch_idx}/{loop.batch_idx} last={trainer.is_last_batch}"
            f" stop={trainer.should_stop} rate={rates(trainer)}"
        )
        if hook == "on_train_batch_end":
            self.losses.append(float(args[1]["loss"]) if args[1] else 0.0)
        if hook.endswith("_end"):
            self.metrics.append(numbers(trainer.callback_metrics))


def rates(trainer: Any) -> list[str]:
    """The learning rates, as text."""
    groups = (group for optimizer in trainer.optimizers for group in optimizer.param_groups)
    return [f"{float(group['lr']):.6g}" for group in groups]


def noting(hook: str) -> Callable[..., None]:
    return lambda self, trainer, *args, **stage: self.note(hook, trainer, *args)


for hook in HOST_HOOKS:
    setattr(Diary, hook, noting(hook))


class Tiny(pl.LightningModule):
    """A backbone and a head; logs losses of both stages, and has a rate and a batch size."""

    def __init__(self, *norms: nn.Module, momentum: float = 0.9) -> None:
        super().__init__()
        self.lr, self.batch_size, self.momentum = 0.05, 8, momentum
        self.backbone = nn.Sequential(nn.Linear(8, 16), *norms, nn.ReLU())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


def normed() -> Tiny:
    return Tiny(nn.BatchNorm1d(16))


class Head(Tiny):
    """Its optimizer has what is trained at the beginning."""

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=self.momentum)


@dataclass(kw_only=True)
class Part:
    """A row: what is trained, and what else is compared (``found``) or said instead (``refused``).

    ``options`` gets a folder and returns Trainer arguments; ``fit`` trains; ``why`` is what the
    docs say of a refusal.
    """

    options: Callable[[Path], dict[str, Any]] = lambda folder: {}
    module: Callable[[], Any] = Tiny
    data: Callable[[], tuple[Any, ...]] = lambda: (loader(64, 8), loader(32, 8, seed=5))
    fit: Callable[[Any, Any, Any], Any] = lambda trainer, module, data: trainer.fit(module, *data)
    found: Callable[[Any, Any], Any] = lambda trainer, module: None
    refused: str = ""
    why: str = ""
    steps: int | None = None  # how many there are, where a row is about that
    raises: type[BaseException] | None = None  # by stock too
    backend: dict[str, Any] = field(default_factory=dict)


@dataclass
class Ran:
    """What a run left behind."""

    diary: Diary
    found: Any
    state: dict[str, Any]
    optimizers: list[Any]
    step: int


def run(part: Part, folder: Path, *, static: bool, policy: str | None = None) -> Ran:
    """Train a row."""
    torch.manual_seed(0)
    module, diary = part.module(), Diary()
    options = {"max_epochs": 3, "default_root_dir": folder, **part.options(folder)}
    options["callbacks"] = [*options.get("callbacks", ()), diary]
    trainer = make_trainer(static, policy, part.backend, **options)
    torch.manual_seed(7)
    result = None
    if part.raises is None:
        result = part.fit(trainer, module, part.data())
    else:
        with pytest.raises(part.raises):
            part.fit(trainer, module, part.data())
    states = [optimizer.state_dict() for optimizer in trainer.optimizers]
    found = result if isinstance(result, (int, float, list)) else part.found(trainer, module)
    return Ran(diary, found, module.state_dict(), states, trainer.global_step)


def callback_of(trainer: Any, kind: type[Any]) -> Any:
    return next(one for one in trainer.callbacks if isinstance(one, kind))


def with_callbacks(*makers: Callable[[], Any], **options: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"callbacks": [make() for make in makers], **options}


def shuffled() -> tuple[Any, ...]:
    return (loader(64, 8, shuffle=True), loader(32, 8, seed=5))


def exact(**options: Any) -> Part:
    return Part(options=lambda folder: options)
