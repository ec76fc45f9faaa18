"""What torch's errors of a loader leave out: the worker, the samples of its batch, and the cause.

``explained`` adds that to an error as notes (``add_note``): its type and text stay torch's. Inside
of it every DataLoader remembers the indices of its last batches, 0.1 µs each (measured); all else
is found out when something has failed. Indices and lines of a raised error are found where the
sample is made: in the worker, if it is forked (on Linux with Python up to 3.13, unless the loader
has another ``multiprocessing_context``).
"""

from __future__ import annotations

import contextlib
import re
import signal
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils.data import Subset
from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from fulgurite.backends.patches import Patch, Shared, patches_of
from fulgurite.backends.torch_versions import CHECKED

STUCK_S = 60.0  # without a batch, until a run says whom it waits for
_DIES_WITHIN_S = 0.2  # a worker whose end of a connection is closed
_DELIVERED = 4  # batches whose indices are remembered though they were handed out: Lightning's is 1
_SHOWN = 8  # indices in a message
_SENT, _WAITED = "_fulgurite_sent", "_fulgurite_waited_s"
_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
_TIMED_OUT = "DataLoader timed out"
_HINTS = {
    "SIGKILL": "The system does that when memory runs out: try fewer workers, a smaller"
    " prefetch_factor, or a smaller batch.",
    "SIGBUS": "Often the shared memory (/dev/shm) is full: make it larger, or use fewer workers.",
    "SIGSEGV": "Code outside of Python crashed: python -X faulthandler shows the line.",
    "SIGABRT": "Code outside of Python gave up: python -X faulthandler shows the line.",
    "SIGTERM": "Another process ended it.",
}
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or network file system",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead",
}
_fetch: Any = _MapDatasetFetcher.fetch
_try_get_data: Any = _MultiProcessingDataLoaderIter._try_get_data
_living: weakref.WeakSet[Any] = weakref.WeakSet()  # iterators with workers


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Let errors of loaders name worker, samples and cause while the block runs."""
    with _PATCHES.in_place():
        try:
            yield
        except RuntimeError as error:
            for note in _notes(str(error)):
                error.add_note(note)
            raise


def _patches() -> Iterator[Patch]:
    checked = CHECKED
    why = "a loader forgets which samples it asked a worker for"
    for kind, replacement in (
        (_MultiProcessingDataLoaderIter, _next_index_of_workers),
        (_SingleProcessDataLoaderIter, _next_index),
    ):
        yield from patches_of(kind, {"_next_index": replacement}, why=why, checked=checked)
    waits = {"_try_get_data": _get_data_told}
    why = "a loader waits for a worker without a word"
    yield from patches_of(_MultiProcessingDataLoaderIter, waits, why=why, checked=checked)
    why = "the error of a dataset does not say which index was asked for"
    yield from patches_of(_MapDatasetFetcher, {"fetch": _fetch_told}, why=why, checked=checked)


_PATCHES = Shared(_patches)


# -- remembering --------------------------------------------------------------------------------


def _next_index(self: Any) -> Any:
    """torch's; remembers the indices of the last batches."""
    index = next(self._sampler_iter)
    _sent_by(self, _DELIVERED).append((self._num_yielded, index))
    return index


def _next_index_of_workers(self: Any) -> Any:
    """torch's; remembers the indices of the batches that workers are to make."""
    index = next(self._sampler_iter)
    ahead = self._prefetch_factor * self._num_workers
    _sent_by(self, ahead + _DELIVERED).append((self._send_idx, index))
    return index


def _sent_by(iterator: Any, kept: int) -> deque[tuple[int, Any]]:
    sent: deque[tuple[int, Any]] | None = vars(iterator).get(_SENT)
    if sent is None:
        sent = vars(iterator)[_SENT] = deque(maxlen=kept)
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            _living.add(iterator)
    return sent


def indices_of(iterator: object, number: int) -> Any:
    """What a loader's sampler gave for a batch; None where that is not remembered."""
    sent = vars(iterator).get(_SENT, ()) if isinstance(iterator, _BaseDataLoaderIter) else ()
    found = [index for one, index in sent if one == number]  # of two epochs the last counts
    known = found and found[-1] is not None
    of_stream = known and isinstance(found[-1], (list, tuple)) and None in found[-1]
    return found[-1] if known and not of_stream else None


def batch_in_words(iterator: object, number: int) -> str:
    """A batch of a loader, with its indices where they are known."""
    indices = indices_of(iterator, number)
    return f"batch_idx {number}" + ("" if indices is None else f" (dataset[{_short(indices)}])")


def name_batch(error: BaseException, fetcher: Any, number: int) -> None:
    """Add to an error which batch it came from.

    Args:
        error: raised by a step.
        fetcher: Lightning's, which gave the batch.
        number: of the batch in its loader.
    """
    combined = fetcher.combined_loader if fetcher is not None else None
    iterators: Any = getattr(getattr(combined, "_iterator", None), "iterators", ())
    one = iterators[0] if len(iterators) == 1 else None
    error.add_note(f"The batch is {batch_in_words(one, number)}.")


def _short(indices: Any) -> str:
    if not isinstance(indices, Sequence) or isinstance(indices, str):
        return repr(indices)
    shown = ", ".join(map(repr, indices[:_SHOWN]))
    more = len(indices) - _SHOWN
    return f"[{shown}]" if more <= 0 else f"[{shown}, ... {more} more]"


# -- a sample that fails ------------------------------------------------------------------------


