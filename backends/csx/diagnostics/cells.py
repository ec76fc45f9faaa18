"""Cells of notebooks: which one a line belongs to, as IPython's own tracebacks name it."""

from __future__ import annotations

import sys


def cell_of(file: str) -> str | None:
    """``Cell In[3]`` for the name under which IPython compiled that cell; None of other files.

    It is the name that the kernel gives the cell's code, such as ``/tmp/ipykernel_71/12345.py``,
    where no file lies. A cell that is run again has another number, its functions of before too
    (IPython 9.18).
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    found = None if shell is None else shell.compile.format_code_name(file)
    return None if found is None else " ".join(found)
