"""The modules that programs were built on, compared with those that are there later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_same_run, both
from models import Classifier, loader, mlp
from torch import nn

from fulgurite.backends.csx.diagnostics.trace_errors import StateChanged
from fulgurite.backends.csx.program.selection import ModuleTree


def tree(model: nn.Module) -> ModuleTree:
    scope: Any = SimpleNamespace(module=model, trains=True, line_naming=lambda *names, **how: None)
    return ModuleTree(scope)


def test_a_replaced_module_is_seen_and_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    before = tree(model)
    before.check("training")
    model[1] = nn.Tanh()
    assert before.is_replaced()
    assert before.is_changed()
    with pytest.raises(StateChanged, match=r"training program was built \(ReLU\)"):
        before.check("training")


def test_an_added_module_is_seen_by_the_whole_comparison_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    before = tree(model)
    model.append(nn.ReLU())
    assert not before.is_replaced()
    assert before.is_changed()
    with pytest.raises(StateChanged, match="one more or less"):
        before.check("validation")


@pytest.mark.numbers
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_hook_may_end_weight_decay(optimizer: Any) -> None:
    class Ends(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, idx: int) -> None:
            if idx == 2:
                trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.0

    ours, stock = both(
        lambda: Classifier(mlp(), optimizer, weight_decay=0.5),
        lambda: (loader(16 * 5),),
        callbacks=(Ends(),),
    )
    assert_same_run(ours, stock)
    assert len(ours.trainer.strategy.programs) == 2
