"""Python's garbage collector while a step is traced and made into a program.

A full collection looks at every object of the process: 0.1 s where torch and Lightning are loaded.
A trace makes so many objects that they take an eighth of its time (measured, Python 3.11).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_YOUNG, _FULL = 10_000, 1_000_000  # objects until a collection; collections until a full one


@contextlib.contextmanager
def young_alone() -> Iterator[None]:
    """Collect only objects that are new while the block runs, and then call all of them old.

    So the next full collection does not come with the block's end, but when there is more again.
    Where the collector is off, or collects less often already, it is left as it is.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < _YOUNG:
        yield
        return
    gc.set_threshold(_YOUNG, before[1], _FULL)
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # else somebody has frozen objects, which would thaw
            gc.freeze()
            gc.unfreeze()
        gc.set_threshold(*before)
