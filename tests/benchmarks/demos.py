"""Both demos beside stock Lightning, as one runs them: whole processes, seconds of the wall clock.

    python tests/benchmarks/demos.py [readme digits] [--rounds 5] [--busy 2] [--epochs 12]

``readme`` is the README's script, ``digits`` is ``fulgurite fit examples/digits.yaml`` (``make
fit``) beside examples/digits.py in stock Lightning. Three contenders take turns: stock, here with
an empty cache of programs, and here with what the run before left there. ``--busy`` adds processes
that compute all the time, on the same cores. Prints a Markdown table: the median, in brackets the
least and the most, and how many times as long stock took; then what the middle cold run printed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests/support"), str(ROOT / "tests/tools")]
from draw_speed import said  # noqa: E402
from pasted import save  # noqa: E402

STOCK, COLD, WARM = "stock", "cold", "warm"
STAND_IN = """
import runpy, sys, types
import lightning.pytorch as pl

def trainer(device, **options):
    return pl.Trainer(accelerator="cpu", **options)

class Record(pl.Callback):
    steps_per_s = 0.0

sys.modules["fulgurite"] = types.SimpleNamespace(Trainer=trainer, backend=None)
sys.modules["side_by_side"] = types.SimpleNamespace(Record=Record, compare=None)
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv.pop(0))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script, with a folder to import from, whose ``fulgurite.Trainer`` is stock Lightning's.
What examples/ has of ours is left out."""


def command(demo: str, contender: str, epochs: int) -> list[str]:
    """What runs it in a folder that holds the README's files."""
    python, stands_in = sys.executable, [sys.executable, "-c", STAND_IN]
    if demo == "readme":
        return [*stands_in, ".", "page.py"] if contender == STOCK else [python, "page.py"]
    if contender == STOCK:
        script = str(ROOT / "examples/digits.py")
        return [*stands_in, str(ROOT / "examples"), script, f"--epochs={epochs}", "--out=runs/it"]
    epochs_set = f"trainer.init.loop.num_epochs={epochs}"
    job = str(ROOT / "examples/digits.yaml")
    cli = [str(Path(python).with_name("fulgurite")), "fit", job, "--set", epochs_set]
    return [*cli, "--model_dir", f"runs/{contender}"]


def seconds(demo: str, contender: str, epochs: int, folder: str) -> tuple[float, str]:
    """How long one run takes, and what it printed."""
    environment = {**os.environ, "XDG_CACHE_HOME": f"{folder}/cache"}
    began = perf_counter()
    done = subprocess.run(
        command(demo, contender, epochs),
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    took = perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{demo}, {contender}: exit status {done.returncode}\n{done.stdout}")
    return took, done.stdout


def turns(demo: str, rounds: int, epochs: int) -> dict[str, list[tuple[float, str]]]:
    """All runs of a demo."""
    runs: dict[str, list[tuple[float, str]]] = {name: [] for name in (STOCK, COLD, WARM)}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            save("README", Path(folder))
            for name in runs:
                runs[name].append(seconds(demo, name, epochs, folder))
                print(f"{demo} {name:6}{runs[name][-1][0]:8.1f} s", file=sys.stderr, flush=True)
    return runs


def row(demo: str, runs: dict[str, list[tuple[float, str]]]) -> str:
    """A row of the table."""
    took = {name: [one for one, _ in found] for name, found in runs.items()}
    cells = []
    for name, found in took.items():
        cell = f"{median(found):.1f} ({min(found):.1f}-{max(found):.1f})"
        times = median(took[STOCK]) / median(found)
        cells.append(cell if name == STOCK else f"{cell}, {times:.1f}x")
    return f"| {demo} | {' | '.join(cells)} |"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("demos", nargs="*", default=["readme", "digits"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside it")
    parser.add_argument("--epochs", type=int, default=12, help="of the digits")
    options = parser.parse_args()
    beside = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.busy)
    ]
    try:
        found = {demo: turns(demo, options.rounds, options.epochs) for demo in options.demos}
    finally:
        for one in beside:
            one.kill()
    heads = (f"seconds, {options.busy} busy processes", STOCK, COLD, WARM)
    print(f"\n| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    print("\n".join(row(demo, runs) for demo, runs in found.items()))
    for demo, runs in found.items():
        _, printed = sorted(runs[COLD])[len(runs[COLD]) // 2]
        print(f"\n{demo}, the cold run in the middle:")
        print("\n".join(said(printed.replace("\r", "\n").splitlines())))


if __name__ == "__main__":
    main()
