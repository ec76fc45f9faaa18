"""The key of a compiled program: equal where the code would be, another where it would not."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config as inductor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fulgurite.backends.csx.compile.store import fingerprint
from fulgurite.backends.csx.compile.store.fingerprint import program_key
from fulgurite.backends.csx.graph.graph import Graph, Input, Kind

Function = Callable[..., Any]


def graph_of(function: Function, *inputs: Tensor, kind: Kind = Kind.STATE) -> Graph:
    """What a capture would make of a function."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in inputs]
    with mode:
        module = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*fakes)
    named = [
        Input(kind=kind, index=i, name=f"input {i}", example=fake) for i, fake in enumerate(fakes)
    ]
    return Graph(module=module, inputs=tuple(named), mode=mode)


def key_of(function: Function, *inputs: Tensor, kind: Kind = Kind.STATE) -> str:
    return program_key(graph_of(function, *inputs, kind=kind), threads=1)


X = torch.ones(4, 6)


def base(x: Tensor) -> Tensor:
    return x.sum(0, keepdim=True) * 2.0 + x


def test_names_and_lines_are_not_in_it() -> None:
    def same(tensor: Tensor) -> Tensor:
        # another file, another name, another line
        total = tensor.sum(0, keepdim=True)
        return total * 2.0 + tensor

    graph = graph_of(same, X)
    for i, node in enumerate(graph.module.graph.nodes):
        node._rename(f"another_{i}")
        node.meta["stack_trace"] = "elsewhere"
    assert program_key(graph, threads=1) == key_of(base, X)


GRAPHS: dict[str, tuple[Function, list[Tensor]]] = {
    "a number": (lambda x: x.sum(0, keepdim=True) * 2.5 + x, [X]),
    "the sign of zero": (lambda x: x.sum(0, keepdim=True) * -0.0 + x, [X]),
    "zero": (lambda x: x.sum(0, keepdim=True) * 0.0 + x, [X]),
    "the type of a number": (lambda x: x.sum(0, keepdim=True) * 2 + x, [X]),
    "an argument by name": (lambda x: x.sum(0, keepdim=True, dtype=torch.float64) * 2.0 + x, [X]),
    "an operation": (lambda x: x.sum(0, keepdim=True) * 2.0 - x, [X]),
    "an overload": (lambda x: x.sum() * 2.0 + x, [X]),
    "which result is read": (lambda x: x.sum(0, keepdim=True) + x * 2.0, [X]),
    "how many results": (lambda x: (base(x), x.neg()), [X]),
    "the order of results": (lambda x: (x.neg(), base(x)), [X]),
    "a shape": (base, [torch.ones(4, 7)]),
    "strides": (base, [torch.ones(6, 4).T]),
    "a dtype": (base, [X.double()]),
    "another input": (lambda x, y: base(x), [X, X]),
    "the value of a constant": (lambda x: base(x) + torch.tensor([1.0, 2.0]).sum(), [X]),
    "another value of a constant": (lambda x: base(x) + torch.tensor([1.0, 3.0]).sum(), [X]),
}


def test_all_that_changes_the_graph_is_in_it() -> None:
    keys = {what: key_of(function, *inputs) for what, (function, inputs) in GRAPHS.items()}
    keys["nothing"] = key_of(base, X)
    keys["the kind of an input"] = key_of(base, X, kind=Kind.BATCH)
    assert len(set(keys.values())) == len(keys), keys


def test_a_constant_is_known_by_its_value() -> None:
    function, inputs = GRAPHS["the value of a constant"]
    assert key_of(function, *inputs) == key_of(function, *inputs)


def test_the_graphs_inside_a_graph_are_in_it() -> None:
    def branching(number: float) -> str:
        torch.compiler.reset()  # since 2.15 torch.cond is an error where a number it saw changed

        def function(x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda x: x * number, lambda x: x.clone(), (x,))

        return key_of(function, X)

    assert branching(2.0) == branching(2.0)
    assert branching(2.0) != branching(3.0)


def test_what_cannot_be_told_apart_is_never_found_again() -> None:
    def with_argument(argument: object) -> Graph:
        graph = graph_of(base, X)
        module = fx.GraphModule(graph.module, graph.module.graph)
        [first, *_] = (node for node in module.graph.nodes if node.op == "call_function")
        first.kwargs = {"unknown": range(3) if argument is None else argument}
        return graph.with_operations(module.graph)

    first, second = (program_key(with_argument(None), threads=1) for _ in range(2))
    assert first != second


ENVIRONMENT: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "torch": lambda patch: patch.setattr(torch, "__version__", "2.13.1"),
    "torch's commit": lambda patch: patch.setattr(torch.version, "git_version", "another"),
    "our code": lambda patch: patch.setattr(fingerprint, "_own_source", lambda: "another"),
    "Python": lambda patch: patch.setattr(fingerprint.sys, "version", "3.12.0"),
    "its ABI": lambda patch: patch.setattr(
        fingerprint.sysconfig, "get_config_var", lambda name: "cpython-312"
    ),
    "the system": lambda patch: patch.setattr(fingerprint.sys, "platform", "darwin"),
    "the machine": lambda patch: patch.setattr(platform, "machine", lambda: "riscv64"),
    "the processor": lambda patch: patch.setattr(fingerprint, "processor", lambda: "flags : sse"),
    "what torch uses of it": lambda patch: patch.setattr(
        torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT"
    ),
    "a flag of the compiler": lambda patch: inductor.patch({"cpp.simdlen": 128}),
    "a pass of somebody's own": lambda patch: inductor.patch(
        {"post_grad_custom_post_pass": lambda graph: None}
    ),
    "the default dtype": lambda patch: patch.setattr(
        torch, "get_default_dtype", lambda: torch.float64
    ),
    "determinism": lambda patch: patch.setattr(
        torch, "are_deterministic_algorithms_enabled", lambda: True
    ),
    "precision of products": lambda patch: patch.setattr(
        torch, "get_float32_matmul_precision", lambda: "medium"
    ),
}


@pytest.mark.parametrize("change", ENVIRONMENT.values(), ids=ENVIRONMENT.keys())
def test_all_else_that_changes_the_code_is_in_it(
    change: Callable[[pytest.MonkeyPatch], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of(base, X)
    before = program_key(graph, threads=1)
    with change(monkeypatch) or contextlib.nullcontext():
        assert program_key(graph, threads=1) != before


def test_the_programs_number_of_threads_is_in_it_and_the_processs_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = graph_of(base, X)
    before = program_key(graph, threads=1)
    assert program_key(graph, threads=2) != before
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert program_key(graph, threads=1) == before


def test_every_file_that_makes_code_is_in_it_and_no_other() -> None:
    read: list[Path] = []
    fingerprint._own_source.cache_clear()
    original = fingerprint.Path.read_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            fingerprint.Path, "read_bytes", lambda path: (read.append(path), original(path))[1]
        )
        fingerprint._own_source()
    csx = Path(fingerprint.__file__).parents[2]
    assert set(read) == {*csx.glob("graph/**/*.py"), *csx.glob("compile/**/*.py")}
    made_by = {"generate.py", "wrapper.py", "steps.py", "functionalize.py", "realize.py"}
    assert made_by <= {path.name for path in read}


@pytest.mark.long
@pytest.mark.process
def test_it_is_the_same_in_every_process() -> None:
    script = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from test_fingerprint import *\n"
        "print(*[key_of(function, *inputs) for function, inputs in GRAPHS.values()])"
    )
    here = [key_of(function, *inputs) for function, inputs in GRAPHS.values()]
    there = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.split() == here
