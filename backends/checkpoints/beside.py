"""A writer that works beside the training: one job after the other, in their order."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

Job = Callable[[], None]


class Writer:
    """Runs jobs in a thread of its own, in their order; after one that fails, none that were given.

    The process does not end before the last one. A copy of a writer (of a Trainer that is copied or
    sent to another process) has no jobs.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self._promised: dict[str, bool] = {}

    def __reduce__(self) -> tuple[type[Writer], tuple[()]]:
        return type(self), ()

    def submit(self, job: Job, path: str | os.PathLike[str], leaves: bool) -> None:
        """Run a job after those before it.

        Args:
            job: what to do; what it raises, ``wait`` raises.
            path: the file that it is about.
            leaves: whether the file is there afterwards.
        """
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="fulgurite-checkpoints")
        before = self._last

        def run() -> None:
            if before is None or before.exception() is None:
                job()
            else:
                raise _failure(before)

        self._promised[os.path.abspath(path)] = leaves
        self._last = self._executor.submit(run)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Whether a file will be there when all jobs are done."""
        return self._promised.get(os.path.abspath(path), os.path.exists(path))

    @property
    def is_idle(self) -> bool:
        """Whether all jobs are done, and none failed since the last ``wait``."""
        return self._last is None

    def wait(self) -> None:
        """Wait for all jobs; raise the error of the first that failed, once."""
        last = self._last
        if last is None:
            return
        try:
            last.result()
        finally:
            if last.done():  # else the wait was interrupted
                self._last = None
                self._promised.clear()

    def close(self) -> None:
        """As ``wait``; then end the thread."""
        try:
            self.wait()
        finally:
            if self._executor is not None and self._last is None:
                self._executor.shutdown()
                self._executor = None


def _failure(job: Future[None]) -> BaseException:
    failure = job.exception()
    assert failure is not None
    return failure
