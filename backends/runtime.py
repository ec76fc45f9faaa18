"""The process around a step: Python's garbage collector, the C library's heap, and Ctrl-C."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_PYTHONS_OWN = 1_000  # objects: 3.12 has frozen 375 when it begins, which may thaw
_YOUNG, _FULL = 10_000, 1_000_000  # objects until a collection; collections until a full one


@contextlib.contextmanager
def young_alone() -> Iterator[None]:
    """Collect only objects that are new while the block runs, and then call all of them old.

    A full collection looks at every object of the process: 0.1 s where torch and Lightning are
    loaded, an eighth of a trace's time, which makes so many (measured, Python 3.11). So
    the next full collection does not come with the block's end, but when there is more again.
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
        # else somebody has frozen objects, which would thaw
        if gc.get_freeze_count() < _PYTHONS_OWN:
            gc.freeze()
            gc.unfreeze()
        gc.set_threshold(*before)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST = 32 * 2**20  # of a block in the heap: glibc takes no more
_ALL = 2**31 - 1  # of a C int
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory() -> Callable[[], None]:
    """Keep up to 2 GB of what is freed, until the returned function gives back all but 64 MB.

    glibc gives the top of its heap back to the system as soon as more than twice the largest block
    that was freed lies there: at the end of a step, whose intermediates all die. The next step has
    each of those pages made anew. A GPT of 2 layers, 8 x 128 tokens, had 7,300 page faults a step,
    11 of its 77 ms; compiled 0 or 5,000, from run to run, as the heap lay; with this 0 (measured,
    glibc 2.36).

    Blocks of more than 32 MB are mapped one by one, as ever. Where the user has set glibc's limits,
    and where the C library is another, nothing changes.
    """
    if _are_set() or not _limit(_MMAP_THRESHOLD, _LARGEST):
        return _nothing
    _limit(_TRIM_THRESHOLD, _ALL)
    return _give_back


def _are_set() -> bool:
    """Whether the user has set glibc's limits."""
    limits = os.environ.get("GLIBC_TUNABLES", "")
    return "malloc" in limits or any(one in os.environ for one in _OF_THE_USER)


def _nothing() -> None:
    """Where nothing was changed."""


def _give_back() -> None:
    _limit(_TRIM_THRESHOLD, 2 * _LARGEST)  # as glibc where such were freed


def _limit(which: int, size: int) -> bool:
    """Set a limit of glibc's heap; whether the C library has it."""
    try:
        return bool(ctypes.CDLL(None).mallopt(which, size))
    except AttributeError:  # not glibc
        return False


def _in_heap_again() -> None:
    _limit(_MMAP_THRESHOLD, _LARGEST)


_LARGE = 1 << 20  # of a block that goes back to the system when it is freed


def return_freed_memory() -> Callable[[], None]:
    """Give back what is freed, but for small blocks, until the returned function is called.

    Where memory is scarce: glibc's heap kept 80 MB more than a step of an MLP needed, and a GPT of
    31 MB in two processes took 64 MB above what stays, of which 25 were predicted, and 33 so
    (measured).
    """
    if _are_set() or not _limit(_MMAP_THRESHOLD, _LARGE):
        return _nothing
    return _in_heap_again


def give_back_freed() -> None:
    """Give back to the system what is freed now, once, whatever ``keep_freed_memory`` keeps."""
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


_LIBC = ctypes.CDLL(None, use_errno=True)  # its calls leave other threads of Python running


def advise(address: int, nbytes: int, advice: int) -> bool:
    """Tell the system what becomes of pages of memory (madvise); whether it takes that advice."""
    address_and_length = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
    return not _LIBC.madvise(*address_and_length, ctypes.c_int(advice))


_LIBC.mmap.restype = ctypes.c_void_p
_MAP_FIXED, _KEEP_SIZE, _PUNCH_HOLE = 0x10, 1, 2  # mmap(2), fallocate(2)
_FAILED = ctypes.c_void_p(-1).value


def map_file(descriptor: int, offset: int, nbytes: int, at: int | None = None) -> int:
    """Map a range of a file into memory, shared with it; returns its address.

    Args:
        descriptor, offset, nbytes: of the range, in whole pages.
        at: map it over the memory there, so that what is written stays in this process.

    Raises:
        OSError: the file cannot be mapped.
    """
    kind = mmap.MAP_SHARED if at is None else mmap.MAP_PRIVATE | _MAP_FIXED
    found: int | None = _LIBC.mmap(
        ctypes.c_void_p(at),
        ctypes.c_size_t(nbytes),
        ctypes.c_int(mmap.PROT_READ | mmap.PROT_WRITE),
        ctypes.c_int(kind),
        ctypes.c_int(descriptor),
        ctypes.c_long(offset),
    )
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot be mapped: {os.strerror(code)}")
    return found


def unmap_file(address: int, nbytes: int, place: tuple[int, int] | None) -> None:
    """Let go of memory that ``map_file`` gave, and of the range of the file.

    Args:
        address, nbytes: of the memory.
        place: the file's descriptor and the range's offset; None: the file keeps it.
    """
    _LIBC.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
    if place is not None:
        how = ctypes.c_int(_KEEP_SIZE | _PUNCH_HOLE)
        offset, length = ctypes.c_long(place[1]), ctypes.c_long(nbytes)
        _LIBC.fallocate(ctypes.c_int(place[0]), how, offset, length)


@contextlib.contextmanager
def interrupted_once() -> Iterator[None]:
    """Let the first Ctrl-C end the block, and ignore others while it puts things back.

    A second one would leave them half put back. What a Ctrl-C does stays what it was: where the
    process's handler raises nothing, the block goes on, and the next one is given to it too. Only
    Python's main thread receives signals; in others nothing has to be done.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    ends = False

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal ends
        if not ends:
            try:
                before(number, frame)
            except BaseException:
                ends = True
                raise

    signal.signal(signal.SIGINT, receive)
    try:
        yield
    finally:
        # the block may have set another one, to stay
        if signal.getsignal(signal.SIGINT) is receive:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Let a Ctrl-C that comes while something is put back take effect when the block is done."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
