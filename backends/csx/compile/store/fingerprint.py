"""What a compiled program depends on, as one key: the graph, torch, our compiler, the machine.

Nothing else is in it: no lines of the user's code, no names, no paths. So a script with one more
comment finds its program again, and one whose program would be another does not.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import platform
import secrets
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload

from fulgurite.backends.csx.diagnostics.regions import region_of
from fulgurite.backends.csx.graph.graph import Graph, LazyGraph
from fulgurite.backends.csx.graph.passes.hold import held_inputs
from fulgurite.backends.csx.graph.update import FORMULAS
from fulgurite.backends.torch_compiler import options

_MAKE_CODE = ("graph", "compile")
_PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_FOREIGN_PASSES = (  # a function's text is its address: what was made with one is never found again
    *("pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass"),
    *("post_grad_custom_pre_pass", "post_grad_custom_post_pass"),
)


def program_key(graph: Graph, threads: int, policy: str = "medium") -> str:
    """A SHA-256 in hexadecimal: equal for graphs that compile to the same code here and now.

    ``threads`` is how many compute it: the compiler writes their number into loops; ``policy`` is
    the one of kernels.
    """
    parts = [*environment(), *described_inputs(graph), *_described(graph)]
    parts += [f"threads {threads}", f"policy {policy}"]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def environment() -> Iterator[str]:
    """What compiled code depends on besides the graph."""
    yield f"torch {torch.__version__} {torch.version.git_version}"
    yield f"fulgurite {_own_source()}"
    yield f"python {sys.version} {sysconfig.get_config_var('SOABI')} {sys.platform}"
    yield f"machine {platform.machine()} {processor()} {torch.backends.cpu.get_cpu_capability()}"
    yield f"compiler {sorted(options.save_config_portable().items())}"
    yield f"passes {[getattr(options, name) for name in _FOREIGN_PASSES]}"
    yield f"default dtype {torch.get_default_dtype()}"
    yield f"deterministic {torch.are_deterministic_algorithms_enabled()}"
    yield f"products {torch.get_float32_matmul_precision()} {torch.backends.mkldnn.enabled}"


def environment_digest() -> str:
    """A SHA-256 of it in hexadecimal: where it is another, nothing compiled is found again."""
    return hashlib.sha256("\n".join(environment()).encode()).hexdigest()


@functools.cache
def versions() -> str:
    """What is not in a key, and might make the same code compute other numbers."""
    libc = "".join(platform.libc_ver())
    return f"{platform.system()} {platform.release()}, {libc}, numpy {np.__version__}"


def described_inputs(graph: Graph) -> Iterator[str]:
    """Kind, dtype, shape, strides and device of each input, a line each."""
    for item in graph.inputs:
        yield f"input {item.kind.value} {layout(item.example)}"


def _described(graph: Graph) -> Iterator[str]:
    """What the compiler is given; or of what it is to be made, where no pass has run yet."""
    if not isinstance(graph, LazyGraph):
        yield from described_operations(graph.module)
        return
    # a graph that is in the cache is found before a pass has run on it
    yield f"before passes, held {held_inputs(graph)}"
    yield from described_operations(graph.runs.module)
    for node in graph.runs.operations():
        for formula in node.meta.get(FORMULAS, ()):
            yield from _lines(formula.graph.nodes)


def described_operations(module: fx.GraphModule) -> Iterator[str]:
    """The operations of a graph, a line each: equal texts mean the same operations."""
    return _lines(module.graph.nodes, module)


def _lines(nodes: Iterable[fx.Node], module: fx.GraphModule | None = None) -> Iterator[str]:
    numbers: dict[fx.Node, str] = {}
    for i, node in enumerate(nodes):
        target = "" if node.op in ("placeholder", "output") else target_of(module, node)
        arguments = text_of((node.args, node.kwargs), numbers) if node.op != "placeholder" else ""
        numbers[node], region = f"%{i}", region_of(node)
        yield f"%{i} {node.op} {target} {arguments}" + f" in {region}" * (region is not None)


def target_of(module: fx.GraphModule | None, node: fx.Node) -> str:
    """What a node of a module calls, or the value that it stands for, as text."""
    if node.op != "get_attr":
        return text_of(node.target, {})
    value = operator.attrgetter(str(node.target))(module)
    return (
        "\n".join(described_operations(value))
        if isinstance(value, fx.GraphModule)
        else text_of(value, {})
    )


def text_of(value: Any, numbers: dict[fx.Node, str]) -> str:
    """A value of a graph as text: equal texts mean equal values."""
    if isinstance(value, fx.Node):
        return numbers[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(text_of(item, numbers) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {text_of(value[key], numbers)}' for key in value)}}}"
    if isinstance(value, slice):
        return f"slice{text_of((value.start, value.stop, value.step), numbers)}"
    if isinstance(value, Tensor):
        content = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return f"{layout(value)} {hashlib.sha256(content.numpy().tobytes()).hexdigest()}"
    if isinstance(value, (OpOverload, HigherOrderOperator)):
        return str(value)
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r}"
    return (
        f"{type(value)} {secrets.token_hex()}"  # a kind that nobody thought of: never found again
    )


def layout(tensor: Tensor) -> str:
    """What an operation sees of a tensor besides its elements."""
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.device}"


@functools.cache
def _own_source() -> str:
    """The SHA-256 of the rooms that make code of a graph: another error's text makes no other."""
    digest = hashlib.sha256()
    for room in _MAKE_CODE:
        for path in sorted(Path(__file__).parents[2].joinpath(room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def processor() -> str:
    """The processor's name and what it can do, as the system tells it."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "Features")
    return "\n".join(line for line in first.splitlines() if line.startswith(names))
