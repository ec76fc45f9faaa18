"""Torch's header as the C++ compiler has read it, kept for the next kernels.

Reading it is most of what the compiler does for a small program: 1.3 of 1.8 s. To keep what was
read takes 5 s and 156 MB, once for each torch and compiler (measured, g++ 12). So the worker does
it when it has compiled what waits, and ``fulgurite doctor`` too. Numbers stay as they are: g++ uses
it for the flags alone that it was read with, and reads the header itself where it is gone.
"""

from __future__ import annotations

import hashlib
import shlex
from functools import cached_property
from pathlib import Path

import torch

from fulgurite.backends.csx.compile.inductor.processes import compilers
from fulgurite.backends.csx.compile.inductor.toolchain import compiler_version
from fulgurite.backends.csx.compile.store.cache import CompileCache
from fulgurite.backends.torch_compiler import (
    CppBuilder,
    CppCompileError,
    CppTorchOptions,
    is_gcc,
    vector_units,
)

FOLDER, HEADER = "headers", "torch's header"
SHARE = 8  # of the bytes that programs may take, headers may take one in so many more
_HEADER = "torch/csrc/inductor/cpp_prefix.h"
_NAME, _READ = "prefix.h", "prefix.h.gch"
_NO_WARNINGS = "-w"  # of torch's header: thousands of lines that nobody reads
_checked: dict[tuple[Path, str], Path] = {}  # headers that this process found whole


def options(*, precompiling: bool = False) -> CppTorchOptions:
    """The compiler's flags: those with which Inductor compiles each kernel by itself."""
    isa = vector_units.pick_vec_isa()
    return CppTorchOptions(vec_isa=isa, extra_flags=[_NO_WARNINGS], precompiling=precompiling)


class Headers:
    """The header in a folder beside compiled programs.

    Args:
        programs: the folder of their cache.
    """

    def __init__(self, programs: Path) -> None:
        self._folder = programs / FOLDER

    @cached_property
    def _key(self) -> str:
        file = Path(torch.__file__).parent / "include" / _HEADER
        found = file.stat()
        # g++ compares its flags with those of the file, and not the header's content
        parts = (_command(), compiler_version(), torch.__version__, found.st_mtime_ns, file)
        return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()

    def keep(self) -> Path | None:
        """The header's file, made now where there is none; None for another compiler than g++.

        Raises:
            CppCompileError: the compiler failed.
            OSError: the folder takes no files.
        """
        if not is_gcc():
            return None
        there = self._whole() if self._folder.is_dir() else None
        cache = CompileCache(self._folder, share=SHARE)
        return there or cache.fetch_here(self._key, _read, lambda folder: folder / _READ).value

    def in_background(self) -> None:
        """Keep the header, in the worker; programs do not need it, so a failure is for its log."""
        try:
            self.keep()
        except (CppCompileError, OSError) as error:
            print(f"torch's header is not kept: {error}")

    def copy_into(self, scratch: Path) -> CppTorchOptions:
        """The flags to compile with in a folder, to which the header is copied if there is one."""
        found = options()
        if self._folder.is_dir() and is_gcc() and (kept := self._whole()) is not None:
            # g++ takes NAME.gch in place of NAME where it finds both in one folder
            (scratch / _NAME).write_text(f"#include <{_HEADER}>\n")
            (scratch / _READ).symlink_to(kept)
            found.precompiled_header = _NAME
        return found

    def _whole(self) -> Path | None:
        """The header's file, if it is there and as it was written: asked once in a process."""
        name = self._folder, self._key
        if name not in _checked:
            cache = CompileCache(self._folder, share=SHARE)
            there = cache.find(self._key, lambda folder: folder / _READ)
            if there is None:
                return None
            _checked[name] = there.value
        return _checked[name]


def _command() -> str:
    command = CppBuilder(_NAME, _NAME, options(precompiling=True)).get_command_line()
    return shlex.join(shlex.split(command))


def _read(folder: Path) -> None:
    """Read the header into an empty folder."""
    (folder / _NAME).write_text(f"#include <{_HEADER}>\n")
    with compilers() as running:
        running.run(_command(), str(folder))
