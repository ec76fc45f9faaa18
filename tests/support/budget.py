"""One process with a budget of memory for its state; each case writes what it found.

python tests/support/budget.py FOLDER NAME ...
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once

import lightning.pytorch as pl
import torch
from harness import QUIET, Recorder
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fulgurite
from fulgurite.backends.csx.compile.host.host_fabric import HostFabric
from fulgurite.backends.csx.costs.memory import memory
from fulgurite.backends.csx.streaming import mapped
from fulgurite.backends.csx.streaming.residency import residency

WIDTH, LAYERS, BATCH = 256, 8, 16


class Tower(pl.LightningModule):
    """Layers of one width: the weights are all there is."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        inner = [one for _ in range(layers) for one in (nn.Linear(width, width), nn.ReLU())]
        self.net = nn.Sequential(*inner, nn.Linear(width, 8))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val_loss", self.training_step(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


class Tied(Tower):
    """Two layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].weight = self.net[0].weight


class Views(Tower):
    """Two weights are views of one memory."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(2 * WIDTH, WIDTH) / 16
        self.net[0].weight = nn.Parameter(both[:WIDTH])
        self.net[2].weight = nn.Parameter(both[WIDTH:])


class Frozen(Tower):
    """The first layers are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net[:6].requires_grad_(False)


class TwoOptimizers(Tower):
    """By hand: each trains its half."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = super().training_step(batch)
        for one in self.optimizers():
            one.zero_grad()
        self.manual_backward(loss)
        for one in self.optimizers():
            one.step()
        return loss

    def configure_optimizers(self) -> Any:
        halves = self.net[:8].parameters(), self.net[8:].parameters()
        return [torch.optim.AdamW(halves[0]), torch.optim.SGD(halves[1], 0.1, momentum=0.9)]


def loader(steps: int, width: int = WIDTH) -> DataLoader[Any]:
    data = torch.Generator().manual_seed(3)
    x = torch.randn(steps * BATCH, width, generator=data)
    y = torch.randint(8, (steps * BATCH,), generator=data)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH)


def state_bytes(module: nn.Module) -> int:
    """Of weights and Adam's state."""
    return 3 * sum(p.nbytes for p in module.parameters())


def trained(
    module: pl.LightningModule,
    share: float | None,
    *callbacks: pl.Callback,
    steps: int = 12,
    width: int = WIDTH,
    backend: dict[str, Any] | None = None,
    **options: Any,
) -> pl.Trainer:
    """A fit with a ``share`` of the state in memory; None: "pipeline"."""
    torch.manual_seed(5)
    given: dict[str, Any] = {"autogen_policy": "disabled"} | (backend or {})
    if share is not None:
        limit = int(share * state_bytes(module))
        given |= {"execution": "weight_streaming", "max_resident_bytes": limit}
    path = options.pop("ckpt_path", None)
    options = {**QUIET, "max_epochs": 1, "limit_val_batches": 0} | options
    options["callbacks"] = [*options.get("callbacks", []), *callbacks]
    trainer = fulgurite.Trainer(backend=fulgurite.backend("CSX", **given), **options)
    trainer.fit(module, loader(steps, width), loader(3, width), ckpt_path=path)
    return trainer


def both(make: Callable[[], Tower], folder: Path, **options: Any) -> dict[str, Any]:
    """The losses of "pipeline" and of a budget, and how much of that was streamed."""
    found: dict[str, Any] = {}
    for name, share in (("pipeline", None), ("budget", 0.5)):
        recorder = Recorder()
        torch.manual_seed(1)
        module = make()
        trainer = trained(module, share, recorder, model_dir=folder, **options)
        sums = [float(p.detach().double().sum()) for p in module.parameters()]
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        found[name] = [recorder.losses, sums, metrics]
        found["files"] = sum(residency.is_in_file(p) for p in module.parameters())
        found["read"] = residency.traffic.read_bytes
    found["steps"] = len(recorder.losses)
    found["left"] = [one.name for one in folder.glob(".fulgurite-state-*")]
    return found


def equal(folder: Path) -> Any:
    """Models of several kinds, operation by operation."""
    return {
        "tower": both(Tower, folder),
        "tied": both(Tied, folder),
        "views": both(Views, folder),
        "frozen": both(Frozen, folder),
        "two optimizers": both(TwoOptimizers, folder),
        "accumulated": both(Tower, folder, accumulate_grad_batches=3),
        "clipped": both(Tower, folder, gradient_clip_val=0.1),
        "validated": both(Tower, folder, limit_val_batches=1.0, val_check_interval=4),
        "bf16": both(Tower, folder, precision="bf16-mixed"),
    }


