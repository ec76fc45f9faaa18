"""Whether optimizers still hold their state in the dicts that programs were built on.

A program takes tensors from the dicts of ``optimizer.state``. Host code may put other dicts in
their place (``load_state_dict`` does) or clear them; then the programs have to be built anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from torch.optim import Optimizer


class HeldStates:
    """The dicts of the state of optimizers as they are now, to be compared with those later.

    They are kept, so that no identity is used twice.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._held: list[tuple[Optimizer, Any, list[Any]]] = [
            (optimizer, optimizer.state, list(optimizer.state.values())) for optimizer in optimizers
        ]

    def are_replaced(self) -> bool:
        """Whether one is gone or another one; state of further parameters comes after them.

        Asked whenever host code ran: keys are not looked up, for a tensor's hash is slow.
        """
        return any(
            optimizer.state is not state
            or len(state) < len(values)
            or not all(map(is_, values, state.values()))
            for optimizer, state, values in self._held
        )
