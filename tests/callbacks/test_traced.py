"""Norms, param groups, inputs and chosen gradients: in the step, as stock computes them."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_close, assert_same_run, both, fit
from models import GAN, Classifier, Transformer, loader, mlp, tokens
from torch import nn
from torch.utils.data import DataLoader

import fulgurite
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.callbacks import (
    ComputeNorm,
    LogInputSummaries,
    LogOptimizerParamGroup,
    SelectiveGrad,
)

devices = pytest.mark.parametrize("static", [True, False], ids=["CSX", "stock"])


def classifier() -> Classifier:
    return Classifier(mlp())


class Layered(Classifier):
    """Names as a transformer's: layers.0 and layers.1."""

    def __init__(self) -> None:
        super().__init__(nn.Module())
        self.net.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4)])
        self.net.forward = lambda x: self.net.layers[1](self.net.layers[0](x).relu())


class ByHand(pl.Callback):
    """Eager norms of every step."""

    def __init__(self) -> None:
        self.norms: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        def norm(tensors: list[Any]) -> float:
            return float(torch.cat([t.detach().flatten() for t in tensors]).norm())

        layers = module.net.layers
        found = {"model_wise_params_norm": norm(list(module.parameters()))}
        found["model_wise_grad_norm"] = norm([p.grad for p in module.parameters()])
        for i in (0, 1):
            of_layer = [p.grad for p in layers[i].parameters()]
            found[f"per_layer_grad_norm/layer_{i}"] = norm(of_layer)
        self.norms.append(found)


@pytest.mark.fits
@pytest.mark.long
def test_a_mock_may_stand_for_a_callback() -> None:
    mock = Mock(spec=pl.Callback)
    run = fit(classifier, lambda: (loader(32),), static=True, callbacks=[mock])
    assert mock.on_train_batch_end.call_count == len(run.losses)
    assert mock.on_after_backward.called


@pytest.mark.numbers
@pytest.mark.parametrize("window", [1, 2])
def test_norms_are_those_before_clipping_of_each_step(window: int) -> None:
    options: dict[str, Any] = {
        "log_every_n_steps": 1,
        "gradient_clip_val": 0.1,
        "accumulate_grad_batches": window,
    }

    def loaders() -> tuple[DataLoader[Any]]:
        return (loader(160),)

    ours = fit(Layered, loaders, static=True, callbacks=(ComputeNorm(),), **options)
    by_hand = ByHand()
    stock = fit(Layered, loaders, static=False, callbacks=(ComputeNorm(), by_hand), **options)
    for run in (ours, stock):
        for step, wanted in enumerate(by_hand.norms):
            seen = run.metrics[window * (step + 1) - 1]
            assert_close({name: seen[name] for name in wanted}, wanted)


@pytest.mark.long
@pytest.mark.numbers
def test_norms_of_a_transformer_are_stocks_and_change_nothing() -> None:
    ours, stock = both(
        Transformer, lambda: (tokens(),), callbacks=(ComputeNorm(),), log_every_n_steps=5
    )
    assert "per_layer_grad_norm/layer_1" in ours.final
    assert_close(ours.final, {key: stock.final[key] for key in ours.final}, 1e-4)
    plain = fit(Transformer, lambda: (tokens(),), static=True)
    assert_close(ours.losses, plain.losses, 1e-6)


@pytest.mark.fits
@devices
def test_several_optimizers_have_norms_and_numbers_of_their_own(static: bool) -> None:
    callbacks = (ComputeNorm(), LogOptimizerParamGroup("lr"))
    options: dict[str, Any] = {"callbacks": callbacks, "log_every_n_steps": 5}
    run = fit(GAN, lambda: (loader(160),), static=static, **options)
    module = run.module
    assert {"model_wise_grad_norm/optimizer_0", "model_wise_grad_norm/optimizer_1"} <= set(
        run.final
    )
    assert "model_wise_grad_norm" not in run.final
    assert run.final["model_wise_params_norm/optimizer_0"] == pytest.approx(
        float(nn.utils.parameters_to_vector(module.generator.parameters()).detach().norm()),
        rel=0.05,
    )
    assert_close([run.final["lr/0"], run.final["lr/1"]], [0.01, 0.01])


def warm_up(kind: Any) -> type[Classifier]:
    class WarmUp(Classifier):
        def __init__(self) -> None:
            super().__init__(mlp())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1.0)
            scheduler = kind(optimizer)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return WarmUp


