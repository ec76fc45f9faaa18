"""The modules that programs were built on, compared with those that are there later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_same_run, both
from models import Classifier, loader, mlp
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.wrappers import MetricTracker

from fulgurite.backends.csx.diagnostics.trace_errors import StateChanged
from fulgurite.backends.csx.program.selection import ModuleTree


def tree(model: nn.Module) -> ModuleTree:
    scope: Any = SimpleNamespace(module=model, trains=True, line_naming=lambda *names, **how: None)
    return ModuleTree(scope)


def test_a_replaced_module_is_seen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    before = tree(model)
    assert before.difference("training") == ""
    model[1] = nn.Tanh()
    assert before.is_changed()
    assert before.difference("training") == "Tanh was put into the model, and 1 more"


@pytest.mark.parametrize("model", [nn.Sequential(), nn.Sequential(nn.Linear(2, 2))])
def test_an_added_module_is_seen_and_a_removed_one(model: nn.Sequential) -> None:
    before = tree(model)
    model.append(nn.ReLU())
    assert before.is_changed()
    assert before.difference("validation") == "ReLU was put into the model"
    more = tree(model)
    del model[-1]
    assert more.is_changed()
    assert more.difference("validation") == "ReLU was taken out of the model"
    assert not before.is_changed()


@pytest.mark.parametrize("name", ["Linear", "in another order"])
def test_modules_with_parameters_are_not_changed(name: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = tree(model)
    model[0] = nn.Linear(2, 2) if name == "Linear" else model[1]
    if name != "Linear":
        model[1] = before.modules[1]
    assert before.is_changed()
    with pytest.raises(StateChanged, match=rf"training program was built \({name}\)"):
        before.difference("training")


class Tracks(Classifier):
    """Keeps a metric of each epoch, as torchmetrics has it for that."""

    def __init__(self, hook: str) -> None:
        super().__init__(mlp())
        self.tracker = MetricTracker(
            MetricCollection([MulticlassAccuracy(4), MulticlassF1Score(4)])
        )
        self.best: list[dict[str, Tensor]] = []
        setattr(self, hook, self.begin)

    def begin(self, *batch: Any) -> None:
        if not batch or batch[1] == 1:
            self.tracker.increment()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self.net(batch[0])
        if self.tracker.n_steps:
            self.tracker.update(outputs, batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.tracker.compute())
        self.best.append(self.tracker.compute_all())


@pytest.mark.numbers
@pytest.mark.parametrize("hook", ["on_validation_epoch_start", "on_validation_batch_start"])
def test_a_metric_may_be_added_for_each_epoch(hook: str) -> None:
    made: list[Tracks] = []

    def make() -> Tracks:
        made.append(Tracks(hook))
        return made[-1]

    options = {"max_epochs": 3, "num_sanity_val_steps": 0}
    ours, stock = both(make, lambda: (loader(48), loader(48)), fresh=True, **options)
    assert_same_run(ours, stock)
    one, other = (module.best for module in made)
    assert len(one) == 3
    for a, b in zip(one, other, strict=True):
        assert {name: value.tolist() for name, value in a.items()} == {
            name: value.tolist() for name, value in b.items()
        }


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
