"""A compiled program as files.

program.py     kernels and matrix products in their order, as a function of tensors
constants.pt   its constants, where it has any
program.json   its steps, and which kernel is in which module
kernels_0.so   kernels, as functions of tensors
kernels.json   what runs the graph (see ``kernels``)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fulgurite.backends.csx.compile.fabric import Call
from fulgurite.backends.csx.compile.inductor import kernel_modules
from fulgurite.backends.csx.compile.inductor.earlier_code import EarlierCode
from fulgurite.backends.csx.compile.programs import steps
from fulgurite.backends.csx.compile.programs.kernels import INDEX, PROGRAM
from fulgurite.backends.csx.compile.programs.linking import Linked
from fulgurite.backends.csx.compile.programs.static_memory import with_static_memory
from fulgurite.backends.csx.compile.programs.uses import BEGIN, with_uses
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.streaming.positions import most_at_once, streamed_inputs
from fulgurite.backends.csx.streaming.residency import begin_call, residency

_CONSTANTS = "constants.pt"


def write(folder: Path, linked: Linked, earlier: EarlierCode, allocate: str) -> None:
    """Compile the kernels; write all but ``kernels.json`` into an existing, empty folder.

    Args:
        folder: where.
        linked: the program.
        earlier: has kernels of earlier programs.
        allocate: as of ``steps.source_of``.

    Raises:
        CppCompileError, UnknownKernel: as ``kernel_modules``.
    """
    modules = earlier.copy_into({kernel.name for kernel in linked.kernels}, folder)
    copied = {name for names in modules for name in names}
    new = [kernel for kernel in linked.kernels if kernel.name not in copied]
    modules += kernel_modules.build(new, folder, len(modules), earlier.headers)
    if linked.constants:
        torch.save(dict(linked.constants), folder / _CONSTANTS)
    program = with_static_memory(linked.program)
    (folder / PROGRAM).write_text(steps.source_of(program, allocate))
    index = {"kernels": modules, "program": steps.plain(program)}
    (folder / INDEX).write_text(json.dumps(index) + "\n")


def load(folder: Path) -> Call:
    """The function of a compiled graph: takes its inputs in order, returns its outputs."""
    return _loaded(folder, (folder / PROGRAM).read_text(), {})


def load_streamed(folder: Path, graph: Graph, allocate: str) -> Call:
    """The same for state that is in files, which is brought into memory as it is used.

    Args:
        folder: as of ``load``.
        graph: what it computes.
        allocate: as of ``steps.source_of``.

    Raises:
        TooMuchAtOnce: one of its calls works on more state than there may be in memory.
    """
    program: steps.Program = steps.typed(json.loads((folder / INDEX).read_text())["program"])
    program, uses = with_uses(program, streamed_inputs(graph), graph.written())
    most, _ = most_at_once(uses, graph)
    if most > residency.room_bytes:
        raise TooMuchAtOnce(
            f"a compiled call works on {most:,} bytes of state at once, more than"
            f" max_resident_bytes={residency.limit_bytes} has room for"
        )
    call = _loaded(folder, steps.source_of(program, allocate), {BEGIN: begin_call})

    def run(inputs: list[Tensor]) -> Sequence[Tensor]:
        with residency.running(uses, inputs):
            return call(inputs)

    return run


class TooMuchAtOnce(RuntimeError):
    """A compiled program works on more state at once than there may be in memory."""


def _loaded(folder: Path, text: str, functions: dict[str, Any]) -> Call:
    modules = json.loads((folder / INDEX).read_text())["kernels"]
    namespace: dict[str, Any] = {"__name__": "fulgurite_program", **functions}
    namespace |= kernel_modules.load(folder, modules)
    if (folder / _CONSTANTS).exists():
        namespace |= torch.load(folder / _CONSTANTS, weights_only=True)
    with torch.inference_mode(False):  # what is made once here is written in other modes too
        exec(compile(text, str(folder / PROGRAM), "exec"), namespace)
    call: Call = namespace["call"]
    return call
