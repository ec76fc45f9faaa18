"""What the compiler says of a graph, as steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import graph_of
from torch import Tensor
from torch._inductor.codegen import common

from fulgurite.backends.csx.compile.inductor import generate as inductor
from fulgurite.backends.csx.compile.inductor import wrapper
from fulgurite.backends.csx.compile.programs.parts import numbered, whole
from fulgurite.backends.csx.compile.programs.steps import (
    Alloc,
    Extern,
    Free,
    Generated,
    Item,
    Kernel,
    Name,
    View,
    calls,
)
from fulgurite.backends.csx.graph.passes import COMPILER_PASSES, lower

pytestmark = pytest.mark.compiler


def generated(function: Callable[..., Any], *inputs: Tensor) -> Generated:
    graph = lower(numbered(graph_of(function, *inputs)), COMPILER_PASSES)
    return inductor._generated(whole(graph), graph.mode, "cpu")


def test_kernels_products_and_views_are_steps() -> None:
    def step(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        product = torch.mm(a.exp(), b.permute(1, 0))
        most = torch.ops.aten.topk(torch.ops.aten.view.dtype(b, torch.int32), 1)[0]
        return torch.ops.aten.topk(product.sin(), 1)[0], most

    code = generated(step, torch.zeros(4, 3), torch.ones(2, 3))
    a, b = code.program.inputs
    found = {one.at: one for one in calls(code.program.steps)}
    first, product, bits, topk = (found[at,] for at in (0, 2, 5, 9))
    assert isinstance(first, Kernel)
    assert first.args[0] == a
    assert isinstance(product, Extern)
    assert product.function == "torch.mm"
    assert product.kernel == "aten.mm.out"
    assert product.args == (first.args[1], View(b, ((3, 2), (1, 3), 0)))
    assert isinstance(topk, Extern)
    assert topk.function == "torch.ops.aten.topk.default"
    assert topk.args[1:] == (1, -1, True, True)
    assert isinstance(bits, Extern)
    assert bits.args[0] == View(b, None, torch.int32)
    values = [one for one in code.program.steps if isinstance(one, Item)]
    assert {(one.of, one.path) for one in values} == {(bits.result, (0,)), (topk.result, (0,))}
    assert {*code.program.outputs} == {one.name for one in values}
    assert Free(a) in code.program.steps
    assert code.sources.keys() == {"cpp_0", "cpp_1"}


def test_random_numbers_are_drawn_into_memory_of_the_programs() -> None:
    layout = [3, 2], [1, 3], torch.float32
    draw = Extern(
        function="torch.ops.fulgurite.uniform.default", args=(*layout, -1.0, 1.0), result=Name("x")
    )
    memory, drawn = wrapper._drawn_in_place(draw)
    assert memory == Alloc(Name("x"), (3, 2), (1, 3), torch.float32)
    assert drawn == Extern(function="torch.ops.aten.uniform_.default", args=("x", -1.0, 1.0))


def test_ours_is_registered_while_a_graph_is_compiled_and_not_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    common.init_backend_registration()
    before = common.device_codegens["cpu"]
    generated(lambda a: a.exp(), torch.zeros(4, 3))
    assert common.device_codegens["cpu"] is before
    monkeypatch.setattr(
        "torch._inductor.codegen.wrapper.PythonWrapperCodegen.codegen_allocation",
        lambda lines, buffer: lines.writeline("buf0 = memory()"),
    )
    with pytest.raises(Exception, match=r"UnknownProgram.*buf0 = memory"):
        generated(lambda a: a.sin(), torch.zeros(4, 3))
    assert common.device_codegens["cpu"] is before
