"""A fabric whose background job has ended, before it is decided what runs from now on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fulgurite.backends.csx.compile.host_fabric import CSXBackend, HostFabric, Job, Loaded

KEY = "0" * 64
"""The program's, in the cache."""


class Settling:
    """A program of nothing, that ran operation by operation until now.

    Args:
        folder: of the compile cache.
    """

    def __init__(self, folder: Path) -> None:
        self._graph: Any = None
        self.fabric = HostFabric(CSXBackend(compile_dir=folder))
        self.loaded = Loaded(
            call=lambda inputs: inputs,
            compiled=False,
            built=False,
            seconds=0.0,
            how="",
            graph=self._graph,
            threads=1,
        )
        self.reference = self.loaded.call

    def settle(self) -> Any:
        """What runs from now on."""
        job = Job(name=("", ""), run=lambda: None, urgent=True, ended=True)
        return self.fabric._settle(self.loaded, self.reference, self._graph, KEY, job)
