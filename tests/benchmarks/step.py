"""Microseconds a training step: the same models in several trainers, side by side in one run.

    python tests/benchmarks/step.py [--sections mlp ...] [--steps 400] [--rounds 7] [--json FILE]

``models`` says what is trained, ``contenders`` and ``elsewhere`` by whom, ``turns`` how they take
turns on one core and one thread, ``fresh`` what compiling, a second start and memory cost,
``table`` and ``verdicts`` what comes of it. Contenders that are not installed are named. A run of
all sections writes step.json beside this file, a run of some only where ``--json`` says. The run
fails if a program of ours was not compiled.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CORES = os.sched_getaffinity(0)
# before torch and JAX are imported: both read these once
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_PLATFORMS": "cpu",
    "KERAS_BACKEND": "jax",
}
os.sched_setaffinity(0, {min(CORES)})

import contenders as torch_  # noqa: E402
import elsewhere  # noqa: E402
import fresh  # noqa: E402
import models  # noqa: E402
import table  # noqa: E402
import torch  # noqa: E402
import verdicts  # noqa: E402
from models import ACCURACY, LOSS, NOTHING, Model  # noqa: E402
from turns import Contender, one_arena, rounds  # noqa: E402

from fulgurite.backends.csx.compile.inductor.toolchain import cpu_name  # noqa: E402

PACKAGES = ("torch", "lightning", "torchmetrics", "accelerate", "jax", "optax", "keras")
FRESH = "fresh"


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the table: who, logging what, and the packages it needs beyond our own."""

    name: str
    make: Callable[[Model], Contender]
    logs: str = NOTHING
    needs: tuple[str, ...] = ()


EAGER = [
    Entry("plain eager loop", torch_.eager),
    Entry("plain eager loop, fused AdamW", partial(torch_.eager, fused=True)),
    Entry("torch.compile, fused AdamW", torch_.compiled),
    Entry("accelerate loop", torch_.accelerated, needs=("accelerate",)),
]
BARE = Entry("Fulgurite bare program", torch_.bare)
JAX = ("jax", "optax")
KERAS = ("keras", "jax")


def fits(*logs: str, **options: Any) -> list[Entry]:
    """Lightning's and our fit, with each logging."""
    return [
        Entry(f"{name}, {what}", partial(torch_.fit, ours=ours, logs=what, **options), what)
        for name, ours in (("Lightning", False), ("Fulgurite", True))
        for what in logs
    ]


def variants(name: str, make: Callable[..., Contender], schedule: models.Schedule) -> list[Entry]:
    """One contender as it is, with a schedule, and in narrower types; stock has no cbfloat16."""
    types = ["bf16-mixed"] if name == "Lightning" else ["bf16-mixed", "cb16-mixed"]
    options: dict[str, dict[str, Any]] = {
        "float32": {},
        "warm-up and cosine": {"schedule": schedule},
        **{precision: {"precision": precision} for precision in types},
    }
    return [Entry(f"{name}, {what}", partial(make, **given)) for what, given in options.items()]


SECTIONS: dict[str, tuple[Callable[[], Model], list[Entry]]] = {
    "mlp": (
        models.mlp,
        [
            *EAGER,
            Entry("JAX jit, optax", elsewhere.jax_step, needs=JAX),
            *(
                Entry(
                    f"Keras on JAX fit, steps_per_execution={n}",
                    partial(elsewhere.keras_fit, steps_per_execution=n),
                    ACCURACY,
                    KERAS,
                )
                for n in (1, 16)
            ),
            *fits(NOTHING, LOSS, ACCURACY),
            BARE,
        ],
    ),
    "mlp, shuffling loader": (
        models.mlp,
        [
            Entry("plain eager loop", torch_.eager_shuffling),
            *fits(NOTHING, feed=torch_.shuffling),
        ],
    ),
    "mlp, validation": (
        models.mlp,
        [
            Entry(
                f"{name}, {ACCURACY}",
                partial(torch_.validation, ours=ours, logs=ACCURACY),
                ACCURACY,
            )
            for name, ours in (("Lightning", False), ("Fulgurite", True))
        ],
    ),
    "mlp, precision and schedule": (
        models.mlp,
        [
            *variants("Lightning", partial(torch_.fit, ours=False), models.on_host),
            *variants("Fulgurite", partial(torch_.fit, ours=True), models.in_program),
            *variants("Fulgurite bare program", torch_.bare, models.in_program),
        ],
    ),
    "convnet": (models.convnet, [*EAGER, *fits(NOTHING, ACCURACY), BARE]),
    "gpt": (models.gpt, [*EAGER, *fits(NOTHING), BARE]),
}


def run_section(name: str, steps: int, count: int) -> dict[str, Any]:
    """The rounds of every contender of a section that is installed, and who is not."""
    make, entries = SECTIONS[name]
    model = make()
    missing = {
        entry.name: [package for package in entry.needs if find_spec(package) is None]
        for entry in entries
    }
    here = [entry for entry in entries if not missing[entry.name]]
    steps = max(2, steps // model.slower)
    times = rounds({entry.name: entry.make(model) for entry in here}, steps, count)
    everywhere = {entry.name for entry in entries}
    unwritten = [e.name for e in SECTIONS["mlp"][1] if e.needs and e.name not in everywhere]
    return {
        "steps": steps,
        "not_written": unwritten if model.name != "mlp" else [],
        "not_installed": {who: what for who, what in missing.items() if what},
        "rows": [
            {"name": e.name, "logs": e.logs, "rounds_us": [round(us, 1) for us in times[e.name]]}
            for e in here
        ],
    }


def environment() -> dict[str, Any]:
    """The machine, the versions and the commit."""
    installed = [package for package in PACKAGES if find_spec(package) is not None]
    git = ["git", "-C", str(Path(__file__).parent)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    return {
        "cpu": cpu_name(),
        "cores": len(CORES),
        "versions": {package: importlib.metadata.version(package) for package in installed},
        "commit": head.stdout.strip() + "+changes" * bool(changed.stdout.strip()),
    }


def main() -> None:
    """Measure, print tables and verdicts, write the JSON."""
    names = [*SECTIONS, FRESH]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sections", nargs="+", choices=names, default=names)
    parser.add_argument("--steps", type=int, default=400, help="of the MLP, in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where the figures go")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    one_arena()
    torch_.quiet()
    figures: dict[str, Any] = {"environment": environment(), "sections": {}}
    print(table.machine(figures))
    for name in arguments.sections:
        if name == FRESH:
            figures[FRESH] = fresh.measure(max(1, arguments.rounds // 3), CORES)
            figures[FRESH]["commit"] = figures["environment"]["commit"]
            print(table.fresh_starts(figures[FRESH]))
            continue
        section = run_section(name, arguments.steps, arguments.rounds)
        figures["sections"][name] = section
        print(table.section(name, section))
    print(verdicts.text(figures))
    whole = set(arguments.sections) == set(names)
    path = arguments.json or (Path(__file__).with_suffix(".json") if whole else None)
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")
        print(f"written: {path}")


if __name__ == "__main__":
    main()
