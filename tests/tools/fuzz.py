"""Random small modules, trained three steps on CSX and in stock Lightning, or misused.

    python tests/tools/fuzz.py --seed 123      one of them: what it is, and what became of it
    python tests/tools/fuzz.py --count 500     many, and a summary
    python tests/tools/fuzz.py --compiled ...  the same, compiled

Two thirds are proper modules, whose losses must equal stock's; a third does something in its step
that a static program cannot, and must end with that misuse's error at the line that does it.
Anything else (another exception, other numbers, a minute without an end) is a finding.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import logging
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from fulgurite import TraceError

sys.path.append(str(Path(__file__).parents[1] / "support"))
from fuzz_parts import (
    CLASSES,
    LAYERS,
    LOSSES,
    MISUSES,
    OPTIMIZERS,
    ROWS,
    SCHEDULERS,
    STARTS,
    Shape,
)
from harness import defaults, fit

STEPS = 3
TOLERANCE = 1e-4
"""Relative, of losses. The program decomposes normalizations and losses, and rounds in other places
than eager's kernels: 1e-6 a step; optimizers that divide by the root of a small gradient, and rates
of 0.05 on unscaled inputs, carry that a hundred times further in three steps."""
LAST_BIT = 2.0**-23
LIMIT_S = {"disabled": 60, "default": 600}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a module is made of, all by name."""

    seed: int
    start: str
    layers: tuple[str, ...]
    loss: str
    optimizer: str
    misuse: str
    scheduler: str
    clip: str
    accumulate: int
    manual: bool
    logs: tuple[str, ...]
    metric: bool

    def __str__(self) -> str:
        parts = [self.start, *self.layers, self.loss, self.optimizer]
        if self.accumulate > 1:
            parts.append(f"accumulate {self.accumulate}")
        options = (self.scheduler, self.clip, *self.logs, "metric" * self.metric)
        parts += [option for option in options if option]
        return " > ".join([*parts, *(["manual"] * self.manual), self.misuse or "proper"])


def recipe(seed: int) -> Recipe:
    """The recipe of a seed."""
    draw = random.Random(seed)
    manual = draw.random() < 0.3
    start = draw.choice(list(STARTS))
    return Recipe(
        seed=seed,
        start=start,
        layers=layers(start, seed, draw),
        loss=draw.choice(list(LOSSES)),
        optimizer=draw.choice(list(OPTIMIZERS)),
        misuse=draw.choice(list(MISUSES)) if seed % 3 == 2 else "",
        scheduler=draw.choice(["", *SCHEDULERS]),
        clip=draw.choice(("", "norm", "value")),
        accumulate=1 if manual else draw.choice((1, 1, 2)),
        manual=manual,
        logs=tuple(name for name in ("on_step", "on_epoch", "prog_bar") if draw.random() < 0.3),
        metric=draw.random() < 0.3,
    )


def layers(start: str, seed: int, draw: random.Random) -> tuple[str, ...]:
    """Names of one to five layers, each of which takes what the one before gives."""
    count = draw.randint(1, 5)
    make_batch, make_first = STARTS[start]
    x = make_first()(make_batch())
    names: list[str] = []
    while len(names) < count:
        shape: Shape = tuple(x.shape)
        fitting = [
            n for n, one in LAYERS.items() if one.rank in (0, len(shape)) and one.fits(shape)
        ]
        name = draw.choice(fitting)
        x = LAYERS[name].make(shape, random.Random(seed))(x)
        names.append(name)
    return tuple(names)


class Part(nn.Module):
    """The layers of a recipe: a batch of its start -> logits [ROWS, CLASSES]"""

    def __init__(self, made_of: Recipe) -> None:
        super().__init__()
        self.recipe = made_of
        make_batch, make_first = STARTS[made_of.start]
        self.net = nn.Sequential(make_first())
        x = self.net(make_batch())
        for name in made_of.layers:
            layer = LAYERS[name].make(tuple(x.shape), random.Random(made_of.seed))
            x = layer(x)
            self.net.append(layer)
        self.head = nn.Linear(x[0].numel(), CLASSES)

    def forward(self, x: Any, change: Callable[[Tensor], Tensor]) -> Tensor:
        return self.head(change(self.net(x).flatten(1)))  # type: ignore[no-any-return]


class Fuzzed(pl.LightningModule):
    """The modules of recipes, side by side; how they are trained is said by the first."""

    def __init__(self, recipes: Sequence[Recipe]) -> None:
        super().__init__()
        self.recipe = recipes[0]
        self.parts = nn.ModuleList(Part(made_of) for made_of in recipes)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.window: list[Any] = []
        self.automatic_optimization = not self.recipe.manual

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        every = [part(x, self.change) for part, (x, _) in zip(self.parts, batch, strict=True)]
        losses = [
            LOSSES[part.recipe.loss](logits, y)  # type: ignore[index, union-attr]
            for part, logits, (_, y) in zip(self.parts, every, batch, strict=True)
        ]
        loss = torch.stack(losses).sum()
        if self.recipe.logs:
            self.log("loss", loss, **dict.fromkeys(self.recipe.logs, True))
        for number, one in enumerate(losses[1:]):
            self.log(f"loss of {number + 1}", one)
        if self.recipe.metric:
            self.accuracy(every[0], batch[0][1])
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        if self.recipe.manual:
            self.update(loss)
        return loss

    def change(self, hidden: Tensor) -> Tensor:
        """What a misuse does to the last hidden layer."""
        misuse = self.recipe.misuse
        return MISUSES[misuse][1](self, hidden) if misuse else hidden

    def update(self, loss: Tensor) -> None:
        """A manual step."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        if self.recipe.clip:
            self.clip_gradients(optimizer, 0.5, self.recipe.clip)
        optimizer.step()
        if self.recipe.scheduler:
            self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        kind, options = OPTIMIZERS[self.recipe.optimizer]
        optimizer = kind(self.parameters(), **{"lr": 1e-2, **options})
        if not self.recipe.scheduler:
            return optimizer
        scheduler = SCHEDULERS[self.recipe.scheduler](optimizer)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def batches(made_of: Recipe) -> list[Any]:
    """``STEPS`` batches."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(made_of.seed)
        make = STARTS[made_of.start][0]
        return [(make(), torch.randint(0, CLASSES, (ROWS,))) for _ in range(STEPS)]


