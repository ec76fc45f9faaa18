"""Change the product in one small place at a time, and see whether the tests notice.

    python tests/tools/mutants.py -- --core    which of the mutants `make test` finds
    python tests/tools/mutants.py              the others: which the whole suite finds
    python tests/tools/mutants.py --only NAME -- --core PATH    one of them, by the tests of a file
    python tests/tools/mutants.py --write      the table in docs/mutants.md

What follows ``--`` are pytest's options: they select tests (not -n, -x or -p). The mutants are in
``tests/tools/mutants.toml``. First the selected tests run once in a copy of this checkout in which
all mutants' sites say who reaches them; that is done once for each selection (``--again`` does it
anew). Then each mutant is made in a copy, and the tests that reach it run, the cheapest and nearest
first, until one fails; by itself it must then fail once more, and not without the mutant. What was
found before is not tried again, so a run that was cut off goes on. Fails where a mutant is not
found.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import importlib
import json
import math
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

sys.path.append(str(Path(__file__).parents[1] / "support"))

from mutation import ROOT, Copy, Mutant, instrumented, mutants

WARM = ("torch", "torch._inductor", "lightning.pytorch", "torchmetrics", "jsonargparse", "sklearn")
"""What every test imports, and what mutants do not change: imported once, and forked."""

CHUNKS_S = (10.0, 60.0, math.inf)
"""CPU time of the tests that run before more are collected."""

LONGEST_S, TIMES = 300.0, 20.0
"""A test hangs that takes as many seconds, and as many times longer than without a mutant."""

PAGE = ROOT / "docs" / "mutants.md"
BEGIN, END = "<!-- mutants: tests/tools/mutants.py -->", "<!-- mutants end -->"
CORE = "--core"

# -- who reaches what ------------------------------------------------------------------------------


@dataclass(slots=True)
class Reach:
    """What is known of a selection of tests.

    Args:
        seconds: of CPU time that each test takes.
        failing: those that fail without a mutant.
        by: the tests that reach each mutant's site; not there for a site in no function, which is
            left to the tests of its room.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    failing: list[str] = field(default_factory=list)
    by: dict[str, list[str]] = field(default_factory=dict)


def probed(every: list[Mutant], folder: Path, options: list[str], workers: int) -> Reach:
    """Run the selected tests in a copy whose sites say who reaches them."""
    copy, notes = Copy(folder / "probe"), folder / "probe.jsonl"
    notes.unlink(missing_ok=True)
    loud: set[str] = set()
    for file in dict.fromkeys(one.file for one in every):
        here = [one for one in every if one.file == file]
        text, silent = instrumented((ROOT / file).read_text(encoding="utf-8"), here)
        copy.change(file, text)
        loud |= {one.name for one in here} - {*silent}
    several = ["-n", str(workers)] if workers > 1 else []
    command = [sys.executable, "-m", "pytest", *_arguments(copy), *several, *options]
    environment = {**copy.variables(), "MUTANTS_NOTES": str(notes)}
    status = subprocess.run(command, cwd=copy.checkout, env=environment, check=False).returncode
    if status not in (0, 1):
        raise SystemExit(f"pytest ended with status {status}")
    found = Reach(by={name: [] for name in loud})
    reached: dict[str, set[str]] = {name: set() for name in loud}
    for line in _notes(notes):
        if "test" in line:
            found.seconds[line["test"]] = line["seconds"]
        elif "failed" in line:
            found.failing.append(line["failed"])
        elif "reached" in line:
            test, _, phase = line["by"].rpartition(" ")
            # a fixture that is made once is of use to all tests of its file
            reached[line["reached"]].add(test.partition("::")[0] if phase == "(setup)" else test)
    for name, by in reached.items():
        found.by[name] = [
            test for test in found.seconds if test in by or test.partition("::")[0] in by
        ]
    return found


