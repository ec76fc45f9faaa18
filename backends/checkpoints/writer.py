"""A copy of a checkpoint, and a thread that writes copies beside the training.

A step writes its parameters in place, so what is written beside the training must be copied first.
The copy is made as ``torch.save`` looks at a checkpoint: everything is pickled but the memory of
tensors (their *storages*), which is copied. So tensors that share memory still do, and whatever
``torch.save`` can write can be copied.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

_STORAGES = (torch.UntypedStorage, torch.TypedStorage)


class Copy:
    """A checkpoint as it is at this moment; memory on other devices is copied to the host's.

    Args:
        checkpoint: whatever ``torch.save`` takes.
    """

    def __init__(self, checkpoint: Any) -> None:
        pickled = io.BytesIO()
        pickler = _Pickler(pickled)
        pickler.dump(checkpoint)
        self._pickled, self._storages = pickled.getvalue(), pickler.copies

    def restored(self) -> Any:
        """The checkpoint; its tensors are those of the copy."""
        try:
            return _Unpickler(io.BytesIO(self._pickled), self._storages).load()
        finally:
            # as torch.load ends: else torch holds sparse tensors until its next load, which warns
            torch._utils._validate_loaded_sparse_tensors()  # type: ignore[no-untyped-call]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.copies: list[torch.UntypedStorage] = []
        self._seen: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def persistent_id(self, obj: Any) -> tuple[int, torch.dtype | None] | None:
        """A storage is copied once, and named by its number."""
        if not isinstance(obj, _STORAGES):
            return None
        dtype = None if isinstance(obj, torch.UntypedStorage) else obj.dtype
        storage = obj if isinstance(obj, torch.UntypedStorage) else obj._untyped_storage
        if storage._cdata not in self._seen:
            # the storage is kept with its number: an address that is free again is another's
            self._seen[storage._cdata] = len(self.copies), storage
            is_elsewhere = storage.device.type not in ("cpu", "meta")
            self.copies.append(storage.cpu() if is_elsewhere else storage.clone())  # type: ignore[no-untyped-call]
        return self._seen[storage._cdata][0], dtype


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storages: list[torch.UntypedStorage]) -> None:
        super().__init__(file)
        self._storages = storages

    def persistent_load(self, pid: tuple[int, torch.dtype | None]) -> Any:
        """The copy of a storage."""
        number, dtype = pid
        storage = self._storages[number]
        if dtype is None:
            return storage
        typed: Any = torch.TypedStorage
        return typed(wrap_storage=storage, dtype=dtype, _internal=True)  # torch 2.13


Job = Callable[[], None]

_NAME = "fulgurite-checkpoints"  # of the threads that write
_pending: dict[str, Future[None]] = {}  # by the file that it is to leave


@functools.cache
def _let_readers_wait() -> None:
    """Let whoever opens a file wait until what is to be written there is: no older one is read."""

    def wait_for(event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not _pending or not isinstance(args[0], (str, os.PathLike)):
            return
        job = _pending.get(os.path.abspath(args[0]))
        if job is not None and not threading.current_thread().name.startswith(_NAME):
            futures.wait([job])

    sys.addaudithook(wait_for)
    os.register_at_fork(after_in_child=_pending.clear)  # there nobody writes


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
            self._executor = ThreadPoolExecutor(1, thread_name_prefix=_NAME)
            _let_readers_wait()
        before = self._last

        def run() -> None:
            # else the removal of an older checkpoint would follow a write that failed
            if before is None or before.exception() is None:
                job()
            else:
                raise _failure(before)

        whole = os.path.abspath(path)
        self._promised[whole] = leaves
        self._last = written = _pending[whole] = self._executor.submit(run)

        def forget(job: Future[None]) -> None:
            if _pending.get(whole) is job:
                _pending.pop(whole, None)

        written.add_done_callback(forget)

    def run(self, job: Job, path: str | os.PathLike[str], leaves: bool) -> None:
        """Run a job at once where all are done; else as ``submit``."""
        if self.is_idle:
            job()
        else:
            self.submit(job, path, leaves)

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
