"""What runs a graph while its compiled code is checked, and from then on."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from torch import Tensor

from fulgurite.backends.csx.compile.checking.selfcheck import SelfCheck
from fulgurite.backends.csx.compile.fabric import Call, Loaded
from fulgurite.backends.csx.compile.store.cache import Fetched
from fulgurite.backends.csx.compile.store.fingerprint import versions
from fulgurite.backends.csx.streaming.residency import residency
from fulgurite.backends.runtime import give_back_freed

_MARK = "wrong"
_WRONG = "run operation by operation (compiled, it was wrong)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """Compiled code whose first calls are the self-check, unless that was done before.

    Code that passes is marked in the cache, with the versions of what it was checked with. As long
    as these stay the same, later runs do not check it again.

    Args:
        loaded: the graph as it is run; its ``call`` is compiled code already.
        found: its compiled code.
        reference: makes what runs its operations one by one.
        program: the folder of the compiled code.
        reports: a folder for what a report needs.
        is_wrong: called where the code was wrong, to tell other processes; None: there are none.
    """

    loaded: Loaded
    found: Fetched[Call]
    reference: Callable[[], Call]
    program: Path
    reports: Path
    is_wrong: Callable[[], None] | None

    def begin(self) -> bool:
        """Let the next call be the check; returns whether it is to be checked."""
        # by another libc, kernel or numpy the same code may compute other numbers
        if (self.found.marked or "").partition("\n")[0] == versions():
            self.loaded.check_again = self._again
            return False
        self._check(once=False)
        return True

    def _again(self) -> None:
        self._check(once=True)

    def _check(self, once: bool) -> None:
        right, graph = self._timed(self.reference()), self.loaded.graph
        assert graph is not None
        settled = functools.partial(self._settled, right, once)
        self.loaded.call = SelfCheck(
            graph, self.found.value, right, settled, self.reports, self.program, once
        )

    def _timed(self, reference: Call) -> Call:
        """Note the shortest time that the operations take one by one, where that is not known."""
        if self.loaded.by_operations_s is not None:
            return reference

        def run(inputs: list[Tensor]) -> Sequence[Tensor]:
            began = perf_counter()
            outputs = reference(inputs)
            least_s = self.loaded.by_operations_s or math.inf
            self.loaded.by_operations_s = min(perf_counter() - began, least_s)
            return outputs

        return run

    def _settled(self, reference: Call, once: bool, agreed: bool, done: str) -> None:
        """Choose what runs the graph from now on; ``done`` is empty where more will be compared."""
        loaded = self.loaded
        if residency.is_open:  # the comparison took some times the largest tensor
            give_back_freed()
        if not agreed:
            loaded.run_by_operations(reference, _WRONG)
            self.found.mark(_MARK)
            if self.is_wrong is not None:
                return self.is_wrong()  # all processes go on without it, at one step
        elif done:
            loaded.call, loaded.check_again = self.found.value, self._again
            # an audit asks again of code that is marked already
            if not once:
                self.found.mark(f"{versions()}\n{done}")
        return loaded.settled()
