"""A training of two processes that Lightning's launcher starts, in which something happens.

python tests/support/several_ends.py WHAT RANK FOLDER [POLICY]

POLICY is that of the backend, "disabled" without one; others are compiled before they run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads both once
if sys.argv[1:3] == ["fails", os.environ.get("LOCAL_RANK", "0")]:
    os.environ["CXX"] = "/nowhere/c++"

import lightning.pytorch as pl
import torch
from harness import QUIET
from models import Classifier, convnet, loader, mlp, pictures
from several import Logged
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import fulgurite
from fulgurite.backends.csx.compile.checking.selfcheck import MiscompiledWarning, SelfCheck
from fulgurite.backends.csx.distributed.parallel import CSXParallelStrategy
from fulgurite.backends.csx.graph.collectives import is_collective, is_wait
from fulgurite.backends.csx.program import audit
from fulgurite.backends.patches import patched
from fulgurite.callbacks import StopOnSignal

SLEEPS_S = 25
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "asked": signal.SIGTERM}


class Net(Classifier):
    """With dropout, and with a step of another kind on one rank if that is asked for."""

    def __init__(self, differs_on: int | None = None) -> None:
        super().__init__(mlp(dropout=0.2))
        self.differs_on = differs_on

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if self.global_rank == self.differs_on else loss


class Happens(pl.Callback):
    """Lets it happen after the fourth batch, on one rank."""

    def __init__(self, what: str, rank: int) -> None:
        self.what, self.rank = what, rank

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step != 4 or trainer.global_rank != self.rank:
            return
        if self.what == "raises":
            raise ValueError("a hook of the user's")
        if self.what == "sleeps":
            time.sleep(SLEEPS_S)
        if self.what == "stops":
            trainer.should_stop = True
        if self.what in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.what])


CHANGES = ("freezes", "freezes_one", "slows", "scales")


class Changed(Net):
    """From the fifth batch on something is another one on the ranks, of the same size or not."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))

    def configure_callbacks(self) -> Any:
        return Compared()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step != 4:
            return
        second = self.global_rank == 1
        optimizer = self.trainer.optimizers[0]
        if self.what == "freezes":
            self.net[2 if second else 0].weight.requires_grad_(False)
        elif self.what == "freezes_one" and second:
            self.net[0].requires_grad_(False)
        elif self.what == "slows" and second:
            optimizer.param_groups[0]["lr"] *= 0.5
        elif self.what == "scales" and second:
            self.net[0].weight.data.mul_(1.1)


class Compared(pl.Callback):
    """Says whether the batch at which a run ended has changed any weight."""

    def _weights(self, module: pl.LightningModule) -> list[Tensor]:
        return [p.detach().clone() for p in module.parameters()]

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        self.before = self._weights(module)

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        now = self._weights(module)
        same = all(torch.equal(a, b) for a, b in zip(self.before, now, strict=True))
        found = "as before" if same else "changed"
        print(f"rank {trainer.global_rank} ended with weights {found}\n", end="", flush=True)


class Halts(Net):
    """One rank ends its epoch in the middle, and validates, while the other trains on."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == 4 and self.global_rank == 1:
            self.trainer.should_stop = True

    def val_dataloader(self) -> Any:
        return loader(64)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)


class Skips(Net):
    """One rank ends its first epoch with its fourth batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.global_rank == 1 and batch_idx == 3 else None


class Shorter(Net):
    """With fewer batches on other ranks than the first."""

    def train_dataloader(self) -> Any:
        return loader(160 - 32 * self.global_rank)


class Uneven(Shorter):
    """With fewer batches of a validation on other ranks, in which all of them take part."""

    def train_dataloader(self) -> Any:
        return loader(64)

    def val_dataloader(self) -> Any:
        return super().train_dataloader()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val", loss, sync_dist=True, on_step=True)


class Validates(Net):
    """Logs in a validation on one rank alone what all of them are to reduce at its end."""

    def val_dataloader(self) -> Any:
        return loader(64)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.global_rank == 0:
            self.log("val", loss, sync_dist=True)


