"""Kernels as C++ source: all kernels of a program in one translation unit, with their binding.

Most of what the C++ compiler does for a kernel is to read torch's header, and it is the same for
all: 21 kernels of a GPT took 26 s one by one, and take 6 s in one translation unit (measured, CPU
time on a busy core). A translation unit is the source of one extension module, which has a
function for each kernel in it, named as the compiler's Python calls it.

Inductor's C++ checks every label and index that it reads by, and throws. An exception that leaves a
loop of several threads ends the process (``terminate called``, seen with torch 2.13). So such a
loop catches it for each element, and the kernel throws when all its loops are done. Only the
text of a kernel changes; a form that is not known stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fulgurite.backends.csx.compile.programs.steps import KernelSource

UNIT_BYTES = 400_000  # of kernels: compiling them takes as long as the header (measured)
MODULE = "kernels"
_INCLUDE = re.compile(r"[ \t]*#include\b.*")
_SIGNATURE = re.compile(r'extern\s+"C"[^({]*\bvoid\b[^({]*\bkernel\s*\(')
# not inlined into its binding: its code is then what it would be in a module of its own
_STATIC = "[[gnu::noinline]] static void kernel("


class UnknownKernel(RuntimeError):
    """A kernel is not of the form that is known (checked against torch 2.13)."""

    def __init__(self, kernel: KernelSource, found: int) -> None:
        super().__init__(
            f"the compiler wrote {kernel.name} with {found} functions of the known form, not one"
        )


def divided(kernels: Sequence[KernelSource], most: int) -> list[list[KernelSource]]:
    """The kernels of each translation unit: as few units as one thread compiles in little time.

    Another unit reads the header once more, so a unit gets at least as much to compile as that is.
    Which kernel is in which unit depends on the arguments alone.

    Args:
        kernels: of one program.
        most: units, which is how many the machine compiles at a time.
    """
    total = sum(len(kernel.source) for kernel in kernels)
    units: list[list[KernelSource]] = [[] for _ in range(max(1, min(most, total // UNIT_BYTES)))]
    filled = [0] * len(units)
    for kernel in sorted(kernels, key=lambda kernel: len(kernel.source), reverse=True):
        # the largest ones first, each to the unit that has least: they end at about the same time
        least = filled.index(min(filled))
        units[least].append(kernel)
        filled[least] += len(kernel.source)
    return [unit for unit in units if unit]


def source_of(kernels: Sequence[KernelSource]) -> str:
    """The source of a translation unit: each kernel in a namespace of its own, and the binding.

    Raises:
        UnknownKernel: one of them is not of the form that is known.
    """
    includes: dict[str, None] = {}
    bodies = []
    for i, kernel in enumerate(kernels):
        lines = kernel.source.splitlines()
        # once, and outside: inside of a namespace they would declare torch's names in it
        includes |= dict.fromkeys(line.strip() for line in lines if _INCLUDE.fullmatch(line))
        text = "\n".join(line for line in lines if not _INCLUDE.fullmatch(line))
        text, found = _SIGNATURE.subn(_STATIC, text)
        if found != 1:
            raise UnknownKernel(kernel, found)
        bodies.append(f"namespace kernel_{i} {{\n{text}\n}}")
    rows = [
        f'    {{"{kernel.name}", as_method(binding<kernel_{i}::kernel>), METH_FASTCALL, nullptr}},'
        for i, kernel in enumerate(kernels)
    ]
    binding = _BINDING.replace("ROWS", "\n".join(rows)).replace("MODULE", MODULE)
    return "\n".join([*includes, *bodies, binding])


# What torch's own binding does, for any number of kernels: it takes a tensor's address from torch,
# by a function whose address Python hands over, so that no header of torch's has to be read for it.
_BINDING = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <exception>
#include <stdexcept>
#include <utility>

static void* (*data_of)(PyObject*) = nullptr;

static PyObject* set_data_of(PyObject*, PyObject* address) {
    void* given = PyLong_AsVoidPtr(address);
    if (given == nullptr) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the address is null");
        return nullptr;
    }
    data_of = reinterpret_cast<void* (*)(PyObject*)>(given);
    Py_RETURN_NONE;
}

template <typename... Pointers, size_t... i>
static inline void call(
    void (*kernel)(Pointers...), PyObject* const* tensors, Py_ssize_t count,
    std::index_sequence<i...>) {
    if (count != sizeof...(Pointers)) throw std::runtime_error("wrong number of tensors");
    kernel(static_cast<Pointers>(data_of(tensors[i]))...);
}

template <typename... Pointers>
static inline void call(
    void (*kernel)(Pointers...), PyObject* const* tensors, Py_ssize_t count) {
    call(kernel, tensors, count, std::index_sequence_for<Pointers...>());
}

template <auto kernel>
static PyObject* binding(PyObject*, PyObject* const* tensors, Py_ssize_t count) {
    try {
        call(kernel, tensors, count);
        Py_RETURN_NONE;
    } catch (std::exception const& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    } catch (...) {
        PyErr_SetString(PyExc_RuntimeError, "unhandled error");
    }
    return nullptr;
}

static PyCFunction as_method(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

static PyMethodDef methods[] = {
    {"set_data_of", set_data_of, METH_O, nullptr},
ROWS
    {nullptr, nullptr, 0, nullptr}};

static PyModuleDef_Slot slots[] = {
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, nullptr}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "MODULE", nullptr, 0, methods, slots, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit_MODULE() { return PyModuleDef_Init(&definition); }
"""


