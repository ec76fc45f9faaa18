"""Max pooling is decomposed as torch's compiler does it, without importing that."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fulgurite.backends.csx.graph.passes.decompositions import decompositions

CASES: list[tuple[int, tuple[Any, ...]]] = [
    (2, ([2, 2], [2, 2])),
    (2, ([3, 3], [2, 2], [1, 1])),
    (2, ([2], [], [0])),
    (2, ([3, 2], [2, 1], [1, 0], [2, 1], True)),
    (2, ([5, 5], [1, 1])),
    (2, ([6, 6], [1, 1])),
    (3, ([2, 2, 2], [2, 2, 2])),
    (3, ([3, 3, 3], [1, 1, 1])),
]


@pytest.mark.parametrize(("dims", "arguments"), CASES)
def test_the_operations_are_those_of_torchs_decomposition(
    dims: int, arguments: tuple[Any, ...]
) -> None:
    import torch._inductor.lowering
    from torch._inductor.decomposition import select_decomp_table

    operation = getattr(torch.ops.aten, f"max_pool{dims}d_with_indices").default
    x = torch.arange(2.0 * 3 * 12**dims).sin().reshape(2, 3, *[12] * dims)

    def operations(table: dict[Any, Any]) -> list[str]:
        def pool(x: Tensor) -> Any:
            return operation(x, *arguments)

        graph = make_fx(pool, decomposition_table=table)(x).graph
        return [node.format_node() or "" for node in graph.nodes]

    assert operations(decompositions()) == operations(select_decomp_table())