class UntilCompiled(pl.Callback):
    """Ends a run some steps after it is known in all processes what runs the step."""

    def __init__(self) -> None:
        self.since: int | None = None
        self.known: int | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        strategy: Any = trainer.strategy
        [one] = strategy.training.executables()
        self.how, step = one.loaded.how, trainer.global_step
        if self.since is None and one.loaded.compiled:
            self.since = step
        settled = one.loaded.compiled or "cannot run" in self.how or "no C++ compiler" in self.how
        if self.known is None and strategy.reduce_boolean_decision(settled):
            self.known = step
        if self.known is None:
            time.sleep(0.2)  # the compiler has to have its time
        elif step == self.known + 20:
            trainer.should_stop = True


def swapped(folder: Path, what: str, rank: int) -> None:
    """Two processes are compiled beside their training; one has no compiler, or gets wrong code."""
    own = int(os.environ.get("LOCAL_RANK", "0"))
    options = {"compile_dir": folder / f"cache{own if what == 'fails' else 0}", "background": True}
    backend = fulgurite.backend("CSX", cluster_config={"num_csx": 2}, **options)
    until = UntilCompiled()
    trainer = fulgurite.Trainer(backend=backend, **QUIET, max_epochs=-1, callbacks=[until])
    pl.seed_everything(3, verbose=False)
    module = Net()
    wrong = [(SelfCheck, "_tried", lambda check, start: ValueError("broken"))]
    with (
        warnings.catch_warnings(record=True) as warned,
        patched(wrong if what == "wrong" and own == rank else []),
    ):
        warnings.simplefilter("always", MiscompiledWarning)
        trainer.fit(module, loader(160, shuffle=True))
    found = {
        "since": until.since,
        "how": until.how,
        "weights": {name: value.tolist() for name, value in module.state_dict().items()},
        "warned": [str(w.message) for w in warned if w.category is MiscompiledWarning],
    }
    (folder / f"{own}.json").write_text(json.dumps(found))


class Part(Classifier):
    """Each rank has every second picture."""

    def train_dataloader(self) -> Any:
        rows = range(self.global_rank, 160, self.trainer.world_size)
        return DataLoader(Subset(pictures(160).dataset, rows), batch_size=8)


def synced(folder: Path) -> None:
    """BatchNorm over all processes' rows."""
    backend = fulgurite.backend("CSX", autogen_policy="disabled", cluster_config={"num_csx": 2})
    options: dict[str, Any] = {**QUIET, "max_epochs": 2, "use_distributed_sampler": False}
    trainer = fulgurite.Trainer(backend=backend, **options, sync_batchnorm=True)
    module = Part(convnet())
    trainer.fit(module)
    assert not isinstance(module.net[1], nn.SyncBatchNorm)  # any more
    weights = {name: value.tolist() for name, value in module.state_dict().items()}
    (folder / f"{trainer.global_rank}.json").write_text(json.dumps(weights))


def fitted(
    folder: Path, module: Any, data: Any = None, path: Path | None = None, **options: Any
) -> tuple[Any, Any]:
    """(trainer, module) of a fit of two processes, from a checkpoint if there is a path."""
    policy: Any = sys.argv[4] if len(sys.argv) > 4 else "disabled"
    backend = fulgurite.backend(
        "CSX", autogen_policy=policy, cluster_config={"num_csx": 2}, background=False
    )
    given = {**QUIET, "max_epochs": 2, "default_root_dir": folder, **options}
    given["use_distributed_sampler"] = not isinstance(module, Shorter)
    trainer = fulgurite.Trainer(backend=backend, **given)
    own = isinstance(module, Shorter)
    trainer.fit(module, None if own else data or loader(160, shuffle=True), ckpt_path=path)
    return trainer, module


def audited(folder: Path) -> None:
    """One process alone has the time to audit, and the others audit the same steps."""
    own = int(os.environ.get("LOCAL_RANK", "0"))
    audit.SHARE = 50.0 if own else 0.0  # however slow the machine is
    steps, look = [], audit.Audits._look

    def noted(audits: Any, executable: Any, again: Any, step: int) -> None:
        steps.append(step)
        look(audits, executable, again, step)

    with patched([(audit.Audits, "_look", noted)]):
        fitted(folder, Net(), max_epochs=6)
    (folder / f"{own}.json").write_text(json.dumps(steps))


