"""A plain function as a program: the step of a hand-written loop.

Its arguments are data (tensors, numbers and strings, in any containers), which is fed to the
program, or static (a module, an optimizer, any other object): what the program is built for. Each
set of static arguments, known by identity, has a step of its own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fulgurite.backends.closures import Span, current_span
from fulgurite.backends.csx.capture import Scope
from fulgurite.backends.csx.compile.fabrics import make_fabric
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.contract import ConstantSource
from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedInput, UnsupportedState
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, user_line
from fulgurite.backends.csx.objects import CONSTANTS, Discovery, discover, keystr
from fulgurite.backends.csx.plugins.host_optimizers import refuse_useless_steps
from fulgurite.backends.csx.program.description import STEP
from fulgurite.backends.csx.program.offline import BuiltOnly
from fulgurite.backends.csx.program.step_function import StepFunction

compiled_names: Any = WeakIdKeyDictionary()
"""Modules that went through ``compile``, and the user's names of them."""

CHECKED_EVERY = 256  # calls: layouts of all states, 300 µs for an MLP (measured)


class Roots(nn.Module):
    """Modules as the children of one that has no other part in them."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(modules)  # names may have dots


@dataclass(slots=True, kw_only=True)
class FunctionScope(Scope):
    """What a function works on."""

    root = ""
    gradients_on_host = True
    discovered: Discovery
    line: UserLine | None
    parameter_names: Callable[[Any], str]
    calls: Callable[[], int]
    function: Callable[..., Any]

    def functions(self) -> Iterator[Any]:
        """The function itself."""
        yield self.function

    def leaf_name(self, path: Any) -> str:
        """An argument, or what is in one."""
        return self.parameter_names(path)

    def outside_tensors(self) -> list[ConstantSource]:
        """What the globals, closures and objects that the function's code names hold."""
        return self.discovered.tensors

    def holders(self) -> Iterator[tuple[str, object]]:
        """The modules, and the user's objects that the function's code names."""
        yield from Scope.holders(self)
        yield from self.discovered.objects.items()

    def objects(self) -> Iterator[object]:
        """Whatever traced code may change on the host."""
        yield from Scope.objects(self)
        yield from (item for item in self.discovered.objects.values() if hasattr(item, "__dict__"))

    def steps_done(self) -> int:
        """How many steps the loop has done before this one; without a loop, how many calls."""
        span = current_span()
        return self.calls() if span is None else span.step - 1

    def line_of(self, hook: str = "") -> UserLine | None:
        """Where the function is defined."""
        return self.line

    line_now = line_of


class FunctionPrograms:
    """A function's programs on one backend.

    Args:
        function: the user's.
        backend: where it runs.
    """

    def __init__(self, function: Callable[..., Any], backend: CSXBackend) -> None:
        self._function, self._backend = function, backend
        if backend.execution == "weight_streaming":
            raise NotImplementedError(
                "execution='weight_streaming' needs a Trainer: functions that are traced by"
                " themselves keep all weights in memory. Leave execution out."
            )
        self._fabric = make_fabric(backend)
        self._device_type = self._fabric.devices()[0].type
        self._signature = inspect.signature(function)
        self._parameters = list(self._signature.parameters.values())
        self._steps: dict[tuple[Any, ...], _Step] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function: trace and compile it the first time, run its program then.

        Raises:
            TraceError: it is not static, or an argument or what it works on changed.
        """
        if kwargs or len(args) != len(self._parameters):
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
        given: Any = (args, kwargs) if kwargs else args
        data, statics = split_static(given)
        device = self._device_type
        autocast = torch.is_autocast_enabled(device)
        key = (
            torch.is_grad_enabled(),
            torch.get_autocast_dtype(device) if autocast else None,
            bool(kwargs),
            *([(i, id(value)) for i, value in statics] if statics else ()),
        )
        step = self._steps.get(key)
        if step is not None and step.scope.discovered.is_current():
            return step(data)
        step = self._make(given, bool(kwargs), statics)
        try:
            return step(data)
        finally:
            if step.step.programs:  # else the next call looks again for what it works on
                self._steps[key] = step

    def _make(self, given: Any, has_keywords: bool, statics: list[tuple[int, Any]]) -> _Step:
        args, kwargs = given if has_keywords else (given, {})
        self._signature.bind(*args, **kwargs)  # raises as a call would
        paths, _ = pytree.tree_flatten_with_path(given)
        name = functools.partial(argument_name, self._parameters, has_keywords)
        line = _line(self._function)
        for path, value in paths:
            check_argument(name(path), value, line)
        arguments = {name(paths[i][0]): value for i, value in statics}
        discovered = discover(self._function, arguments)
        trains = torch.is_grad_enabled()
        scope = FunctionScope(
            module=Roots(_by_compiled_names(discovered.modules)),
            schedulers=list(discovered.schedulers.values()),
            trains=trains,
            python_runs_once=not self._backend.retrace_every_iteration,
            compares_traces=self._backend.compares_traces,
            function=self._function,
            discovered=discovered,
            line=line,
            parameter_names=name,
            calls=lambda: step.step.runs,
        )
        if trains:
            scope.take_optimizers(discovered.optimizers)
        stage = getattr(self._function, "__name__", type(self._function).__name__)
        step = _Step(
            step=StepFunction(stage, scope, self._backend, self._fabric),
            scope=scope,
            function=self._function,
            statics=statics,
            has_keywords=has_keywords,
        )
        for optimizer in scope.optimizers:
            refuse_useless_steps(optimizer)
        return step


@dataclass(slots=True, kw_only=True)
class _Step:
    """A function with one set of static arguments."""

    step: StepFunction
    scope: FunctionScope
    function: Callable[..., Any]
    statics: list[tuple[int, Any]]
    has_keywords: bool
    span: Span | None = None
    not_run: BuiltOnly | None = None

    def __call__(self, data: Any) -> Any:
        if self.not_run is not None:
            return self.not_run.result
        span = current_span()
        if span is not self.span or self.step.runs % CHECKED_EVERY == 0:
            self.span = span
            self.step.check_state()
        else:
            self.step.check_modules()
        self.step.check_scalars()  # nothing tells what the loop did
        try:
            return self.step(data, lambda: {STEP: self._run})
        except BuiltOnly as built:
            self.not_run = built
            return built.result
        finally:
            self.scope.show_numbers()

    def _run(self, data: Any) -> Any:
        leaves, tree = pytree.tree_flatten(data)
        for i, value in self.statics:
            leaves[i] = value
        arguments = pytree.tree_unflatten(leaves, tree)
        args, kwargs = arguments if self.has_keywords else (arguments, {})
        with self._known_optimizers():
            return self.function(*args, **kwargs)

    @contextlib.contextmanager
    def _known_optimizers(self) -> Iterator[None]:
        """Refuse an optimizer that was not found: its state would be lost."""
        known = {id(optimizer) for optimizer in self.scope.optimizers}

        def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if id(optimizer) in known:
                return
            kind = type(optimizer).__name__
            if not self.scope.trains:
                raise UnsupportedState(
                    f"{kind}.step() was called in a function that runs under torch.no_grad().",
                    line=user_line(),
                    remedy="call the traced function outside of torch.no_grad()",
                )
            raise UnsupportedState(
                f"{kind}.step() was called, but that optimizer was not found among the globals, the"
                " closure and the arguments that the function's code names.",
                line=user_line(),
                remedy=f"pass it as an argument: {self.step.stage}(..., optimizer)",
            )

        handle = register_optimizer_step_pre_hook(check)
        try:
            yield
        finally:
            handle.remove()


def _by_compiled_names(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules under the names that ``compile`` saw, where these are free."""
    named: dict[str, nn.Module] = {}
    for name, module in modules.items():
        wanted = compiled_names.get(module, name)
        named[name if wanted in named or wanted in modules else wanted] = module
    return named


