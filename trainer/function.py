"""``compile`` and ``trace``: hand-written loops, without Lightning's.

On CSX a traced function becomes one program; on CPU and GPU it stays the eager function.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from fulgurite.backends import Backend, CSXBackend, backend_from
from fulgurite.backends import backend as live_or_new_backend
from fulgurite.backends.backend import check_backend_type, current_backend, gpu_device
from fulgurite.backends.closures import call_and_run, current_span
from fulgurite.backends.csx.diagnostics.trace_errors import UsersFramesAlone
from fulgurite.backends.csx.plugins.function_programs import FunctionPrograms, compiled_names
from fulgurite.backends.step_context import running, step_context

_Module = TypeVar("_Module", bound=nn.Module)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def compile(model: _Module, backend: Backend | str | None = None) -> _Module:
    """Prepare a model for a backend; returns the model itself.

    On GPU its parameters and buffers move there. On CSX nothing is compiled yet: that happens when
    a traced function is first called, for all that it does.

    >>> compile(nn.Linear(3, 1), "CPU")
    Linear(in_features=3, out_features=1, bias=True)

    Args:
        model: any module, not one that went through ``torch.compile``.
        backend: a backend or its type ("CSX", "CPU", "GPU"); None takes the live one.

    Raises:
        RuntimeError: a backend of another type lives in this process; or none does, and none was
            given.
        TypeError: ``model`` is no module, or went through ``torch.compile``.
    """
    from torch._dynamo import OptimizedModule

    if not isinstance(model, nn.Module):
        raise TypeError(f"compile takes a torch.nn.Module; got {type(model).__name__}.")
    if isinstance(model, OptimizedModule) or model._compiled_call_impl is not None:
        raise TypeError(
            f"compile got a {type(model).__name__} that went through torch.compile. Give it the"
            " module itself."
        )
    chosen = _chosen(backend)
    # what the caller calls it is what programs say of it: a closure's or a list's name tells less
    frame = sys._getframe(1)
    names = (name for name, value in frame.f_locals.items() if value is model and name != "self")
    name = next(names, None)
    if name is not None:
        compiled_names[model] = name
    if chosen.backend_type == "GPU":
        model.to(gpu_device())
    return model


def _chosen(backend: Backend | str | None) -> Backend:
    if isinstance(backend, str):
        live = current_backend()
        same = live is not None and live.backend_type == backend.upper()
        return live if live is not None and same else live_or_new_backend(backend)
    if backend is None:
        return live_or_new_backend()
    if isinstance(backend, Backend):
        check_backend_type(backend.backend_type)
        return backend_from(backend)
    raise TypeError(
        "backend must be a backend object (fulgurite.backend('CSX')), its type ('CSX', 'CPU' or"
        f" 'GPU') or None; got {type(backend).__name__} {backend!r}."
    )


def trace(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make a function one static program: its Python runs once, on its first call.

    What it does to tensors becomes the program: forward, backward, optimizers, metrics. Later calls
    only feed it. Tensors, numbers and strings among the arguments, in any containers, are data;
    modules, optimizers, ``self`` and other objects are static: each set of them has programs of its
    own. Modules, optimizers and schedulers are found from the names in the function's code. Called
    under ``torch.no_grad()`` it computes no gradients. Results are concrete, detached tensors.

    On CPU and GPU, and inside another traced function, it is called as it is.

    >>> model = compile(nn.Linear(2, 1, bias=False), "CPU")  # or "CSX", "GPU"
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    >>> @trace
    ... def training_step(x):
    ...     loss = model(x).sum()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     return loss.detach()
    >>> losses = [training_step(torch.ones(1, 2)) for _ in range(2)]
    >>> round(float(losses[0] - losses[1]), 4)
    1.0

    Args:
        function: a function, a method (the decorator works in a class body), or another callable.

    Raises:
        TypeError: ``function`` is no callable, or a class, a generator or a coroutine function.
        RuntimeError: at a call: there is no backend yet.
        TraceError: at a call: the function is not static.
    """
    _check(function)
    programs: FunctionPrograms | None = None
    built_for: Backend | None = None
    calls = 0  # that were eager

    @functools.wraps(function)
    def traced(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        nonlocal programs, built_for, calls
        now = step_context.get()
        # a part of the step around it, which is traced, or runs the closures of both
        if now.trace is not None or now.note is not None:
            return function(*args, **kwargs)
        backend = live_or_new_backend()
        if not isinstance(backend, CSXBackend):
            span = current_span()
            done = torch.tensor(calls if span is None else span.step - 1)
            with running(global_step=lambda: done):
                result: _Result = call_and_run(function, args, kwargs)
            calls += 1
            return result
        # a backend that was made anew with the same options has the same programs
        if programs is None or (built_for is not backend and built_for != backend):
            programs, built_for = FunctionPrograms(function, backend), backend
        with UsersFramesAlone():
            result = programs(args, kwargs)
        return result

    return traced


def _check(function: Any) -> None:
    if isinstance(function, (staticmethod, classmethod)):
        kind = type(function).__name__
        raise TypeError(f"trace got a {kind}. Put @{kind} above @fulgurite.trace.")
    if not callable(function) or isinstance(function, type):
        got = "a class" if isinstance(function, type) else type(function).__name__
        raise TypeError(f"trace takes a function or a method; got {got}.")
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise TypeError(
            f"trace got {function.__name__}(), a generator or coroutine function. A step runs from"
            " its begin to its end: return tensors."
        )
