"""Weights in parts over several processes, by torchrun; each rank writes what it found.

torchrun --nproc_per_node=2 tests/support/streaming.py FOLDER NAME ...
"""

from __future__ import annotations

import json
import os
import pickle
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from harness import QUIET, Recorder
from lightning.pytorch.callbacks import EMAWeightAveraging
from models import Classifier, loader
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import fulgurite
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.passes import gathers, observing_passes
from fulgurite.backends.report.words import in_parts


class Wide(Classifier):
    """Its weights are all there is; Adam holds twice as much."""

    def __init__(self, optimizer: Any = torch.optim.AdamW) -> None:
        super().__init__(nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 4)))
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=1e-2)


def trained(module: pl.LightningModule, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """A fit of weights in parts; 2 epochs of a few steps."""
    given = {**QUIET, "max_epochs": 2, "callbacks": [*callbacks]} | options
    path, execution = given.pop("ckpt_path", None), given.pop("execution", "weight_streaming")
    backend = fulgurite.backend("CSX", autogen_policy="disabled", execution=execution)
    trainer = fulgurite.Trainer(backend=backend, **given)
    trainer.fit(module, loader(96), ckpt_path=path)
    return trainer


def part_bytes(folder: Path) -> Any:
    """Bytes of weights and optimizer state that this process holds, and those of all."""
    torch.manual_seed(0)
    module = Wide()
    whole = 3 * sum(p.nbytes for p in module.parameters())
    trainer = trained(module)
    [optimizer] = trainer.optimizers
    states = [one for state in optimizer.state.values() for one in state.values() if one.ndim]
    parts = [one.part for one in (*module.parameters(), *states)]
    return [sum(part.untyped_storage().nbytes() for part in parts), whole]


def resumed(folder: Path) -> Any:
    """Losses of two epochs, and of the second after a checkpoint."""
    torch.manual_seed(0)
    whole, later = Recorder(), Recorder()
    trained(Wide(), whole)
    torch.manual_seed(0)
    path = str(folder / "one.ckpt")
    trained(Wide(), max_epochs=1).save_checkpoint(path)
    dist.barrier()
    torch.manual_seed(1)
    trained(Wide(), later, ckpt_path=path)
    return [whole.losses[-len(later.losses) :], later.losses]


class Reads(pl.Callback):
    """A host hook that reads a weight, and tries to change it."""

    found: dict[str, Any]

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        p = module.net[0].weight
        self.found = {
            "type": isinstance(p, nn.Parameter),
            "shape": list(p.shape),
            "sum": float(p.sum()),
            "norm": float(p.detach().norm()),
            "array": float(p.detach().numpy().sum()),
        }
        p.data.mul_(2).add_(torch.ones(p.shape))
        self.found["changed"] = float(p.sum())
        [optimizer] = trainer.optimizers
        self.found["state"] = list(optimizer.state[p]["exp_avg"].clone().shape)
        changes: dict[str, Callable[[], object]] = {
            "normal_": lambda: p.data.normal_(),
            "item": lambda: p.data[0].fill_(0),
            "pickle": lambda: pickle.dumps(p),
        }
        self.found["row"] = p.data[0].tolist() == p.detach().numpy()[0].tolist()
        for name, change in changes.items():
            try:
                change()
            except Exception as error:
                self.found[name] = f"{type(error).__name__}: {error}"
        with torch.no_grad():
            p.copy_(torch.ones(p.shape))
        self.found["copied"] = float(p.sum())
        self.found["writeable"] = p.detach().numpy().flags.writeable
        p.data = p.data * 0.5 + torch.full(p.shape, 1.5)
        self.found["assigned"] = float(p.sum()) / p.numel()
        with pytest.raises(fulgurite.errors.StateChanged, match="of another shape"):
            p.data = torch.ones(3)


def read(folder: Path) -> Any:
    """What a host hook finds."""
    torch.manual_seed(0)
    reads = Reads()
    trained(Wide(), reads)
    return reads.found


def averaged(folder: Path) -> Any:
    """Sums of averaged weights, by Lightning's callback, of parts and of wholes."""
    found = []
    for execution in ("weight_streaming", "pipeline"):
        torch.manual_seed(0)
        module = Wide()
        backend = fulgurite.backend("CSX", autogen_policy="disabled", execution=execution)
        average = EMAWeightAveraging(decay=0.9)
        given = {**QUIET, "max_epochs": 2, "callbacks": [average]}
        fulgurite.Trainer(backend=backend, **given).fit(module, loader(96))
        found.append([float(p.sum()) for p in module.parameters()])
    return found


def fitted_twice(folder: Path) -> Any:
    """A second fit of the same module goes on from its parts; then it is validated."""
    torch.manual_seed(0)
    module, first, second = Wide(), Recorder(), Recorder()
    trained(module, first, max_epochs=1)
    trainer = trained(module, second, max_epochs=1)
    stock = Wide()
    stock.load_state_dict(trainer.strategy.lightning_module_state_dict())
    again = [float(p.sum()) for p in module.parameters()]
    return [first.losses[0], second.losses[0], again, [float(p.sum()) for p in stock.parameters()]]


class OfShape(torch.optim.Optimizer):
    """Its state, made on first use, depends on how many elements and rows a parameter has."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """A step whose size is by the parameter's elements and rows."""
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    rows = float(p.shape[0]) if p.ndim > 1 else 1.0
                    state["size"] = torch.tensor(float(p.numel()) / rows)
                    state["mean"] = torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 0.5)
                p.add_(state["mean"] / state["size"], alpha=-group["lr"])
        return loss


