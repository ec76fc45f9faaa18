"""Small programs of five fields, as users of Lightning write them.

    python tests/support/programs list          their names
    python tests/support/programs vision.NAME   one of them in a process of its own: stock, then CSX

vision  generative  rl  text  tabular

A program is a function of ``make_trainer``, which makes a Trainer of Lightning's or of CSX. It
trains about 20 steps and returns what is to be compared: losses, metrics, weights, predictions.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import needs
import torch
from harness import make_trainer
from programs.compared import (
    DIFFERENT,
    REFUSED,
    TOLERANCE,
    TOLERANCES,
    WARNED,
    first_difference,
)
from recorded import place, recorded

from fulgurite import FrozenValueWarning
from fulgurite.backends import reset_backend

Program = Callable[[Callable[..., Any]], Any]

FIELDS = ("vision", "generative", "rl", "text", "tabular")


def every_program() -> dict[str, Program]:
    """All programs, ``vision.NAME`` and so on."""
    found: dict[str, Program] = {}
    for field in FIELDS:
        module = importlib.import_module(f"programs.{field}")
        for name, value in vars(module).items():
            own = inspect.isfunction(value) and value.__module__ == module.__name__
            if own and list(inspect.signature(value).parameters) == ["make_trainer"]:
                found[f"{field}.{name}"] = value
    return found


class Jitter(pl.Callback):
    """Moves every parameter by about its last bit before training."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in pl_module.parameters():
                p.mul_(1 + 2e-7 * torch.randn(p.shape, generator=generator))


def results(program: Program, static: bool, jitter: bool = False) -> Any:
    """What a program returns: on CSX if ``static``, else in stock Lightning."""

    def make(**options: Any) -> Any:
        if jitter:
            given = options.get("callbacks") or []
            options["callbacks"] = [*(given if isinstance(given, list) else [given]), Jitter()]
        return make_trainer(static, **options)

    reset_backend()
    torch.manual_seed(7)
    return program(make)


def difference(name: str) -> str | None:
    """How a program's results on CSX differ from stock Lightning's; None if they do not.

    Gradients that are rounding noise (of a bias before BatchNorm) make noise of weights under Adam:
    how much is seen where stock Lightning itself starts from weights that differ in the last bit.
    """
    program = every_program()[name]
    if name in REFUSED:
        try:
            results(program, static=True)
        except REFUSED[name]:
            return None
        return f"no {REFUSED[name].__name__}"
    needs.watch.stock += 1
    stock = recorded(lambda: results(program, static=False), place())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = results(program, static=True)
    told = any(issubclass(one.category, FrozenValueWarning) for one in caught)
    warned = name in WARNED and told
    tolerance = TOLERANCES.get(name, TOLERANCE)
    if name in DIFFERENT or warned or first_difference(ours, stock, None, tolerance) is None:
        return None
    jittered = results(program, static=False, jitter=True)
    return first_difference(ours, stock, jittered, tolerance)
