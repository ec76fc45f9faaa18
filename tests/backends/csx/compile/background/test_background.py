"""The worker that compiles beside the training, with jobs that are quick: no compiler runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from fcntl import LOCK_EX, flock
from pathlib import Path

import pytest

from fulgurite.backends.csx.compile.background import queue as background
from fulgurite.backends.csx.compile.background import worker_pulse
from fulgurite.backends.csx.compile.background.queue import Job, Queue
from fulgurite.backends.csx.compile.background.worker_pulse import Pulse
from fulgurite.backends.csx.compile.fabric import Wanted
from fulgurite.backends.csx.compile.programs import progress
from fulgurite.backends.csx.compile.programs.progress import CODE, tell
from fulgurite.backends.patches import trace_lock

pytestmark = pytest.mark.skipif(not background.AVAILABLE, reason="workers are forked on Linux")


@pytest.fixture
def queue() -> Iterator[Queue]:
    """A queue of the test's own."""
    found = Queue()
    yield found
    found.end()


def job(name: str, run: Callable[[], str | None], urgent: bool = True) -> Job:
    """A job."""
    return Job(name=(name,), run=run, wanted=Wanted(urgent))


def wait(queue: Queue, *jobs: Job, most_s: float = 60.0) -> None:
    """Poll until all of them ended."""
    until = time.monotonic() + most_s
    while not all(one.ended for one in jobs):
        assert time.monotonic() < until, "not ended in time"
        queue.poll()
        time.sleep(0.005)


def wait_for(path: Path) -> None:
    """Until a file is there."""
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"no {path}"
        time.sleep(0.005)


@pytest.mark.process
def test_a_job_runs_in_another_process(queue: Queue, tmp_path: Path) -> None:
    def run() -> None:
        (tmp_path / "pid").write_text(f"{os.getpid()} {os.nice(0)}")

    one = queue.add(job("a", run))
    wait(queue, one)
    pid, nice = (tmp_path / "pid").read_text().split()
    assert int(pid) != os.getpid()
    cores = len(os.sched_getaffinity(0))
    assert int(nice) == min(os.nice(0) + (3 if cores == 1 else 10), 19)
    assert one.failure is None
    assert one.seconds > 0


@pytest.mark.process
def test_nothing_starts_before_something_urgent_comes_and_that_is_first(
    queue: Queue, tmp_path: Path
) -> None:
    def run(name: str) -> None:
        with open(tmp_path / "order", "a") as file:
            file.write(name)

    validation = queue.add(job("v", lambda: run("v"), urgent=False))
    queue.poll()
    assert queue._worker is None
    training = queue.add(job("t", lambda: run("t")))
    wait(queue, training)
    queue.hurry()
    wait(queue, validation)
    assert (tmp_path / "order").read_text() == "tv"


@pytest.mark.process
def test_both_entry_points_of_a_training_are_compiled_before_its_validation(
    queue: Queue, tmp_path: Path
) -> None:
    def named(name: str, urgent: bool) -> Job:
        def run() -> None:
            with open(tmp_path / "order", "a") as file:
                file.write(name)

        return job(name, run, urgent=urgent)

    jobs = [queue.add(named("v", urgent=False))]
    for name in ("a", "s"):
        jobs.append(queue.add(named(name, urgent=True)))
        queue.hurry()
    wait(queue, *jobs)
    assert (tmp_path / "order").read_text() == "asv"


@pytest.mark.process
def test_what_waits_is_compiled_in_the_end_where_what_is_urgent_is_in_the_cache(
    queue: Queue,
) -> None:
    queue.hurry()
    validation = queue.add(job("v", lambda: None, urgent=False))
    queue.poll()
    assert queue._worker is None  # what hurried was before it
    queue.hurry()
    wait(queue, validation)


@pytest.mark.process
def test_the_same_job_is_done_once(queue: Queue) -> None:
    first = queue.add(job("a", lambda: None))
    assert queue.add(job("a", lambda: None)) is first
    wait(queue, first)
    assert queue.add(job("a", lambda: None)) is not first


