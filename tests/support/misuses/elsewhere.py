"""What others say to the same programs: plain PyTorch, ``torch.compile(fullgraph=True)``, JAX."""

from __future__ import annotations

import multiprocessing
import signal
import textwrap
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from misuses.program import Misuse, batches, run

RUNS = "runs"
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["misuses.program"])
_JAX = """\
import jax
import jax.numpy as jnp

def step(weight, x, y):
    out = x @ weight
    loss = -jnp.take_along_axis(jax.nn.log_softmax(out), y[:, None], 1).mean()
{body}
    return loss

run = jax.jit(jax.grad(step))
"""


def plain_pytorch(row: Misuse, folder: Path) -> str:
    """The program in eager PyTorch on the CPU, under stock Lightning."""
    return first_line(run(row.bad, folder, static=False).error)


def torch_compile(row: Misuse, folder: Path) -> str:
    """The same with ``training_step`` under ``torch.compile(fullgraph=True)``.

    Backend "aot_eager" says the same about programs that Dynamo refuses as the default one does,
    sooner. In a process of its own, for torch 2.13 aborts it where a device is missing.
    """

    here, there = multiprocessing.Pipe(duplex=False)
    child = _SERVER.Process(target=_compile_and_tell, args=(row, folder, there))
    child.start()
    there.close()
    try:
        return str(here.recv())
    except EOFError:
        child.join()
        assert child.exitcode is not None
        return f"the process is aborted, {signal.Signals(-child.exitcode).name}"


def _compile_and_tell(row: Misuse, folder: Path, answer: Connection) -> None:
    answer.send(first_line(run(row.bad, folder, static=False, compiled=True).error))


def jax_jit(row: Misuse) -> str:
    """The same step written in JAX, its gradient under ``jax.jit``, on two batches."""
    if not row.jax:
        return "no counterpart"
    import jax

    names: dict[str, Any] = {}
    weight = jax.numpy.ones((8, 4))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(_JAX.format(body=textwrap.indent(textwrap.dedent(row.jax), " " * 4)), names)
            for x, y in batches(2):
                names["run"](weight, x.numpy(), y.numpy())
    except Exception as error:  # whatever JAX says is what the document shows
        return first_line(error)
    return RUNS


def first_line(error: BaseException | None) -> str:
    """An exception as one line, or that there was none."""
    if error is None:
        return RUNS
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    begins = lines[0].endswith(":") and len(lines) > 1
    text = f"{type(error).__name__}: {' '.join(lines[: 1 + begins])}"
    return text if len(text) <= 180 else f"{text[:177]}..."
