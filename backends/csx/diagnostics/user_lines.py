"""Lines of the user's code: which one runs now, and which one every node of a graph comes from.

Words: a *library* frame belongs to torch, Lightning, torchmetrics, this package, the standard
library or another installed package; every other frame is the *user's*. A library that is none of
those named is a *package*: models come from there. The *boundary* is the frame
where a trace began: frames below it (the script's call of ``fit``) are no part of the step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

import torch
from torch.fx import Node

from fulgurite.backends.csx.diagnostics.mentions import mentions
from fulgurite.backends.csx.diagnostics.regions import (
    Region,
    backward_of,
    begin_counting,
    marked,
    region_now,
    unmarked,
)


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


LIBRARIES = frozenset(
    {"torch", "lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics", "fulgurite"}
) | (sys.stdlib_module_names - {"__main__"})

_NO_MODELS = LIBRARIES | {"", "numpy", "scipy", "pandas", "sklearn", "PIL", "_pytest", "pluggy"}
_CALL = torch.nn.Module._call_impl.__code__
_BACKWARD = "the backward pass"
_COMPREHENSIONS = {f"<{one}>" for one in ("listcomp", "setcomp", "dictcomp", "genexpr")}
_IN = "\n    in "  # after a line's source, before the module

_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


@dataclass(frozen=True, slots=True)
class UserLine:
    """A line of the user's code, and the line that it led to in a module of an installed package.

    Where no code of the user's runs, it is a line of the package itself.
    """

    file: str
    line: int
    function: str
    inside: UserLine | None = field(default=None, compare=False)

    @classmethod
    def at(cls, code: CodeType, line: int, inside: UserLine | None = None) -> UserLine:
        """A line of this code; a comprehension is part of the function it is written in."""
        function = code.co_name
        if function in _COMPREHENSIONS:  # from Python 3.12 on most have no code of their own
            around = [one for one in code.co_qualname.split(".") if not one.startswith("<")]
            function = around[-1] if around else "<module>"
        return cls(code.co_filename, line, function, inside)

    @classmethod
    def of_frame(cls, frame: FrameType, inside: UserLine | None = None) -> UserLine:
        """The line that a frame is in."""
        return cls.at(frame.f_code, frame.f_lineno, inside)

    @classmethod
    def of_method(cls, owner: type, name: str) -> UserLine | None:
        """Where the user wrote a method of a class; None if they did not."""
        function = inspect.unwrap(getattr(owner, name, None))  # type: ignore[arg-type]
        code = getattr(function, "__code__", None)
        ours = ("lightning", "fulgurite.optim")
        if code is None or str(function.__module__).startswith(ours):
            return None
        return cls.of_function(function)

    @classmethod
    def of_function(cls, function: FunctionType) -> UserLine:
        """Where a function is defined: its ``def``, below the decorators."""
        found = cls.at(function.__code__, function.__code__.co_firstlineno)
        while found.source.startswith("@"):
            found = cls(found.file, found.line + 1, found.function)
        return found

    @property
    def source(self) -> str:
        """The text of the line as it is in the file now, without its indent."""
        linecache.checkcache(self.file)
        return linecache.getline(self.file, self.line).strip()

    @property
    def place(self) -> str:
        """File and line alone, for the middle of a sentence: ``model.py:41``."""
        return f"{cell_of(self.file) or os.path.basename(self.file)}:{self.line}"

    def __str__(self) -> str:
        near = os.path.relpath(self.file) if os.path.isabs(self.file) else self.file
        shown = cell_of(self.file) or (self.file if near.startswith("..") else near)
        return f"{shown}:{self.line} in {self.function}"


def is_library(frame: FrameType) -> bool:
    """Whether a frame belongs to a library rather than to the user: those named, or installed."""
    return _is_library(frame.f_code.co_filename, str(frame.f_globals.get("__name__", "")))


def belongs_to_library(item: type | ModuleType | FunctionType) -> bool:
    """The same of a class, a Python module, or a function."""
    if isinstance(item, FunctionType):
        return _is_library(item.__code__.co_filename, str(item.__globals__.get("__name__", "")))
    module = item if isinstance(item, ModuleType) else sys.modules.get(item.__module__)
    return _is_library(getattr(module, "__file__", None) or "", getattr(module, "__name__", ""))


def is_from_library(function: Any) -> bool:
    """The same of a function that may be bound or wrapped; other callables count as the user's."""
    function = inspect.unwrap(function)
    function = getattr(function, "__func__", function)
    return isinstance(function, FunctionType) and belongs_to_library(function)


