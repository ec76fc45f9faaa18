"""Optimizer state is the program's resident state: updated in place, and never handed out.

For every optimizer that we know, torch's and ours, with as much state as it can have.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import make_trainer
from models import Classifier, loader, mlp
from optimizers import OURS, TORCH
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from fulgurite import optim
from fulgurite.backends.csx.graph.graph import Graph, Kind
from fulgurite.backends.csx.graph.op_schema import written_nodes
from fulgurite.backends.csx.program.description import STEP, Program

pytestmark = pytest.mark.fits

FULL: dict[type[Optimizer], dict[str, Any]] = {
    **{kind: {} for kind, _ in (*TORCH, *OURS)},
    torch.optim.SGD: {"momentum": 0.9, "dampening": 0.5},
    torch.optim.Adam: {"amsgrad": True, "lr": torch.tensor(0.01)},
    torch.optim.AdamW: {"amsgrad": True, "fused": True},
    torch.optim.RMSprop: {"momentum": 0.9, "centered": True},
    optim.Adam: {"amsgrad": True, "lr": torch.tensor(0.01)},
    optim.AdamW: {"amsgrad": True},
}
"""Every optimizer, with the options that give it most state."""


class Watching(pl.Callback):
    """Where each tensor of the optimizer's state is after every step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, tuple[int, int]]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        states = dict(state_of(trainer.optimizers[0]))
        self.seen.append({name: (id(t), t.data_ptr()) for name, t in states.items()})


def state_of(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an optimizer's state by name."""
    for i, state in enumerate(optimizer.state.values()):
        for name, tensor in state.items():
            yield f"{i}.{name}", tensor


def live() -> list[Tensor]:
    """All tensors that are alive."""
    gc.collect()
    return [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]


def live_bytes() -> int:
    """The bytes of all tensors that are alive, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in live()}
    return sum(storages.values())


class Net(Classifier):
    """An MLP whose matrices alone are trained: Muon takes nothing else."""

    def __init__(self, optimizer: type[Optimizer], options: dict[str, Any]) -> None:
        super().__init__(mlp(), optimizer, **options)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return self.optimizer([self.net[0].weight, self.net[3].weight], **self.options)


def states_of(graph: Graph) -> list[fx.Node]:
    """The inputs that are an optimizer's state."""
    return [
        node
        for item, node in zip(graph.inputs, graph.placeholders(), strict=True)
        if item.kind is Kind.STATE and ".state[" in item.name
    ]


def program_of(trainer: Any) -> Program:
    """The training program."""
    [program] = trainer.strategy.step_functions["training"].programs
    return program


@pytest.mark.parametrize(("optimizer", "options"), [*FULL.items(), (torch.optim.Muon, {})])
def test_state_stays_where_it_is_and_is_no_output(
    optimizer: type[Optimizer], options: dict[str, Any]
) -> None:
    watching = Watching()
    trainer = make_trainer(True, max_epochs=1, callbacks=[watching])
    trainer.fit(Net(optimizer, options), loader(16 * 6))
    assert watching.seen[0]
    assert all(places == watching.seen[0] for places in watching.seen[1:])

    program = program_of(trainer)
    [entry] = program.entries
    names = [name for name in entry.state if ".state[" in name]
    assert len(names) == len(set(names)) == len(watching.seen[0])
    nodes = states_of(entry.graph)
    written = {node: sum(node in written_nodes(user) for user in node.users) for node in nodes}
    assert set(written.values()) == {1}
    assert all(state.written for state in program.state if state.name in names)

    [results] = entry.graph.module.graph.output_node().args
    assert len(results) == entry.outputs == 1  # the loss
    values = {user.args[1] for node in nodes for user in node.users if node in written_nodes(user)}
    assert {*nodes, *values}.isdisjoint(results)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, optim.Adafactor])
def test_as_many_bytes_live_after_66_steps_as_after_2(optimizer: type[Optimizer]) -> None:
    """The losses of up to 64 steps are kept, until they are looked at together."""

    class Counting(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *others: Any) -> None:
            if trainer.global_step in (2, 66):
                counts.append(live_bytes())

    counts: list[int] = []
    held = live()  # those of earlier tests, which would else be gone in the middle of this one
    trainer = make_trainer(True, max_epochs=1, callbacks=[Counting()])
    trainer.fit(Net(optimizer, FULL[optimizer]), loader(16 * 66))
    del held
    assert len(counts) == 2
    assert counts[0] == counts[1]


def test_both_entry_points_of_accumulation_share_the_state() -> None:
    trainer = make_trainer(True, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(Net(torch.optim.AdamW, {}), loader(160))
    entries = {entry.name: entry for entry in program_of(trainer).entries}
    assert [name for name in entries["accumulate"].state if ".state[" in name] == []
    assert len([name for name in entries[STEP].state if ".state[" in name]) == 6
