"""Names of classes: forms, homes, what is no choice, and what the errors say."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.profilers import SimpleProfiler
from torch import nn

import fulgurite.optim
from fulgurite.config.document.problems import Problem
from fulgurite.config.types.classes import (
    CATEGORIES,
    Classes,
    Named,
    imported,
    named,
)


@pytest.mark.parametrize(
    ("value", "arguments", "arguments_path"),
    [
        ("AdamW", {}, ("o",)),
        ({"AdamW": {"lr": 1}}, {"lr": 1}, ("o", "AdamW")),
        ({"AdamW": {}}, {}, ("o", "AdamW")),
        ({"name": "AdamW", "lr": 1}, {"lr": 1}, ("o",)),
        ({"class_path": "AdamW", "init_args": {"lr": 1}}, {"lr": 1}, ("o", "init_args")),
        ({"class_path": "AdamW", "init_args": None}, {}, ("o", "init_args")),
        ({"class_path": "AdamW"}, {}, ("o", "init_args")),
    ],
)
def test_a_class_has_four_forms(
    value: Any, arguments: dict[str, Any], arguments_path: tuple[str, ...]
) -> None:
    found = named(value, ("o",), "optimizer")
    assert isinstance(found, Named)
    assert (found.name, found.removed) == ("AdamW", False)
    assert (found.arguments, found.arguments_path) == (arguments, arguments_path)


def test_a_name_with_null_is_taken_away() -> None:
    found = named({"AdamW": None}, ("o",), "optimizer")
    assert isinstance(found, Named)
    assert found.removed


@pytest.mark.parametrize(
    ("value", "path", "told"),
    [
        (3, (), "expected an optimizer, as {Name: {arguments}}; got 3."),
        ({}, (), "expected an optimizer, as {Name: {arguments}}; got {}."),
        ("", (), "expected an optimizer"),
        ({"SGD": None, "lr": 1}, (), "Indent lr deeper, as the arguments of SGD."),
        ({"SGD": 3}, ("SGD",), "expected the arguments of SGD, as {key: value}; got 3."),
        ({"name": 3}, ("name",), "expected the name of an optimizer; got 3."),
        (
            {"class_path": "SGD", "init_arg": {}},
            ("init_arg",),
            "takes init_args: {...} only. Did you mean 'init_args'?",
        ),
        ({"class_path": "SGD", "init_args": []}, ("init_args",), "expected the arguments of SGD"),
    ],
)
def test_what_is_no_form_of_a_class_is_said_where_it_stands(
    value: Any, path: tuple[str, ...], told: str
) -> None:
    found = named(value, (), "optimizer")
    assert isinstance(found, Problem)
    assert found.path == path
    assert told in found.text


@pytest.mark.parametrize(
    ("category", "name", "target"),
    [
        ("optimizer", "adamw", fulgurite.optim.AdamW),
        ("optimizer", "SGD", torch.optim.SGD),
        ("optimizer", "LBFGS", torch.optim.LBFGS),
        ("optimizer", "torch.optim.AdamW", torch.optim.AdamW),
        ("scheduler", "STEPLR", fulgurite.optim.lr_scheduler.StepLR),
        ("scheduler", "ReduceLROnPlateau", torch.optim.lr_scheduler.ReduceLROnPlateau),
        ("callback", "earlystopping", pl.callbacks.EarlyStopping),
        ("logger", "csvlogger", pl.loggers.CSVLogger),
        ("metric", "MulticlassAccuracy", torchmetrics.classification.MulticlassAccuracy),
        ("metric", "SignalNoiseRatio", torchmetrics.audio.SignalNoiseRatio),
        ("profiler", "simpleprofiler", SimpleProfiler),
        ("module", "GELU", nn.GELU),
        ("model", "torch.nn.Linear", nn.Linear),
    ],
)
def test_names_are_found_in_any_case_ours_first(category: str, name: str, target: Any) -> None:
    assert Classes().find(category, name) is target


def test_choices_are_neither_bases_nor_private_nor_abstract() -> None:
    for category in map(Classes().category, CATEGORIES):
        for name, target in Classes().short_names(category).items() if category.homes else ():
            assert not name.startswith("_")
            assert not getattr(target, "__abstractmethods__", None)
            assert target not in category.bases
            assert "_deprecated" not in target.__module__


@pytest.mark.parametrize(
    ("category", "name", "told"),
    [
        ("optimizer", "AdmW", "no optimizer is named 'AdmW'. Did you mean 'AdamW'?"),
        ("optimizer", "Optimizer", "no optimizer is named 'Optimizer'."),
        ("optimizer", "torch.optim.Optimizer", "is not an optimizer: expected a subclass"),
        ("optimizer", "torch.optim.swa_utils", "is a module, not an optimizer"),
        ("optimizer", "torch.optim.AdmW", "torch.optim has no 'AdmW'. Did you mean 'AdamW'?"),
        ("optimizer", "torch.nn.Linear", "is not an optimizer: expected a subclass of Optimizer."),
        ("callback", "Callback", "no callback is named 'Callback'."),
        ("model", "a..b", "'a..b' is no import path (my.module.Name)."),
        ("model", ".", "is no import path"),
        ("model", "no_such_package.Net", "cannot be imported: No module named 'no_such_package'."),
        ("model", "torch.no_such.Net", "torch has no 'no_such'."),
    ],
)
def test_a_name_that_nothing_has_is_told_with_the_nearest(
    category: str, name: str, told: str
) -> None:
    with pytest.raises(LookupError) as caught:
        Classes().find(category, name)
    assert told in str(caught.value)


def test_modules_of_the_users_come_first_and_in_their_order() -> None:
    class Mine(torch.optim.SGD):
        pass

    one, other = ModuleType("one"), ModuleType("other")
    one.SGD = Mine  # type: ignore[attr-defined]
    other.SGD = torch.optim.Adam  # type: ignore[attr-defined]
    other.SGDX = torch.optim.Adam  # type: ignore[attr-defined]
    classes = Classes(modules=(one, other))
    assert classes.find("optimizer", "sgd") is Mine
    assert classes.find("optimizer", "SGDX") is torch.optim.Adam


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "users_net.py").write_text("class Outer:\n    class Inner:\n        pass\n")
    (tmp_path / "users_bad.py").write_text("1 / 0\n")
    (tmp_path / "users_needs.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("users_net", "users_bad", "users_needs"):
        sys.modules.pop(name, None)


def test_classes_within_classes_are_imported(package: Path) -> None:
    assert imported("users_net.Outer.Inner").__qualname__ == "Outer.Inner"


def test_a_module_that_fails_says_so_with_its_line(package: Path) -> None:
    with pytest.raises(LookupError, match=r"ZeroDivisionError: .*users_bad.py:1\)"):
        imported("users_bad.Net")
    with pytest.raises(LookupError, match="No module named 'no_such_package'"):
        imported("users_needs.Net")


def test_a_misspelt_module_is_looked_for_beside_the_file(package: Path) -> None:
    with pytest.raises(LookupError, match="Did you mean 'users_net'"):
        Classes(folder=str(package)).find("model", "user_net.Outer")


def test_without_imports_the_users_classes_are_only_named(package: Path) -> None:
    classes = Classes(imports=False)
    assert classes.find("model", "users_net.Net") is None
    assert classes.find("model", "gpt") is None
    assert "users_net" not in sys.modules
    assert classes.find("optimizer", "AdamW").__module__ == "fulgurite.optim.adam"
    with pytest.raises(LookupError, match="AdamW"):
        classes.find("optimizer", "AdmW")
    with_modules = Classes(imports=False, packages=frozenset({"users"}))
    assert with_modules.find("optimizer", "MyOwn") is None


def test_the_category_of_a_parameter_follows_from_its_type() -> None:
    assert Classes().find(Classes().category_of((torchmetrics.Metric,)), "MeanMetric")
    assert Classes().find(Classes().category_of((pl.Callback,)), "EarlyStopping")
    with pytest.raises(LookupError, match="no Linear is named 'GELU'"):
        Classes().find(Classes().category_of((nn.Linear,)), "GELU")