class _Asked(list[Any]):
    """The indices of a batch, which notes how far the dataset was asked for them."""

    _iterator: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        self._iterator = list.__iter__(self)
        return self._iterator

    @property
    def now(self) -> list[Any]:
        """The one that is asked for; none before the first and after the last."""
        # a list's iterator says where it is when it is copied, at no cost to the loop over it
        state: Any = self._iterator.__reduce__()
        return self[state[2] - 1 : state[2]] if len(state) > 2 else []


def _fetch_told(self: Any, possibly_batched_index: Any) -> Any:
    """torch's; an error says which sample it came from."""
    indices = possibly_batched_index
    getter = getattr(self.dataset, "__getitems__", None)
    one_by_one = getter is None or getter.__module__ == Subset.__module__
    if self.auto_collation and isinstance(indices, (list, tuple)) and one_by_one:
        indices = _Asked(indices)
    try:
        return _fetch(self, indices)
    except StopIteration as error:
        raise RuntimeError(
            "The dataset raised StopIteration, which would end the epoch early in silence."
            f" {_sample_in_words(error.__traceback__, indices)}"
        ) from error
    except Exception as error:
        error.add_note(_sample_in_words(error.__traceback__, indices))
        raise


def _sample_in_words(traceback: TracebackType | None, indices: Any) -> str:
    """Which sample of a batch an error came from."""
    if not isinstance(indices, (list, tuple)):
        return f"It came from dataset[{indices!r}]."
    of_batch = f"a batch of dataset[{_short(indices)}]"
    if isinstance(indices, _Asked) and indices.now:
        return f"The sample was dataset[{indices.now[0]!r}], of {of_batch}."
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        data = frame.f_locals.get("data") if frame.f_code is _fetch.__code__ else None
        if isinstance(data, list):
            return f"The samples were put together as {of_batch}.{_odd_sample(data, indices)}"
    return f"It came from {of_batch}."


def _odd_sample(samples: list[Any], indices: Sequence[Any]) -> str:
    """The first sample that is not like most others; nothing where all are alike."""
    layouts = [_layout(sample) for sample in samples]
    [(usual, _)] = Counter(layouts).most_common(1)
    for layout, index in zip(layouts, indices, strict=False):
        if layout != usual:
            return f" dataset[{index!r}] is {layout}, where most are {usual}."
    return ""


def _layout(sample: Any) -> str:
    """Shapes of tensors and arrays, types of all else."""

    def one(leaf: Any) -> str:
        shape = getattr(leaf, "shape", None)
        if shape is None:
            return type(leaf).__name__
        kind = "" if isinstance(leaf, Tensor) else f" ({type(leaf).__name__})"
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(shape)}{kind}"

    return str(pytree.tree_map(one, sample)).replace("'", "")


# -- a worker that waits or dies ----------------------------------------------------------------


def _get_data_told(self: Any, timeout: float = MP_STATUS_CHECK_INTERVAL) -> tuple[bool, Any]:
    """torch's; says once whom it waits for, when that takes long."""
    try:
        found: tuple[bool, Any] = _try_get_data(self, timeout)
    except (OSError, EOFError) as error:  # a worker died while it handed a batch over
        for i, worker in enumerate(self._workers):
            # a worker's end of the connection is closed some moments before the process is gone
            worker.join(_DIES_WITHIN_S)
            if not worker.is_alive():
                error.add_note(_death_in_words(self, i))
        raise
    attributes = vars(self)
    if found[0]:
        attributes.pop(_WAITED, None)
        return found
    before = attributes.get(_WAITED, 0.0)
    waited = attributes[_WAITED] = before + timeout
    if before < STUCK_S <= waited:
        warnings.warn(
            f"DataLoader: no batch for {waited:.0f} s. {_waited_for(self)} The run goes on when it"
            " comes; DataLoader(timeout=...) would end it.",
            stacklevel=2,
        )
    return found


def _waited_for(iterator: Any) -> str:
    """Who makes the batch that comes next."""
    number = iterator._rcvd_idx
    worker = iterator._workers[iterator._task_info[number][0]]
    state = _state(worker.pid)
    which = f"worker {iterator._workers.index(worker)} (pid {worker.pid}{state})"
    return f"It is {which} that makes {batch_in_words(iterator, number)}."


def _state(pid: int) -> str:
    """What a process does now, where the system tells it (Linux)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return f", {_STATES.get(text.rpartition(') ')[2][:1], 'alive')}"


def _notes(text: str) -> Iterator[str]:
    """What torch's error of workers leaves out; nothing for other errors."""
    died = _DIED.match(text)
    pids = set(died[1].split(", ")) if died is not None else set()
    for iterator in list(_living):
        for i, worker in enumerate(iterator._workers):
            if str(worker.pid) in pids:
                yield _death_in_words(iterator, i)
        if text.startswith(_TIMED_OUT) and iterator._rcvd_idx in iterator._task_info:
            yield _waited_for(iterator)


def _death_in_words(iterator: Any, worker: int) -> str:
    process, tasks = iterator._workers[worker], iterator._task_info
    code, hint = process.exitcode, ""
    ended = f"exited with code {code}"
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        ended, hint = f"was killed by {name}", f" {_HINTS.get(name, '')}".rstrip()
    own = [number for number, task in tasks.items() if task[0] == worker and len(task) == 1]
    missing = " and ".join(batch_in_words(iterator, number) for number in sorted(own)[:_SHOWN])
    owed = f" It had not delivered {missing}." if own else ""
    return f"Worker {worker} of the loader (pid {process.pid}) {ended}.{owed}{hint}"
