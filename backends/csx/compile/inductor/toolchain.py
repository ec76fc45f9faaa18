"""What the machine has for compiling: its processor, a C++ compiler, Python's headers.

What the system says of the processor's vector units is believed until a compiler fails. Inductor
has the C++ compiler make a test program for each kind before the first kernel, and runs Python to
load it: 3 to 7 s (measured). Nearly every compiler can do what its processor can. Where one cannot,
the first program fails to compile, and only then the compiler is asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
import shlex
import shutil
import subprocess
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fulgurite.backends.csx.compile.inductor.processes import compilers
from fulgurite.backends.csx.compile.programs import compiler_log
from fulgurite.backends.csx.compile.store.cache import NothingStored, UnfitEntry
from fulgurite.backends.csx.compile.store.fingerprint import processor
from fulgurite.backends.csx.diagnostics.trace_errors import UnfusedLoss
from fulgurite.backends.patches import Patch, patches_of
from fulgurite.backends.torch_compiler import (
    CppCompileError,
    InvalidCxxCompiler,
    get_cpp_compiler,
    options,
    vector_units,
)
from fulgurite.backends.torch_versions import CHECKED


class NoToolchain(Exception):
    """Generated kernels cannot be made on this machine; the text says why."""

    remedy = "Install a C++ compiler and Python's headers"


class CompilerFailed(NoToolchain):
    """A compiler was there, and failed; the text is one line, ``printed`` the rest.

    Args:
        error: of the C++ compiler, of torch's, or of our own work on what that one wrote.
    """

    remedy = "Read the file"

    def __init__(self, error: Exception) -> None:
        super().__init__(f"torch's compiler failed: {compiler_log.in_a_line(error)}")
        self.printed = "".join(traceback.format_exception(error))


@contextlib.contextmanager
def failures_reported() -> Iterator[None]:
    """Whatever fails in the block is a failed compile, which the run goes on without.

    The compiler's own code, and what it writes, change with every version of torch: any exception
    may come of it. None is hidden: the line of the program names it, and a file has the rest. What
    is no failure of compiling passes: Ctrl-C, a folder that takes no files, an error about the
    user's code, and a warning that the user made an error.

    Raises:
        CompilerFailed: something failed.
    """
    try:
        yield
    except (NoToolchain, NothingStored, UnfitEntry, UnfusedLoss, OSError, Warning):
        raise
    except Exception as error:
        raise CompilerFailed(error) from None


def nothing_compiled(missing: Any, why: str) -> RuntimeError:
    """The error of a run that was only to compile."""
    return RuntimeError(
        f"compile_only=True, but nothing can be compiled on this machine: {why}."
        f" {missing.remedy}; or validate_only=True, which checks the model without."
    )


@functools.cache
def cpu_name() -> str:
    """The processor's name, as the system tells it."""
    names = [line for line in processor().splitlines() if line.startswith("model name")]
    return (
        names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()
    )


def toolchain_missing(starts: bool = True) -> str | None:
    """What generated kernels lack on this machine: a reason in words, or None.

    Args:
        starts: a compiler is started, to see that it runs; else one that can be found will do.
    """
    found = [one for one in _compilers() if shutil.which(one)]
    try:
        # found on the PATH, it may still not run: asking torch starts it
        if starts or not found:
            get_cpp_compiler()
    except InvalidCxxCompiler:
        return f"{found[0]} does not run" if found else "no C++ compiler was found"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "Python.h was not found"
    return None


def compiler_version() -> str:
    """The C++ compiler in its own words: ``g++ (Debian 12.2.0-14) 12.2.0``.

    Raises:
        InvalidCxxCompiler: there is none that runs.
    """
    command = [get_cpp_compiler(), "--version"]
    said = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    return next(iter(said.stdout.splitlines()), command[0])


def loading_fails(folder: Path) -> str | None:
    """Why a library that the C++ compiler makes in a folder cannot be loaded, or None."""
    source, library = folder / "answer.cpp", folder / "answer.so"
    command = shlex.join([get_cpp_compiler(), "-shared", "-fPIC", source.name, "-o", library.name])
    try:
        source.write_text('extern "C" int answer() { return 42; }\n')
        with compilers() as running:
            running.run(command, str(folder))
        made = ctypes.CDLL(str(library)).answer()
    except (CppCompileError, OSError) as error:
        return str(error).strip()
    return None if made == 42 else f"a function that returns 42 returned {made}"


def _compilers() -> list[str]:
    """The commands that torch tries."""
    tried: Any = options.cpp.cxx
    return [one for one in (tried if isinstance(tried, (list, tuple)) else [tried]) if one]


def believed() -> Iterator[Patch]:
    """A patch that takes every test program for one that was made and loaded."""

    def check_build(self: Any, code: str) -> bool:
        return True

    why = "the first program waits for test programs of the processor's vector units"
    return patches_of(vector_units.VecISA, {"check_build": check_build}, why=why, checked=CHECKED)


def ask_the_compiler() -> bool:
    """Have the test programs made now; returns whether others are used than were before."""
    before = _described()
    for unit in vector_units.supported_vec_isa_list:
        # torch keeps each answer twice: in caches of its methods, and for two units in an attribute
        for name in ("_is_avx512_bf16_supported", "_is_amx_fp16_supported"):
            vars(unit).pop(name, None)
        for kind in type(unit).__mro__:
            for value in vars(kind).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    vector_units.valid_vec_isa_list.cache_clear()
    return _described() != before


def _described() -> tuple[str, str]:
    unit = chosen()
    return str(unit), unit.build_arch_flags()


def chosen() -> Any:
    """The vector units that compiled code uses; false where there are none."""
    return vector_units.pick_vec_isa()
