"""The base of optimizers whose state exists before their first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.optim.optimizer
from torch import Tensor
from torch.optim.optimizer import ParamsT

__all__ = ["Optimizer", "ParamsT", "check_betas", "check_not_negative", "wide_dtype"]


class Optimizer(torch.optim.Optimizer):
    """An optimizer written parameter by parameter, in tensor operations.

    A subclass says which state a parameter has before its first update (``new_state``) and makes
    one update (``update_parameter``). It then runs eagerly and inside a static program, with the
    same numbers.

    State is never a Python number: a count is a tensor. The numbers of ``group`` may change from
    step to step; inside a program they are inputs.

    >>> class SignSGD(Optimizer):
    ...     def new_state(self, p, group):
    ...         return {}
    ...
    ...     def update_parameter(self, p, state, group):
    ...         p.sub_(p.grad.sign() * group["lr"])
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([3.0, -0.5])
    >>> SignSGD([weight], {"lr": 0.25}).step()
    >>> weight.data
    tensor([0.7500, 1.2500])

    Args:
        params: parameters, or dicts of a param group each.
        defaults: the options of groups that do not set their own.

    Raises:
        ValueError: an option of a group is out of its range (``check_group``).
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)

    def new_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of one parameter before its first update."""
        raise self._undefined("new_state(self, p, group)")

    def update_parameter(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update one parameter that has a gradient, and its state, in place."""
        raise self._undefined("update_parameter(self, p, state, group)")

    def _undefined(self, method: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has to define {method}.")

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ``ValueError`` where an option of a new group is out of its range."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as ``torch.optim.Optimizer`` does, with its options checked."""
        self.check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def preinitialize(self) -> None:
        """Make the state of every parameter that requires grad and has none.

        Called before a program is traced; ``step`` makes what is missing, so that eagerly nobody
        needs to call it. State that exists, from a checkpoint for one, stays.
        """
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    self._state_of(p, group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model and its gradients anew, and returns the loss.

        Returns:
            What ``closure`` returned; None without one.

        Raises:
            RuntimeError: a parameter is complex, or its gradient sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._check_dense(p)
                    self.update_parameter(p, self._state_of(p, group), group)
        return loss

    def _state_of(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state.get(p) or self.new_state(p, group)
        self.state[p] = state
        return state

    def _check_dense(self, p: Tensor) -> None:
        assert p.grad is not None
        if p.is_complex():
            raise RuntimeError(f"{type(self).__name__} does not support complex parameters")
        if p.grad.layout is not torch.strided:
            raise RuntimeError(
                f"{type(self).__name__} does not support sparse gradients; a layer with"
                " sparse=False has dense ones"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over loaded state: older or torch's own, which lacks options and counts on the CPU.

        Checked against torch 2.13: ``load_state_dict`` ends here, and so does unpickling.
        """
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            for p in group["params"]:
                loaded = self.state.get(p) or {}
                if "step" in loaded:
                    loaded["step"] = torch.as_tensor(
                        loaded["step"], dtype=torch.float32, device=p.device
                    )


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """What a parameter's update is computed in, to be rounded once: float32 or wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


def check_not_negative(group: dict[str, Any], *names: str) -> None:
    """Raise ``ValueError`` where one of these options is below zero, or NaN."""
    for name in names:
        value = group[name]
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{name} is a tensor of {value.numel()} elements; it must have one")
        if not value >= 0:
            raise ValueError(f"{name} is {value!r}; it must be at least 0")


def check_betas(group: dict[str, Any]) -> None:
    """Raise ``ValueError`` unless ``betas`` are two numbers from 0 to below 1."""
    betas = group["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas is {betas!r}; it must be two numbers, each from 0 to below 1")
