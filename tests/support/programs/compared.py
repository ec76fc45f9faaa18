"""How the results of a program are compared, and which programs are to be refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite import TraceError
from fulgurite.errors import (
    ConditionalOnTensor,
    DynamicShape,
    HostRead,
    RandomStateSet,
    UnsupportedState,
)

TOLERANCE = 1e-3
"""Relative to the largest element: of losses after some twenty steps, and weights."""
NOISE = 30
"""Times the difference that rounding alone makes."""
TOLERANCES = {"text.rotary_grouped_query_model": 2**-8}
"""Relative, of programs in bfloat16, whose noise a last bit of float32 does not show."""

REFUSED: dict[str, type[TraceError]] = {
    "vision.moco_queue_with_int_pointer": HostRead,
    "vision.depth_boolean_indexing": DynamicShape,
    "generative.glow_data_dependent_actnorm": HostRead,
    "rl.actor_critic_running_reward_as_float": HostRead,
    "rl.dqn_plays_inside_training_step": RandomStateSet,
    "text.adaptive_softmax_model": DynamicShape,
    "text.packed_lstm_classifier": HostRead,
    "text.ctc_speech": DynamicShape,
    "tabular.sparse_matrix_factorization": UnsupportedState,
    "tabular.graph_sage_boolean_mask": DynamicShape,
    "tabular.logged_item": HostRead,
    "tabular.skipped_nan_batches": ConditionalOnTensor,
}
"""Programs that are not static: name -> the error that must come."""

WARNED = frozenset(
    (
        "rl.td3_delayed_by_a_counter",
        "text.coin_flip_teacher_forcing",
    )
)
"""Programs that keep a Python number of the first step: other numbers, and a warning of it."""

DIFFERENT = {
    "tabular.digits_checkpoint_and_resume": "resumed: goes on in the order of the whole run",
    "tabular.deep_factorization_machine": "bfloat16: weights differ by its rounding, 2 % of them",
}
"""Programs that run on both and whose numbers are not compared, with the reason."""

Path = tuple[Any, ...]


def first_difference(
    ours: Any, stock: Any, jittered: Any = None, tolerance: float = TOLERANCE
) -> str | None:
    """Where two results differ first, in words; None if they are equal.

    Args:
        ours: dicts, lists and tuples of tensors, numbers and anything else.
        stock: the reference.
        jittered: the reference from weights that differ in the last bit.
        tolerance: relative to the largest element.
    """
    mine, reference, noisy = (dict(_leaves(one)) for one in (ours, stock, jittered))
    if list(mine) != list(reference):
        differing = [
            path for path in {**mine, **reference} if (path in mine) != (path in reference)
        ]
        return f"{_name(differing[0])} is only in one of the results" if differing else "the order"
    for path, wanted in reference.items():
        if not _same(mine[path], wanted, noisy.get(path), tolerance):
            return f"{_name(path)}: {mine[path]} instead of {wanted}"
    return None


def _leaves(value: Any, path: Path = ()) -> Any:
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        if value and all(map(_is_loss, value)):  # one scale and one noise for all
            yield path, torch.tensor([float(item) for item in value], dtype=torch.float64)
            return
        items = list(enumerate(value))
    else:
        yield path, value
        return
    yield path, type(value)
    for key, item in items:
        yield from _leaves(item, (*path, key))


def _is_loss(value: Any) -> bool:
    return type(value) is float or (
        isinstance(value, Tensor) and not value.ndim and value.is_floating_point()
    )


def _name(path: Path) -> str:
    return "results" + "".join(f"[{key!r}]" for key in path)


def _same(ours: Any, stock: Any, jittered: Any, tolerance: float) -> bool:
    if not (isinstance(stock, (Tensor, float)) or hasattr(stock, "__array__")):
        return bool(type(ours) is type(stock) and ours == stock)
    if type(ours) is not type(stock):
        return False
    a, b = torch.as_tensor(ours), torch.as_tensor(stock)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.double(), b.double()
    scale = max([1e-2, *b[b.isfinite()].abs().flatten().tolist()])
    allowed = tolerance * scale if _is_floating(stock) else 0.0
    if jittered is not None:
        moved = (torch.as_tensor(jittered).double() - b).abs().nan_to_num()
        allowed = max(allowed, NOISE * float(moved.max()) if moved.numel() else 0.0)
    return torch.allclose(a, b, rtol=0, atol=allowed, equal_nan=True)


def _is_floating(value: Any) -> bool:
    """Whether a number or a tensor may differ by rounding."""
    return torch.as_tensor(value).is_floating_point()
