"""Where eager kernels round narrow floats (bfloat16, float16), done in the same places.

An eager kernel computes in float32 and rounds its result once. What stands for one here, a number
of a param group multiplied out or a fused optimizer in its plain formulas, is several operations,
and each would round. Checked bit for bit against torch 2.13 on CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, adagrad, adam, sgd

from fulgurite.backends.csx.graph.dtypes import NARROW
from fulgurite.backends.csx.hyperparams.traced_float import as_number, is_traced, tensor_or_value
from fulgurite.backends.patches import Patch, patches_of
from fulgurite.backends.torch_versions import CHECKED

_ROUND_THEIR_NUMBER = ("add", "radd", "iadd", "sub", "rsub", "isub", "pow", "ipow")
"""Whose kernels first round a Python number to the tensor's type; the others take it in float32."""


def call_rounding_once(call: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
    """``call(func, args, kwargs)``; where numbers meet narrow floats, in float32, rounded once."""
    narrow = _narrow_dtype(args, kwargs)
    writes_elsewhere = func is Tensor.__setitem__ or "out" in kwargs
    if narrow is None or writes_elsewhere:
        return call(func, args, kwargs)
    rounds_number = getattr(func, "__name__", "").strip("_") in _ROUND_THEIR_NUMBER

    def operand(leaf: Any) -> Any:
        if is_traced(leaf) and rounds_number:
            number = tensor_or_value(leaf)
            return as_number(number.to(narrow).to(number.dtype))
        return leaf if is_traced(leaf) else _widened(leaf)

    wide = [operand(arg) for arg in args]
    result = call(func, wide, {key: operand(arg) for key, arg in kwargs.items()})
    if result is wide[0]:  # in place
        return args[0].copy_(result)
    return result.to(narrow) if result.is_floating_point() else result


def _narrow_dtype(args: Any, kwargs: Any) -> torch.dtype | None:
    """The narrow type of a call's tensors, if a number is among its arguments."""
    leaves = [*args, *kwargs.values()]
    if not any(map(is_traced, leaves)):
        return None
    tensors = [t for t in leaves if isinstance(t, Tensor) and not is_traced(t)]
    dtypes = {t.dtype for t in tensors if t.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= set(NARROW) else None


def _widened(leaf: Any) -> Any:
    is_narrow = isinstance(leaf, Tensor) and leaf.dtype in NARROW
    return leaf.to(torch.float32) if is_narrow else leaf


def fused_rounding(optimizers: list[Optimizer]) -> Iterator[Patch]:
    """Patches by which ``fused=True`` optimizers round at the end, in their plain formulas too.

    To be made before the groups' ``fused`` is changed.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    fused = {id(p) for group in groups if group.get("fused") for p in group["params"]}
    for owner in (adam, sgd, adagrad):
        name = f"_single_tensor_{owner.__name__.rpartition('.')[2]}"
        formula = {name: _rounding_at_the_end(getattr(owner, name), fused)}
        why = "a fused kernel rounds 16-bit weights once, the plain formula in each operation"
        yield from patches_of(owner, formula, why=why, checked=CHECKED)


def _rounding_at_the_end(formula: Callable[..., None], fused: set[int]) -> Callable[..., None]:
    @functools.wraps(formula)
    def rounding(params: list[Tensor], grads: list[Tensor], *rest: Any, **options: Any) -> None:
        if not params or id(params[0]) not in fused or params[0].dtype not in NARROW:
            return formula(params, grads, *rest, **options)
        states = [item for item in rest if isinstance(item, list)]
        wide = {id(held): [_widened(t) for t in held] for held in (params, grads, *states)}
        formula(*(wide.get(id(item), item) for item in (params, grads, *rest)), **options)
        for held in (params, *states):
            for t, result in zip(held, wide[id(held)], strict=True):
                if result is not t:
                    t.copy_(result)

    return rounding
