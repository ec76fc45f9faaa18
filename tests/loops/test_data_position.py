"""Resuming where loaders keep their own position: no batch is left out, none comes twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import QUIET, csx
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from models import CLASSES, rows
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fulgurite
from fulgurite.backends import reset_backend


class Stateful:
    """Ten shuffled batches an epoch; it says where it is, and goes on there."""

    def __init__(self, seed: int = 3, sized: bool = True) -> None:
        self._data, self._generator = rows(160), torch.Generator().manual_seed(seed)
        self._order: list[int] = []
        self._next = 0
        if sized:
            self.__class__ = Sized

    def __iter__(self) -> Iterator[Any]:
        if self._next in (0, 10):
            self._order = torch.randperm(160, generator=self._generator).tolist()
            self._next = 0
        while self._next < 10:
            self._next += 1
            chosen = self._order[16 * (self._next - 1) : 16 * self._next]
            yield [torch.stack(part) for part in zip(*[self._data[i] for i in chosen], strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "order": self._order, "rng": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next, self._order = state["next"], state["order"]
        self._generator.set_state(state["rng"])


class Sized(Stateful):
    """The same with a length."""

    def __len__(self) -> int:
        return 10


class Global(Sized):
    """Its order comes from torch's global random state."""

    def __iter__(self) -> Iterator[Any]:
        if self._next in (0, 10):
            self._generator.manual_seed(int(torch.randint(1000, ())))
        return super().__iter__()


def plain(batches: int = 10) -> DataLoader[Any]:
    return DataLoader(rows(16 * batches), batch_size=16, shuffle=True)


def generated() -> Iterator[Any]:
    """A generator: what was taken from it does not come again."""
    yield from DataLoader(rows(160), batch_size=16)


class Net(pl.LightningModule):
    """Takes whatever the loaders give; remembers what came."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, CLASSES))
        self.seen: list[Any] = []
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pairs = list(batch.values()) if isinstance(batch, dict) else [batch]
        losses = [nn.functional.cross_entropy(self.net(x), y) for x, y in pairs]
        return torch.stack(losses).sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pairs = list(batch.values()) if isinstance(batch, dict) else [batch]
        self.seen.append([x[:, 0].tolist() for x, _ in pairs])
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(
    static: bool, folder: Path, loaders: Any, seed: int, path: Path | None = None, **more: Any
) -> Net:
    torch.manual_seed(0)
    module = Net()
    when = more or {"every_n_train_steps": 1}
    keep = ModelCheckpoint(folder, save_top_k=-1, filename="{step}", **when)
    options: dict[str, Any] = {**QUIET, "enable_checkpointing": True, "callbacks": [keep]}
    options |= {"max_epochs": 1} if loaders is generated else {"max_steps": 25}
    torch.manual_seed(seed)
    if static:
        reset_backend()
        trainer: pl.Trainer = fulgurite.Trainer(backend=csx(), **options)
    else:
        trainer = pl.Trainer(accelerator="cpu", **options)
    trainer.fit(module, loaders(), ckpt_path=path)
    assert trainer.global_step == (10 if loaders is generated else 25)
    return module


def several() -> CombinedLoader:
    return CombinedLoader({"a": Stateful(3), "b": Stateful(4)}, "max_size_cycle")


def mixed() -> CombinedLoader:
    return CombinedLoader({"a": Stateful(3), "b": plain()}, "max_size_cycle")


def cycled() -> CombinedLoader:
    return CombinedLoader({"a": Stateful(3), "b": plain(4)}, "max_size_cycle")


def unsized() -> Stateful:
    return Stateful(sized=False)


@pytest.mark.numbers
@pytest.mark.parametrize("step", [3, 10, 14])
@pytest.mark.parametrize("loaders", [Stateful, several])
def test_a_loader_with_state_goes_on_as_in_stock(
    tmp_path: Path, loaders: Callable[[], Any], step: int
) -> None:
    rests = []
    for static in (True, False):
        folder = tmp_path / str(static)
        whole = run(static, folder, loaders, 1)
        rest = run(static, folder / "rest", loaders, 50, folder / f"step={step}.ckpt")
        assert rest.seen == whole.seen[step:]
        rests.append(rest)
    assert rests[0].seen == rests[1].seen


@pytest.mark.fits
@pytest.mark.parametrize("step", [3, 10, 14])
@pytest.mark.parametrize("loaders", [Global, mixed, cycled])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(
    tmp_path: Path, loaders: Callable[[], Any], step: int
) -> None:
    whole = run(True, tmp_path, loaders, 1)
    rest = run(True, tmp_path / "rest", loaders, 50, tmp_path / f"step={step}.ckpt")
    assert rest.seen == whole.seen[step:]
    assert rest.losses == whole.losses[step:]


@pytest.mark.numbers
def test_a_checkpoint_of_an_epochs_end_goes_on_with_the_next_epoch(tmp_path: Path) -> None:
    for static in (True, False):
        folder = tmp_path / str(static)
        whole = run(static, folder, Stateful, 1, every_n_epochs=1)
        rest = run(static, folder / "rest", Stateful, 5, folder / "step=10.ckpt", every_n_epochs=1)
        assert rest.seen == whole.seen[10:]


@pytest.mark.numbers
def test_of_a_loader_without_length_stocks_batches_come(tmp_path: Path) -> None:
    rests = []
    for static in (True, False):
        folder = tmp_path / str(static)
        run(static, folder, unsized, 1)
        rests.append(run(static, folder / "rest", unsized, 50, folder / "step=3.ckpt"))
    assert rests[0].seen == rests[1].seen


@pytest.mark.fits
def test_a_generator_that_is_the_loader_loses_no_batch(tmp_path: Path) -> None:
    whole = run(True, tmp_path, generated, 1)
    rest = run(True, tmp_path / "rest", generated, 50, tmp_path / "step=3.ckpt")
    assert rest.seen == whole.seen[3:]
