"""StopIteration that left the user's code: the loops around it would take it for the data's end.

Lightning's loops end an epoch, and manual optimization a step, at any StopIteration, whoever raised
it: ``next(self.it)`` on an iterator that is exhausted ends the training without a word. Python does
the same to generators no longer, for the same reason (PEP 479).
"""

from __future__ import annotations

from types import TracebackType

from fulgurite.backends.csx.diagnostics.user_lines import is_library, raised_at

_DATA = ("lightning.pytorch.loops.fetchers", "fulgurite.loops.fetching", "torch.utils.data")
"""Who asks for batches: a StopIteration that passed one of these is the end of the data."""


def refuse_stop_iteration(error: StopIteration) -> None:
    """Raise a RuntimeError that names the line, if it was the user's code that raised this one."""
    modules, innermost_is_users = _modules(error.__traceback__)
    line = raised_at(error)
    if line is None or not innermost_is_users or any(name.startswith(_DATA) for name in modules):
        return
    raise RuntimeError(
        f"{line.function} raised StopIteration, which would end the epoch without a word.\n"
        f"  at {line}\n      {line.source}\n"
        "  Remedy: let next(it) never run out: make the iterator anew where it is exhausted, or use"
        " itertools.cycle. What a step reads anew on every batch belongs in the batch."
    ) from error


def _modules(traceback: TracebackType | None) -> tuple[list[str], bool]:
    """The modules that an exception passed, and whether the last of them is the user's."""
    modules, is_users = [], False
    while traceback is not None:
        frame = traceback.tb_frame
        modules.append(str(frame.f_globals.get("__name__", "")))
        is_users = not is_library(frame)
        traceback = traceback.tb_next
    return modules, is_users