@pytest.mark.process
@pytest.mark.process
def test_how_far_a_job_is_can_be_asked(queue: Queue, tmp_path: Path) -> None:
    def run() -> None:
        for i in range(3):
            tell(CODE, i, 3)
        wait_for(tmp_path / "code")
        tell("21 kernels in C++", 0, 1)
        wait_for(tmp_path / "kernels")

    one, other = queue.add(job("one", run)), queue.add(job("other", lambda: None))
    assert queue.progress(one) == ""
    said = [until_it_says(queue, one, "code 3 of 3, 0 s")]
    (tmp_path / "code").touch()
    said.append(until_it_says(queue, one, "21 kernels in C"))
    assert queue.progress(other) == ""  # it waits for its turn
    (tmp_path / "kernels").touch()
    wait(queue, one, other)
    assert queue.progress(one) == queue.progress(other) == ""


def until_it_says(queue: Queue, job: Job, text: str) -> str:
    until = time.monotonic() + 60
    while text not in queue.progress(job):
        assert time.monotonic() < until, queue.progress(job)
        queue.poll()
        time.sleep(0.01)
    return queue.progress(job)


def test_what_is_left_is_estimated_by_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    course = progress.Course()
    now += 2
    assert str(course) == "code, 2 s"  # nothing is known of what is left
    course.note(CODE, 0, 4)
    assert str(course) == "code 1 of 4, 2 s"
    now += 2
    course.note(CODE, 1, 4)  # 16 s in all, and the C++ compiler 0.7 of that
    assert str(course) == "code 2 of 4, 4 s, about 23 s to go"
    now += 16
    course.note("9 kernels in C++", 0, 1)
    assert str(course) == "9 kernels in C++, 20 s, about 14 s to go"
    now += 20  # longer than usual
    assert str(course) == "9 kernels in C++, 40 s"


def test_a_worker_starves_where_it_gets_less_than_half_a_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, ticks = 0.0, 0
    row = ["R", "1", "1", "7", *["0"] * 7, "TICKS", "0", "0", "0"]
    rows = lambda: [(7, [str(ticks) if one == "TICKS" else one for one in row])]  # noqa: E731
    monkeypatch.setattr(worker_pulse.time, "monotonic", lambda: now)
    monkeypatch.setattr(worker_pulse, "_processes", rows)
    pulse, seen = Pulse(7), []
    for share in (1.0, 1.0, 1.0, 1.0, 0.2, 0.2, 0.2, 0.2, 1.0, 1.0, 1.0):
        now += 1.5
        ticks += int(150 * share)
        assert pulse.lost() is None
        seen.append(pulse.starves)
    assert seen == [False] * 5 + [True] * 4 + [False] * 2


@pytest.mark.process
def test_a_failure_is_told_in_words_with_its_log(queue: Queue) -> None:
    def run() -> None:
        print("what the compiler says")
        raise ValueError("no such operation\nand more")

    bad, good = queue.add(job("bad", run)), queue.add(job("good", lambda: None))
    wait(queue, bad, good)
    assert bad.failure == "ValueError: no such operation"
    assert not bad.full
    assert bad.log is not None
    assert "what the compiler says" in bad.log.read_text()
    assert "ValueError" in bad.log.read_text()
    assert good.failure is None
    bad.log.unlink()


@pytest.mark.process
def test_a_reason_that_a_job_gives_is_the_failure(queue: Queue) -> None:
    one = queue.add(job("a", lambda: "no C++ compiler was found"))
    wait(queue, one)
    assert one.failure == "no C++ compiler was found"
    assert one.log is not None
    one.log.unlink()


@pytest.mark.process
def test_a_full_disk_is_told_apart(queue: Queue) -> None:
    def run() -> None:
        raise OSError(28, "No space left on device")

    one = queue.add(job("a", run))
    wait(queue, one)
    assert one.full
    assert one.failure == "OSError: [Errno 28] No space left on device"
    assert one.log is not None
    one.log.unlink()


@pytest.mark.process
def test_a_worker_that_is_killed_fails_its_jobs_and_the_next_one_runs(
    queue: Queue, tmp_path: Path
) -> None:
    def run() -> None:
        (tmp_path / "began").touch()
        time.sleep(60)

    one, other = queue.add(job("a", run)), queue.add(job("b", lambda: None))
    queue.poll()
    wait_for(tmp_path / "began")
    assert queue._worker is not None
    os.kill(queue._worker._pid, signal.SIGKILL)
    wait(queue, one, other)
    assert one.failure is not None
    assert "was ended by SIGKILL; the system does that when memory runs out" in one.failure
    assert other.failure == one.failure
    third = queue.add(job("c", lambda: None))
    wait(queue, third)
    assert third.failure is None
    assert one.log is not None
    assert other.log == one.log
    assert one.log.read_text().endswith("compiling a\n")  # it was killed there
    one.log.unlink()


