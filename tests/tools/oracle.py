"""What fits on CSX do, to the bit, at another commit and here: which of it a change changed.

    python tests/tools/oracle.py COMMIT                 the tests of numbers that are in the core
    python tests/tools/oracle.py COMMIT -- -k ema       pytest's own options

Each ``harness.fit`` of a test leaves a line: digests of its losses, logged values, weights and
optimizer state, of the operations of its programs as they were traced, how many programs there
were, the warnings of the test, and the text of an error. What COMMIT does is kept in
``runs/oracle``, one file for each machine's kind and each selection of tests. A test whose text
differs is compared all the same; one that is at one of the two alone is left out. Fails where
something differs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

ROOT = Path(__file__).parents[2]
CHOSEN = ("--core", "-m", "numbers and not several")
ROOMS = {"trainer": "", "loops": "loops", "callbacks": "callbacks", "backends": "backends"}

# -- what is written: a plugin of pytest -----------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add where lines are written."""
    parser.addoption("--oracle", type=Path, metavar="FOLDER", help="write what fits did")


def pytest_configure(config: pytest.Config) -> None:
    """Let the harness write what fits did, where that is asked for."""
    import harness  # of the checkout whose tests run

    folder = config.getoption("--oracle")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(lines := Lines(folder / f"{os.getpid()}.jsonl"))
        harness.fit = lines.around(harness.fit)


class Lines:
    """The lines of one process.

    Args:
        file: receives them.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def add(self, test: str, **found: Any) -> None:
        """Write one."""
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"test": test, **found}) + "\n")

    def around(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        """``harness.fit``, that tells what it did."""

        def told(*args: Any, static: bool, **options: Any) -> Any:
            test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
            try:
                run = fit(*args, static=static, **options)
            except BaseException as error:
                if static:
                    self.add(test, error=f"{type(error).__name__}: {plain(str(error))}")
                raise
            if static and test:
                with contextlib.suppress(
                    AttributeError
                ):  # an optimizer without torch's ``__init__``
                    self.add(test, **of_run(run))
            return run

        return told

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, nodeid: str
    ) -> None:
        """Write a warning."""
        text = plain(str(warning_message.message))
        self.add(nodeid, warning=f"{warning_message.category.__name__}: {text}")


def of_run(run: Any) -> dict[str, Any]:
    """Digests of what a run left."""
    numbers = run.compared
    strategy = run.trainer.strategy
    stages = [getattr(strategy, name, None) for name in ("training", "evaluation")]
    graphs = [
        str(one.graph.runs.module.graph)
        for stage in stages
        if hasattr(stage, "executables")
        for one in stage.executables()
    ]
    return {
        "losses": digest(numbers.losses),
        "logged": digest([numbers.metrics, numbers.final]),
        "weights": digest(numbers.weights),
        "optimizers": digest(numbers.optimizers),
        "operations": [digest(plain(graph)) for graph in graphs],
        "programs": len(getattr(strategy, "programs", ())),
    }


def digest(value: Any) -> str:
    """Of numbers, tensors to the bit, and lists and dicts of them."""
    leaves, tree = pytree.tree_flatten(value)
    texts = [
        f"{one.dtype}{[*one.shape]}{one.detach().contiguous().flatten().view(torch.uint8).tolist()}"
        if isinstance(one, torch.Tensor) and one.numel()
        else repr(one)
        for one in leaves
    ]
    return hashlib.sha256("\n".join([plain(str(tree)), *texts]).encode()).hexdigest()[:16]


def plain(text: str) -> str:
    """A text without addresses, folders, lines and times, which may be others in each run."""
    text = re.sub(r"0x[0-9a-f]+", "0x", text)
    text = re.sub(r"\.py:\d+", ".py", text)
    text = re.sub(r"(/[\w.+-]+)+/", "/", text)
    return re.sub(r"\d+(\.\d+)? (s|ms|MiB|GiB)\b", "n", text)


# -- what is compared ------------------------------------------------------------------------------


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines of each test, warnings in any order."""
    found = defaultdict[str, list[dict[str, Any]]](list)
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            found[(one := json.loads(line)).pop("test")].append(one)
    return {
        test: sorted(lines, key=lambda line: line.get("warning", ""))
        for test, lines in found.items()
    }


def differences(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> Iterator[str]:
    """What the lines of one test differ in."""
    if len(before) != len(now):
        yield f"{len(now)} lines for {len(before)}"
        before, now = ([x for x in lines if "warning" not in x] for lines in (before, now))
    for a, b in zip(before, now, strict=False):
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                short = key in ("programs", "warning", "error")
                yield f"{key}: {b.get(key)!r}, was {a.get(key)!r}" if short else key


def run_tests(checkout: Path, folder: Path, options: list[str]) -> None:
    """Let the tests of a checkout write into a folder; the package is the checkout's."""
    with tempfile.TemporaryDirectory() as made:
        package = Path(made, "fulgurite")
        package.mkdir()
        for room, name in ROOMS.items():
            for path in [checkout / room] if name else [*(checkout / room).iterdir()]:
                (package / (name or path.name)).symlink_to(path)
        path = os.pathsep.join([made, str(Path(__file__).parent)])
        command = [sys.executable, "-m", "pytest", "-p", "oracle", f"--oracle={folder}", "-q"]
        command += ["-n", "2", "--tb=line", "-p", "no:cacheprovider", *options]
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=checkout, env=environment, check=False)


def main() -> int:
    """Return 1 where something differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("commit")
    parser.add_argument("options", nargs="*")
    given = parser.parse_args()
    options = given.options or list(CHOSEN)
    command = ["git", "rev-parse", "--short", given.commit]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    kind = digest([options, torch.__version__, torch.backends.cpu.get_cpu_capability()])
    before = ROOT / "runs" / "oracle" / f"{commit.strip()}-{kind}"
    with tempfile.TemporaryDirectory() as made:
        if not before.exists():
            tree, part = Path(made, "before"), Path(made, "lines")
            subprocess.run(
                ["git", "worktree", "add", "-q", "--detach", tree, commit.strip()],
                cwd=ROOT,
                check=True,
            )
            try:
                run_tests(tree, part, options)
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
            before.parent.mkdir(parents=True, exist_ok=True)
            part.rename(before)
        run_tests(ROOT, Path(made, "now"), options)
        old, new = read(before), read(Path(made, "now"))
    counts = Counter[str]()
    for test in sorted(old.keys() & new.keys()):
        found = [*differences(old[test], new[test])]
        counts.update({one.partition(":")[0] for one in found})
        if found:
            print(f"{test}: {'; '.join(dict.fromkeys(found))}")
    print(f"{len(old.keys() & new.keys())} tests compared; {dict(counts) or 'nothing'} differs")
    return bool(counts)


if __name__ == "__main__":
    sys.exit(main())
