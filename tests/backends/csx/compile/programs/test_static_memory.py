"""A program in static form: the same operations, small intermediates made once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fulgurite.backends.csx.compile.programs import static_memory
from fulgurite.backends.csx.compile.programs.static_memory import with_static_memory
from fulgurite.backends.csx.compile.programs.steps import (
    Alias,
    Alloc,
    Extern,
    Free,
    Item,
    Kernel,
    Name,
    Program,
    View,
    source_of,
    views_in,
)

ALLOCATE = "torch._C._dynamo.guards._empty_strided_cpu"
A, B, BUF0, BUF1, BUF2, BUF3, BUF4, BUF5 = map(Name, ["a", "b", *(f"buf{i}" for i in range(6))])
FLIPPED = ((3, 2), (1, 3), 0)
SINE = Extern(
    function="torch.ops.aten.sin.default", args=(View(BUF3, ((2, 3), (1, 2), 0)),), result=BUF4
)
ZEROS = Extern(function="torch.zeros", args=(2,), result=BUF5)
WHOLE = Program(
    inputs=(A,),
    steps=(
        Alloc(BUF0, (2, 3), (3, 1), torch.float32),
        Kernel(kernel="double", args=(A, BUF0)),
        Free(A),
        Alias(BUF1, BUF0),
        Free(BUF0),
        Alloc(BUF2, (3, 2), (2, 1), torch.float32),
        Kernel(kernel="double", args=(View(BUF1, FLIPPED), BUF2)),
        Free(BUF1),
        Alias(BUF3, BUF2),
        Free(BUF2),
        SINE,
        Free(BUF3),
    ),
    outputs=(BUF4,),
)


def returning(name: Name, *more: Any) -> Program:
    return replace(WHOLE, steps=WHOLE.steps + more, outputs=(name,))


def load(program: Program) -> Any:
    """The function of the static form."""
    names: dict[str, Any] = {"double": lambda x, out: torch.mul(x, 2, out=out)}
    exec(source_of(with_static_memory(program), ALLOCATE), names)
    return names["call"]


def made_once(program: Program) -> set[str]:
    return {str(one.name) for one in with_static_memory(program).once if isinstance(one, Alloc)}


def test_intermediates_and_their_views_are_made_once() -> None:
    static = with_static_memory(WHOLE)
    assert static.once == (WHOLE.steps[0], Alias(Name("view0"), View(BUF0, FLIPPED)))
    assert [one for one in static.steps if isinstance(one, (Alias, Free))] == [
        *(Free(A), Alias(BUF3, BUF2), Free(BUF2), Free(BUF3)),
    ]
    call = load(WHOLE)
    x = torch.randn(2, 3)
    for _ in range(2):
        assert torch.equal(call([x])[0], torch.sin(x * 4))


def test_what_may_be_returned_is_made_anew() -> None:
    assert made_once(WHOLE) == {"buf0"}  # the sine may be its operand, for all that is known
    assert made_once(returning(BUF3)) == {"buf0"}
    picked = Item(BUF5, BUF3, (0,))
    assert made_once(returning(BUF5, picked)) == {"buf0"}
    assert made_once(returning(BUF5, ZEROS)) == {"buf0", "buf2"}
    call = load(WHOLE)
    first, second = call([torch.ones(2, 3)])[0], call([torch.zeros(2, 3)])[0]
    assert not torch.equal(first, second)


def test_views_of_an_input_are_made_once_a_step() -> None:
    flipped, other = View(A, FLIPPED), View(B, ((2, 3), (1, 2), 0))
    program = Program(
        inputs=(A, B),
        steps=(
            Alloc(BUF0, (3, 2), (2, 1), torch.float32),
            Kernel(kernel="double", args=(flipped, BUF0)),
            Extern(function="torch.mm", args=(BUF0, other), result=BUF1),
            Extern(function="torch.mm", args=(BUF1, flipped), result=BUF2),
            Free(A),
        ),
        outputs=(BUF2,),
    )
    assert [*views_in(with_static_memory(program).steps)] == [flipped, other]
    call = load(program)
    for _ in range(2):
        a, b = torch.randn(2, 3), torch.randn(3, 2)
        torch.testing.assert_close(call([a, b])[0], (2 * a.T) @ b.T @ a.T)


def test_only_the_smallest_intermediates_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program = returning(BUF5, ZEROS)
    monkeypatch.setattr(static_memory, "RESIDENT_BYTES", 24)
    assert made_once(program) == {"buf0"}
    monkeypatch.setattr(static_memory, "RESIDENT_BYTES", 23)
    assert made_once(program) == set()


def test_a_view_of_a_view_is_made_once_too() -> None:
    row = Name("row")
    program = Program(
        inputs=(A,),
        steps=(
            Alloc(BUF0, (2, 3), (3, 1), torch.float32),
            Alias(row, View(BUF0, ((3,), (1,), 3))),
            Kernel(kernel="double", args=(A, View(row, ((2,), (1,), 1)))),
            Alloc(BUF5, (2,), (1,), torch.float32),
            Kernel(kernel="double", args=(View(BUF0, ((2,), (1,), 4)), BUF5)),
        ),
        outputs=(BUF5,),
    )
    static = with_static_memory(program)
    assert [type(one) for one in static.once] == [Alloc, Alias, Alias, Alias]
    assert [type(one) for one in static.steps] == [Kernel, Alloc, Kernel]
    assert torch.equal(load(program)([torch.ones(2)])[0], torch.full((2,), 4.0))
