"""What a compiled program imports: nothing of the compiler that it does not use."""

from __future__ import annotations

import torch
from torch._inductor.select_algorithm import extern_kernels

from fulgurite.backends.csx.compile.light_imports import with_light_imports

HEAD = """import torch
from math import inf, nan
from torch._inductor.hooks import run_intermediate_hooks
from torch._inductor.codegen.memory_planning import _align as align
from torch._inductor.select_algorithm import extern_kernels"""


def test_imports_that_nothing_reads_go() -> None:
    light = with_light_imports(f"{HEAD}\nx = torch.full((2,), inf)")
    assert light.splitlines() == [
        "import torch",
        "from math import inf",
        "x = torch.full((2,), inf)",
    ]


def test_a_name_is_read_by_its_other_name() -> None:
    assert "import _align as align" in with_light_imports(f"{HEAD}\nx = align(3)")


def test_products_are_called_by_torchs_own_name() -> None:
    call = "extern_kernels.mm(x, x, out=y)"
    light = with_light_imports(f"{HEAD}\n{call}")
    assert light.splitlines() == ["import torch", "torch.mm(x, x, out=y)"]
    assert extern_kernels.mm is torch.mm


def test_a_product_of_the_compilers_own_stays_its() -> None:
    own = [
        name
        for name, value in vars(extern_kernels).items()
        if callable(value) and value is not getattr(torch, name, None)
    ]
    assert own
    light = with_light_imports(f"{HEAD}\nextern_kernels.{own[0]}(x); extern_kernels.mm(x, x)")
    assert "import extern_kernels" in light
    assert f"extern_kernels.{own[0]}(x)" in light
    assert "torch.mm(x, x)" in light


def test_what_uses_operations_of_the_compilers_imports_it() -> None:
    source = f"{HEAD}\nx = torch.ops.prims.inductor_seeds.default(2, 'cpu')"
    assert with_light_imports(source) == source
