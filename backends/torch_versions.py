"""In which way the versions of torch differ, as far as this package sees it.

Each difference is one name here, with what differs, since which version, and what it matters to.
Whoever is concerned imports the name: nothing else in the package asks which torch is installed
(tests/test_rules.py). Where a difference shows itself, as a name that is there or not, it is looked
for rather than inferred from the version.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import checkpoint

OLDEST_CHECKED = "2.13"
CHECKED = f"torch {OLDEST_CHECKED} to 2.15"
"""The versions that the whole test suite passes on. With 2.11 a fit was tried, whose programs run
operation by operation: its compiler lacks names that ours asks for. 2.12 was not tried."""

IS_OLDER = torch.__version__ < OLDEST_CHECKED
"""Whether a program that is not compiled wants a newer torch: nobody else can mend that."""

DETACHING = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
"""What ``tensor.detach()`` is in a trace: ``aten.detach`` in 2.13, ``aten.alias`` since 2.14."""

CHECKPOINTING = (
    "_checkpoint_without_reentrant_generator_impl"
    if hasattr(checkpoint, "_checkpoint_without_reentrant_generator_impl")
    else "_checkpoint_without_reentrant_generator"
)
"""What ``torch.utils.checkpoint.checkpoint`` calls before and after the function: since 2.14 the
name without ``_impl`` is for callers outside of torch alone, and a patch of it has no effect."""

LOSES_ORDER = torch.__version__ < "2.14"
"""Whether the compiler loses the order after an operation that writes into a buffer, and may read
the buffer before: ``compile/inductor/changes`` mends 2.13 (pytorch issue 185509)."""

DROPS_COPIES = torch.__version__ < "2.15"
"""Whether the compiler drops a copy of an input that the graph overwrites, and reads the new value:
``compile/inductor/changes`` mends 2.13 and 2.14 (pytorch issue 198131)."""

FORMULAS_OF_OTHERS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        torch.ops.aten._scaled_dot_product_flash_attention
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Operations for which ``torch.utils.flop_counter`` may have no formula, each with one that has and
whose arguments begin with the same tensors: attention on the CPU got its own in 2.15."""


def last_node(graph: fx.Graph) -> Any:
    """The node that was made last; None of a graph without one.

    ``next(reversed(graph.nodes))`` does since torch 2.13: before, ``reversed`` gave no iterator.
    """
    return next(iter(reversed(graph.nodes)), None)
