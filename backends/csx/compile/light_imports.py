"""The imports of a compiled program, made light.

Inductor's wrapper imports whatever a wrapper may use, its autotuner among it, which takes 1.2 s of
CPU (measured, torch 2.13): longer than loading the program. What is not used goes, and a matrix
product that the autotuner only passes on is called by torch's own name.
"""

from __future__ import annotations

import ast
import importlib
from typing import Any

import torch

_PRODUCTS = "extern_kernels"  # torch.mm and the like, under the same names
_DEFINED_THERE = "torch.ops.prims."  # operations that the compiler defines when it is imported


def with_light_imports(source: str) -> str:
    """The source of a wrapper without imports that it does not need."""
    if _DEFINED_THERE in source:
        return source
    module = _TorchsOwn().visit(ast.parse(source))
    used = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
    for statement in [one for one in module.body if isinstance(one, ast.ImportFrom)]:
        statement.names = [one for one in statement.names if (one.asname or one.name) in used]
        if not statement.names:
            module.body.remove(statement)
    return ast.unparse(ast.fix_missing_locations(module))


class _TorchsOwn(ast.NodeTransformer):
    """Writes ``torch.mm`` for ``extern_kernels.mm`` where both are the same function."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        owner = node.value
        if isinstance(owner, ast.Name) and owner.id == _PRODUCTS:
            own: Any = getattr(torch, node.attr, None)
            if own is not None and own is getattr(_products(), node.attr, None):
                owner.id = "torch"
        return node


def _products() -> Any:
    """The compiler's; who compiles has imported them."""
    return importlib.import_module("torch._inductor.select_algorithm").extern_kernels
