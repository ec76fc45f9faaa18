"""The modules that programs were built on, compared with those that are there later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fulgurite.backends.csx.diagnostics.errors import StateChanged
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
