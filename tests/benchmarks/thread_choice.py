"""One thread, all of them, and the number that is found by measurement: the zoo and the demos.

    python tests/benchmarks/thread_choice.py [readme digits lstm ...] [--rounds 5] [--seconds 0.7]

Each model has a process of its own, in which three fits take turns: one with one thread, one with
all of torch's, one that chooses. Operation by operation first, then compiled. Prints milliseconds a
batch as a Markdown table, medians of the rounds; *chosen* has in brackets what it took by the
better one of the other two.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from stock import NAMES, made
from turns import FitInTurns, rounds

import fulgurite

EVERY = torch.get_num_threads()
CONTENDERS = {"one": 1, "all": EVERY, "chosen": None}
POLICIES = {
    "operation by operation": {"autogen_policy": "disabled"},
    "compiled": {"background": False},
}
WARM_UP = 40
"""Steps in which programs are traced and compiled, and threads chosen."""


def contender(name: str, number: int | None, options: dict[str, Any]) -> FitInTurns:
    """A fit that computes with so many threads."""

    def fit(turns: pl.Callback) -> None:
        pl.seed_everything(0, verbose=False)
        torch.set_num_threads(number or EVERY)  # of this Python thread
        module, loaders = made(name)
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = fulgurite.Trainer(
            backend=fulgurite.backend("CSX", audit=False, **options),
            max_epochs=10_000,
            callbacks=[turns],
            **dict.fromkeys(quiet, False),
        )
        trainer.fit(module, *loaders)

    return FitInTurns(fit)


def obeyed(number: int | None) -> AbstractContextManager[Any]:
    """Programs that are loaded meanwhile take torch's number, as with OMP_NUM_THREADS."""
    variables = {"OMP_NUM_THREADS": str(number)}
    return mock.patch.dict(os.environ, variables) if number else nullcontext()


def child(name: str, count: int, seconds: float) -> None:
    """Print the rows of a model."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for policy, options in POLICIES.items():
        runs, steps = {}, 0
        for who, number in CONTENDERS.items():
            runs[who] = contender(name, number, options)
            with obeyed(number):
                runs[who](WARM_UP)
            steps = steps or max(5, int(seconds * 1e6 / runs[who](5)))
        ms = {who: median(us) / 1e3 for who, us in rounds(runs, steps, count).items()}
        by_better = ms["chosen"] / min(ms["one"], ms["all"])
        cells = (f"{ms['one']:.2f}", f"{ms['all']:.2f}", f"{ms['chosen']:.2f} ({by_better:.2f})")
        print(f"| {name} | {policy} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=", ".join(NAMES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.7, help="of each turn, about")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.names[0], options.rounds, options.seconds)
    print(f"| model | | one thread | {EVERY} threads | chosen |\n| --- | --- | --- | --- | --- |")
    for name in options.names or NAMES:
        arguments = [f"--rounds={options.rounds}", f"--seconds={options.seconds}", "--child"]
        subprocess.run([sys.executable, __file__, name, *arguments], check=True)


if __name__ == "__main__":
    main()
