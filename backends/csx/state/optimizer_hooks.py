"""What is called before and after an optimizer's steps."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def before_steps(optimizer: Optimizer, hook: Callable[..., Any]) -> RemovableHandle:
    """Call a hook before every step, also of an optimizer whose ``__init__`` left torch's out.

    Without it there may be no place for hooks, or a dict that has no weak references, and ``step``
    does not call them.
    """
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        hooks = vars(optimizer).get(name)
        if type(hooks) is not OrderedDict:
            setattr(optimizer, name, OrderedDict(hooks or {}))
    if not hasattr(optimizer.step, "hooked"):  # which torch would set on the class, for all of it
        step: Any = Optimizer.profile_hook_step(type(optimizer).step)
        step.hooked = True
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer.register_step_pre_hook(hook)


@contextlib.contextmanager
def around_steps(
    optimizer: Optimizer, before: Callable[..., Any], after: Callable[..., None]
) -> Iterator[None]:
    """Call these around every step of an optimizer, within the hooks of users."""
    depth = 0  # a step may call its parent class's, which has hooks too

    def begin(optimizer: Any, args: Any, kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        return before(optimizer, args, kwargs) if depth == 1 else None

    def end(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal depth
        depth -= 1
        if not depth:
            after(optimizer, args, kwargs)

    first, last = before_steps(optimizer, begin), optimizer.register_step_post_hook(end)
    hooks: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict
    hooks.move_to_end(last.id, last=False)
    try:
        yield
    finally:
        first.remove()
        last.remove()