@pytest.mark.process
def test_a_worker_that_is_stopped_says_so_and_where_it_was(queue: Queue, tmp_path: Path) -> None:
    def run() -> None:
        (tmp_path / "began").touch()
        time.sleep(60)

    one = queue.add(job("a", run))
    queue.poll()
    wait_for(tmp_path / "began")
    assert queue._worker is not None
    os.kill(queue._worker._pid, signal.SIGTERM)
    wait(queue, one)
    assert one.failure == "the compiling process was stopped by SIGTERM"
    assert one.log is not None
    assert "time.sleep(60)" in one.log.read_text()
    one.log.unlink()


@pytest.mark.process
def test_ending_the_queue_ends_the_worker_and_what_it_started(queue: Queue, tmp_path: Path) -> None:
    def run() -> None:
        with background_sleep() as process:
            (tmp_path / "pid").write_text(str(process.pid))
            (tmp_path / "began").touch()
            process.wait()

    queue.add(job("a", run))
    queue.poll()
    wait_for(tmp_path / "began")
    assert queue._worker is not None
    pid, folder = queue._worker._pid, queue._worker._folder
    queue.end()
    assert not folder.exists()
    wait_for_end(pid)
    wait_for_end(int((tmp_path / "pid").read_text()))


def background_sleep() -> subprocess.Popen[bytes]:
    """Something that a job starts, in a group of its own as a compiler is."""
    code = "import time; time.sleep(60)"
    return subprocess.Popen([sys.executable, "-c", code], process_group=0)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_for_end(pid: int) -> None:
    """Until a process is gone."""
    until = time.monotonic() + 20
    while is_alive(pid):
        assert time.monotonic() < until, "a process is left"
        time.sleep(0.02)


@pytest.mark.process
def test_what_a_killed_worker_started_ends_within_two_seconds(queue: Queue, tmp_path: Path) -> None:
    def run() -> None:
        with background_sleep() as process:
            (tmp_path / "pid").write_text(str(process.pid))
            (tmp_path / "began").touch()
            process.wait()

    one = queue.add(job("a", run))
    queue.poll()
    wait_for(tmp_path / "began")
    assert queue._worker is not None
    os.kill(queue._worker._pid, signal.SIGKILL)
    began = time.monotonic()
    wait(queue, one)
    wait_for_end(int((tmp_path / "pid").read_text()))
    assert time.monotonic() - began < 2


@pytest.mark.process
def test_a_pipe_of_the_training_ends_when_the_training_closes_it(
    queue: Queue, tmp_path: Path
) -> None:
    def run() -> None:
        (tmp_path / "began").touch()
        time.sleep(60)

    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        queue.add(job("a", run))
        queue.poll()
        wait_for(tmp_path / "began")
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10)  # the worker has the other end no more


@pytest.mark.process
@pytest.mark.parametrize("times", [1, 2])
def test_a_worker_that_does_nothing_is_replaced_once(
    times: int, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pulse, "IDLE_S", 0.5)
    monkeypatch.setattr(worker_pulse, "LOOK_S", 0.2)

    def run() -> None:
        with open(tmp_path / "runs", "a") as file:
            file.write("x")
        if len((tmp_path / "runs").read_text()) <= times:
            time.sleep(60)

    one, other = queue.add(job("a", run)), queue.add(job("b", lambda: None))
    with pytest.warns(UserWarning, match=r"has done nothing.*Another one takes its place") as told:
        wait(queue, one, other)
    assert len(told) == times
    assert ("has done nothing for" in str(one.failure)) == (times == 2)
    assert other.failure is None
    assert len((tmp_path / "runs").read_text()) == 2


