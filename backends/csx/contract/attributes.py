"""What the step's Python reads and writes in attributes of modules while it is traced.

- A *scalar* that it read (``self.kl_weight``, a Dropout's ``p``) is a constant of the program
  (``frozen_values``).
- A number that it set (``self.n += 1``, ``self.w = min(1.0, self.global_step / 500)``) is set after
  every step; one that it asked for before is an input of the program (``hyperparams/counts``).
- Another scalar that it changed (``self.phase = "main"``) changes that once: a warning.
- An attribute that it found without a tensor and left with one (``if self.ema is None: ...``,
  ``self.total += loss`` from 0.0) is state that is born in the first step (``capture/births``).
- What it appends to a list (``self.outs.append(loss)``, Lightning's idiom for collecting outputs)
  is appended after every step. A step that also *reads* the list (``torch.stack(self.outs)``) would
  see it as it was in the first step, for ever: an error. While a step is traced, the user's code
  gets a ``WatchedList`` for such a list, which notes reads.

``ModuleChanges`` notes which line put something into a module, so that an error about what the step
left there can name it: ``self.seen = torch.cat([self.seen, y])``, or
``torch.nn.utils.weight_norm(self.net)``.

``nn.Module``'s own attribute access is replaced while a trace lasts: 16,569 reads in the GPT of
examples/ (measured), which do not show in the 1.8 s that its trace takes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import is_
from types import CodeType
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torchmetrics import Metric

from fulgurite.backends.csx.contract.frozen_reads import warn
from fulgurite.backends.csx.contract.frozen_values import (
    Access,
    is_same_scalar,
    is_scalar,
    may_be_scalar,
    scalar_of_class,
)
from fulgurite.backends.csx.contract.proxies import holds_tensors, holds_traced, operand
from fulgurite.backends.csx.contract.rules import misuse
from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedState
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, is_library, user_line
from fulgurite.backends.csx.hyperparams.run_numbers import FOLLOWED, RunNumber
from fulgurite.backends.csx.hyperparams.traced_float import (
    TracedNumber,
    is_traced,
    kind_of,
    tensor_or_value,
)
from fulgurite.backends.csx.state import (
    NewPlace,
    Place,
    SideEffects,
    copying_remedy,
    parameter_replaced,
)
from fulgurite.backends.patches import MISSING, applied, caller, patches_of
from fulgurite.backends.torch_versions import CHECKED


class WatchedList(list[Any]):
    """Stands for the list ``original`` while a step is traced; ``line`` is the user's, now."""

    __slots__ = ("changed_at", "cleared", "line", "original", "read_at")

    def __init__(self, original: list[Any], line: Callable[[], UserLine | None]) -> None:
        super().__init__(original)
        self.original, self.line = original, line
        self.read_at: UserLine | None = None
        self.changed_at: UserLine | None = None
        self.cleared = False

    def note_read(self) -> None:
        """Somebody looks at the content; what the step itself put there is no other step's."""
        if self.read_at is None and not self.cleared:
            self.read_at = self.line()

    def note_change(self) -> None:
        """Somebody adds to the content."""
        self.changed_at = self.line()

    def clear(self) -> None:
        """Empty it."""
        super().clear()
        self.note_change()
        self.cleared = True

    def content(self) -> list[Any]:
        """What it holds, without noting a read."""
        return list(list.__iter__(self))


def _noting(name: str, note: Callable[[WatchedList], None]) -> Callable[..., Any]:
    original = getattr(list, name)

    def method(self: WatchedList, *args: Any, **kwargs: Any) -> Any:
        note(self)
        return original(self, *args, **kwargs)

    return method


_OPERATORS = ("len", "iter", "getitem", "delitem", "contains", "reversed", "eq", "repr")
_METHODS = ("index", "count", "copy", "pop", "remove", "insert", "sort", "reverse")
for _name in (*(f"__{name}__" for name in _OPERATORS), *_METHODS):
    setattr(WatchedList, _name, _noting(_name, WatchedList.note_read))
for _name in ("append", "extend", "__iadd__", "__setitem__"):
    setattr(WatchedList, _name, _noting(_name, WatchedList.note_change))

pytree.register_pytree_node(  # results of a step, arguments of a checkpoint
    WatchedList,
    lambda watched: (list(watched), None),
    lambda leaves, _: list(leaves),
    serialized_type_name=f"{__name__}.{WatchedList.__name__}",
)


def may_collect(values: list[Any]) -> bool:
    """Whether outputs may be collected in a list: it is empty, or holds tensors already."""
    return not values or holds_tensors(values)


def note_lists(arguments: Iterable[Any]) -> None:
    """Note the lists among a torch function's arguments: it reads them past their methods."""
    for argument in arguments:
        if type(argument) is WatchedList:
            argument.note_read()