def optimizers(folder: Path) -> Any:
    """How far optimizers are from themselves with whole weights, at most; or why they refuse."""
    given = {"SGD": {"momentum": 0.9}, "LBFGS": {"max_iter": 2}}
    ours = {name: getattr(fulgurite.optim, name) for name in ("Lion", "Lamb")}
    ours["OfShape"] = OfShape
    found = {}
    for name, kind in {**vars(torch.optim), **ours}.items():
        if not isinstance(kind, type) or name in ("Optimizer", "SparseAdam"):
            continue
        losses = []
        try:
            for execution in ("weight_streaming", "pipeline"):
                torch.manual_seed(0)
                module, recorder = Wide(partial(kind, **given.get(name, {}))), Recorder()
                if name == "Muon":  # takes matrices alone
                    module.net[0].bias = module.net[2].bias = None
                trained(module, recorder, max_epochs=1, execution=execution)
                losses.append(recorder.losses)
            found[name] = max(abs(x - y) for x, y in zip(*losses, strict=True))
        except fulgurite.errors.UnsupportedState as error:
            found[name] = str(error)
    return found


class Deep(Classifier):
    """Layers of one size between two small ones; its weights are all there is.

    Args:
        width: of the layers.
        depth: how many.
        configured: they are made in ``configure_model``.
    """

    def __init__(self, width: int, depth: int, configured: bool = False) -> None:
        super().__init__(nn.Identity())
        self.sizes = width, depth
        if not configured:
            self.make()

    def make(self) -> None:
        width, depth = self.sizes
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
        ends = nn.Linear(8, width), nn.Linear(width, 4)
        self.net = nn.Sequential(ends[0], nn.BatchNorm1d(width), *layers, ends[1])

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            self.make()
            self.net.apply(_begin)


def _begin(layer: nn.Module) -> None:
    """What somebody's own beginning of weights does, in a module that is whole."""
    if isinstance(layer, nn.Linear):
        nn.init.zeros_(layer.bias)
        layer.weight.data.mul_(0.5)


def built(folder: Path) -> Any:
    """Losses of a module that was made before the fit, in ``configure_model``, and as meta."""
    found = {}
    for how in ("before", "configured", "meta"):
        torch.manual_seed(0)
        losses, rank = Recorder(), int(os.environ["RANK"])
        torch.manual_seed(rank)  # the first process's weights are those of all
        if how == "before":
            module = Deep(64, 2)
            with torch.no_grad():
                module.net.apply(_begin)
        elif how == "configured":
            module = Deep(64, 2, configured=True)
        else:
            trainer = fulgurite.Trainer(backend=_backend(), **QUIET)
            with trainer.init_module(empty_init=True):
                module = Deep(64, 2)
        trained(module, losses, gradient_clip_val=0.5)
        found[how] = losses.losses
    torch.manual_seed(0)
    try:
        with torch.device("meta"):
            module = Deep(64, 2)
        module.net[1].register_buffer("extra", torch.ones(2, device="meta"))
        trained(module)
    except fulgurite.errors.UnsupportedState as error:
        found["buffer"] = str(error)
    return found


