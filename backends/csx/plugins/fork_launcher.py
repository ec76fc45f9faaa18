"""Lightning's launcher of forked processes, in a notebook, where threads are not forked with them.

OpenMP's threads belong to the Python thread that first had them work. A process that this one forks
goes on with that thread alone, and the next operation of two threads waits for ever for those that
were not forked. A thread that never had any gets new ones: so processes are forked by such a one.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from fulgurite.backends.csx.diagnostics.errors import UsersFramesAlone


class ForkLauncher(_MultiProcessingLauncher):
    """Forks a process for each rank, and waits until all of them have ended."""

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        """Run a function in each process; what that of rank 0 gives."""
        self.procs = []  # those of the run before have ended
        result: Future[Any] = Future()
        launch = super().launch

        def fork_and_wait() -> None:  # the processes are told when the thread that forks them ends
            try:
                result.set_result(launch(function, *args, trainer=trainer, **kwargs))
            except BaseException as error:
                result.set_exception(error)

        context = contextvars.copy_context()  # by which a notebook knows whose output it is
        threading.Thread(target=context.run, args=(fork_and_wait,), daemon=True).start()
        return result.result()

    def _wrapping_function(self, *args: Any) -> None:
        """Run the function in a process, whose errors are shown as in a script."""
        with UsersFramesAlone():
            super()._wrapping_function(*args)
