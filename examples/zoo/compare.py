"""The models of this folder in stock Lightning and as programs: the same losses, and what pays.

    python examples/zoo/compare.py [lstm vae ...] [--steps 30] [--seconds 10] [--clock wall]

Each runs in processes of its own, from the same seed, on one thread: in stock Lightning, again from
weights that differ in the last bit (so far apart are losses that rounding alone makes), as a
program that has to be compiled, and as one that is found compiled. Programs are waited for
(``background=False``). Prints a Markdown table:

    losses apart    largest relative difference of the first --steps losses
    compiled        seconds that compiling took
    first step      seconds from the start of the fit to the end of its first step
    step            milliseconds in steady state: the median of pieces of ten steps, after the first
                    --steps, for --seconds; the mean of both processes
    pays after      steps from which on the fit is ahead of stock Lightning's
"""

import argparse
import importlib
import itertools
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

import lightning.pytorch as pl
import torch

import fulgurite
import fulgurite.errors

ZOO = {
    "lstm": "Forecaster",
    "vae": "VAE",
    "unet": "UNet",
    "dqn": "DQN",
    "gpt2": "GPT2",
    "llama": "Llama",
    "bert": "Bert",
    "t5": "T5",
    "patchtst": "PatchTST",
    "vit": "ViT",
    "swin": "Swin",
    "convnext": "ConvNeXt",
    "resnet18": "ResNet18",
    "graph": "GraphNet",
    "gat": "GraphAttention",
}
"""The files of this folder, and the LightningModule in each."""

KINDS = ("stock", "moved", "cold", "warm")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
PIECE = 10  # steps


class Watch(pl.Callback):
    """The first losses, when the first step was done, and how long pieces of later ones took."""

    def __init__(self, steps, seconds, clock):
        self.steps, self.seconds, self.clock = steps, seconds, clock
        self.losses, self.times = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        done = trainer.global_step
        if done == 1:
            self.first = time.perf_counter()
        if done <= self.steps:
            self.losses.append(float(outputs["loss"]))
            self.measuring_since = time.perf_counter()
        elif (done - self.steps) % PIECE == 1:
            self.times.append(self.clock())
            measured_s = time.perf_counter() - self.measuring_since
            trainer.should_stop = len(self.times) > 3 and measured_s > self.seconds

    @property
    def step_ms(self):
        """Of a step in steady state."""
        pieces = [after - before for before, after in itertools.pairwise(self.times)]
        return statistics.median(pieces) / PIECE * 1000


def move(module):
    """Change every weight in about its last bit."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(1 + 1e-7 * torch.randn(weight.shape, generator=draw))


def fit(name, kind, steps, seconds, clock):
    """Train one model in this process; what was seen of it, as plain data."""
    warnings.simplefilter("ignore")
    for wrong in (fulgurite.FrozenValueWarning, fulgurite.errors.MiscompiledWarning):
        warnings.simplefilter("error", wrong)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    file = importlib.import_module(name)
    pl.seed_everything(0, verbose=False)
    module = getattr(file, ZOO[name])()
    loaders = [file.loader()] if hasattr(file, "loader") else []
    if kind == "moved":
        move(module)
    watch = Watch(steps, seconds, CLOCKS[clock])
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    options = {**quiet, "max_epochs": -1, "callbacks": [watch]}
    began = time.perf_counter()
    if kind in ("stock", "moved"):
        trainer = pl.Trainer(accelerator="cpu", **options)
    else:
        backend = fulgurite.backend("CSX", background=False)
        trainer = fulgurite.Trainer(backend=backend, **options)
    trainer.fit(module, *loaders)
    programs = getattr(trainer.strategy, "programs", [])
    return {
        "losses": watch.losses,
        "first_s": watch.first - began,
        "step_ms": watch.step_ms,
        "compiled_s": sum(program.cost.compiled_s for program in programs),
    }


def child(name, kind, options, cache):
    """The same in a process of its own, with a folder for what it compiles."""
    arguments = [f"--{key}={getattr(options, key)}" for key in ("steps", "seconds", "clock")]
    done = subprocess.run(
        [sys.executable, __file__, name, f"--kind={kind}", *arguments],
        env={"OMP_NUM_THREADS": "1", **os.environ, "XDG_CACHE_HOME": cache},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{name}, {kind}: ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def apart(losses, wanted):
    """The largest relative difference; NaN where a loss is."""
    a, b = torch.tensor(losses), torch.tensor(wanted)
    return ((a - b) / b).abs().max().item()


def pays_after(behind_s, stock_ms, ours_ms):
    """From which step on a fit is ahead that was late by some seconds after its first step."""
    if ours_ms >= stock_ms:
        return "never"
    return f"{max(1, 1 + math.ceil(behind_s / (stock_ms - ours_ms) * 1000)):,}"


def row(name, options):
    """A row of the table."""
    with tempfile.TemporaryDirectory() as cache:
        stock, moved, cold, warm = (child(name, kind, options, cache) for kind in KINDS)
    if not cold["compiled_s"] or warm["compiled_s"]:
        sys.exit(f"{name}: was not compiled once; its first steps would mean nothing")
    stock_ms = (stock["step_ms"] + moved["step_ms"]) / 2
    ours_ms = (cold["step_ms"] + warm["step_ms"]) / 2
    pays = [
        pays_after(one["first_s"] - stock["first_s"], stock_ms, ours_ms) for one in (cold, warm)
    ]
    return (
        f"| {name} | {max(apart(one['losses'], stock['losses']) for one in (cold, warm)):.0e}"
        f" | {apart(moved['losses'], stock['losses']):.0e} | {cold['compiled_s']:.0f} s"
        f" | {stock['first_s']:.2f} s | {cold['first_s']:.0f} s | {warm['first_s']:.1f} s"
        f" | {stock_ms:.2f} ms | {ours_ms:.2f} ms | {stock_ms / ours_ms:.2f} | {' | '.join(pays)} |"
    )


HEADS = (
    *("model", "losses apart", "by rounding alone", "compiled"),
    *("first step, stock", "cold", "warm", "step, stock", "Fulgurite", "times faster"),
    *("pays after, cold", "warm"),
)


def main():
    """Print the table, or what one fit gave."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=", ".join(ZOO))
    parser.add_argument("--steps", type=int, default=30, help="whose losses are compared")
    parser.add_argument("--seconds", type=float, default=10, help="of steps that are timed")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu on a busy machine")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.names) - set(ZOO):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(ZOO)}")
    if options.kind:
        one = fit(*options.names, options.kind, options.steps, options.seconds, options.clock)
        print(json.dumps(one))
        return
    print(f"| {' | '.join(HEADS)} |\n|{' --- |' * len(HEADS)}", flush=True)
    for name in options.names or ZOO:
        print(row(name, options), flush=True)


if __name__ == "__main__":
    main()
