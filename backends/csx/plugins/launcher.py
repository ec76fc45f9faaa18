"""Lightning's launcher of a script in several processes, which says whose process ended.

Lightning's own kills all processes at once where one ends with an error, and says its number alone:
there is no time for the others to end by themselves (``heartbeats``).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

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
        sys.stdout.flush()
        os._exit(1)
