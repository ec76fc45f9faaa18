"""The programs of parts as one: views of inputs are copied, and no name outlives its call."""

from __future__ import annotations

import torch

from fulgurite.backends.csx.compile.programs.linking import linked
from fulgurite.backends.csx.compile.programs.parts import Call, Division, ViewBetween
from fulgurite.backends.csx.compile.programs.steps import (
    Alias,
    Alloc,
    Extern,
    Free,
    Generated,
    Kernel,
    Name,
    Program,
    View,
)

A, B, BUF0, BUF1, TWO = map(Name, ["a", "b", "buf0", "buf1", "constant"])
PART = Generated(
    Program(
        inputs=(A, B),
        steps=(
            Alloc(BUF0, (2,), (1,), torch.float32),
            Extern(
                function="torch.add", args=(A, B), kwargs=(("out", BUF0),), kernel="add", at=(0,)
            ),
            Kernel(kernel="cpp_0", args=(BUF0, TWO), at=(1, 2)),
            Alias(BUF1, View(B, ((1, 2), (2, 1), 0))),
            Free(B),
        ),
        outputs=(BUF0, BUF1, View(A, ((2, 1), (1, 1), 0))),
    ),
    sources={"cpp_0": "its source"},
    constants={"constant": torch.ones(1)},
)


def test_a_view_of_an_input_is_copied_and_no_name_outlives_its_call() -> None:
    calls = (Call(0, (0, 1), (2, 3, 4), (7, 8, -1)), Call(0, (2, 1), (5, 6, 7), (9, 10, 11)))
    division = Division((), calls, inputs=(0, 1), outputs=(5, 3))
    found = linked([PART], division, [], lambda source: f"kernel of {source}")
    steps = found.program.steps
    copies = [one for one in steps if isinstance(one, Extern) and one.function == "torch.clone"]
    assert [(one.result, *one.args) for one in copies] == [
        ("v3", "buf1_0"),
        ("v4", View(Name("v0"), ((2, 1), (1, 1), 0))),
        ("v6", "buf1_1"),
        ("v7", View(Name("v2"), ((2, 1), (1, 1), 0))),
    ]
    assert Alias(Name("v2"), Name("buf0_0")) in steps
    freed = [str(one.name) for one in steps if isinstance(one, Free)]
    assert sorted(freed) == sorted({*freed})
    assert {"buf0_0", "buf1_0", "buf0_1", "buf1_1", "v2", "v4", "v1"} <= {*freed}
    kernels = [one for one in steps if isinstance(one, Kernel)]
    assert [one.at for one in kernels] == [(8,), (10, 11)]
    assert {(one.kernel, one.args[1]) for one in kernels} == {
        ("kernel of its source", "constant_of_0")
    }
    assert [one.name for one in found.kernels] == ["kernel of its source"]
    assert found.constants.keys() == {"constant_of_0"}


def test_a_look_between_calls_is_a_view_and_one_part_keeps_its_names() -> None:
    layout = ((1,), (1,), 1)
    division = Division((), (ViewBetween(layout, (0,), (1,)),), inputs=(0,), outputs=(1,))
    found = linked([PART], division, [], str)
    assert found.program.steps == (Alias(Name("v1"), View(Name("v0"), layout)), Free(Name("v0")))
    alone = linked([PART], None, [(4, -1, 5)], str).program
    assert [one.at for one in alone.steps if isinstance(one, (Kernel, Extern))] == [(4,), (5,)]
    assert alone.inputs == PART.program.inputs