def trained(
    recipes: Sequence[Recipe], static: bool, moved: float = 0.0
) -> tuple[list[float], list[dict[str, float]]]:
    """Losses and logged values of each step, from weights that are ``moved`` by a part of them."""

    def make() -> Fuzzed:
        module = Fuzzed(recipes)
        with torch.no_grad():
            for p in module.parameters() if moved else ():
                p.mul_(1 + moved)
        return module

    first = recipes[0]
    options: dict[str, Any] = {"backend": {"audit": True}}
    if not first.manual:
        options["accumulate_grad_batches"] = first.accumulate
        if first.clip:
            options |= {"gradient_clip_val": 0.5, "gradient_clip_algorithm": first.clip}
    steps: Any = [list(step) for step in zip(*map(batches, recipes), strict=True)]
    data = DataLoader(steps, batch_size=None)
    run = fit(make, lambda: (data,), static=static, **options)
    return run.losses, run.metrics


def finding(*seeds: int) -> str | None:
    """What is wrong with the run of a seed, or of several at once; None if nothing is."""
    recipes = [recipe(seed) for seed in seeds]
    try:
        with time_limit():
            return misused(recipes[0]) if recipes[0].misuse else compared(recipes)
    except Exception:  # whatever it is, it is the finding
        return "".join(traceback.format_exc(limit=-4))


def misused(made_of: Recipe) -> str | None:
    """What is wrong with the error that a misuse gave."""
    wanted = MISUSES[made_of.misuse][0]
    try:
        trained([made_of], static=True)
    except TraceError as error:
        if not isinstance(error, wanted):
            return f"{type(error).__name__} instead of {wanted.__name__}: {error}"
        if error.line is None or not error.line.file.endswith(("fuzz_parts.py", "fuzz.py")):
            return f"{wanted.__name__} without the line: {error}"
        return None
    return f"no {wanted.__name__}"


def compared(recipes: Sequence[Recipe]) -> str | None:
    """How a run differs from stock's, by more than stock's from one of weights in the last bit."""
    ours, stock = trained(recipes, static=True), trained(recipes, static=False)
    if len(ours[0]) != STEPS:
        return f"{len(ours[0])} losses"
    right, slack = numbers(stock), [TOLERANCE * max(abs(one), 1e-3) for one in numbers(stock)]
    if _is_near(numbers(ours), right, slack):
        return None
    for moved in (LAST_BIT, -LAST_BIT):  # RReLU draws for numbers below zero alone, for one
        others = numbers(trained(recipes, static=False, moved=moved))
        slack = [max(a, 2 * abs(b - c)) for a, b, c in zip(slack, others, right, strict=True)]
    return None if _is_near(numbers(ours), right, slack) else f"{ours} instead of {stock}"


def _is_near(found: list[float], right: list[float], slack: list[float]) -> bool:
    return all(a == b or abs(a - b) <= most for a, b, most in zip(found, right, slack, strict=True))


def numbers(run: tuple[list[float], list[dict[str, float]]]) -> list[float]:
    """Every number of a run, in order; NaN, which equals nothing, as text."""
    losses, logged = run
    every = [*losses, *(value for step in logged for _, value in sorted(step.items()))]
    return [float("inf") if value != value else value for value in every]


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Raise in what does not end."""

    limit_s = LIMIT_S[defaults["autogen_policy"]]

    def late(*_: Any) -> None:
        raise TimeoutError(f"{limit_s} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def report(seeds: list[int], say: Callable[[str], None] = print) -> list[int]:
    """Run seeds; say what is found, and how to repeat it. Returns the seeds of findings."""
    began, found = time.perf_counter(), []
    layers_seen: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        layers_seen.update(recipe(seed).layers)
        wrong = finding(seed)
        if len(seeds) == 1 or wrong is not None:
            say(str(recipe(seed)))
        if wrong is not None:
            found.append(seed)
            say(f"{wrong}\n  repeat: python tests/tools/fuzz.py --seed {seed}\n")
    misuses = sum(bool(recipe(seed).misuse) for seed in seeds)
    say(
        f"{len(seeds)} modules ({misuses} misused), {len(layers_seen)} kinds of layers,"
        f" {time.perf_counter() - began:.0f} s: {len(found)} findings {found or ''}"
    )
    return found


def main() -> int:
    """Return 1 if anything was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="the seed, or the first of them")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--compiled", action="store_true")
    given = parser.parse_args()
    if given.compiled:
        defaults["autogen_policy"] = "default"
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # other people's; the suite runs with warnings as errors
    return bool(report(list(range(given.seed, given.seed + given.count))))


if __name__ == "__main__":
    sys.exit(main())
