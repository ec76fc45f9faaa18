"""What is known of an operation without running it."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from fulgurite.backends.csx.graph.op_schema import (
    is_alias,
    is_mutable,
    is_random,
    is_uninitialized,
    operation_name,
    written,
)

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("operation", "args", "kwargs", "expected"),
    [
        (aten.add.Tensor, ("x", "y"), {}, []),
        (aten.add_.Tensor, ("x", "y"), {}, ["x"]),
        (aten.add.out, ("x", "y"), {"out": "z"}, ["z"]),
        (aten._foreach_add_.List, (["x", "y"], ["a", "b"]), {}, ["x", "y"]),
        (
            aten._native_batch_norm_legit.default,
            ("x", None, None, "mean", "var"),
            {},
            ["mean", "var"],
        ),
        (aten.native_batch_norm.default, ("x", None, None, "m", "v"), {}, []),
        (operator.getitem, ("x", 0), {}, []),
    ],
)
def test_what_an_operation_writes(
    operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], expected: list[str]
) -> None:
    assert written(operation, args, kwargs) == expected
    assert is_mutable(operation) == bool(expected)


def test_a_view_and_an_in_place_result_are_memory_of_an_argument() -> None:
    assert is_alias(aten.view.default)
    assert is_alias(aten.split.Tensor, 2)
    assert is_alias(aten.add_.Tensor)
    assert not is_alias(aten.add.Tensor)
    assert not is_alias(aten.topk.default, 1)


def test_draws_and_uninitialized_memory_are_known() -> None:
    assert is_random(aten.bernoulli_.float)
    assert is_random(aten.native_dropout.default)
    assert not is_random(aten.mul.Tensor)
    assert not is_random(operator.getitem)
    assert is_uninitialized(aten.new_empty.default)
    assert not is_uninitialized(aten.new_zeros.default)


def test_an_operations_name_is_that_of_its_kin() -> None:
    assert operation_name(aten.add_.Tensor) == operation_name(aten.add.out) == "add"
    assert operation_name(operator.getitem) == ""
