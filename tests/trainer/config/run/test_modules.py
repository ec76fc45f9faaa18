"""Models and optimizers of a file: against the same thing in Python."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from parts import DEVICES, QUIET, Net, Plain, Rows, Steps, described
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

import fulgurite
from fulgurite.config.document.problems import ParameterFileError
from fulgurite.config.run import modules
from fulgurite.config.schema.checking import check
from fulgurite.config.schema.optimizers import param_groups
from fulgurite.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineDecayLR,
    LinearLR,
    ScalePerParamLR,
    SequentialLR,
)
from fulgurite.optim.weight_decay_scheduler import LinearWD

BOTH = pytest.mark.parametrize("device", ["CSX", "CPU"])


class Wrapped(pl.LightningModule):
    """``Plain`` in Python."""

    def __init__(self, configure: Callable[[Plain], Any]) -> None:
        super().__init__()
        self.net, self.configure = Plain(), configure

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        return self.configure(self.net)


def in_python(device: str, configure: Callable[[Plain], Any]) -> Steps:
    steps = Steps()
    pl.seed_everything(0, verbose=False)
    options = {**DEVICES[device], **QUIET, "enable_checkpointing": False, "max_epochs": 1}
    trainer = fulgurite.Trainer(**options, callbacks=[steps])
    trainer.fit(Wrapped(configure), DataLoader(Rows(), batch_size=8, shuffle=True))
    return steps


def fitted(folder: Path, device: str, optimizer: Any, **init: Any) -> Steps:
    init = {"model": {"parts.Plain": {}}, "optimizer": optimizer, **init}
    file = described(folder, device, **init)
    del file["trainer"]["fit"]["val_dataloader"]
    fulgurite.run_config(file, "fit")
    return Steps.seen[-1]


def bias_and_rest(net: Plain) -> tuple[list[Any], list[Any]]:
    named = list(net.named_parameters())
    return [p for n, p in named if "bias" in n], [p for n, p in named if "bias" not in n]


def grouped(net: Plain) -> Optimizer:
    bias, rest = bias_and_rest(net)
    return AdamW([{"params": bias, "weight_decay": 0.0}, {"params": rest}], lr=0.01)


def sequential(net: Plain) -> Any:
    optimizer = grouped(net)
    warm_up = LinearLR(optimizer, 0.0, end_learning_rate=0.02, total_iters=3)
    cosine = CosineDecayLR(optimizer, 0.02, end_learning_rate=0.001, total_iters=4)
    return [optimizer], [SequentialLR(optimizer, [warm_up, cosine])]


def with_decay(net: Plain) -> Any:
    bias, rest = bias_and_rest(net)
    groups = [{"params": bias, "weight_decay": 0.0, "tags": "no_decay"}, {"params": rest}]
    optimizer = AdamW(groups, lr=0.01)
    decay = LinearWD(optimizer, 0.5, end_val=0.0, total_iters=6, param_group_tags=[None])
    return [optimizer], [ConstantLR(optimizer, 0.02), decay]


def scaled(net: Plain) -> Any:
    bias, rest = bias_and_rest(net)
    groups = [{"params": bias, "adjust_learning_rate": 0.25}, {"params": rest}]
    optimizer = SGD(groups, lr=0.1)
    return [optimizer], [ScalePerParamLR(optimizer, ConstantLR(optimizer, 0.2))]


def chained(net: Plain) -> Any:
    optimizer = SGD(net.parameters(), lr=0.1)
    parts = [
        ConstantLR(optimizer, 0.1),
        LinearLR(optimizer, 1.0, end_learning_rate=0.5, total_iters=5),
    ]
    return [optimizer], [ChainedScheduler(parts)]


def on_host(net: Plain) -> Any:
    optimizer = SGD(net.parameters(), lr=0.1)
    return [optimizer], [{"scheduler": StepLR(optimizer, 2, gamma=0.5), "interval": "step"}]


def by_tag(net: Plain) -> Any:
    optimizer = grouped(net)
    optimizer.param_groups[0]["tags"] = "bias"
    parts = [
        LinearLR(optimizer, 0.1, end_learning_rate=0.0, total_iters=2, param_group_tags="bias"),
        ConstantLR(optimizer, 0.001, param_group_tags="bias"),
    ]
    return [optimizer], [SequentialLR(optimizer, parts, param_group_tags="bias")]


NO_DECAY = {"params": "*.bias", "weight_decay": 0.0}
WARM_UP = {"LinearLR": {"initial_learning_rate": 0.0, "end_learning_rate": 0.02, "total_iters": 3}}
COSINE = {
    "CosineDecayLR": {"initial_learning_rate": 0.02, "end_learning_rate": 1e-3, "total_iters": 4}
}
CASES: dict[str, tuple[Any, Any, Callable[[Plain], Any]]] = {
    "a plain optimizer": (
        {"sgd": {"learning_rate": 0.1, "momentum": 0.9}},
        [],
        lambda net: SGD(net.parameters(), lr=0.1, momentum=0.9),
    ),
    "its name alone": ("AdamW", [], lambda net: AdamW(net.parameters())),
    "groups by glob": ({"torch.optim.AdamW": {"lr": 0.01, "params": [NO_DECAY]}}, [], grouped),
    "warm-up, then cosine": (
        {"torch.optim.AdamW": {"lr": 0.01, "params": [NO_DECAY]}},
        [{"SequentialLR": {"schedulers": [WARM_UP, COSINE]}}],
        sequential,
    ),
    "weight decay by tag": (
        {"torch.optim.AdamW": {"lr": 0.01, "params": [{**NO_DECAY, "tag": "no_decay"}]}},
        [
            {"ConstantLR": {"learning_rate": 0.02}},
            {
                "LinearWD": {
                    "initial_val": 0.5,
                    "end_val": 0.0,
                    "total_iters": 6,
                    "param_group_tags": [None],
                }
            },
        ],
        with_decay,
    ),
    "factors of groups": (
        {"SGD": {"lr": 0.1, "params": {"params": "*.bias", "adjust_learning_rate": 0.25}}},
        {"ConstantLR": {"learning_rate": 0.2}},
        scaled,
    ),
    "factors by glob": (
        {"SGD": {"lr": 0.1, "adjust_learning_rate": {"*.bias": 0.25}}},
        [{"ScalePerParamLR": {"scheduler": {"ConstantLR": {"learning_rate": 0.2}}}}],
        scaled,
    ),
    "a chain": (
        {"SGD": {"lr": 0.1}},
        [
            {
                "ChainedScheduler": {
                    "schedulers": [
                        {"ConstantLR": {"learning_rate": 0.1}},
                        {
                            "LinearLR": {
                                "initial_learning_rate": 1.0,
                                "end_learning_rate": 0.5,
                                "total_iters": 5,
                            }
                        },
                    ]
                }
            }
        ],
        chained,
    ),
    "one of torch's by class path": (
        {"SGD": {"lr": 0.1}},
        [{"torch.optim.lr_scheduler.StepLR": {"step_size": 2, "gamma": 0.5}}],
        on_host,
    ),
    "a sequence for a tag": (
        {"torch.optim.AdamW": {"lr": 0.01, "params": [{**NO_DECAY, "tag": "bias"}]}},
        [
            {
                "SequentialLR": {
                    "param_group_tags": "bias",
                    "schedulers": [
                        {
                            "LinearLR": {
                                "initial_learning_rate": 0.1,
                                "end_learning_rate": 0.0,
                                "total_iters": 2,
                            }
                        },
                        {"ConstantLR": {"learning_rate": 0.001}},
                    ],
                }
            }
        ],
        by_tag,
    ),
}


@pytest.mark.fits
@BOTH
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_the_same_optimizer_in_python(
    case: str, device: str, tmp_path: Path
) -> None:
    optimizer, schedulers, configure = CASES[case]
    ours = fitted(tmp_path, device, optimizer, schedulers=schedulers)
    theirs = in_python(device, configure)
    assert len(ours.losses) == 8
    if case == "its name alone":  # Fulgurite's AdamW, torch's numbers
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    else:
        assert ours.losses == theirs.losses
    assert ours.lrs == theirs.lrs


@pytest.mark.fits
def test_a_scheduler_that_follows_a_metric(tmp_path: Path) -> None:
    plateau = {"ReduceLROnPlateau": {"patience": 0, "factor": 0.1, "monitor": "val_loss"}}
    module = {"model": {"parts.Net": {}}, "optimizer": {"SGD": {"lr": 0.1}}}
    file = described(tmp_path, **module, schedulers=[plateau], max_epochs=2)
    fulgurite.run_config(file, "fit")
    loaded = fulgurite.load(file)
    loaded.trainer.fit(loaded.module, loaded.data)
    [config] = loaded.trainer.lr_scheduler_configs
    assert isinstance(config.scheduler, ReduceLROnPlateau)
    assert (config.interval, config.monitor) == ("epoch", "val_loss")


@pytest.mark.parametrize(
    ("scheduler", "text"),
    [
        ({"ReduceLROnPlateau": {"factor": 0.1}}, "monitor: required"),
        ({"ConstantLR": {"learning_rate": 0.1, "interval": "epoch"}}, "takes no interval"),
        (
            {"torch.optim.lr_scheduler.StepLR": {"step_size": 2, "interval": "batch"}},
            "expected step or epoch; got 'batch'",
        ),
    ],
)
def test_when_schedulers_run_is_checked(scheduler: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ParameterFileError, match=text):
        check(described(tmp_path, optimizer="SGD", schedulers=[scheduler]))


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        ({"SGD": {"lr": 0.1, "learning_rate": 0.1}}, "the same as lr"),
        ({"SGD": {"params": [{"weight_decay": 0.1}]}}, "expected a glob of parameter names"),
        ({"SGD": {"params": [{"params": "*", "weight_dcay": 0.1}]}}, "takes no 'weight_dcay'"),
        ({"SGD": {"params": [{"params": "*", "momentum": "much"}]}}, "params.0.momentum: expected"),
        ({"SGD": {"adjust_learning_rate": {"a": "b"}}}, "expected a number; got 'b'"),
        (
            {"SGD": {"params": {"params": "*", "adjust_learning_rate": 0.5}}},
            "factors of what a scheduler",
        ),
    ],
)
def test_mistakes_of_groups_are_known_before_the_model_is(
    optimizer: Any, text: str, tmp_path: Path
) -> None:
    with pytest.raises(ParameterFileError, match=text):
        check(described(tmp_path, model="parts.Broken", optimizer=optimizer))


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        (["*.bais"], r"params.0.params: '\*.bais' matches no parameter."),
        (["frst.bias"], "Did you mean 'first.bias'"),
        (["*.bias", "first.bias"], "params.1: all its parameters belong to entries before it"),
    ],
)
def test_a_group_without_parameters_is_an_error(
    groups: list[str], text: str, tmp_path: Path
) -> None:
    entries = [{"params": glob, "lr": 0.1} for glob in groups]
    file = described(tmp_path, model="parts.Plain", optimizer={"SGD": {"params": entries}})
    with pytest.raises(ParameterFileError, match=text):
        fulgurite.load(file)


def test_a_group_may_be_of_classes_of_modules_and_empty(tmp_path: Path) -> None:
    class Norm(nn.LayerNorm):
        """Of a class of its own, and of LayerNorm."""

    net = nn.Sequential(OrderedDict(first=nn.Linear(4, 4), scale=Norm(4), batch=nn.BatchNorm1d(4)))
    entry = {"params": "*bias*", "modules": ["LayerNorm", "Batch*"], "weight_decay": 0.0}
    plan = check(described(tmp_path, optimizer={"SGD": {"weight_decay": 0.1, "params": [entry]}}))
    call, refuse = plan.phases[0].init.optimizer, plan.document.refuse
    names = {parameter: name for name, parameter in net.named_parameters()}
    found = [[names[one] for one in group["params"]] for group in param_groups(call, net, refuse)]
    assert found == [
        ["first.bias", "scale.weight", "scale.bias", "batch.weight", "batch.bias"],
        ["first.weight"],
    ]
    [rest] = param_groups(call, nn.Linear(4, 1, bias=False), refuse)
    assert len(rest["params"]) == 1


def test_schedulers_need_the_files_optimizer(tmp_path: Path) -> None:
    with pytest.raises(ParameterFileError, match="schedulers: set numbers of the file's optimizer"):
        check(described(tmp_path, schedulers=[{"ConstantLR": {"learning_rate": 0.1}}]))


@pytest.mark.fits
def test_the_files_optimizer_is_used_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(modules, "rank_zero_info", said.append)
    trainer, module, data = fulgurite.load(described(tmp_path, optimizer={"Adam": {"lr": 0.5}}))
    trainer.fit(module, data)
    assert isinstance(trainer.optimizers[0], fulgurite.optim.Adam)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5
    assert said == ["The file's optimizer, Adam, is used; Net.configure_optimizers is not."]


@pytest.mark.fits
def test_frozen_parameters_stay_in_their_groups(tmp_path: Path) -> None:
    """As in ``module.parameters()``: a callback may thaw them."""
    file = described(tmp_path, optimizer={"SGD": {"lr": 0.1, "params": [NO_DECAY]}})
    trainer, module, data = fulgurite.load(file)
    module.net.first.requires_grad_(False)
    trainer.fit(module, data)
    assert [len(group["params"]) for group in trainer.optimizers[0].param_groups] == [3, 3]


@pytest.mark.fits
@BOTH
@pytest.mark.parametrize("form", ["loss", "dict", "pair"])
def test_a_plain_module_trains_whatever_way_it_returns_its_loss(
    form: str, device: str, tmp_path: Path
) -> None:
    file = described(tmp_path, device, model={"parts.Plain": {"form": form}}, optimizer="SGD")
    [metrics] = fulgurite.run_config(file, "fit")
    assert metrics["loss"] > 0
    [[tested]] = fulgurite.run_config(file, "test")
    assert tested["test_loss"] == pytest.approx(metrics["val_loss"], rel=1e-6)
    [predicted] = fulgurite.run_config(file, "predict")
    assert len(predicted) == 2


@pytest.mark.fits
@BOTH
def test_a_plain_module_without_a_loss_is_an_error(device: str, tmp_path: Path) -> None:
    model = {"parts.Plain": {"form": "logits"}}
    file = described(tmp_path, device, model=model, optimizer="SGD")
    with pytest.raises(TypeError, match=r"It returned a tensor of shape \[8, 4\]"):
        fulgurite.run_config(file, "fit")
    [predicted] = fulgurite.run_config(file, "predict")
    assert predicted[0].shape == (8, 4)


@pytest.mark.parametrize("model", [{"parts.Plain": {}}, {"parts.plain": {}}])
def test_a_plain_module_without_an_optimizer_validates_and_does_not_train(
    model: Any, tmp_path: Path
) -> None:
    file = described(tmp_path, model=model)
    [[metrics]] = fulgurite.run_config(file, "validate")
    assert metrics["val_loss"] > 0
    with pytest.raises(ParameterFileError, match=r"is a plain nn.Module, and the file has no"):
        fulgurite.run_config(file, "fit")


@pytest.mark.fits
def test_a_checkpoint_of_a_plain_module_has_its_own_names(tmp_path: Path) -> None:
    file = described(tmp_path, model="parts.Plain", optimizer="SGD")
    trainer, module, data = fulgurite.load(file)
    trainer.fit(module, data)
    path = tmp_path / "checkpoint_8.ckpt"
    net = Plain()
    net.load_state_dict(torch.load(path, weights_only=False)["state_dict"])
    trained = module.get_submodule("model").state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in net.state_dict().items())
    assert fulgurite.run_config(file, "fit") == [{}]  # it loads here as well


@pytest.mark.fits
def test_a_module_with_its_own_optimizer_keeps_it(tmp_path: Path) -> None:
    trainer, module, data = fulgurite.load(described(tmp_path, model={"parts.Net": {"lr": 0.3}}))
    trainer.fit(module, data)
    assert isinstance(module, Net)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.3