_CHECK = "TORCH_CHECK("
_LOOP = re.compile(r"\s*#pragma omp (?:for(?P<loops>.*)|single.*)")
_KERNEL = re.compile(r'extern "C".*\bvoid\s+kernel\(')
_FAILED = "fulgurite_failed"
_INCLUDES = "#include <atomic>\n#include <stdexcept>\n"


def throw_after_loops(source: str) -> str:
    """Rewrite the source of a kernel that checks indices in parallel loops."""
    lines = source.splitlines()
    start = next((i for i, line in enumerate(lines) if _KERNEL.match(line)), None)
    if start is None:
        return source
    loops = [
        block
        for i in range(start, len(lines))
        if (block := _body(lines, i)) is not None
        and any(_CHECK in line for line in lines[block[0] : block[1]])
    ]
    begin = next((i for i in range(start, len(lines)) if lines[i] == "{"), None)
    end = next((i for i in range(start, len(lines)) if lines[i] == "}"), None)
    # a form that is not known: then a bad index ends the process, as with torch alone
    if begin is None or end is None or not loops:
        return source
    lines[begin] = f"{{\n{_FAILED} = false;"
    lines[end] = (
        f'if ({_FAILED}.exchange(false)) throw std::out_of_range("index out of range");\n}}'
    )
    for opens, closes in loops:
        lines[opens] = "{ try {"
        lines[closes] = f"}} catch (...) {{ {_FAILED} = true; }} }}"
    lines.insert(start, f"{_INCLUDES}static std::atomic<bool> {_FAILED}{{false}};")
    return "\n".join(lines) + "\n"


def _body(lines: list[str], i: int) -> tuple[int, int] | None:
    """Where the body of a parallel loop whose pragma is line ``i`` opens and closes."""
    found = _LOOP.fullmatch(lines[i])
    if found is None:
        return None
    collapsed = re.search(r"collapse\((\d+)\)", found["loops"] or "")
    # ``single`` has no loop, ``for`` has one, and with ``collapse(n)`` n stand before the body
    headers = 0 if found["loops"] is None else int(collapsed[1]) if collapsed else 1
    opens = i + 1
    while headers and opens < len(lines):
        stripped = lines[opens].strip()
        if stripped.startswith("for("):
            headers -= 1
        elif stripped not in ("", "{"):
            return None
        opens += 1
    if opens >= len(lines) or lines[opens].strip() != "{":
        return None
    depth = 0
    for closes in range(opens, len(lines)):
        depth += lines[closes].count("{") - lines[closes].count("}")
        if depth == 0:
            return (opens, closes) if lines[closes].strip() == "}" else None
    return None
