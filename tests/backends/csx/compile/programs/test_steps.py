"""A program as steps: as JSON and back, and as Python."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import pytest
import torch
from torch._inductor.select_algorithm import extern_kernels

from fulgurite.backends.csx.compile.programs import steps
from fulgurite.backends.csx.compile.programs.steps import (
    Alias,
    Alloc,
    Extern,
    Free,
    Item,
    Kernel,
    Name,
    Program,
    UnknownProgram,
    View,
)

ALLOCATE = "torch._C._dynamo.guards._empty_strided_cpu"
A, B, C, D = map(Name, "abcd")
SINE = "torch.ops.aten.sin.default"
CONSTANTS = (None, True, 2, 0.1, inf, -inf, 1 + 2j, "sum", [A, 1], (B,), torch.float32)
WHOLE = Program(
    inputs=(A,),
    steps=(
        Alloc(B, (2, 3), (3, 1), torch.float32),
        Kernel(kernel="double", args=(A, B), at=(1, 2), region="a loss", template="gemm"),
        Alias(C, View(B, ((3, 2), (1, 3), 0))),
        Extern(function=SINE, args=(C,), result=D, kernel="aten.sin.default", at=(3,)),
        Free(B),
    ),
    outputs=(D, View(D, ((6,), (1,), 0), torch.int32), None),
)


def run(program: Program, *inputs: Any, **names: Any) -> Any:
    """What a program returns, given its kernels and constants."""
    exec(steps.source_of(program, ALLOCATE), names)
    return names["call"](list(inputs))


@pytest.mark.parametrize(
    "value",
    [
        WHOLE,
        Extern(function=SINE, args=CONSTANTS, kwargs=(("out", View(A, None, torch.int32)),)),
        Item(A, B, (0, "key")),
        (torch.device("cpu"), torch.strided, torch.contiguous_format),
    ],
)
def test_a_program_is_the_same_after_json(value: Any) -> None:
    again = steps.typed(json.loads(json.dumps(steps.plain(value))))
    assert again == value
    assert all(type(name) is Name for name in steps.names_in(again))


def test_what_json_has_nothing_for_is_an_unknown_program() -> None:
    with pytest.raises(UnknownProgram, match="object"):
        steps.plain((object(),))


def test_a_program_as_python_computes_what_its_steps_say() -> None:
    x = torch.randn(2, 3)
    wanted = torch.sin((x * 2).T)
    found, bits, nothing = run(WHOLE, x, double=lambda one, out: torch.mul(one, 2, out=out))
    assert torch.equal(found, wanted)
    assert torch.equal(bits, wanted.as_strided((6,), (1,)).view(torch.int32))
    assert nothing is None


def test_constants_are_the_same_in_python() -> None:
    program = Program((A, B), (Extern(function="torch.kept", args=CONSTANTS, result=C),), (C,))
    source = steps.source_of(program, ALLOCATE).replace("torch.kept", "tuple_of")
    names: dict[str, Any] = {"tuple_of": lambda *values: values}
    exec(source, names)
    assert names["call"]([A, B]) == [CONSTANTS]


def test_functions_of_one_name_are_two() -> None:
    functions = (SINE, "torch.sin", SINE, "torch.ops.aten.sin.out")
    called = tuple(Extern(function=one, args=(A,)) for one in functions)
    source = steps.source_of(Program((A,), called, ()), ALLOCATE)
    assert [line.split(" = ")[-1] for line in source.splitlines() if "sin" in line] == [
        *(SINE, "torch.sin", "torch.ops.aten.sin.out"),
        *("    sin(a)", "    sin_2(a)", "    sin(a)", "    sin_3(a)"),
    ]


def test_a_program_imports_of_the_compiler_what_it_uses_alone() -> None:
    own = [
        name
        for name, value in vars(extern_kernels).items()
        if callable(value) and value is not getattr(torch, name, None)
    ]
    function = f"torch._inductor.select_algorithm.extern_kernels.{own[0]}"
    seeds = "torch.ops.prims.inductor_seeds.default"
    for called, module in (
        ("torch.mm", ""),
        (function, "torch._inductor.select_algorithm"),
        (seeds, "torch._inductor.inductor_prims"),
    ):
        source = steps.source_of(Program((A,), (Extern(function=called, args=(A,)),), ()), ALLOCATE)
        imports = [one for one in source.splitlines() if one.startswith("import ")]
        assert imports == ["import torch", *([f"import {module}"] if module else [])]
        exec(source, {})
        assert callable(steps.function_of(called))


def test_bytes_are_from_the_first_to_the_last_element() -> None:
    assert Alloc(A, (2, 3), (4, 1), torch.float32).nbytes == 4 * 7
    assert Alloc(A, (), (), torch.float64).nbytes == 8
    assert Alloc(A, (2, 0), (1, 1), torch.float32).nbytes == 0
