"""Kernels as C++ source: which is in which translation unit, and the text of one."""

from __future__ import annotations

import pytest

from fulgurite.backends.csx.compile.inductor import translation_unit
from fulgurite.backends.csx.compile.inductor.translation_unit import (
    KernelSource,
    UnknownKernel,
    divided,
    source_of,
)

HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"
KERNEL = f"""{HEADER}
#include <atomic>
extern "C"  void  kernel(const float* in_ptr0,
                       float* out_ptr0)
{{
    out_ptr0[0] = in_ptr0[0];
}}
"""


def kernels(*sizes: int) -> list[KernelSource]:
    return [KernelSource(f"k{i}", "x" * size) for i, size in enumerate(sizes)]


def names(units: list[list[KernelSource]]) -> list[list[str]]:
    return [[kernel.name for kernel in unit] for unit in units]


def test_a_program_is_one_unit_until_another_unit_has_as_much_to_compile_as_the_header_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(translation_unit, "UNIT_BYTES", 100)
    assert names(divided(kernels(50, 149), most=8)) == [["k1", "k0"]]
    assert names(divided(kernels(50, 150), most=8)) == [["k1"], ["k0"]]
    assert len(divided(kernels(*[100] * 20), most=8)) == 8
    assert len(divided(kernels(*[100] * 20), most=1)) == 1


def test_units_are_about_equal_and_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation_unit, "UNIT_BYTES", 100)
    units = divided(kernels(70, 10, 80, 60, 20, 30, 40, 90), most=4)
    assert [sum(len(kernel.source) for kernel in unit) for unit in units] == [100] * 4
    assert units == divided(kernels(70, 10, 80, 60, 20, 30, 40, 90), most=4)


def test_one_kernel_that_is_larger_than_all_others_fills_no_empty_units(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(translation_unit, "UNIT_BYTES", 100)
    assert names(divided(kernels(1000), most=4)) == [["k0"]]


def test_what_kernels_include_is_included_once_and_outside_of_their_namespaces() -> None:
    text = source_of([KernelSource("first", KERNEL), KernelSource("second", KERNEL)])
    assert text.startswith(f"{HEADER}\n#include <atomic>\nnamespace kernel_0 {{\n")
    assert text.count(HEADER) == text.count("#include <atomic>") == 1
    assert 'extern "C"' not in text
    for i, name in enumerate(("first", "second")):
        assert f'{{"{name}", as_method(binding<kernel_{i}::kernel>), METH_FASTCALL, ' in text


@pytest.mark.parametrize("source", [KERNEL.replace("kernel(", "other("), KERNEL + KERNEL])
def test_a_kernel_of_another_form_is_an_error_with_its_name(source: str) -> None:
    with pytest.raises(UnknownKernel, match=r"cpp_fused_7 with [02] functions"):
        source_of([KernelSource("cpp_fused_7", source)])