def _line(function: Any) -> UserLine | None:
    """Where a callable is defined."""
    function = inspect.unwrap(function)
    if isinstance(function, functools.partial):
        return _line(function.func)
    if isinstance(function, nn.Module):
        return _line(type(function).forward)
    if not inspect.isroutine(function):
        return _line(type(function).__call__)
    function = getattr(function, "__func__", function)
    return UserLine.of_function(function) if isinstance(function, FunctionType) else None


_DATA = (Tensor, *CONSTANTS)
_PLAIN = frozenset(_DATA)


def split_static(given: Any) -> tuple[Any, list[tuple[int, Any]]]:
    """Arguments with None for each static one, and these with their positions among the leaves."""
    statics: list[tuple[int, Any]] = []
    position = 0
    for value in given:  # pytree would take 30 µs (measured)
        kind = type(value)
        if kind in (list, tuple) and all(type(item) in _PLAIN for item in value):
            position += len(value)
            continue
        if kind in pytree.SUPPORTED_NODES or isinstance(value, tuple):
            return _split_deeply(given)
        if kind not in _PLAIN and not isinstance(value, _DATA):
            statics.append((position, value))
        position += 1
    if not statics:
        return given, statics
    static = {id(value) for _, value in statics}
    return tuple(None if id(value) in static else value for value in given), statics


def _split_deeply(given: Any) -> tuple[Any, list[tuple[int, Any]]]:
    leaves, tree = pytree.tree_flatten(given)
    statics = [(i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, _DATA)]
    for i, _ in statics:
        leaves[i] = None
    return (pytree.tree_unflatten(leaves, tree) if statics else given), statics


def argument_name(parameters: list[inspect.Parameter], has_keywords: bool, path: Any) -> str:
    """``inputs[0]``: a leaf of the arguments by its path in what ``split_static`` takes."""
    first, *rest = path[1:] if has_keywords else path
    if has_keywords and path[0].idx == 1:
        return f"{first.key}{keystr(rest)}"
    kinds = [parameter.kind for parameter in parameters]
    rests_at = len(kinds)
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        rests_at = kinds.index(inspect.Parameter.VAR_POSITIONAL)
    part = "" if first.idx < rests_at else f"[{first.idx - rests_at}]"
    return f"{parameters[min(first.idx, rests_at)].name}{part}{keystr(rest)}"


def check_argument(name: str, value: Any, line: UserLine | None) -> None:
    """Refuse data that would be taken for a constant, and a gradient that would be lost."""
    if isinstance(value, Tensor):
        if value.requires_grad and torch.is_grad_enabled():
            raise UnsupportedInput(
                f"{name} requires a gradient; data of a traced function has none.",
                line=line,
                remedy=f"{name}.detach(); or pass the module or the optimizer that holds it",
            )
        return
    # np.float64 is one of Python's floats as well, and so data
    if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, _DATA):
        raise UnsupportedInput(
            f"{name} is a numpy {type(value).__name__}.",
            line=line,
            remedy=f"torch.as_tensor({name})",
        )
    if isinstance(value, Mapping) or is_dataclass(value):
        as_dict: Callable[[Any], dict[Any, Any]] = dict if isinstance(value, Mapping) else vars
        if any(isinstance(leaf, Tensor) for leaf in as_dict(value).values()):
            raise UnsupportedInput(
                f"{name} is a {type(value).__name__} with tensors in it, which would be constants.",
                line=line,
                remedy=f"a dict of tensors: {as_dict.__name__}({name})",
            )