_SETTERS = ("__setattr__", "__delattr__", "register_parameter", "register_buffer", "add_module")


class ModuleChanges:
    """Tensors and modules that a step puts into the modules of ``root``, or takes out.

    Attributes:
        of_modules: the line that added, removed or replaced a module first; None if none did.
    """

    def __init__(self, root: nn.Module) -> None:
        self._owners = {
            id(container): id(module)
            for module in root.modules()
            for container in (vars(module), module._parameters, module._buffers)
        }
        self._modules = frozenset(self._owners.values())
        self._lines: dict[tuple[int, str], UserLine | None] = {}
        self._last: dict[int, UserLine | None] = {}
        self.of_modules: UserLine | None = None

    @contextlib.contextmanager
    def watching(self, boundary: CodeType) -> Iterator[None]:
        """Watch all modules; ``boundary`` is the frame where the trace began."""

        def noting(original: Callable[..., Any]) -> Callable[..., Any]:
            def method(module: nn.Module, name: str, *value: Any, **options: Any) -> Any:
                if id(module) in self._modules and isinstance(
                    value[0] if value else None, (Tensor, nn.Module, type(None))
                ):
                    self._note(module, name, value, user_line(boundary))
                return original(module, name, *value, **options)

            return method

        methods = {name: noting(getattr(nn.Module, name)) for name in _SETTERS}
        why = "an error about what the step put into a module names the line"
        with applied(patches_of(nn.Module, methods, why=why, checked=CHECKED)):
            yield

    def _note(self, module: nn.Module, name: str, value: Any, line: UserLine | None) -> None:
        self._lines[id(module), name] = self._last[id(module)] = line
        if name in module._modules or (value and isinstance(value[0], nn.Module)):
            self.of_modules = self.of_modules or line

    def line_of(self, container: Any, key: Any) -> UserLine | None:
        """Where the attribute ``key`` that the dict ``container`` holds was last set."""
        module = self._owners.get(id(container), 0)
        return self._lines.get((module, key)) or self._last.get(module)


_HOST_HOOK = "a host hook such as on_train_batch_start, which runs on every step"
_Key = tuple[int, str]
_OF_TRAINING: dict[str, type[nn.Module]] = {"p": _DropoutNd, "momentum": _NormBase}
"""Numbers that layers read in eval mode, too, and do not use there."""


@dataclass
class SetNumbers:
    """The numbers and flags that the user's code has put into attributes.

    Args:
        reads: the scalars that it has asked for.

    Attributes:
        written: the first write to each.
        left: what is there when the step has run, as Python's own numbers.
        made: those in dicts, where there were none: each what was there, and what is left.
    """

    reads: Mapping[_Key, Access]
    written: dict[_Key, Access] = field(default_factory=dict)
    left: dict[_Key, Any] = field(default_factory=dict)
    made: list[tuple[Place, Any, Any]] = field(default_factory=list)

    def settle(self) -> Iterator[tuple[Access, Any, bool]]:
        """Those that are there when the step has run.

        Each with what it is now, and whether the code had asked for another number there.
        """
        for key, write in self.written.items():
            now, asked = write.container.get(write.name), key in self.reads
            if type(now) is bool:  # one that the code has asked for has a program for each value
                is_set = not asked
            else:
                is_set = _is_number(now) and not (asked and is_same_scalar(now, write.before))
            if is_set:
                self.left[key] = now.value if isinstance(now, TracedNumber) else now
                yield write, now, asked and _is_number(write.before)


