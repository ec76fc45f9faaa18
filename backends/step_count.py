"""``fulgurite.global_step()``: the number of optimizer steps done, as a tensor.

One module can ask for it on every device. Whoever runs a step says what the number is: a trace
gives an input of its program, a Trainer that runs eagerly gives a tensor of its counter.
"""

from __future__ import annotations

from torch import Tensor

from fulgurite.backends.step_context import step_context


def global_step() -> Tensor:
    """The number of optimizer steps done before this step, an int64 tensor without dimensions.

    It is what Lightning's ``trainer.global_step`` is when the step begins. In a traced step it is
    an input of the program, so it counts on where ``self.global_step`` would stay as it was.

    Raises:
        RuntimeError: nothing runs that has steps.
    """
    count = step_context.get().global_step
    if count is None:
        raise RuntimeError(
            "fulgurite.global_step() was called outside of a run. Call it in a step or a hook while"
            " a fulgurite.Trainer runs, or in a function under fulgurite.trace."
        )
    return count()
