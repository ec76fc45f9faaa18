"""Models that were installed: errors name their package's line, then the user's; reads warn."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from harness import fit
from installed import installed
from models import Classifier, loader, mlp
from torch import Tensor, nn

from fulgurite.backends.csx.contract.frozen_reads import FrozenValueWarning
from fulgurite.backends.csx.diagnostics.trace_errors import ConditionalOnTensor
from fulgurite.backends.csx.diagnostics.user_lines import belongs_to_library

pytestmark = pytest.mark.fits

PACKAGE = """
import random

import lightning.pytorch as pl
import torch
from torch import nn


def positive(x):
    return bool(x.sum() > 0)  # branch


class Branches(nn.Module):
    def forward(self, x):
        return x if positive(x) else -x


class WarmUp(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    @property
    def weight(self):
        return min(1.0, self.current_epoch / 10)  # epoch

    def training_step(self, batch, batch_idx):
        kept = random.random() < 2  # drawn
        return self.layer(batch[0]).square().mean() * (1 - self.weight) * kept

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Refused(WarmUp):
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean() if positive(batch[0]) else None
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An installed package with models in it."""
    return installed(tmp_path, "modelzoo", PACKAGE, monkeypatch)


def line_with(mark: str) -> int:
    """The line of the package that a mark is in."""
    return next(i for i, line in enumerate(PACKAGE.splitlines(), 1) if mark in line)


def test_an_error_in_a_packages_module_names_its_line_and_then_the_users(
    package: ModuleType,
) -> None:
    class Uses(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.net(package.Branches()(x)), y)  # here

    with pytest.raises(ConditionalOnTensor) as caught:
        fit(lambda: Uses(mlp()), lambda: (loader(32),), static=True)
    _, at, source, led, users, *_ = str(caught.value).splitlines()
    assert at.startswith("  at ")
    assert at.endswith(f"modelzoo.py:{line_with('# branch')} in positive")
    assert source == "      return bool(x.sum() > 0)  # branch"
    assert led.startswith("  from ")
    assert led.endswith(" in training_step")
    assert users.endswith("# here")
    assert caught.value.line is not None
    assert caught.value.line.file == __file__


def test_a_model_that_is_a_packages_names_the_packages_line(package: ModuleType) -> None:
    with pytest.raises(ConditionalOnTensor) as caught:
        fit(package.Refused, lambda: (loader(32),), static=True)
    assert f"modelzoo.py:{line_with('# branch')} in positive" in str(caught.value)


def test_what_a_packages_model_reads_of_the_run_warns_as_the_users_would(
    package: ModuleType,
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(1)
        fit(package.WarmUp, lambda: (loader(32),), static=True)
    found = {(w.lineno, str(w.message)) for w in caught if w.category is FrozenValueWarning}
    wanted = {line_with("# drawn"): "random.random"}  # the epoch is followed
    assert {line for line, _ in found} == set(wanted)
    for line, text in found:
        assert text.startswith(wanted[line])


@pytest.mark.parametrize("lists", [True, False])
def test_what_pip_put_into_a_folder_of_its_own_is_a_package(
    lists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apart" / "layers").mkdir(parents=True)
    (tmp_path / "apart" / "__init__.py").write_text("")
    (tmp_path / "apart" / "layers" / "__init__.py").write_text("class Layer: ...")
    if lists:
        (tmp_path / "apart-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("apart", "apart.layers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    layers = importlib.import_module("apart.layers")
    assert belongs_to_library(layers.Layer) is lists
