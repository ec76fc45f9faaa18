"""What is known of an operation without running it: its name, what it writes, whether it draws.

torch declares these facts in an operation's schema and tags. Every room asks here. Whatever else
stands in a graph (``getitem``, a subgraph) has no schema: it writes nothing and has no name.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx


@functools.cache
def _written_arguments(operation: object) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that an operation changes in place."""
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(arguments_of(operation))
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def arguments_of(operation: object) -> Sequence[Any]:
    """What the schema says of each argument, in order."""
    schema: Any = getattr(operation, "_schema", None)
    return () if schema is None else schema.arguments


def written(operation: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors (in a graph: nodes) among its arguments that an operation changes in place."""
    values = [
        args[i] if i < len(args) else kwargs.get(name) for i, name in _written_arguments(operation)
    ]
    return [leaf for leaf in pytree.tree_leaves(values) if leaf is not None] if values else values


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors a node changes in place."""
    return written(node.target, node.args, node.kwargs)


def is_mutable(operation: object) -> bool:
    """Whether an operation changes an argument in place."""
    return bool(_written_arguments(operation))


def is_alias(operation: object, result: int = 0) -> bool:
    """Whether a result is memory of an argument: a view, or what was changed in place."""
    returns: Any = operation._schema.returns  # type: ignore[attr-defined]
    # all tensors of a list (split, unbind) are one return in the schema
    return bool(returns) and returns[min(result, len(returns) - 1)].alias_info is not None


def memory_of(node: fx.Node) -> fx.Node:
    """The node whose tensor has the memory that a node's tensor is in."""
    while node.op == "call_function" and node.all_input_nodes:
        of = node.all_input_nodes[0] if node.target is operator.getitem else node  # of a list
        which: Any = 0 if of is node else node.args[1]
        if getattr(of.target, "_schema", None) is None or not is_alias(of.target, which):
            break
        [node, *_] = of.all_input_nodes
    return node


def is_random(operation: object) -> bool:
    """Whether an operation draws random numbers, which moves the process's random state."""
    return torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())


def is_uninitialized(operation: object) -> bool:
    """Whether a result holds whatever was in its memory before: ``empty`` and its kin."""
    return "empty" in operation_name(operation)


def operation_name(operation: object) -> str:
    """The name without namespace, overload and final underscore: ``add`` of ``aten::add_.Tensor``.

    Empty for what has no schema.
    """
    schema: Any = getattr(operation, "_schema", None)
    return "" if schema is None else schema.name.partition("::")[2].removesuffix("_")


def is_view(operation: object) -> bool:
    """Whether an operation only looks at memory: a view, or one of several results."""
    if operation is operator.getitem:
        return True
    returns = getattr(operation, "_schema", None) is not None
    return returns and is_alias(operation) and not is_mutable(operation)


def arguments_read(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of an operation that it reads: a batch norm in eval mode has no momentum."""
    if node.target is torch.ops.aten.native_batch_norm.default and node.args[5] is False:
        return (*node.args[:6], 0.0, *node.args[7:])
    return node.args


def is_written(node: fx.Node, but_by: fx.Node | None = None) -> bool:
    """Whether an operation of the graph so far changes a tensor, or a view of it, in place.

    Others than ``but_by``, if that is given, whose result is the tensor after it.
    """
    others = [user for user in node.users if user is not but_by]
    return any(node in written_nodes(user) for user in others) or any(
        is_written(user) for user in _views(others)
    )


def _views(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    for node in nodes:
        target: Any = node.target
        has_schema = isinstance(target, torch._ops.OpOverload)
        if target is operator.getitem or (has_schema and is_alias(target)):
            yield node