@functools.lru_cache(maxsize=4096)  # a trace asks for 28 frames an operation
def _is_library(file: str, module: str) -> bool:
    generated = not module  # by exec: torch.fx does
    installed = any(folder in file for folder in _INSTALLED) or file.endswith(".pyx")
    package = module.partition(".")[0]
    return generated or installed or package in LIBRARIES or _is_in_target(file, package)


def _is_in_target(file: str, package: str) -> bool:
    """Whether a package is in a folder that ``pip install --target`` filled."""
    if package == "__main__" or not os.path.isabs(file):
        return False
    root = next((one.parent for one in Path(file).parents if one.name == package), None)
    return _has_installed(str(root or Path(file).parent))


@functools.cache
def _has_installed(folder: str) -> bool:
    with contextlib.suppress(OSError):  # one that is gone, or must not be listed
        # pip leaves this beside the packages, whatever the folder is called
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    return False


def package_of(frame: FrameType) -> str | None:
    """The package of a frame that may have models in it; "" of other libraries, None of users."""
    return _package_named(frame.f_code.co_filename, str(frame.f_globals.get("__name__", "")))


@functools.lru_cache(maxsize=4096)
def _package_named(file: str, module: str) -> str | None:
    if not _is_library(file, module):
        return None
    package = module.partition(".")[0]
    return "" if package in _NO_MODELS else package


def user_modules() -> Iterator[ModuleType]:
    """The modules of the user's: what a name imported from elsewhere may be held by."""
    yield from _user_modules(imported())


def imported() -> int:
    """A hash of the loaded Python modules: the key of the cache of ``user_modules``."""
    return hash(tuple(map(id, sys.modules.values())))


@functools.lru_cache(maxsize=1)
def _user_modules(imported: int) -> list[ModuleType]:
    found = []
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType):
            file = getattr(module, "__file__", None) or ""
            if not _is_library(file, name) and (file or name == "__main__"):
                found.append(module)
    return found


def modules_under(package: str) -> list[ModuleType]:
    """The loaded modules of a package: itself, and those in it."""
    return _modules_under(package, imported())


@functools.lru_cache(maxsize=16)
def _modules_under(package: str, imported: int) -> list[ModuleType]:
    loaded = [item for item in sys.modules.items() if isinstance(item[1], ModuleType)]
    return [one for name, one in loaded if f"{name}.".startswith(f"{package}.")]


def top_package(frame: FrameType) -> str:
    """The first part of the name of the module that a frame belongs to."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def user_line(boundary: CodeType | None = None) -> UserLine | None:
    """The innermost line of the user's that runs now, above the frame of ``boundary``.

    With it comes the innermost line of a package, if a module of that package's runs.
    """
    frame: FrameType | None = sys._getframe(1)
    found: list[FrameType] = []  # of one package, the innermost first
    while frame is not None and frame.f_code is not boundary:
        package = package_of(frame)
        if package is None:
            runs = any(isinstance(one.f_locals.get("self"), torch.nn.Module) for one in found)
            return UserLine.of_frame(frame, UserLine.of_frame(found[0]) if runs else None)
        if package and (not found or top_package(found[0]) == package):
            found.append(frame)
        frame = frame.f_back
    # in a trace without a line of the user's own (a model of a package), the package's line is
    # better than none
    return UserLine.of_frame(found[0]) if found and boundary is not None else None


def line_naming(
    owners: Iterable[type], names: Collection[str], *, stored: bool = False
) -> UserLine | None:
    """The first line in methods of the user's classes that names a function or attribute.

    With ``stored``, only lines that set or delete such an attribute, after ``__init__``.
    """
    for owner in owners:
        for one in vars(owner).values():
            if isinstance(one, FunctionType) and not belongs_to_library(one):
                if stored and one.__name__ == "__init__":
                    continue
                for said in mentions(one.__code__):
                    if said.name in names and (said.is_set or not stored):
                        return UserLine.at(one.__code__, said.line)
    return None


def run_backward(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a backward pass. Frames above this one are the user's hooks and own functions."""
    return run(*args, **kwargs)


