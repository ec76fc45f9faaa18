"""This checkout against another commit: microseconds a step, and seconds a trace, in turns.

    python tests/benchmarks/against.py COMMIT [--rounds 9] [--steps 400]

Both are built as wheels and imported by processes of their own, which take turns on one core and
one thread. A ratio is the median over rounds of this checkout's time by the other's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

CORES = os.sched_getaffinity(0)
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once
ROOT = Path(__file__).parents[2]
SUBJECTS = ("fit", "fit, one self.log", "fit, loss and accuracy", "trace of the GPT")


def contenders() -> dict[str, Callable[[int], float]]:
    """In a child: what is timed, by name; a trace's time is in seconds."""
    import contenders as torch_
    import lightning.pytorch as pl
    import models
    import torch
    from turns import one_arena

    import fulgurite

    torch.set_num_threads(1)
    one_arena()
    torch_.quiet()

    def traced(steps: int) -> float:
        backend = fulgurite.backend("CSX", autogen_policy="disabled")
        model = models.gpt()
        seconds: list[float] = []

        class Timed(pl.Callback):
            def on_train_batch_start(self, *args: object) -> None:
                seconds.append(-time.process_time())

            def on_train_batch_end(self, *args: object) -> None:
                seconds[0] += time.process_time()

        options = {"max_steps": 1, "callbacks": [Timed()], **torch_.QUIET}
        trainer = fulgurite.Trainer(backend=backend, **options)
        trainer.fit(model.module(), torch_.preloaded(model))
        return seconds[0]

    logs = dict(zip(SUBJECTS, (models.NOTHING, models.LOSS, models.ACCURACY), strict=False))
    found: dict[str, Callable[[int], float]] = {
        name: torch_.fit(models.mlp(), ours=True, logs=what) for name, what in logs.items()
    }
    return {**found, SUBJECTS[-1]: traced}


def answer() -> None:
    """In a child: run the contender that each line of the input names, and print its time."""
    known = contenders()
    print("ready", flush=True)
    for line in sys.stdin:
        name, steps = line.rsplit(" ", 1)
        print(known[name](int(steps)), flush=True)
    os._exit(0)  # fits wait for their next turn


def start(checkout: Path, folder: Path) -> subprocess.Popen[str]:
    """A child that imports a checkout as it would be installed."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder)]
    subprocess.run([*build, str(checkout)], check=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return subprocess.Popen(
        [sys.executable, __file__, "--child"],
        env={**os.environ, "PYTHONPATH": str(folder / "site")},
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(child: subprocess.Popen[str], name: str, steps: int) -> float:
    """Let a child take its turn."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{name} {steps}\n")
    child.stdin.flush()
    while True:
        line = child.stdout.readline()
        if not line:
            raise SystemExit(f"a process ended during {name!r}")
        try:
            return float(line)
        except ValueError:
            continue  # "ready", and what Lightning prints


def main() -> None:
    """Print a line for each subject."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(CORES)})
    with tempfile.TemporaryDirectory() as name:
        other = Path(name, "other")
        archive = subprocess.run(
            ["git", "archive", options.commit], cwd=ROOT, check=True, capture_output=True
        )
        other.mkdir()
        subprocess.run(["tar", "-x", "-C", str(other)], input=archive.stdout, check=True)
        pair = [start(root, Path(name, str(i))) for i, root in enumerate((ROOT, other))]
        for subject in SUBJECTS:
            times: list[tuple[float, ...]] = []
            for i in range(options.rounds + 1):
                order = (0, 1) if i % 2 else (1, 0)  # who is first may be slower
                turn = {side: ask(pair[side], subject, options.steps) for side in order}
                times.append((turn[0], turn[1]))
            ours, theirs = (statistics.median(side) for side in zip(*times[1:], strict=True))
            ratio = statistics.median(a / b for a, b in times[1:])
            print(f"{subject}: {ours:.4g}, {options.commit} {theirs:.4g}; {ratio:.3f}", flush=True)
        for child in pair:
            child.terminate()


if __name__ == "__main__":
    answer() if sys.argv[1:] == ["--child"] else main()
