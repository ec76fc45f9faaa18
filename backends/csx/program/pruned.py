"""Parameters that ``torch.nn.utils.prune`` takes from their layers between steps.

ModelPruning does that. In the place of ``weight`` there are then ``weight_orig``, which is the same
parameter, and ``weight_mask``; each step computes ``weight`` of them. That is another program.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod

from fulgurite.backends.csx.state import member


def pruned(module: nn.Module) -> tuple[str, ...]:
    """The names that they had, of a module and those in it."""
    return tuple(
        member(path, hook._tensor_name)
        for path, one in module.named_modules()
        for hook in one._forward_pre_hooks.values()
        if isinstance(hook, BasePruningMethod)
    )


def difference(before: tuple[str, ...], now: tuple[str, ...]) -> str:
    """In words, what was pruned, or no longer is."""
    new = [name for name in now if name not in before]
    first, *others = new or [name for name in before if name not in now]
    more = f" ({len(others) + 1} in all)" if others else ""
    return f"{first} {'was pruned' if new else 'is no longer pruned'}{more}"


def rename(gradients: dict[str, Tensor], before: tuple[str, ...], now: tuple[str, ...]) -> None:
    """Give gradients that programs keep, as ``{parameter}.grad``, the names of their parameters."""
    for names, end, new_end in ((now, "", "_orig"), (before, "_orig", "")):
        for name in set(names) - set(before if names is now else now):
            if (gradient := gradients.pop(f"{name}{end}.grad", None)) is not None:
                gradients[f"{name}{new_end}.grad"] = gradient
