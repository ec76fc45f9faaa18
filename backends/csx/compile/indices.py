"""Strides of indices without sympy's ``simplify``, where the answer can be read off.

The C++ backend asks for the stride of each index in each loop variable, and has sympy simplify the
difference of two expressions: a third of its Python for a small ConvNet (measured, torch 2.13).
Nearly all indices are sums of variables times numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import sympy  # type: ignore[import-untyped]

from fulgurite.backends.patches import Patch, patches_of
from fulgurite.backends.torch_versions import CHECKED


def read_off() -> Iterator[Patch]:
    """A patch that asks sympy only of other indices than sums of variables times numbers."""
    from torch._inductor import sizevars

    stride_at, simplified = sizevars.stride_at, sizevars.simplify_index_in_vec_range

    @functools.lru_cache
    def stride(index: Any, variable: Any) -> Any:
        if is_linear(index):
            return sympy.expand(index).coeff(variable)
        return stride_at(index, variable)

    @functools.lru_cache
    def in_vector(index: Any, variable: Any, vec_length: int) -> Any:
        if is_linear(index):
            return index
        return simplified(index, variable, vec_length)

    functions = {"stride_at": stride, "simplify_index_in_vec_range": in_vector}
    why = "sympy's simplify takes a third of the time in which C++ is generated"
    return patches_of(sizevars, functions, why=why, checked=CHECKED)


def is_linear(index: Any) -> bool:
    """Whether an expression is a sum of symbols times numbers, in whatever nesting."""
    if isinstance(index, int) or index.is_Number or index.is_Symbol:
        return True
    if index.is_Add:
        return all(map(is_linear, index.args))
    if index.is_Mul:
        others = [factor for factor in index.args if not factor.is_Number]
        return len(others) <= 1 and all(map(is_linear, others))
    return False