def resumed(folder: Path) -> Any:
    """A run that goes on from a checkpoint, and one that was never stopped; then a second fit."""
    whole, later, stock, again = Recorder(), Recorder(), Recorder(), Recorder()
    torch.manual_seed(1)
    trained(Tower(), 0.5, whole, max_epochs=2, model_dir=folder)
    torch.manual_seed(1)
    saving = pl.callbacks.ModelCheckpoint(dirpath=folder, filename="one", save_last=False)
    options = {"model_dir": folder, "enable_checkpointing": True}
    trained(Tower(), 0.5, saving, **options)
    torch.manual_seed(2)
    module, path = Tower(), str(folder / "one.ckpt")
    trained(module, 0.5, later, max_epochs=2, ckpt_path=path, model_dir=folder)
    trained(Tower(), None, stock, max_epochs=2, ckpt_path=path, model_dir=folder)
    copy = Tower()
    copy.load_state_dict(module.state_dict())
    trained(module, 0.5, again, model_dir=folder)
    trained(copy, None, memory_again := Recorder())
    return {
        "whole": whole.losses,
        "later": later.losses,
        "stock": stock.losses,
        "again": again.losses,
        "again in memory": memory_again.losses,
    }


def resident_bytes() -> int:
    """Of this process: its own memory, and what is mapped of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kinds = ("RssAnon:", "RssFile:")
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(kinds))


class Peaks(pl.Callback):
    """The most that is resident in each step, as a thread sees it, and how long each takes."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.seconds: list[float] = []
        self._most, self._began, self._runs = 0, 0.0, True

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while self._runs:
            self._most = max(self._most, resident_bytes())
            time.sleep(0.002)

    def on_train_batch_start(self, *given: Any) -> None:
        self._most, self._began = resident_bytes(), time.perf_counter()

    def on_train_batch_end(self, *given: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)
        self.bytes.append(max(self._most, resident_bytes()))

    def on_train_end(self, *given: Any) -> None:
        self._runs = False


def measured(folder: Path, policy: str, share: float | None, width: int) -> Any:
    """A fit of 20 layers: its losses, what was resident in its steps, and what was predicted."""
    recorder, peaks, loads = Recorder(), Peaks(), []
    load = HostFabric.load

    def seen(fabric: Any, graph: Any, *given: Any, **options: Any) -> Any:
        loads.append(load(fabric, graph, *given, **options))
        return loads[-1]

    HostFabric.load = seen  # type: ignore[method-assign]
    torch.manual_seed(1)
    module = Tower(width, 20)
    backend = {
        "autogen_policy": policy,
        "background": False,
        "audit": False,
        "compile_dir": folder / "compiled",
    }
    trained(
        module, share, recorder, peaks, steps=24, width=width, model_dir=folder, backend=backend
    )
    [loaded] = loads
    needs = memory(loaded.runs, loaded.kernels())
    after = len(peaks.bytes) // 2  # compiled code is checked before
    return {
        "losses": [loss.hex() for loss in recorder.losses],
        "peak": max(peaks.bytes[after:]),
        "check": max(peaks.bytes),
        "step_s": sorted(peaks.seconds[after:])[len(peaks.seconds) // 4],
        "needs": needs.peak_bytes - needs.state_bytes,
        "state": state_bytes(module),
        "read": residency.traffic.read_bytes,
        "compiled": loaded.compiled,
        "waited_s": residency.traffic.waited_s,
    }


MEASURED = {
    f"{policy} {name}": (policy, share, width)
    for policy in ("disabled", "default")
    for name, share, width in (("small", None, 16), ("pipeline", None, 1024), ("budget", 0.5, 1024))
}


def refused(folder: Path) -> Any:
    """What cannot be is an error, and nothing was trained."""
    found = {}
    cases: dict[str, tuple[float, dict[str, Any]]] = {
        "two layers": (0.1, {}),
        "fits": (2.0, {}),
        "no folder": (0.5, {"model_dir": "/proc/fulgurite"}),
    }
    # as a file system without mmap, and a full disk, answer
    broken = {
        "no mmap": (mapped, "map_file", OSError(errno.ENODEV, "cannot be mapped")),
        "full disk": (os, "posix_fallocate", OSError(errno.ENOSPC, "No space left on device")),
    }
    for name, (share, options) in [*cases.items(), *((name, (0.5, {})) for name in broken)]:
        recorder = Recorder()
        owner, function, answer = broken.get(name, (os, "getpid", None))
        replaced = mock.patch.object(owner, function, side_effect=answer)
        try:
            with replaced if answer else contextlib.nullcontext():
                trained(Tower(), share, recorder, **{"model_dir": folder, **options})
            told = "trains"
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        found[name] = [told, len(recorder.losses)]
    return found


CASES: dict[str, Callable[[Path], Any]] = {
    "equal": equal,
    "resumed": resumed,
    "refused": refused,
}


def main() -> None:
    """Run cases, and write what came of each."""
    folder, *names = sys.argv[1:]
    warnings.simplefilter("ignore")
    found = {
        name: measured(Path(folder), *MEASURED[name])
        if name in MEASURED
        else CASES[name](Path(folder))
        for name in names
    }
    (Path(folder) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