def _backend(**options: Any) -> Any:
    return fulgurite.backend(
        "CSX", execution="weight_streaming", **{"autogen_policy": "disabled"} | options
    )


def messages(folder: Path) -> Any:
    """The products and messages of a step, in order, and how many elements each message has."""
    found: list[list[Any]] = []

    def observe(name: str, before: Graph, after: Graph) -> None:
        for node in after.operations() if name == "shard_state" else ():
            kind = f"{node.target}.".split(".")[1]
            if kind in ("mm", "addmm") or "_c10d_functional" in str(node.target):
                sent = node.all_input_nodes[0]
                found.append([kind, node.name, sent.name, node.meta["val"].numel()])

    gathers.HELD_BYTES = 0
    torch.manual_seed(0)
    with observing_passes(observe):
        trained(Deep(64, 3), gradient_clip_val=0.5, max_steps=1)
    return found


def fsdp(folder: Path) -> Any:
    """Losses, and the same of torch's own fully sharded data parallel, of 50 steps and more."""
    torch.manual_seed(0)
    ours = Recorder()
    trained(Wide(), ours, max_epochs=20)
    torch.manual_seed(0)
    module, losses, data = Wide(), list[float](), loader(96).dataset
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (module.net[0], module.net[2], module.net):
        fully_shard(layer, mesh=mesh)
    optimizer = module.configure_optimizers()
    sampler = DistributedSampler(data)  # which shuffles, as in Lightning's trainings
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=16, sampler=sampler):
            loss = nn.functional.cross_entropy(module.net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return [ours.losses, losses]


def memory(folder: Path) -> Any:
    """Bytes of all state and gradients, of the largest layer, measured at most, and predicted; the
    report's entry point without its operations, and the line about what is in parts."""
    torch.manual_seed(0)
    module, peak = Deep(1024, 8), Peak()
    built_in = folder / f"report{os.environ['WORLD_SIZE']}"
    options = {"artifact_dir": str(built_in), "autogen_policy": "default", "audit": False}
    trainer = fulgurite.Trainer(
        backend=_backend(background=False, **options), **QUIET, max_epochs=4, callbacks=[peak]
    )
    trainer.fit(module, loader(128))
    [optimizer] = trainer.optimizers
    states = [one for state in optimizer.state.values() for one in state.values() if one.ndim]
    parts = sum(one.part.nbytes for one in (*module.parameters(), *states))
    whole = 4 * sum(p.nbytes for p in module.parameters())
    dist.barrier()
    [program] = json.loads((built_in / "report.json").read_text())["programs"]
    [entry] = program["entries"]
    predicted = entry["memory"]
    measured = parts + predicted["kept_bytes"] + statistics.median(peak.bytes)
    told = {key: entry[key] for key in ("gathered", "messages", "calls")} | {
        "line": in_parts(entry)
    }
    return [whole, 4 * 1024**2, measured, predicted["peak_bytes"], told]


class Peak(pl.Callback):
    """The most memory of its own that the process has in each step, more than between them.

    Attributes:
        bytes: it, of each step after the first few.
    """

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self._most = self._between = 0
        self._looks = False

    def on_train_batch_start(self, *_: Any) -> None:
        self._most, self._between, self._looks = 0, _own_bytes(), True
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._looks = False
        self._thread.join()
        if trainer.global_step > 5:  # all code is there
            self.bytes.append(self._most)

    def _look(self) -> None:
        while self._looks:
            self._most = max(self._most, _own_bytes() - self._between)
            time.sleep(2e-4)


def _own_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


CASES: dict[str, Callable[[Path], Any]] = {
    "memory": memory,  # first: what others have freed would be used again
    "part_bytes": part_bytes,
    "resumed": resumed,
    "read": read,
    "fitted_twice": fitted_twice,
    "fsdp": fsdp,
    "averaged": averaged,
    "optimizers": optimizers,
    "built": built,
    "messages": messages,
}


def main_of(cases: dict[str, Callable[[Path], Any]]) -> None:
    """Run cases, and write what came of each."""
    folder, *names = sys.argv[1:]
    warnings.simplefilter("ignore")
    found = {name: cases[name](Path(folder)) for name in names}
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main_of(CASES)
