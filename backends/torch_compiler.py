"""The parts of torch's compiler that more than one room needs: its options, its errors, its C++.

Beside this file only ``csx/compile/inductor`` imports ``torch._inductor``
(``tests/test_rooms.py``). What is heavy of it is imported where it is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch._inductor import config as options
from torch._inductor import cpu_vec_isa as vector_units
from torch._inductor.cpp_builder import CppBuilder as CppBuilder
from torch._inductor.cpp_builder import CppTorchOptions as CppTorchOptions
from torch._inductor.cpp_builder import get_cpp_compiler as get_cpp_compiler
from torch._inductor.cpp_builder import is_gcc as is_gcc
from torch._inductor.exc import CppCompileError as CppCompileError
from torch._inductor.exc import InvalidCxxCompiler as InvalidCxxCompiler

__all__ = ["options", "vector_units"]


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The compiler's table: 0.2 s of CPU where it is asked for first.

    Raises:
        ImportError: this torch has it elsewhere.
    """
    from torch._inductor.decomposition import select_decomp_table

    table: dict[Any, Callable[..., Any]] = select_decomp_table()
    return table


def compile_threads() -> int:
    """How many C++ compilers are to run at a time."""
    from torch._inductor.async_compile import get_compile_threads

    return get_compile_threads()


def compiler_module() -> Any:
    """The compiler's module of worker processes, if this process has imported it."""
    return sys.modules.get("torch._inductor.async_compile")
