"""``p.data = value`` in a step: the tensor moves to other memory, as eagerly.

What it leaves keeps its values for whoever still looks there (``old = p.data; p.data = q.data;
q.data = old`` swaps). The program's memory does not move: what is where at the step's end is copied
into it, after everything else.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.fx.experimental.proxy_tensor import get_innermost_proxy_mode

from fulgurite.backends.csx.graph.graph import storage_of


class ReplacedData:
    """The inputs of one trace whose ``.data`` was replaced."""

    def __init__(self) -> None:
        self._left: list[tuple[Tensor, Tensor]] = []  # (the tensor, the memory that it left)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's data was replaced."""
        return any(tensor is one for one, _ in self._left)

    def replace(self, tensor: Tensor, value: Tensor) -> None:
        """``tensor.data = value``, of equal shape and dtype."""
        mode = get_innermost_proxy_mode()
        assert mode is not None
        proxies = mode.tracer.tensor_tracker
        with torch.no_grad():
            if value not in proxies:  # a constant
                value = value.clone()
            if not self.holds(tensor):
                self._left.append((tensor, tensor.detach()))
        with DisableTorchFunction():
            tensor.data = value
        proxies[tensor] = proxies[value]  # which torch does not see: the update would be lost

    def write_back(self) -> None:
        """Copy each into the memory that it left; all are read before one is written."""
        pairs = [(left, t) for t, left in self._left if storage_of(t) != storage_of(left)]
        values = [tensor.detach().clone() for _, tensor in pairs]
        for (left, _), value in zip(pairs, values, strict=True):
            left.copy_(value)
