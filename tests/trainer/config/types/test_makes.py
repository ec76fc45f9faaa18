"""What a class or function makes is looked at before it is called."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.fx.graph_module import reduce_graph_module
from torch.utils.data import DataLoader, Dataset

from fulgurite.config.types.categories import ANY_CLASS
from fulgurite.config.types.classes import Classes
from fulgurite.config.types.makes import is_plain, is_pythons

CLASSES = Classes()


class Net(nn.Module):
    @classmethod
    def small(cls) -> Any: ...


class Given:
    def __iter__(self) -> Any: ...


class Unlike: ...


def says_nothing(): ...  # type: ignore[no-untyped-def]
def anything() -> Any: ...
def unresolved() -> Nowhere: ...  # type: ignore[name-defined]  # noqa: F821
def net() -> Net: ...
def base() -> nn.Module | None: ...
def tensor() -> torch.Tensor: ...
def dataset() -> Dataset[Any]: ...
def loaders() -> dict[str, DataLoader[Any]]: ...
def batches() -> Iterator[torch.Tensor]: ...
def datamodule() -> pl.LightningDataModule: ...
def number() -> int: ...
def text() -> str: ...
def nothing() -> None: ...


@pytest.mark.parametrize(
    ("category", "target"),
    [
        *[("model", one) for one in (Net, Net.small, net, base, says_nothing, anything)],
        *[("model", one) for one in (unresolved,)],
        *[("data", one) for one in (Given, dataset, loaders, batches, datamodule, unresolved)],
        *[("data", one) for one in (says_nothing, anything, DataLoader, tensor)],
    ],
)
def test_what_may_make_what_is_asked_for_passes(category: str, target: Any) -> None:
    assert CLASSES.refusal(target, CLASSES.category(category)) == ""


@pytest.mark.parametrize(
    ("category", "target", "told"),
    [
        ("model", number, "returns int, which is not a model."),
        ("model", tensor, "returns Tensor, which is not a model."),
        ("model", nothing, "returns NoneType, which is not a model."),
        ("model", torch.stack, "does not say that it returns a model."),
        ("model", pl.LightningModule.load_from_checkpoint, "is no part of a run"),
        ("model", reduce_graph_module, "runs what"),
        ("model", torch.hub.load, "runs what a file or an address holds"),
        ("model", subprocess.run, "is of Python's own library"),
        ("model", eval, "is of Python's own library"),
        ("data", number, "returns int, which is not a data processor."),
        ("data", text, "returns str, which is not a data processor."),
        ("data", Unlike, "gives no batches: expected a Dataset"),
        ("data", subprocess.Popen, "is of Python's own library"),
        ("data", open, "is of Python's own library"),
        ("data", torch.load, "runs what a file or an address holds"),
    ],
)
def test_what_makes_something_else_is_refused(category: str, target: Any, told: str) -> None:
    assert told in CLASSES.refusal(target, CLASSES.category(category))


@pytest.mark.parametrize("target", [Path, dict, len, ValueError, Unlike, number, torch.tensor])
def test_where_any_value_does_plain_ones_of_python_do_too(target: Any) -> None:
    assert CLASSES.refusal(target, ANY_CLASS) == ""


@pytest.mark.parametrize(
    "target", [functools.partial, subprocess.Popen, exec, dict.fromkeys, torch.jit.load, Path.touch]
)
def test_where_any_value_does_what_acts_is_refused(target: Any) -> None:
    assert CLASSES.refusal(target, ANY_CLASS)


def test_a_module_beside_the_file_may_have_the_name_of_one_of_pythons(tmp_path: Path) -> None:
    assert is_pythons("code.Net")
    assert is_pythons("os")
    assert not is_pythons("torch.os")
    assert is_pythons("antigravity.x", str(tmp_path))
    assert "antigravity" not in sys.modules
    (tmp_path / "code.py").touch()
    (tmp_path / "test").mkdir()
    assert not is_pythons("code.Net", str(tmp_path))
    assert not is_pythons("test.nets.Net", str(tmp_path))


def test_names_of_plain_values_are_known_before_they_are_imported() -> None:
    assert is_plain("math.exp")
    assert is_plain("builtins.ValueError")
    assert not is_plain("builtins.eval")
    assert not is_plain("os.path")
