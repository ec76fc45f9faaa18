"""The processor's vector units: what the system says of them is believed until a compiler fails.

Inductor has the C++ compiler make a test program for each kind before the first kernel, and runs
Python to load it: 3 to 7 s (measured). Nearly every compiler can do what its processor can. Where
one cannot, the first program fails to compile, and only then the compiler is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fulgurite.backends.patches import Patch, patches_of
from fulgurite.backends.torch_versions import CHECKED


def believed() -> Iterator[Patch]:
    """A patch that takes every test program for one that was made and loaded."""
    from torch._inductor.cpu_vec_isa import VecISA

    def check_build(self: VecISA, code: str) -> bool:
        return True

    why = "the first program waits for test programs of the processor's vector units"
    return patches_of(VecISA, {"check_build": check_build}, why=why, checked=CHECKED)


def ask_the_compiler() -> bool:
    """Have the test programs made now; returns whether others are used than were before."""
    from torch._inductor import cpu_vec_isa

    before = _described()
    for unit in cpu_vec_isa.supported_vec_isa_list:
        for name in ("_is_avx512_bf16_supported", "_is_amx_fp16_supported"):
            vars(unit).pop(name, None)
        for kind in type(unit).__mro__:
            for value in vars(kind).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    return _described() != before


def _described() -> tuple[str, str]:
    unit = chosen()
    return str(unit), unit.build_arch_flags()


def chosen() -> Any:
    """The vector units that compiled code uses; false where there are none."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return pick_vec_isa()