def raised_at(error: BaseException) -> UserLine | None:
    """The innermost line of the user's in an exception's traceback."""
    found, traceback = None, error.__traceback__
    while traceback is not None:
        if not is_library(traceback.tb_frame):
            found = UserLine.at(traceback.tb_frame.f_code, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def user_frames(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of libraries."""
    kept: list[TracebackType] = []
    while traceback is not None:
        if not is_library(traceback.tb_frame):
            kept.append(traceback)
        traceback = traceback.tb_next
    found: TracebackType | None = None
    for one in reversed(kept):
        found = TracebackType(found, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return found


class NodeLines:
    """Puts the user's line on each node that a trace makes, as its ``stack_trace``.

    The module goes with it whose ``forward`` runs, and the fused region that runs.

    A node of the backward pass gets the line of a hook of the user's that makes it, or else of the
    forward operation that it differentiates: whose autograd node has that sequence number. A node
    that no user frame made (an optimizer's, a clip's) gets ``fallback()``, which need not look at
    the frames again.

    Args:
        boundary: the code of the frame where the trace begins.
        fallback: gives the line of what no user frame made.
        paths: modules' names by their identity.
    """

    def __init__(
        self, boundary: CodeType, fallback: Callable[[], UserLine | None], paths: Mapping[int, str]
    ) -> None:
        self._boundary, self._fallback, self._paths = boundary, fallback, paths
        self._described = functools.cache(_described)
        self._forward: dict[int, tuple[UserLine | None, str, Region | None]] = {}
        self._known = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        begin_counting()

    def __call__(self, node: Node) -> None:
        """Put its line on a node, right after its operation has run."""
        grad_node = torch._C._current_autograd_node()
        if grad_node is None:
            line, inside = user_line(self._boundary), _module_now(self._boundary, self._paths)
            region = region_now()
            # an operation's own autograd node, where it has one, was made before this node
            before, self._known = self._known, torch.autograd._get_sequence_nr()
            self._forward.update(dict.fromkeys(range(before, self._known), (line, inside, region)))
        else:
            line, inside, of = self._forward.get(grad_node._sequence_nr(), (None, "", None))
            inside = _BACKWARD + f" of {inside}" * bool(inside)
            region = None if of is None else backward_of(of)
            # a hook of the user's made this node, whatever forward operation it is called for
            line = user_line(run_backward.__code__) or line or user_line(self._boundary)
        line = line or self._fallback()
        if line is not None:
            node.meta["stack_trace"] = marked(self._described(line, inside), region)


def line_of(node: Node) -> UserLine | None:
    """The line that ``record_lines`` put on a node."""
    return _line_in(str(node.meta.get("stack_trace", "")))


@functools.lru_cache(maxsize=4096)  # many nodes share one
def _line_in(text: str) -> UserLine | None:
    found = re.match(r'File "(.*)", line (\d+), in (.*)', text)
    return None if found is None else UserLine(found[1], int(found[2]), found[3])


def module_of(node: Node) -> str:
    """``net.0 (Linear)`` or ``the backward pass of net.0 (Linear)``; empty where none ran."""
    return unmarked(str(node.meta.get("stack_trace", ""))).partition(_IN)[2]


def split_backward(module: str) -> tuple[str, bool]:
    """What ``module_of`` gives as the module's own name, and whether it is its backward pass."""
    own = module.removeprefix(_BACKWARD)
    return own.removeprefix(" of ") if own != module else module, own != module


def _described(line: UserLine, inside: str) -> str:
    """A line, and what ``module_of`` gives, as text: torch's own passes carry it along."""
    text = f'File "{line.file}", line {line.line}, in {line.function}\n    {line.source}'
    return text + f"{_IN}{inside}" * bool(inside)


def _module_now(boundary: CodeType, paths: Mapping[int, str]) -> str:
    """The innermost module that has a name and whose ``forward`` runs now."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not boundary:
        if frame.f_code is _CALL:
            module = frame.f_locals["self"]
            if path := paths.get(id(module)):
                return f"{path} ({type(module).__name__})"
        frame = frame.f_back
    return ""
