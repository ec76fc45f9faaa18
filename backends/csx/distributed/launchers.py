"""Lightning's launchers of several processes, so that they end as they should, and say whose did.

A script is started again for each rank: Lightning kills all processes at once where one ends with
an error, and says its number alone, so that the others cannot end by themselves (``heartbeats``).

In a notebook processes are forked, without the threads. OpenMP's threads belong to the Python
thread that first had them work: a process that this one forks goes on with that thread alone, and
its next operation of two threads waits for ever for those that were not forked. A thread that never
had any gets new ones, so processes are forked by such a one.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)

from fulgurite.backends.csx.diagnostics.trace_errors import UsersFramesAlone

LOOKS_EVERY_S = 0.5
GRACE_S = 10.0
"""How long the processes have to end by themselves, when one of them has ended by an error."""


class Launcher(_SubprocessScriptLauncher):
    """Starts the script again for each further rank of this node."""

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        """Start the processes, and run a function of this one's."""
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            self._call_children_scripts()
            threading.Thread(target=self._watch, name="launcher", daemon=True).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def _watch(self) -> None:
        """End this process, some time after another one has ended by an error."""
        while True:
            states = [process.poll() for process in self.procs]
            if all(state == 0 for state in states):
                return
            failed = [(i, state) for i, state in enumerate(states, 1) if state]
            if failed:
                break
            time.sleep(LOOKS_EVERY_S)
        rank, status = failed[0]
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        said = f"CSX: the process of local rank {rank} ended {how}."
        print(said, file=sys.stderr, flush=True)
        time.sleep(GRACE_S)
        for process in self.procs:
            process.kill()
        # the main thread may wait in a collective for the process that is gone, where Python ends
        # nothing
        sys.stdout.flush()
        os._exit(1)


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
