"""Run one module under stock Lightning and under CSX from the same seed, and compare.

Eager Lightning on the CPU is the reference. Tolerances are float32's: 1e-5 relative for losses and
logged values, and for weights and optimizer state except where a gradient is rounding noise (a bias
before BatchNorm, which Adam blows up).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import needs
import torch
from recorded import place, recorded
from torch import Tensor

import fulgurite
from fulgurite.backends import reset_backend

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass
class Run:
    """What one run left behind."""

    module: pl.LightningModule
    trainer: pl.Trainer
    losses: list[float]
    outputs: list[dict[str, Any]]
    metrics: list[dict[str, float]]
    final: dict[str, float] = field(default_factory=dict)

    @property
    def compared(self) -> Compared:
        """What ``assert_same_run`` looks at."""
        return Compared(
            losses=self.losses,
            metrics=self.metrics,
            final=self.final,
            step=self.trainer.global_step,
            weights=self.module.state_dict(),
            names=[name for name, _ in self.module.named_parameters()],
            optimizers=[optimizer.state_dict() for optimizer in self.trainer.optimizers],
        )


@dataclass(kw_only=True)
class Compared:
    """Numbers of a run: after every step, and at its end."""

    losses: list[float]
    metrics: list[dict[str, float]]
    final: dict[str, float]
    step: int
    weights: dict[str, Any]
    names: list[str]
    optimizers: list[dict[str, Any]]


class Stock:
    """A run of stock Lightning whose numbers are kept (``recorded``); fitted where more is asked.

    Args:
        fit: fits it.
        place: where they are kept.
    """

    def __init__(self, fit: Callable[[], Run], place: Path | None) -> None:
        self._fit = fit
        self.compared: Compared = recorded(lambda: self.run.compared, place)
        self.losses, self.metrics = self.compared.losses, self.compared.metrics
        self.final = self.compared.final

    @functools.cached_property
    def run(self) -> Run:
        return self._fit()

    @property
    def module(self) -> Any:
        return self.run.module

    @property
    def trainer(self) -> pl.Trainer:
        return self.run.trainer

    @property
    def outputs(self) -> list[dict[str, Any]]:
        return self.run.outputs


class Recorder(pl.Callback):
    """Losses and metrics after every training step, as numbers."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.outputs: list[dict[str, Any]] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.outputs.append(outputs)
        if outputs and "loss" in outputs:
            self.losses.append(float(outputs["loss"]))
        self.metrics.append(numbers(trainer.callback_metrics))


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Metrics as Python floats."""
    return {key: float(value) for key, value in metrics.items()}


defaults: dict[str, Any] = {"autogen_policy": "disabled", "audit": False, "background": False}
"""Of a backend, unless a test says otherwise or the suite runs with ``--compiled``: nothing is
compiled, and no step traced again (0.2 s a test); what is compiled is so from the first step on."""


def csx(policy: str | None = None, **options: Any) -> fulgurite.backends.Backend:
    """A CSX backend that compiles nothing, unless asked to (see ``defaults``)."""
    chosen = {} if policy is None else {"autogen_policy": policy}
    return fulgurite.backend("CSX", **{**defaults, **chosen, **options})


def make_trainer(
    static: bool, policy: str | None = None, backend: dict[str, Any] | None = None, **options: Any
) -> pl.Trainer:
    """A quiet Trainer: on CSX if ``static``, else stock Lightning's."""
    options = {**QUIET, **options}
    if not static:
        return pl.Trainer(accelerator="cpu", **options)
    reset_backend()
    return fulgurite.Trainer(backend=csx(policy, **(backend or {})), **options)


def fit(
    make: Callable[[], pl.LightningModule],
    loaders: Callable[[], tuple[Any, ...]],
    *,
    static: bool,
    policy: str | None = None,
    callbacks: tuple[pl.Callback, ...] = (),
    backend: dict[str, Any] | None = None,
    seed: int = 7,
    **options: Any,
) -> Run:
    """Fit a fresh module on fresh loaders: on CSX if ``static``, else in stock Lightning."""
    torch.manual_seed(0)
    module = make()
    recorder = Recorder()
    options = {"max_epochs": 1, **options, "callbacks": [recorder, *callbacks]}
    trainer = make_trainer(static, policy, backend, **options)
    torch.manual_seed(seed)
    trainer.fit(module, *loaders())
    return Run(
        module,
        trainer,
        recorder.losses,
        recorder.outputs,
        recorder.metrics,
        numbers(trainer.callback_metrics),
    )


def both(
    make: Callable[[], pl.LightningModule],
    loaders: Callable[[], tuple[Any, ...]],
    fresh: bool = False,
    **options: Any,
) -> tuple[Run, Any]:
    """(CSX, stock) of the same thing.

    Args:
        make: makes the module.
        loaders: makes the loaders.
        fresh: fit stock Lightning even where its numbers are kept: the test looks at what the
            module or a callback did outside of both.
        options: of ``fit``.
    """
    kept = place()
    ours = fit(make, loaders, static=True, **options)
    options = {k: v for k, v in options.items() if k not in ("policy", "backend")}
    stock = functools.partial(fit, make, loaders, static=False, **options)
    needs.watch.stock += 1
    return ours, stock() if fresh else Stock(stock, kept)


def assert_close(got: Any, wanted: Any, tolerance: float = 1e-5, where: str = "") -> None:
    """Compare numbers, tensors, and lists and dicts of them."""
    if isinstance(wanted, dict):
        assert list(got) == list(wanted), where
        for key in wanted:
            assert_close(got[key], wanted[key], tolerance, f"{where}[{key!r}]")
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted), where
        for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
            assert_close(a, b, tolerance, f"{where}[{i}]")
    elif isinstance(wanted, Tensor):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, msg=where or None)
    else:
        assert got == wanted or abs(got - wanted) <= tolerance * max(abs(wanted), 1e-3), (
            f"{where}: {got} instead of {wanted}"
        )


def assert_same_run(
    ours: Run,
    stock: Run | Stock,
    noise: tuple[str, ...] = (),
    losses: float = 1e-5,
    weights: float = 2e-5,
) -> None:
    """Losses, logged metrics, weights, optimizer state and counters are equal.

    Args:
        ours: the run on CSX.
        stock: the reference.
        noise: parameters whose gradient is rounding noise; they and their state are left out.
        losses: relative tolerance of losses and logged values.
        weights: relative and absolute tolerance of weights and optimizer state.
    """
    mine, theirs = ours.compared, stock.compared
    assert_close(ours.losses, stock.losses, losses, "losses")
    assert_close(ours.metrics, stock.metrics, losses, "metrics")
    assert_close(ours.final, stock.final, losses, "final")
    assert mine.step == theirs.step
    assert list(mine.weights) == list(theirs.weights)
    for name, value in theirs.weights.items():
        if name not in noise:
            assert_close(mine.weights[name], value, weights, name)
    for left, right in zip(mine.optimizers, theirs.optimizers, strict=True):
        assert list(left["state"]) == list(right["state"])
        for index, values in right["state"].items():
            name = theirs.names[index]
            if name not in noise:
                assert_close(left["state"][index], values, weights, f"state of {name}")
        assert_close(left["param_groups"], right["param_groups"], where="param_groups")
