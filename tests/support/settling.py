"""A fabric whose background job has ended, before it is decided what runs from now on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fulgurite.backends.csx.compile.background.compilation import Compilation
from fulgurite.backends.csx.compile.background.queue import Job
from fulgurite.backends.csx.compile.host.host_fabric import CSXBackend, HostFabric, Loaded
from fulgurite.backends.csx.compile.store.cache import CompileCache, UnfitEntry

KEY = "0" * 64
"""The program's, in the cache."""


class _OfNothing(Compilation):
    """The compilation of a program of nothing."""

    def __init__(self, cache: CompileCache) -> None:
        self._cache, self.key = cache, KEY

    def _load(self, folder: Path) -> Any:
        raise UnfitEntry


class Settling:
    """A program of nothing, that ran operation by operation until now.

    Args:
        folder: of the compile cache.
    """

    def __init__(self, folder: Path) -> None:
        graph: Any = object()
        self.fabric = HostFabric(CSXBackend(compile_dir=folder))
        self.fabric._later.compilation = lambda graph, threads: _OfNothing(self.fabric._later.cache)
        self.loaded = Loaded(
            call=lambda inputs: inputs,
            compiled=False,
            built=False,
            seconds=0.0,
            how="",
            graph=graph,
        )
        self.reference = self.loaded.call

    def settle(self) -> Any:
        """What runs from now on."""
        job = Job(name=("", ""), run=lambda: None, ended=True)
        return self.fabric._later._settle(self.loaded, self.reference, job)
