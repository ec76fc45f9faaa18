"""The C++ compiler's processes: whatever ends a compilation ends them, with all that they started.

``g++`` is several processes. Killing the one that was started, as Python does on Ctrl-C, leaves the
others at work for seconds, writing into folders that are being removed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from fulgurite.backends.torch_compiler import CppCompileError

GRACE_S = 2.0  # for a compiler to remove its temporary files


class Compilers:
    """Runs compilers, in any thread, until it is ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: dict[subprocess.Popen[bytes], Path | None] = {}  # and what each one writes
        self._ended = False

    def run(self, command: str, folder: str) -> None:
        """Run a command line in a folder, instead of torch's ``cpp_builder._run_compile_cmd``.

        Raises:
            CppCompileError: it failed.
        """
        words = shlex.split(command)
        with self._changed:
            # another thread's: it waited for this lock while they were ended
            if self._ended:
                raise CppCompileError(words, "the compilation was interrupted")
            process = subprocess.Popen(
                words,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # a group of its own: by it all ends that g++ starts
                process_group=0,
            )
            self._running[process] = _target(words, folder)
        try:
            output, _ = process.communicate()
        except BaseException:
            self.end()
            raise
        finally:
            assert process.stdout is not None
            process.stdout.close()
            with self._changed:
                self._running.pop(process, None)
                self._changed.notify_all()
        if process.returncode:
            printed = output.decode(errors="replace")
            if process.returncode < 0:
                # one that is killed has printed nothing that says so
                printed += f"\nfatal error: ended by {signal.Signals(-process.returncode).name}"
            raise CppCompileError(words, printed)

    def end(self) -> None:
        """End them all, and start none any more; what they wrote by halves is removed."""
        with self._changed:
            self._ended = True
            running = dict(self._running)
        for process, target in running.items():
            _end(process)
            if target is not None:
                target.unlink(missing_ok=True)

    def wait(self) -> None:
        """Return when no thread runs one any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running)


@contextlib.contextmanager
def compilers() -> Iterator[Compilers]:
    """Compilers that end with the block, if it ends by an exception."""
    found = Compilers()
    try:
        yield found
    except BaseException:
        found.end()
        found.wait()
        raise


def _target(words: list[str], folder: str) -> Path | None:
    """What a command line writes: its existence alone makes torch take it for whole."""
    return Path(folder, words[words.index("-o") + 1]) if "-o" in words[:-1] else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process and what it started to end; after a while do not ask."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
