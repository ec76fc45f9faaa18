"""Nonlinearities by name are torch's modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from harness import csx
from torch import Tensor, nn

import fulgurite
from fulgurite.nn.nonlinearities import NONLINEARITIES

FUNCTIONS = {
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "identity": lambda x: x,
    "linear": lambda x: x,
    "prelu": lambda x: nn.functional.prelu(x, torch.tensor(0.25)),
    "swish": nn.functional.silu,
}
"""Those that are not called in ``torch.nn.functional`` as they are here."""


@pytest.mark.parametrize("name", NONLINEARITIES)
def test_a_name_stands_for_torchs_function(name: str) -> None:
    x = torch.linspace(-8, 8, 65)
    function = FUNCTIONS.get(name) or getattr(nn.functional, name)
    assert torch.equal(fulgurite.nn.nonlinearity(name)(x), function(x))


def test_in_a_program_each_has_torchs_values_and_gradients() -> None:
    csx()
    modules = nn.ModuleList([fulgurite.nn.nonlinearity(name) for name in NONLINEARITIES])

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        values = torch.stack([module(x) for module in modules])
        return values, torch.autograd.grad(values.square().sum(), x)[0]

    x = torch.linspace(-8, 8, 64)
    torch.testing.assert_close(fulgurite.trace(step)(x), step(x))


def test_arguments_are_the_modules() -> None:
    leaky = fulgurite.nn.nonlinearity("leaky_relu", negative_slope=0.2)
    assert repr(leaky) == "LeakyReLU(negative_slope=0.2)"
    with pytest.raises(TypeError, match="slope"):
        fulgurite.nn.nonlinearity("leaky_relu", slope=0.2)


@pytest.mark.parametrize(("name", "near"), [("leakyrelu", "leaky_relu"), ("SiLU", "silu")])
def test_an_unknown_name_is_told_what_is_like_it(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"called '{name}'. Did you mean '{near}'?"):
        fulgurite.nn.nonlinearity(name)


def test_the_documentation_has_every_name() -> None:
    page = (Path(__file__).parents[3] / "docs/autogen.md").read_text(encoding="utf-8")
    listed = page.partition("# torch.nn.LeakyReLU\n```\n")[2].partition(".\n")[0]
    assert re.findall(r"`(\w+)`", listed) == list(NONLINEARITIES)
