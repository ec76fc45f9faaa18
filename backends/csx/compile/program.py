"""A compiled program as files.

program.py     kernels and matrix products in their order, as a function of tensors
constants.pt   its constants, where it has any
program.json   which kernel is in which module
kernels_0.so   kernels, as functions of tensors
made.json      what runs the graph (see ``made``)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fulgurite.backends.csx.compile import kernel_modules
from fulgurite.backends.csx.compile.fabric import Call
from fulgurite.backends.csx.compile.kept import INDEX, Generated, Kept
from fulgurite.backends.csx.compile.light_imports import with_light_imports
from fulgurite.backends.csx.compile.linking import Compiled, linked
from fulgurite.backends.csx.compile.made import PROGRAM
from fulgurite.backends.csx.compile.parallel_checks import throw_after_loops
from fulgurite.backends.csx.compile.parts import Division
from fulgurite.backends.csx.compile.static_wrapper import make_static, parsed
from fulgurite.backends.csx.compile.translation_unit import Kernel

_CONSTANTS = "constants.pt"


def named(parts: Sequence[Generated], kept: Kept) -> list[dict[str, Kernel]]:
    """The kernels of each part, as programs call them, by the names that they have in it."""
    return [
        {
            one.name: replace(one, name=kept.name_of(one))
            for one in _taken_apart(part).wrapper.kernels
        }
        for part in parts
    ]


def write(folder: Path, parts: Sequence[Generated], division: Division | None, kept: Kept) -> None:
    """Compile the kernels, and write everything but ``made.json`` into an existing, empty folder.

    Args:
        folder: where.
        parts: in the order of the division's.
        division: in which order they are called; None where there is one.
        kept: has kernels of earlier programs.

    Raises:
        CppCompileError, UnknownKernel, UnknownWrapper: as ``kernel_modules`` and ``linking``.
    """
    program = linked([_taken_apart(part) for part in parts], division, kept.name_of)
    kernels = program.wrapper.kernels
    modules = kept.lend({kernel.name for kernel in kernels}, folder)
    lent = {name for names in modules for name in names}
    new = [kernel for kernel in kernels if kernel.name not in lent]
    modules += kernel_modules.build(new, folder, len(modules), kept.headers)
    if program.constants:
        torch.save(program.constants, folder / _CONSTANTS)
    source = with_light_imports(make_static(program.wrapper))
    (folder / PROGRAM).write_text(f"{source}\n")
    (folder / INDEX).write_text(json.dumps({"kernels": modules}, indent=1) + "\n")


def load(folder: Path) -> Call:
    """The function of a compiled graph: takes its inputs in order, returns its outputs."""
    modules = json.loads((folder / INDEX).read_text())["kernels"]
    namespace: dict[str, Any] = {"__name__": "fulgurite_program"}
    namespace |= kernel_modules.load(folder, modules)
    if (folder / _CONSTANTS).exists():
        namespace |= torch.load(folder / _CONSTANTS, weights_only=True)
    program = folder / PROGRAM
    with torch.inference_mode(False):  # what is made once here is written in other modes too
        exec(compile(program.read_text(), str(program), "exec"), namespace)
    call: Call = namespace["call"]
    return call


def _taken_apart(part: Generated) -> Compiled:
    wrapper = parsed(part.source)
    kernels = [replace(one, source=throw_after_loops(one.source)) for one in wrapper.kernels]
    return Compiled(replace(wrapper, kernels=kernels), part.constants)
