"""Draw the README's picture, steps a second over a run, and write what was measured and printed.

    python tests/tools/draw_speed.py [--rounds 3] [--cores 2]     measures, draws, writes
    python tests/tools/draw_speed.py --draw                       draws and writes what was measured

Runs the README's script in stock Lightning, here with an empty cache of programs, and here again
with what the run before has left in the cache. Each run is a process of its own with one thread, on
the same cores; the three take turns. Of each one the round in the middle is shown, by its seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch

import fulgurite
from fulgurite.backends.csx.compile.inductor.toolchain import cpu_name

sys.path.append(str(Path(__file__).parents[1] / "support"))
from pasted import ROOT, save

FIGURES = ROOT / "tests/benchmarks/run.json"
README = ROOT / "README.md"
SHOWN_LINES = 7
"""Of those that a run prints."""
STOCK, FIRST, AGAIN = "Lightning", "Fulgurite, first run", "Fulgurite, next run"
CONTENDERS = (STOCK, FIRST, AGAIN)
STYLES = {  # page's color, text's, and the contenders'
    "light": ("white", "#1f2328", ("#818b98", "#bf8700", "#0969da")),
    "dark": ("#0d1117", "#e6edf3", ("#9198a1", "#d29922", "#58a6ff")),
}


class Epochs(pl.Callback):
    """Seconds from the making of the Trainer to the end of each epoch.

    Asked once an epoch and not once a step, for a hook after each step costs time of its own.
    """

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.ends_s: list[float] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.ends_s.append(time.perf_counter() - self.began_s)


def run(contender: str) -> None:
    """Run ``page.py`` of the working directory, and print its steps and seconds as JSON."""
    ours, made = fulgurite.Trainer, []

    def make(device: str, **options: Any) -> pl.Trainer:
        options["callbacks"] = [Epochs()]
        stock = contender == STOCK
        made.append(
            pl.Trainer(accelerator="cpu", **options) if stock else ours(device=device, **options)
        )
        return made[0]

    fulgurite.Trainer = make  # type: ignore[assignment,misc]
    sys.path.insert(0, "")
    runpy.run_path("page.py", run_name="__main__")
    [trainer] = made
    [epochs] = [one for one in trainer.callbacks if isinstance(one, Epochs)]
    print(json.dumps({"steps": trainer.global_step, "ends_s": epochs.ends_s}))


def measure(rounds: int, cores: int) -> dict[str, Any]:
    """What each contender took in each round, and where."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            save("README", Path(folder))
            for name in CONTENDERS:
                runs[name].append(_in_a_process(name, folder))
                print(f"{name:22}{runs[name][-1]['ends_s'][-1]:8.2f} s", flush=True)
    return {"environment": environment(), "runs": runs}


def environment() -> dict[str, Any]:
    """Where and with what it is measured."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {"torch": torch.__version__, "lightning": lightning.__version__},
        "commit": subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip(),
    }


def _in_a_process(contender: str, folder: str) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": f"{folder}/cache"}
    command = [sys.executable, __file__, "--run", contender]
    done = subprocess.run(command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE)
    done.check_returncode()
    *lines, measured = done.stdout.replace("\r", "\n").splitlines()
    return {**json.loads(measured), "said": list(said(lines))}


def said(lines: list[str]) -> Iterator[str]:
    """Of what a run prints the lines of ours, and below the last one its table."""
    ours = False
    for line in lines:
        ours = line.startswith("CSX") or (ours and line.startswith("  "))
        if ours:
            yield line.rstrip()


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run in the middle by its seconds."""
    return sorted(runs, key=lambda one: one["ends_s"][-1])[len(runs) // 2]


def rates(one: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Seconds at which each epoch began and ended, and the steps a second in between."""
    edges = [0.0, *one["ends_s"]]
    steps = one["steps"] / len(one["ends_s"])
    spans = list(itertools.pairwise(edges))
    seconds = [edge for span in spans for edge in span]
    return seconds, [steps / (end - begin) for begin, end in spans for _ in (begin, end)]


def draw(figures: dict[str, Any]) -> None:
    """Write the picture, light and dark."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for style, (page, text, colors) in STYLES.items():
        figure, axes = pyplot.subplots(figsize=(7.5, 3.2), layout="constrained", facecolor=page)
        for name, color in zip(CONTENDERS, colors, strict=True):
            _line(axes, name, middle(figures["runs"][name]), color)
        _frame(axes, page, text)
        figure.savefig(ROOT / f"docs/speed_{style}.png", dpi=130, metadata={"Software": None})
        pyplot.close(figure)


def _line(axes: Any, name: str, one: dict[str, Any], color: str) -> None:
    """A run, with its name and its seconds at its end."""
    seconds, steps_per_s = rates(one)
    end = seconds[-1], steps_per_s[-1]
    axes.plot(seconds, steps_per_s, color=color, linewidth=1.8)
    axes.plot(*end, "o", color=color, markersize=4)
    label = f"{name}: {seconds[-1]:.1f} s"
    beside = {"xytext": (6, 4), "textcoords": "offset points", "annotation_clip": False}
    axes.annotate(label, end, color=color, fontsize=9, **beside)


def _frame(axes: Any, page: str, text: str) -> None:
    """Colors and names of the axes, and room for the names of the runs."""
    axes.set_facecolor(page)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 1.3 * max(line.get_xdata()[-1] for line in axes.lines))
    axes.set_xlabel("seconds since the start of the run", color=text)
    axes.set_ylabel("steps a second", color=text)
    axes.tick_params(colors=text)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(text)


def caption(figures: dict[str, Any]) -> str:
    """The line below the picture: what was run, what it took, and where."""
    runs = {name: middle(figures["runs"][name]) for name in CONTENDERS}
    took = {name: f"{one['ends_s'][-1]:.1f} s" for name, one in runs.items()}
    where = figures["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    rounds = len(figures["runs"][STOCK])
    return (
        f"The {runs[STOCK]['steps']:,} steps of the script below took {took[STOCK]} in stock"
        f" Lightning, {took[FIRST]} here, and {took[AGAIN]} the next time.\n"
        f"{where['cpu']}, {where['cores']} cores, one thread; the middle of {rounds} rounds in"
        f" turns; {versions}; commit {where['commit']}.\n"
    )


def screen(figures: dict[str, Any]) -> str:
    """What the first run here printed, as the README shows it."""
    lines = middle(figures["runs"][FIRST])["said"][:SHOWN_LINES]
    return "\n" + "".join(f"    {line}\n" for line in lines) + "\n"


PARTS = {"run": caption, "screen": screen}


def with_parts(text: str, figures: dict[str, Any]) -> str:
    """The README with what was measured in its places."""
    for name, part in PARTS.items():
        before, begin, rest = text.partition(f"<!-- {name}: tests/tools/draw_speed.py -->\n")
        _, end, after = rest.partition(f"<!-- {name} ends -->")
        if not end:
            raise SystemExit(f"README.md has no place for {name!r}: a comment and one at its end.")
        text = before + begin + part(figures) + end + after
    return text


def main() -> None:
    """Measure, draw, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2, help="the step's, and the compiler's")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--run", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run(options.run)
        return
    if not options.draw:
        FIGURES.write_text(json.dumps(measure(options.rounds, options.cores)) + "\n")
    figures = json.loads(FIGURES.read_text())
    draw(figures)
    README.write_text(with_parts(README.read_text(encoding="utf-8"), figures), encoding="utf-8")
    print(caption(figures))


if __name__ == "__main__":
    main()
