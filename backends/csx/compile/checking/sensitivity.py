"""How far a graph's results move when every operation rounds otherwise.

Two right ways to compute a step differ where a value is rounding noise, and much: the gradient of a
bias before a BatchNorm is noise, of which Adam's first step makes plus or minus the learning rate.
So a difference between two ways is measured against what the graph itself does when each result
that is not exact is moved by about its rounding error.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from fulgurite.backends.csx.graph.graph import Kind, like
from fulgurite.backends.csx.graph.op_schema import is_alias, is_random, operation_name
from fulgurite.backends.csx.graph.passes.cbfloat16 import EXACT, rounding

_MOVES = {torch.float64: 1e-15, torch.float32: 3e-7}  # relative: some units in the last place
_STEPS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # one unit in the last place
_CBFLOAT16_STEP = 2.0**-9
_MOVED = 0.1  # of the elements of a narrow type, each by one unit in the last place: assumed
_SUMS = (
    "mm",
    "sum",
    "mean",
    "conv",
    "var",
    "cum",
    "norm",
    "softmax",
    "scatter",
    "put",
    "attention",
)
"""Parts of names of operations whose error is relative to what they add up, not to the sum."""


class Noisy(fx.Interpreter):
    """Runs a graph with every inexact result moved by about its rounding error.

    Args:
        module: the graph.
        seed: of the moves; the process's random state is the graph's alone.
        scale: how many times its rounding error each result is moved by.
    """

    def __init__(self, module: fx.GraphModule, seed: int, scale: int) -> None:
        super().__init__(module)
        self._scale = scale
        self._generator = torch.Generator().manual_seed(seed)

    def run_node(self, n: fx.Node) -> Any:
        """The node's result, moved."""
        result = super().run_node(n)
        if n.op != "call_function" or _is_exact(n):
            return result
        return pytree.tree_map_only(Tensor, lambda x: self._moved(x, n), result)

    def _moved(self, x: Tensor, node: fx.Node) -> Tensor:
        if not x.is_floating_point() or not x.numel():
            return x
        step = _CBFLOAT16_STEP if node.target is rounding() else _STEPS.get(x.dtype)
        draw = torch.rand(x.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        if step is not None:
            moved = x.double() * (1 + step * draw.sign() * (draw.abs() < self._scale * _MOVED))
        else:
            size = x.double().abs()
            if any(part in operation_name(node.target) for part in _SUMS):
                size = size + size.square().mean().sqrt()
            moved = x.double() + size * draw * self._scale * _MOVES[x.dtype]
        moved = torch.where(x.isfinite(), moved, x.double())  # infinity less infinity is none
        return torch.empty_like(x).copy_(moved)


def moved_away(x: Tensor, kind: Kind) -> Tensor:
    """An input with other numbers, as it might have them after some steps.

    What is not negative, or at most 1, stays so: a variance, a probability. Integers stay, and
    whole numbers that are no state, which may be classes. Those of groups only become smaller.

    Args:
        x: the input.
        kind: what it is.
    """
    if not (x.is_floating_point() and x.numel()):
        return x
    # of its own: the process's draws are the step's
    generator = torch.Generator().manual_seed(x.numel())
    draw, size = torch.rand(x.shape, generator=generator), x.detach().abs()
    if kind is Kind.NUMBERS:
        return x * (1 - 0.1 * draw)
    if kind in (Kind.BATCH, Kind.CONSTANT) and torch.equal(size, size.floor()):
        return x
    average = float(size.nan_to_num(0.0, 0.0).float().mean())
    shift = 0.1 * (average or 0.1) * (draw - 0.5 * float((x < 0).any()))
    moved = x * (0.9 + 0.2 * draw) + shift
    if float(size.max()) <= 1:
        moved = moved.clamp(-1, 1)
    return like(x).copy_(moved)


def _is_exact(node: fx.Node) -> bool:
    """Whether a result is moved data, a choice, a draw, a constant, or memory of an argument."""
    name = operation_name(node.target)
    if name in ("_to_copy", "convert_element_type"):
        return node.meta["val"].dtype not in _STEPS
    return (
        not name
        or not node.all_input_nodes
        or name in EXACT
        or is_random(node.target)
        or is_alias(node.target)
    )