def _notes(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def _arguments(copy: Copy) -> list[str]:
    return ["-q", "-p", "reached_plugin", "-p", "no:cacheprovider", f"--basetemp={copy.folder}/tmp"]


def ordered(mutant: Mutant, reach: Reach, without: set[str]) -> list[str]:
    """The tests that may find a mutant: cheap ones first, of many files, those nearest to it."""
    known = reach.by.get(mutant.name)
    least = ROOM if known is None else NEAREST
    near = [test for test in reach.seconds if _nearness(mutant, test) >= least]
    wanted = [one for one in dict.fromkeys([*(known or ()), *near]) if one not in without]
    wanted.sort(key=lambda test: reach.seconds[test])
    seen: dict[str, int] = {}
    score = {}
    for test in wanted:
        file = test.partition("::")[0]
        seen[file] = seen.get(file, 0) + 1
        score[test] = (reach.seconds[test] + 0.05) * seen[file] / _nearness(mutant, test)
    return sorted(wanted, key=lambda test: score[test])


NEAREST, ROOM = 20.0, 5.0  # how near are the tests of a file, and those of a room


def _nearness(mutant: Mutant, test: str) -> float:
    """How likely a test is the one that was written for a mutant's line."""
    file, path = Path(mutant.file), Path(test.partition("::")[0])
    folder = path.parent.relative_to("tests")
    if path.stem.removeprefix("test_") == file.stem and folder in file.parents:
        return NEAREST
    return ROOM if folder in (file.parent, file.parent.parent) and folder.parts else 1.0


def first_of(tests: list[str], limit_s: float, reach: Reach) -> list[str]:
    """The first tests, as many as take so long."""
    so_far = accumulate(reach.seconds[test] for test in tests)
    return tests[: next((i for i, seconds in enumerate(so_far, 1) if seconds >= limit_s), None)]


# -- runs of tests in forked processes -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Tests that shall run until one fails, of a mutant or of the product as it is."""

    mutant: Mutant | None
    tests: list[str]
    longest_s: float  # of CPU time that one of them takes


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it: the tests that failed, and how the process ended where it did badly."""

    failed: list[str]
    ended: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """Which test found a mutant, None where none did; out of how many that may, and by what."""

    test: str | None
    tests: int
    how: str = ""


Trial = Generator[Run, Outcome, None]
"""Asks for runs, and is given what came of them."""

Note = Callable[[Mutant, Finding], None]


class Lane:
    """A copy in which one run after the other is made."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        self.copy, self._options = Copy(folder), options
        self._notes, self._log = folder / "notes.jsonl", folder / "log.txt"
        self._order = folder / "order.json"
        self.pid = 0

    def begin(self, run: Run) -> None:
        """Fork a process that makes a run."""
        self._run, self._moved = run, time.time()  # when a test began or ended last
        self._notes.unlink(missing_ok=True)
        self._order.write_text(json.dumps(run.tests))
        self.copy.restore()
        if run.mutant is not None:
            source = (ROOT / run.mutant.file).read_text(encoding="utf-8")
            self.copy.change(run.mutant.file, run.mutant.mutated(source))
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._be_pytest()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # whoever comes first
            os.setpgid(self.pid, self.pid)

    def _be_pytest(self) -> NoReturn:
        status: Any = 99
        try:
            os.setpgid(0, 0)
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
                os.dup2(file, number)
            os.chdir(self.copy.checkout)
            os.environ.update(self.copy.variables())
            os.environ.update(MUTANTS_NOTES=str(self._notes), MUTANTS_ORDER=str(self._order))
            others = [path for path in sys.path if not Path(path).is_relative_to(ROOT / "tests")]
            sys.path[:] = [str(self.copy.checkout), str(self.copy.installed), *others]
            sys.argv = ["pytest", "-x", *_arguments(self.copy), *self._options]
            # as the main module, for processes that a test spawns import it
            runpy.run_module("pytest", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status if isinstance(status, int) else 99)

    def ended(self) -> Outcome | None:
        """What came of the run; None where it goes on."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.pid, code = 0, os.waitstatus_to_exitcode(status)
            return self._outcome(code)
        with contextlib.suppress(FileNotFoundError):  # no test has begun
            self._moved = max(self._moved, self._notes.stat().st_mtime)
        if time.time() - self._moved > LONGEST_S + TIMES * self._run.longest_s:
            self.kill()
            return Outcome([self._last()], "hangs")
        return None

    def _outcome(self, code: int) -> Outcome:
        failed = [line["failed"] for line in _notes(self._notes) if "failed" in line]
        if failed or code in (0, 5):  # all passed; none was there to run
            return Outcome(failed)
        if not self._last():
            raise SystemExit(f"pytest ended with status {code}:\n{self._log.read_text()[-3000:]}")
        return Outcome([self._last()], f"ends the process ({code})")

    def _last(self) -> str:
        """The test that ran last."""
        return [*(line["begun"] for line in _notes(self._notes) if "begun" in line), ""][-2:][0]

    def kill(self) -> None:
        """End the process, and what it started."""
        if self.pid:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


def drive(trials: Iterable[Trial], lanes: list[Lane]) -> None:
    """Let trials have their runs, as many at a time as there are lanes."""
    waiting, running = iter(trials), dict[Lane, Trial]()
    try:
        while True:
            for lane in lanes:
                while lane not in running and (trial := next(waiting, None)) is not None:
                    _go_on(trial, None, lane, running)
            if not running:
                return
            for lane, trial in list(running.items()):
                if (outcome := lane.ended()) is not None:
                    _go_on(trial, outcome, lane, running)
            time.sleep(0.05)
    finally:
        for lane in lanes:
            lane.kill()


def _go_on(trial: Trial, outcome: Outcome | None, lane: Lane, running: dict[Lane, Trial]) -> None:
    running.pop(lane, None)
    try:
        run = next(trial) if outcome is None else trial.send(outcome)
    except StopIteration:
        return
    lane.begin(run)
    running[lane] = trial


def tried(mutant: Mutant, reach: Reach, broken: set[str], note: Note) -> Trial:
    """Let the tests that may find a mutant run, until one fails with it twice, and not without."""
    rest, began = ordered(mutant, reach, broken), time.monotonic()
    found = Finding(None, len(rest))
    for limit in CHUNKS_S:
        while rest and found.test is None:
            some = first_of(rest, limit, reach)
            outcome = yield Run(mutant, some, max(reach.seconds[test] for test in some))
            if not outcome.failed:
                rest = rest[len(some) :]
                break
            test = outcome.failed[0]
            longest_s = reach.seconds.get(test, 0.0)
            again = yield Run(mutant, [test], longest_s)
            without = (yield Run(None, [test], longest_s)) if again.failed else again
            if again.failed and not without.failed:
                found = Finding(test, found.tests, again.ended)
                break
            said = "fails without a mutant too" if without.failed else "failed once, and no more"
            print(f"         {test} {said}", flush=True)
            broken |= {*without.failed}
            rest = rest[rest.index(test) + 1 :] if test in rest else rest[len(some) :]
    told = f"{found.test} {found.how}".strip() if found.test else "NOT FOUND"
    print(f"{time.monotonic() - began:6.0f} s  {mutant.name}: {told}", flush=True)
    note(mutant, found)


# -- what was found --------------------------------------------------------------------------------


def digest(mutant: Mutant) -> str:
    """What a finding is of: the change, and not the words about it."""
    change = "\0".join([mutant.file, mutant.within, mutant.old, mutant.new])
    return hashlib.sha256(change.encode()).hexdigest()[:16]


class Results:
    """What was found, by mutant and selection; a file in the tool's folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "results.json"
        self._rows: list[dict[str, Any]] = []
        if self._path.exists():
            self._rows = json.loads(self._path.read_text(encoding="utf-8"))

    def add(self, mutant: Mutant, options: list[str], finding: Finding) -> None:
        """Note a finding, in place of the one that there was."""
        key = {"mutant": digest(mutant), "name": mutant.name, "options": options}
        self._rows = [row for row in self._rows if not key.items() <= row.items()]
        self._rows.append({**key, **asdict(finding)})
        self._path.write_text(json.dumps(self._rows, indent=1), encoding="utf-8")

    def of(self, mutant: Mutant, core: bool = False) -> list[Finding]:
        """All findings of a mutant; with ``core`` those of the tests of `make test` alone."""
        return [
            Finding(row["test"], row["tests"], row["how"])
            for row in self._rows
            if row["mutant"] == digest(mutant) and (not core or CORE in row["options"])
        ]

    def missed_by(self, mutant: Mutant) -> str:
        """All of which tests were tried in vain, as the table calls them; empty: of neither."""
        selections = [row["options"] for row in self._rows if row["mutant"] == digest(mutant)]
        known = {"`make test-all`": [], "`make test`": [CORE]}
        return next((name for name, options in known.items() if options in selections), "")


def table(every: list[Mutant], results: Results) -> str:
    """The mutants and who finds them, as Markdown."""
    rows, core, whole, untried = [], 0, 0, 0
    for one in every:
        by_core = [finding for finding in results.of(one, core=True) if finding.test]
        by_all = [finding for finding in results.of(one) if finding.test]
        core, whole = core + bool(by_core), whole + bool(by_all)
        missed = results.missed_by(one)
        untried += not by_all and not missed
        test, by = ("**nothing**", missed) if missed else ("not tried", "")
        for finding in (by_core or by_all)[:1]:
            assert finding.test is not None
            test = f"`{_short(finding.test)}`" + f", which {finding.how}" * bool(finding.how)
            by = "`make test`" if by_core else "`make test-all`"
        where = f"`{Path(one.file).parent}`"
        rows.append(f"| {one.name} | {where} | {one.breaks} | {test} | {by} |")
    said = f"Of {len(every)} mutants `make test` finds {core}, `make test-all` {whole}"
    said += f"; {untried} were not tried by all tests" * bool(untried)
    head = "| mutant | in | what goes wrong | found by | of |\n|---|---|---|---|---|"
    return f"{said}.\n\n{head}\n" + "\n".join(rows)


def _short(test: str) -> str:
    """A test's file and name, without its folder and its case."""
    file, _, name = test.partition("::")
    return f"{Path(file).stem}: {name.partition('[')[0]}" if name else Path(file).stem


def write(text: str) -> None:
    """Put the table into its page."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants, found or not")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--again", action="store_true", help="ask anew, try again what was found")
    parser.add_argument("--write", action="store_true", help="write the table, and do no more")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "mutants")
    parser.add_argument("options", nargs="*", help="pytest's, after --")
    given = parser.parse_args()
    folder, every = given.folder.resolve(), mutants()
    folder.mkdir(parents=True, exist_ok=True)
    results = Results(folder)
    if given.write:
        write(table(every, results))
        return 0
    unknown = {*(given.only or ())} - {one.name for one in every}
    if unknown:
        parser.error(f"no mutant is named {', '.join(sorted(unknown))}")
    for name in ("TORCHINDUCTOR_COMPILE_THREADS", "OMP_NUM_THREADS"):  # as in tests/conftest.py
        os.environ.setdefault(name, "1")  # which torch reads when it is imported
    reach = _reach(every, folder, given.options, given.workers, given.again)
    wanted = [one for one in every if not given.only or one.name in given.only]
    if not given.only and not given.again:
        core = CORE in given.options
        wanted = [one for one in wanted if not any(old.test for old in results.of(one, core))]
    for module in WARM:
        importlib.import_module(module)
    assert "fulgurite" not in sys.modules
    gc.freeze()
    lanes = [Lane(folder / f"copy-{i}", given.options) for i in range(given.workers)]
    found: dict[str, Finding] = {}

    def note(mutant: Mutant, finding: Finding) -> None:
        found[mutant.name] = finding
        results.add(mutant, given.options, finding)

    broken = {*reach.failing}
    drive((tried(one, reach, broken, note) for one in wanted), lanes)
    missed = [one.name for one in wanted if found[one.name].test is None]
    print(f"{len(wanted) - len(missed)} of {len(wanted)} found; not: {', '.join(missed) or 'none'}")
    return int(bool(missed))


def _reach(
    every: list[Mutant], folder: Path, options: list[str], workers: int, again: bool
) -> Reach:
    """Who reaches what: asked, or as it was found for these options before."""
    name = hashlib.sha256(shlex.join(options).encode()).hexdigest()[:16]
    path = folder / f"reach-{name}.json"
    if not again and path.exists():
        print(f"who reaches what: {path}", flush=True)
        return Reach(**json.loads(path.read_text(encoding="utf-8")))
    reach = probed(every, folder, options, workers)
    path.write_text(json.dumps(asdict(reach)), encoding="utf-8")
    print(f"{len(reach.seconds)} tests, {sum(reach.seconds.values()):.0f} s of CPU time")
    return reach


if __name__ == "__main__":
    sys.exit(main())
