"""Checks of indices inside parallel loops, made errors instead of the process's end.

Inductor's C++ checks every label and index that it reads by, and throws. An exception that leaves a
loop of several threads ends the process (``terminate called``, seen with torch 2.13). So such a
loop catches it for each element, and the kernel throws when all its loops are done.

Only the text of a kernel changes; a form that is not known stays as it is.
"""

from __future__ import annotations

import re

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
