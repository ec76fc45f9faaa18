"""What runs a graph while its compiled code is checked, and from then on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from fulgurite.backends.csx.compile.cache import Fetched
from fulgurite.backends.csx.compile.fabric import Call, Loaded
from fulgurite.backends.csx.compile.fingerprint import versions
from fulgurite.backends.csx.compile.made import one_by_one
from fulgurite.backends.csx.compile.selfcheck import SelfCheck
from fulgurite.backends.csx.graph.graph import Graph


def check_first(
    loaded: Loaded,
    graph: Graph,
    found: Fetched[Call],
    reference: Callable[[], Call],
    program: Path,
    reports: Path,
) -> bool:
    """Let the first calls of compiled code be the self-check, unless that was done before.

    Who passes it is marked in the cache, with the versions of what it was done with.

    Args:
        loaded: the graph as it is run; its ``call`` is compiled code already.
        graph: the graph.
        found: its compiled code.
        reference: makes what runs its operations one by one.
        program: the folder of the compiled code.
        reports: a folder for what a report needs.

    Returns:
        Whether it is to be checked.
    """

    def check(once: bool) -> None:
        right = reference()
        settled = functools.partial(_settled, loaded, graph, found, right, once, again)
        loaded.call = SelfCheck(graph, found.value, right, settled, reports, program, once)

    again = functools.partial(check, once=True)
    if (found.marked or "").partition("\n")[0] == versions():
        loaded.check_again = again
        return False
    check(once=False)
    return True


def _settled(
    loaded: Loaded,
    graph: Graph,
    found: Fetched[Call],
    reference: Call,
    once: bool,
    again: Callable[[], None],
    agreed: bool,
    done: str,
) -> None:
    """What runs the graph after its check, or between its parts, where nothing is ``done``."""
    if not agreed:
        loaded.call, loaded.compiled, loaded.check_again = reference, False, None
        loaded.made = functools.partial(one_by_one, graph)
        loaded.how = "run operation by operation (compiled, it was wrong)"
        found.mark("wrong")
        return
    if done:
        loaded.call, loaded.check_again = found.value, again
        if not once:
            found.mark(f"{versions()}\n{done}")
    loaded.tell()
