"""What a strategy does together with other processes: nothing, where there is one."""

from __future__ import annotations

import contextlib

from fulgurite.backends.csx.state.gradients import Gradients


class OneProcess:
    """A strategy's dealings with other processes, where there are none."""

    def reducing(self, gradients: Gradients) -> contextlib.AbstractContextManager[None]:
        """What happens to the gradients of a backward pass that is traced inside of it."""
        return contextlib.nullcontext()

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """What happens around a step that is traced, where it does not only accumulate."""
        return contextlib.nullcontext()