@pytest.mark.fits
@devices
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.001 * (step + 1)),
        lambda o: fulgurite.optim.lr_scheduler.LinearLR(
            o, 0.001, end_learning_rate=0.011, total_iters=10
        ),
    ],
    ids=["host", "program"],
)
def test_the_learning_rate_is_the_one_that_the_step_used(static: bool, schedule: Any) -> None:
    if not static and "fulgurite" in schedule.__code__.co_names:
        pytest.skip("stock Lightning steps torch's schedulers only")
    logged: list[float] = []

    class Read(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
            logged.append(float(trainer.callback_metrics["lr/0"]))

    for steps in (4, 8):
        fit(
            warm_up(schedule),
            lambda: (loader(320),),
            static=static,
            callbacks=(LogOptimizerParamGroup("lr"), Read()),
            log_every_n_steps=4,
            max_steps=steps,
        )
    assert_close(logged, [0.004, 0.008])


@pytest.mark.fits
@devices
def test_several_keys_and_tuples_are_logged(static: bool) -> None:
    run = fit(
        classifier,
        lambda: (loader(160),),
        static=static,
        callbacks=(LogOptimizerParamGroup(["betas", "weight_decay"]),),
        log_every_n_steps=5,
    )
    found = {key: run.final[key] for key in ("betas/0/0", "betas/0/1", "weight_decay/0")}
    assert_close(found, {"betas/0/0": 0.9, "betas/0/1": 0.999, "weight_decay/0": 0.01})


@pytest.mark.fits
@devices
def test_a_key_that_no_optimizer_has_is_an_error_before_the_first_step(static: bool) -> None:
    with pytest.raises(ValueError, match=r"no param group has 'learning_rate'.*lr, "):
        fit(
            classifier,
            lambda: (loader(160),),
            static=static,
            callbacks=(LogOptimizerParamGroup("learning_rate"),),
        )


@pytest.mark.parametrize("keys", [3, [], [1], ""])
def test_keys_are_names(keys: Any) -> None:
    with pytest.raises(ValueError, match="keys is a key of the optimizer's param groups"):
        LogOptimizerParamGroup(keys)


class OfDict(Classifier):
    """Batches {"x": [B, 8], "views": [[B, 2], ids [B]], "y": [B]}."""

    def __init__(self) -> None:
        super().__init__(mlp())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch["x"], batch["y"]), batch_idx)


def dicts() -> tuple[DataLoader[Any]]:
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(10):
        x = torch.randn(4, 8, generator=generator)
        views = [torch.rand(4, 2, generator=generator).double().float(), torch.arange(4)]
        batches.append({"x": x, "views": views, "y": x[:, :4].argmax(1)})
    return (DataLoader(batches, batch_size=None),)


@pytest.mark.fits
@devices
@pytest.mark.parametrize("window", [1, 2])
def test_inputs_are_summed_up_where_they_are_floating(static: bool, window: int) -> None:
    run = fit(
        OfDict,
        dicts,
        static=static,
        callbacks=(LogInputSummaries(),),
        log_every_n_steps=1,
        accumulate_grad_batches=window,
    )
    last = list(dicts()[0])[-1]
    wanted = {}
    for name, x in (("x", last["x"]), ("views.0", last["views"][0])):
        wanted |= {f"input.{name}/mean": x.mean(), f"input.{name}/std": x.std(correction=0)}
        wanted |= {f"input.{name}/min": x.min(), f"input.{name}/max": x.max()}
    found = {key: value for key, value in run.final.items() if key.startswith("input.")}
    assert_close(found, {key: float(value) for key, value in wanted.items()})
    assert "training_step" not in vars(run.trainer.strategy)


@pytest.mark.fits
@devices
@pytest.mark.parametrize("clip", [None, 0.5])
def test_only_chosen_parameters_move(static: bool, clip: float | None) -> None:
    torch.manual_seed(0)
    before = {name: p.clone() for name, p in Classifier(mlp()).named_parameters()}
    options: dict[str, Any] = {"gradient_clip_val": clip, "static": static}

    def make() -> Classifier:
        return Classifier(mlp(), torch.optim.SGD)

    only = SelectiveGrad([{"param_filter": "net.3.*"}, {"param_filter": ["net.0.bias"]}])
    run = fit(make, lambda: (loader(160),), callbacks=(only,), **options)
    moved = {n for n, p in run.module.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"net.0.bias", "net.3.weight", "net.3.bias"}


@pytest.mark.numbers
def test_chosen_gradients_are_stocks() -> None:
    ours, stock = both(
        classifier,
        lambda: (loader(160),),
        callbacks=(SelectiveGrad({"param_filter": "net.3.*"}),),
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
    )
    assert_same_run(ours, stock)
    for entry in ours.trainer.strategy.training.executables():  # as they would be compiled
        graph = entry.graph
        written = {graph.inputs[i].name for i in Graph.written(graph)}  # of its lowered operations
        assert written >= {f"{name}.grad" for name, _ in ours.module.named_parameters()}


@pytest.mark.fits
@devices
def test_under_manual_optimization_too(static: bool) -> None:
    callbacks = (SelectiveGrad({"param_filter": "critic.*"}), LogInputSummaries())
    torch.manual_seed(0)
    before = GAN().generator.weight.clone()
    run = fit(GAN, lambda: (loader(160),), static=static, callbacks=callbacks, log_every_n_steps=5)
    assert torch.equal(run.module.generator.weight, before)
    assert "input.0/mean" in run.final


@pytest.mark.fits
@devices
def test_a_filter_that_matches_nothing_is_an_error_with_the_nearest_name(static: bool) -> None:
    with pytest.raises(ValueError, match=r"no parameter's name matches 'net\.9\.weight'.*'net\."):
        fit(
            classifier,
            lambda: (loader(160),),
            static=static,
            callbacks=(SelectiveGrad({"param_filter": "net.9.weight"}),),
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "names no parameters"),
        ({}, "param_filter is a glob or a list of globs; got None"),
        ({"param_filter": 3}, "param_filter is a glob or a list of globs; got 3"),
        ({"param_filter": "a", "filter": "b"}, "'filter' is no key of selective_grads"),
        ({"param_filter": "a", "init_method": "ones"}, "It would change numbers"),
        (["decoder.*"], r"expected a dict; got 'decoder\.\*'"),
    ],
)
def test_what_selects_gradients_is_a_dict_with_a_filter(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SelectiveGrad(given)
