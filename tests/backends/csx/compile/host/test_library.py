"""The table of the kernel library: what it names is in torch, and what it lacks is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchgen
import yaml
from document_library import PAGE, page

from fulgurite.backends.csx.compile.host import library

aten, prims = torch.ops.aten, torch.ops.prims
ABSENT = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cosh", "sinh", "tan"),
    *("digamma", "erfinv", "lgamma", "polygamma", "exp2", "log2", "log10", "hypot"),
    *("cumsum", "cumprod", "flip", "roll", "sort", "topk", "tril", "triu", "prod", "bucketize"),
    *("grid_sampler_2d", "_fft_r2c", "_cdist_forward", "linalg_qr", "searchsorted", "median"),
)
"""Operations that models use, which a program has to generate or run on the host."""


def functions() -> set[str]:
    """The functions for the CPU, or for any device, that torch says operations are made of."""
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    found: set[str] = set()
    for row in yaml.safe_load(path.read_text()):
        if "ufunc_inner_loop" in row:  # torch writes this function
            found.add(f"ufunc_{row['func'].partition('.')[0]}_CPU")
        for keys, function in (row.get("dispatch") or {}).items():
            if "CPU" in keys.split(", ") or keys.startswith("Composite"):
                found.add(function)
    return found


def test_each_kernel_is_a_function_of_torch() -> None:
    names = {kernel.function for kernel in library.LIBRARY.values()}
    assert names - functions() == set()


def test_each_operation_is_one_of_torch() -> None:
    assert [name for name in library.LIBRARY if not hasattr(aten, name)] == []


@pytest.mark.parametrize("name", ABSENT)
def test_what_models_use_is_absent(name: str) -> None:
    operation = getattr(aten, name)
    assert not library.has(getattr(operation, operation.overloads()[0]))


@pytest.mark.parametrize(
    "operation",
    [aten.add.Tensor, aten.copy_.default, aten.convolution_backward.default, aten.eq.Scalar],
)
def test_an_operation_is_found_whatever_its_overload(operation: object) -> None:
    assert library.has(operation)


def test_a_decomposition_is_found_under_the_name_of_what_it_does() -> None:
    assert library.has(prims.convert_element_type.default)
    assert not library.has(prims.fft_r2c.default)


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/tools/document_library.py"
