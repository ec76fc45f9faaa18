"""Kernels as machine code: the C++ compiler makes extension modules of them, which are loaded here.

The flags are those with which Inductor compiles each kernel by itself, so numbers are the same.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from fulgurite.backends.csx.compile.inductor.headers import Headers, options
from fulgurite.backends.csx.compile.inductor.processes import compilers
from fulgurite.backends.csx.compile.inductor.translation_unit import MODULE, divided, source_of
from fulgurite.backends.csx.compile.programs.progress import tell
from fulgurite.backends.csx.compile.programs.steps import KernelSource
from fulgurite.backends.torch_compiler import CppBuilder, CppCompileError, compile_threads


def build(
    kernels: Sequence[KernelSource], folder: Path, first: int = 0, headers: Headers | None = None
) -> list[list[str]]:
    """Compile kernels into modules in a folder; returns the names of each module's kernels.

    Args:
        kernels: what to compile.
        folder: where.
        first: the number of the first module.
        headers: has torch's header, if it was read before.

    Raises:
        CppCompileError: the compiler failed, or made what cannot be loaded.
        UnknownKernel: a kernel is not of the form that is known.
    """
    if not kernels:
        return []
    units = divided(kernels, compile_threads())
    names = [[kernel.name for kernel in unit] for unit in units]
    tell(f"{len(kernels)} kernel{'s' * (len(kernels) > 1)} in C++", 0, 1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        flags = options() if headers is None else headers.copy_into(Path(scratch))
        commands = []
        for i, unit in enumerate(units):
            source = Path(scratch, f"{MODULE}_{i}.cpp")
            source.write_text(source_of(unit))
            builder = CppBuilder(f"{MODULE}_{i}", source.name, flags)
            commands.append(builder.get_command_line())
        # the compilers end first: else an exception would wait in the pool for them
        with ThreadPoolExecutor(len(units)) as pool, compilers() as running:
            list(pool.map(lambda command: running.run(command, scratch), commands))
        for i, unit_names in enumerate(names):
            module = module_file(Path(scratch), i)
            try:
                _loaded(module, unit_names)
            except ImportError as error:
                raise CppCompileError(commands[i].split(), str(error)) from None
            shutil.copyfile(module, module_file(folder, first + i))
    return names


def failing(kernels: Sequence[KernelSource]) -> dict[str, str] | None:
    """Which of some kernels the C++ compiler fails on by themselves, and what it prints.

    None if that is none of them, or all: then it is not the kernels that fail.
    """
    found: dict[str, str] = {}
    distinct = {kernel.name: kernel for kernel in kernels}
    for name, kernel in distinct.items():
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            try:
                build([kernel], Path(folder))
            except CppCompileError as error:
                found[name] = error.output
    return found if 0 < len(found) < len(distinct) else None


def load(folder: Path, names: list[list[str]]) -> dict[str, Callable[..., None]]:
    """The kernels in a folder, by name, as functions of tensors; ``names`` is what ``build`` said.

    A kernel reads and writes the memory of the tensors that it is given, as they come: it checks
    nothing but how many there are.
    """
    found: dict[str, Callable[..., None]] = {}
    for i, unit_names in enumerate(names):
        found |= _loaded(module_file(folder, i), unit_names)
    return found


def module_file(folder: Path, i: int) -> Path:
    """Where the module of a number lies in a folder."""
    return folder / f"{MODULE}_{i}.so"


def _loaded(path: Path, names: list[str]) -> dict[str, Callable[..., None]]:
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    data_of = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    module.set_data_of(data_of)
    return {name: getattr(module, name) for name in names}