def lightnings(folder: Path) -> None:
    """Lightning's own Trainer gets the strategy of several processes, too."""
    weights = {}
    for make, options in (
        (pl.Trainer, {"strategy": "csx"}),
        (fulgurite.Trainer, {"device": "CSX"}),
    ):
        trainer = make(**QUIET, **options, devices=2, max_epochs=1)
        pl.seed_everything(3, verbose=False)
        module = Net()
        trainer.fit(module, loader(160, shuffle=True))
        weights[make.__module__] = {k: v.tolist() for k, v in module.state_dict().items()}
    (folder / f"{trainer.global_rank}.json").write_text(json.dumps([*weights.values()]))


def messages(folder: Path) -> None:
    """What processes send for a training step: its collectives, without the waiting for them."""
    sent: list[list[str]] = []
    compare = CSXParallelStrategy.compare

    def noted(strategy: Any, stage: str, captured: Any) -> None:
        if stage == "training":
            targets = [n.target for one in captured.values() for n in one.graph.operations()]
            sent.append([str(t) for t in targets if is_collective(t) and not is_wait(t)])
        compare(strategy, stage, captured)

    with patched([(CSXParallelStrategy, "compare", noted)]):
        fitted(folder, Logged(mlp()), max_epochs=1)
        trainer, _ = fitted(folder, Classifier(convnet()), pictures(160), max_epochs=1)
    (folder / f"{trainer.global_rank}.json").write_text(json.dumps(sent))


def resumed(folder: Path) -> None:
    """A run that ``max_steps`` ended in the middle of an epoch."""
    trainer, _ = fitted(folder, Net(), max_steps=7)
    trainer.save_checkpoint(folder / "seven.ckpt")
    goes_on(folder, folder / "seven.ckpt")


def signalled(folder: Path) -> None:
    """A run that ended after a signal to one of its processes: all know, and one writes."""
    with StopOnSignal() as stop:
        fitted(folder, Net(), callbacks=[stop, Happens("asked", 1)])
    assert stop.signal == signal.SIGTERM
    assert stop.checkpoint == folder / "stopped-step=5.ckpt"
    goes_on(folder, stop.checkpoint)


def goes_on(folder: Path, checkpoint: Path) -> None:
    """From that checkpoint a run ends as one that nobody disturbed."""
    pl.seed_everything(3, verbose=False)
    whole = fitted(folder, Net())[1].state_dict()
    pl.seed_everything(3, verbose=False)  # of the sampler
    module = Net()
    torch.manual_seed(99)
    trainer, _ = fitted(folder, module, path=checkpoint)
    assert all(torch.equal(value, whole[name]) for name, value in module.state_dict().items())
    (folder / f"same{trainer.global_rank}").touch()


def main() -> None:
    """Let it happen."""
    what, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    warnings.simplefilter("ignore")
    pl.seed_everything(3, verbose=False)
    entries = (resumed, signalled, synced, audited, lightnings, messages)
    whole = {entry.__name__: entry for entry in entries}
    if what in whole:
        whole[what](folder)
        return
    if what in ("swaps", "fails", "wrong"):
        swapped(folder, what, rank)
        return
    options: dict[str, Any] = {"callbacks": [Happens(what, rank)]}
    own = int(os.environ.get("LOCAL_RANK", "0"))
    if what == "other" and own == rank:
        options["accumulate_grad_batches"] = 2
    made = {one.__name__.lower(): one for one in (Shorter, Uneven, Validates, Halts, Skips)}
    module = made[what]() if what in made else Net(rank if what == "differs" else None)
    if what in CHANGES:
        module = Changed(what)
    if what == "unbiased" and own == rank:
        module.net[0].bias = None
    trainer, _ = fitted(folder, module, **options)
    (folder / f"done{trainer.global_rank}").touch()


if __name__ == "__main__":
    main()