@pytest.mark.process
def test_a_worker_that_somebody_stops_is_replaced(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pulse, "STOPPED_S", 0.5)
    monkeypatch.setattr(worker_pulse, "LOOK_S", 0.1)

    def run() -> None:
        if not (tmp_path / "began").exists():
            (tmp_path / "began").touch()
            time.sleep(60)

    one = queue.add(job("a", run))
    queue.poll()
    wait_for(tmp_path / "began")
    assert queue._worker is not None
    stopped = queue._worker._pid
    os.kill(stopped, signal.SIGSTOP)
    with pytest.warns(UserWarning, match=rf"{stopped} was stopped \(SIGSTOP\)\. Another one"):
        wait(queue, one)
    assert one.failure is None
    assert not is_alive(stopped)


@pytest.mark.process
def test_a_worker_that_waits_for_a_lock_is_left_alone(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pulse, "IDLE_S", 0.5)
    monkeypatch.setattr(worker_pulse, "LOOK_S", 0.1)

    def run() -> None:
        (tmp_path / "began").touch()
        with open(tmp_path / "lock") as file:
            flock(file, LOCK_EX)

    with open(tmp_path / "lock", "w") as file:
        flock(file, LOCK_EX)
        one = queue.add(job("a", run))
        queue.poll()
        wait_for(tmp_path / "began")
        until = time.monotonic() + 2
        while time.monotonic() < until:
            queue.poll()
            time.sleep(0.02)
        assert not one.ended
    wait(queue, one)
    assert one.failure is None


@pytest.mark.process
def test_folders_that_dead_workers_left_are_removed_by_the_next(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, alive, other = (tmp_path / f"fulgurite-compile-{name}" for name in "abc")
    for folder in (dead, alive, other):
        folder.mkdir()
    (tmp_path / "elsewhere").mkdir()
    for folder in (dead, alive, tmp_path / "elsewhere"):
        (folder / "log.txt").touch()
    (tmp_path / "fulgurite-compile-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "fulgurite-compile-x.txt").touch()  # a log that is kept
    with open(alive / "log.txt") as file:
        flock(file, LOCK_EX)
        wait(queue, queue.add(job("a", lambda: None)))
    assert not dead.exists()
    left = {path.name.removeprefix("fulgurite-compile-") for path in tmp_path.iterdir()}
    assert left >= {"b", "c", "link", "x.txt", "elsewhere"}
    assert (tmp_path / "elsewhere" / "log.txt").exists()


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_worker_ends_with_its_parent(how: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "from fulgurite.backends.csx.compile.background.queue import Job, queue\n"
        "def run():\n"
        f"    pathlib.Path({str(tmp_path / 'part')!r}).write_text(str(os.getpid()))\n"
        f"    os.rename({str(tmp_path / 'part')!r}, {str(tmp_path / 'pid')!r})\n"
        "    time.sleep(60)\n"
        "queue.add(Job(name=('a',), run=run))\n"
        "queue.poll()\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, script], stderr=subprocess.DEVNULL, env=environment)
    wait_for(tmp_path / "pid")
    worker = int((tmp_path / "pid").read_text())
    parent.send_signal(how)
    parent.wait(60)
    wait_for_end(worker)
    assert not list(tmp_path.glob("fulgurite-compile-*"))


@pytest.mark.process
def test_a_forked_process_has_a_queue_of_its_own(queue: Queue, tmp_path: Path) -> None:
    def run() -> None:
        time.sleep(0.5)
        (tmp_path / "done").touch()

    one = background.queue.add(job("a", run))
    background.queue.poll()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if background.queue._worker is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    wait(background.queue, one)
    assert (tmp_path / "done").exists()


@pytest.mark.process
def test_no_worker_is_forked_while_another_thread_traces(queue: Queue) -> None:
    traces, done = threading.Event(), threading.Event()

    def trace() -> None:
        with trace_lock:
            traces.set()
            done.wait(60)

    thread = threading.Thread(target=trace)
    thread.start()
    assert traces.wait(60)
    one = queue.add(job("a", lambda: None))
    queue.poll()
    assert queue._worker is None
    done.set()
    thread.join()
    wait(queue, one)
    assert one.failure is None


def test_a_process_that_cannot_be_made_is_a_failure(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork() -> int:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    one = queue.add(job("a", lambda: None))
    queue.poll()
    assert one.ended
    assert one.failure == ("no process to compile in: [Errno 11] Resource temporarily unavailable")
