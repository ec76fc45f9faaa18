"""Attributes of modules, classes and objects that have another value for the time of a block.

``patched`` sets them and puts them back. A *patch* (monkeypatching) replaces a part of somebody
else's code, and says why; ``csx/capture/patch_table`` lists those of a trace. Changes are the whole
process's while they last; patched functions and properties are as ever in other threads.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType
from typing import Any

from torch.fx._symbolic_trace import _Patcher

from fulgurite.backends.supported import refuse_if_gone
from fulgurite.backends.torch_versions import CHECKED

fx_lock = threading.RLock()
"""Held while a step is traced or compiled: torch.fx, which both use, is made for one thread.

Who takes ``trace_lock`` too takes this one first.
"""

trace_lock = threading.RLock()
"""Held while a step is traced, not while it is compiled.

While it is, the parameters and buffers of the module that is traced stand for no values. Another
thread that reads them waits where it can (``csx/state/fake_swap``); one that takes this lock first
reads them as they are between two steps.
"""

MISSING: Any = object()
"""What is in a place where there is nothing."""

Change = tuple[Any, str, Any]
"""Owner, name of the attribute, and the value that it gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """An attribute of somebody else's code, and what stands there instead for a while.

    Args:
        owner: the module, class or object that has the attribute.
        name: the attribute.
        replacement: what stands there.
        why: what would happen without it, or what it gives.
        checked: the package whose code it was checked with, and the version.
        upstream: the issue at the owner's authors', if it works around a bug of theirs.
    """

    owner: Any
    name: str
    replacement: Any
    why: str
    checked: str
    upstream: str = ""


def patches_of(
    owner: Any, replacements: Mapping[str, Any], *, why: str, checked: str, upstream: str = ""
) -> Iterator[Patch]:
    """A patch of each of an owner's attributes that is named, for one reason."""
    same: Any = {"owner": owner, "why": why, "checked": checked, "upstream": upstream}
    for name, replacement in replacements.items():
        yield Patch(name=name, replacement=replacement, **same)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Be the only thread that traces while the block runs."""
    with fx_lock, trace_lock, applied([FX]):
        yield


@contextlib.contextmanager
def applied(patches: Iterable[Patch], importers: Iterable[dict[str, Any]] = ()) -> Iterator[None]:
    """Keep patches in place while the block runs, whatever ends it.

    Other threads that call a patched function, or ask a patched property, get to the original.

    Args:
        patches: all of them are made before the first is put in place.
        importers: global names of modules that may have imported a patched function by its name.
    """
    changes = [(one.owner, one.name, _of_this_thread(one)) for one in tuple(patches)]
    with patched([*changes, *rebind_everywhere(changes, importers)]):
        yield


def rebind_everywhere(
    changes: Iterable[Change], importers: Iterable[dict[str, Any]]
) -> Iterator[Change]:
    """Changes by which patches of functions reach those who imported them by name.

    ``from math import sqrt`` is a name of the importer's own: a patch of ``math`` misses it.
    """
    functions: dict[int, Any] = {}
    for owner, name, replacement in changes:
        if isinstance(owner, ModuleType):
            original = vars(owner).get(name)
            if callable(original):
                functions[id(original)] = replacement
    for names in {id(names): names for names in importers}.values():
        for name, value in names.items():
            if id(value) in functions:
                yield _Namespace(names), name, functions[id(value)]


class Shared:
    """Patches for all threads, in place while there is anybody who asked for them.

    Neither put there nor taken away while a step is traced: what another thread's trace has put
    in the same place would be taken for the original.

    Args:
        patches: makes them.
    """

    def __init__(self, patches: Callable[[], Iterable[Patch]]) -> None:
        self._patches, self._users = patches, 0
        self._stack = contextlib.ExitStack()

    def put(self) -> None:
        """Ask for them."""
        with trace_lock:
            self._users += 1
            if self._users == 1:
                changes = [(one.owner, one.name, one.replacement) for one in self._patches()]
                self._stack.enter_context(patched(changes))

    def remove(self) -> None:
        """Need them no longer, once for each time they were asked for."""
        with trace_lock:
            self._users -= 1
            if self._users == 0:
                self._stack.close()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Ask for them while the block runs."""
        self.put()
        try:
            yield
        finally:
            self.remove()


def _of_this_thread(patch: Patch) -> Any:
    """What a patch puts there for the thread that asks for it, with the original for all others."""
    here, new = threading.get_ident(), patch.replacement
    if isinstance(new, property):
        own = inspect.getattr_static(patch.owner, patch.name)
        # an attribute that objects have themselves: other threads get theirs through a property too
        if not isinstance(own, property):
            own = _plain(patch.name, own)
        return property(*(_chosen(here, *pair) for pair in _accessors(new, own)))
    if callable(new) and not isinstance(new, type):
        own = getattr(patch.owner, patch.name, vars(builtins).get(patch.name))
        return _chosen(here, new, own)
    return new  # a value


def _accessors(new: property, own: property) -> Iterator[tuple[Any, Any]]:
    """The getters of two properties, then their setters."""
    yield new.fget, own.fget
    yield new.fset, own.fset


def _plain(name: str, default: Any) -> property:
    """An attribute that objects keep themselves, as a property."""
    return property(
        lambda owner: vars(owner).get(name, default),
        lambda owner, value: vars(owner).__setitem__(name, value),
    )


def _chosen(here: int, new: Any, own: Any) -> Any:
    """A function that is ``new`` in the thread ``here`` and ``own`` in others."""
    if new is None:
        return None

    @functools.wraps(new)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (new if threading.get_ident() == here else own)(*args, **kwargs)

    return chosen


_CHOSEN: CodeType = _chosen(0, len, len).__code__


def caller(frame: FrameType) -> FrameType:
    """Who called a patch: ``frame``, or the one before it where that chose by thread."""
    return frame.f_back or frame if frame.f_code is _CHOSEN else frame


def _patch_method(
    patcher: _Patcher, owner: type, name: str, new: Any, deduplicate: bool = True
) -> None:
    by_thread = _chosen(threading.get_ident(), new, getattr(owner, name))
    _ORIGINAL(patcher, owner, name, by_thread, deduplicate)


_ORIGINAL = _Patcher.patch_method
FX = Patch(
    owner=_Patcher,
    name="patch_method",
    replacement=_patch_method,
    why="nn.Module.__call__ raises NameError in other threads while torch.fx traces",
    checked=CHECKED,
)


class _Namespace:
    """Global names as attributes; the module that has them may be in no list of modules."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


@contextlib.contextmanager
def patched(changes: Iterable[Change]) -> Iterator[None]:
    """Let attributes have other values while the block runs, whatever ends it.

    Args:
        changes: an attribute that the owner itself does not have is gone again afterwards.

    Raises:
        UnsupportedVersion: an owner of another package's has no such attribute: nobody would look
            at what is put there.
    """
    before: list[Change] = []
    try:
        for owner, name, value in changes:
            refuse_if_gone(owner, name)
            # its own value: what it inherits is there again when this one is deleted
            before.append((owner, name, vars(owner).get(name, MISSING)))
            _put(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            _put(owner, name, value)


def _put(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, or delete it; past an object's own ``__setattr__``."""
    if isinstance(owner, type):
        if value is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    elif value is MISSING:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value