class Attributes:
    """The attributes of a step's modules while it is traced.

    Args:
        root: the module that holds them all.
    """

    def __init__(self, root: nn.Module) -> None:
        scalar_of_class.cache_clear()  # a class may have got others since the last trace
        self._paths = {id(module): path for path, module in root.named_modules()}
        self._reads: dict[_Key, Access] = {}
        self._writes: dict[_Key, Access] = {}  # by the user: the line is the last write's
        self.numbers = SetNumbers(self._reads)  # that the step has put there
        self._written: set[_Key] = set()  # by anybody
        self._lists: dict[_Key, tuple[nn.Module, WatchedList]] = {}
        self._parameters: dict[_Key, Access] = {}  # written by the user
        self.changed_lists: list[tuple[list[Any], list[Any]]] = []  # and what was in them

    @contextlib.contextmanager
    def watching(self, boundary: CodeType) -> Iterator[None]:
        """Watch the attributes of all modules; ``boundary`` is the frame where the trace began."""
        self._line = functools.partial(user_line, boundary)
        get, missing = object.__getattribute__, nn.Module.__getattr__
        put, drop = nn.Module.__setattr__, nn.Module.__delattr__

        def read(module: nn.Module, name: str) -> Any:
            value = get(module, name)
            kind = type(value)
            if kind is list:
                return self._list(module, name, value)
            if may_be_scalar(kind):
                self._note_read(module, name, value)
            elif kind is RunNumber and (line := self._line()) is not None:
                FOLLOWED.add((line.file, line.function))
            return value

        def read_rest(module: nn.Module, name: str) -> Any:
            try:
                value = missing(module, name)
            except AttributeError:
                self._note_read(module, name, MISSING)
                raise
            if value is None:  # a buffer that is not there yet, of which Python asks that
                self._note_read(module, name, None)
            return value

        def write(module: nn.Module, name: str, value: Any) -> None:
            put(module, name, self._note_write(module, name, value))

        def erase(module: nn.Module, name: str) -> None:
            self._note_write(module, name, MISSING)
            drop(module, name)

        methods = {"__getattribute__": read, "__getattr__": read_rest, "__setattr__": write}
        methods["__delattr__"] = erase
        why = "the program keeps Python values that the step reads, and does not run what it writes"
        with applied(patches_of(nn.Module, methods, why=why, checked=CHECKED)):
            yield

    # -- while the step runs -------------------------------------------------------------------

    def _access(self, module: nn.Module, name: str, before: Any) -> Access:
        where = self._name(module, name)
        return Access(module=module, name=name, where=where, before=before, line=self._line())

    def _name(self, module: nn.Module, name: str) -> str:
        return f"self.{self._paths[id(module)]}.{name}".replace("..", ".")  # the root has no path

    def _note_read(self, module: nn.Module, name: str, value: Any) -> None:
        key = (id(module), name)
        noted = key in self._reads or key in self._written or key in self.numbers.written
        if noted or key[0] not in self._paths:
            return
        own = value is MISSING or name in vars(module) or name in module._buffers
        own = own or scalar_of_class(cast(Any, type(module)), name) is not MISSING
        # train() and eval() choose another program, so that ``training`` may change
        frameworks = name == "training" or (name[0] == "_" and is_library(caller(sys._getframe(2))))
        empty = type(value) is tuple and not value
        unused = isinstance(module, _OF_TRAINING.get(name, ())) and not vars(module)["training"]
        is_asked = own and not (empty or unused or frameworks)
        if is_asked and (value is MISSING or is_scalar(value)):
            self._reads[key] = self._access(module, name, value)

    def _note_write(self, module: nn.Module, name: str, value: Any) -> Any:
        """Note a write; returns the value to be written."""
        if type(value) is WatchedList:
            value = value.original  # self.outs += [loss] sets the stand-in: it must not stay there
        key = (id(module), name)
        now = (module._buffers if name in module._buffers else vars(module)).get(name, MISSING)
        if isinstance(now, TracedNumber):
            self._written.add(key)
            return operand(value)  # the trace's inputs know what is set there
        is_users = key[0] in self._paths and not is_library(caller(sys._getframe(2)))
        if is_users and key in self._reads:
            value = operand(value)  # else it is that of each batch
        before = self._writes[key].before if key in self._writes else now
        if is_users and (_is_number(value) or type(value) is bool):
            self.numbers.written.setdefault(key, self._access(module, name, before))
        if now is value or (is_scalar(now) and is_same_scalar(value, now)):
            return value  # so that it is compared from now on: a hook may change it
        self._written.add(key)
        if is_users:
            if name in module._parameters:
                written = self._access(module, name, module._parameters[name])
                self._parameters.setdefault(key, written)
            self._writes[key] = self._access(module, name, before)
        return value

    def _list(self, module: nn.Module, name: str, value: list[Any]) -> list[Any]:
        """A list as the code that reads the attribute sees it."""
        key = (id(module), name)
        if is_library(caller(sys._getframe(2))) or isinstance(module, Metric):
            return value
        if key in self._lists and self._lists[key][1].original is value:
            return self._lists[key][1]
        own = key[0] in self._paths and key not in self._written and name in vars(module)
        if not own or not may_collect(value):
            return value
        # two attributes may hold one list: both are to see what either does
        known = [watched for _, watched in self._lists.values() if watched.original is value]
        watched = known[0] if known else WatchedList(value, self._line)
        self._lists[key] = (module, watched)
        return watched

    # -- when it has run -----------------------------------------------------------------------

    def settle(self, effects: SideEffects, is_constant: Callable[[Tensor], bool]) -> None:
        """Put lists back, and judge what the step found and left.

        Args:
            effects: receives lists that the step cleared before it filled them.
            is_constant: whether a traced tensor follows from constants alone; it may be cached.

        Raises:
            UnsupportedState: it reads a list of tensors that it makes longer, or replaced a
                parameter.
        """
        for write in self._parameters.values():
            if write.module._parameters.get(write.name) is not write.before is not None:
                raise UnsupportedState(
                    parameter_replaced(write.where, "in the step"),
                    line=write.line,
                    remedy=copying_remedy(write.where),
                )
        for (_, name), (module, watched) in self._lists.items():
            self._settle_list(module, name, watched, effects)
        self._lists.clear()  # they hold traced tensors
        for read in self._reads.values():
            now = read.now()
            if holds_traced(now):
                place = Place(read.container, read.name, read.where)
                leaves = map(tensor_or_value, pytree.tree_leaves(now))
                tensors = [one for one in leaves if isinstance(one, Tensor)]
                if all(map(is_constant, tensors)):
                    effects.tables.append(place)
                else:
                    effects.new_places.append(NewPlace(place=place))

    def _settle_list(
        self, module: nn.Module, name: str, watched: WatchedList, effects: SideEffects
    ) -> None:
        content, original = watched.content(), watched.original
        if len(content) == len(original) and all(map(is_, content, original)):
            return
        if not holds_traced(content):  # Python values, which no program appends
            self.changed_lists.append((original, list(original)))
        _judge_list(self._name(module, name), name, watched, content)
        if holds_traced(content) and watched.cleared:
            effects.set_after([Place(vars(module), name)], content)
        else:
            original[:] = content

    def reads(self) -> tuple[Access, ...]:
        """The scalars that the step read, or that were not there, but for what it wrote itself."""
        kept = self._written.difference(self.numbers.left)
        return tuple(read for key, read in self._reads.items() if key not in kept)

    def warn_of_changes(self) -> None:
        """Say what the step changed, and no later one will."""
        for key in [key for key in self._writes if key not in self.numbers.left]:
            _warn_of_change(self._writes[key], was_read=key in self._reads)

    def settings(self) -> list[tuple[Place, Any, Any]]:
        """Flags (bools) that the user's code changed, and what it set that was not there.

        Each with what was there before, and what is now; no tensors.
        """
        left, writes = self.numbers.left, self._writes.items()
        changed = [(one, left.get(k, one.container.get(one.name, MISSING))) for k, one in writes]
        return self.numbers.made + [
            (Place(one.container, one.name, one.where), one.before, now)
            for one, now in changed
            if now is not one.before
            and (type(now) is bool or one.before is None or one.before is MISSING)
        ]

    def changes(self) -> tuple[Access, ...]:
        """The scalars that the user's code changed, but for numbers that each step sets."""
        changed = (write for key, write in self._writes.items() if key not in self.numbers.left)
        return tuple(write for write in changed if is_scalar(write.now()))


def _judge_list(where: str, name: str, watched: WatchedList, content: list[Any]) -> None:
    """Warn of a list whose change happens once; raise where the step reads what it makes longer."""
    count = len(watched.original)
    if not holds_traced(content):
        text = f"{where} was changed while the step was traced; that happens once"
        warn(where, text, watched.changed_at or watched.read_at, _HOST_HOOK)
    elif watched.read_at is not None and len(content) != count:
        found = {"attribute": where, "name": name, "count": f"{count} element{'s' * (count != 1)}"}
        raise misuse("growing_list", watched.read_at, **found)


def code_of_zeros(value: Any) -> str:
    """Code that makes zeros of the same shapes; numbers where eagerly there are some."""
    if is_traced(value):
        return repr(kind_of(value)())
    if isinstance(value, Tensor):
        plain = value.dtype == torch.get_default_dtype()
        return f"torch.zeros({list(value.shape)}{'' if plain else f', dtype={value.dtype}'})"
    if isinstance(value, dict):
        pairs = ", ".join(f"{key!r}: {code_of_zeros(item)}" for key, item in value.items())
        return f"{{{pairs}}}"
    if isinstance(value, (list, tuple)):
        items = ", ".join(map(code_of_zeros, value))
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' * (len(value) == 1)})"
    return repr(value)


def _is_number(value: Any) -> bool:
    """Whether a value is a number of Python's, which a program may follow; no flag."""
    return type(value) in (int, float) or isinstance(value, TracedNumber)


def _warn_of_change(write: Access, was_read: bool) -> None:
    before, now = write.before, write.now()
    counted = was_read if before is None or before is MISSING else is_scalar(before)
    if not counted or not is_scalar(now) or (type(now) is type(before) and now == before):
        return
    shown = "nothing" if before is MISSING else repr(before)
    text = f"{write.where} was changed from {shown} to {now!r} while the step was traced"
    remedy = f"a buffer; or {_HOST_HOOK}" if type(now) is bool else _HOST_HOOK
    warn(write.where, f"{text}; that happens once", write.line, remedy)
