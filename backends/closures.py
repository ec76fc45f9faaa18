"""Functions that run on the host after a step, with the values that the step computed.

``step_closure`` functions run after every step, ``checkpoint_closure`` functions after steps that a
checkpoint is written for. Called inside a step they are noted and run when it is over; called in
the loop around it they run at once.

Words: a *span* is a loop over batches that knows its steps (``utils.data.DataExecutor``); the
innermost one counts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, Protocol
from weakref import WeakKeyDictionary, WeakSet

import lightning.pytorch as pl
import torch.utils._pytree as pytree
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor

from fulgurite.backends.backend import current_backend
from fulgurite.backends.step_context import running, step_context

_Arguments = ParamSpec("_Arguments")


class Span(Protocol):
    """A loop over batches, seen from the body of the loop."""

    step: int  # the first is 1

    @property
    def is_activation_step(self) -> bool:
        """Whether step closures run."""

    @property
    def is_checkpoint_step(self) -> bool:
        """Whether checkpoint closures run."""


_spans: list[Span] = []
_MARK = "_fulgurite_closure"
_trainers: WeakSet[pl.Trainer] = WeakSet()
_remembered: WeakKeyDictionary[pl.Trainer, dict[Any, Callable[[], Any]]] = WeakKeyDictionary()


class Closure:
    """A function that runs on the host.

    Args:
        function: the user's.
        on_checkpoint: only on steps that a checkpoint is written for.
    """

    def __init__(self, function: Callable[..., Any], on_checkpoint: bool) -> None:
        self.function, self.on_checkpoint = function, on_checkpoint

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What the user's call does: take note inside a step, run outside."""
        note = step_context.get().note
        if note is not None:
            note(self, args, kwargs)
        elif not getattr(current_backend(), "only_builds", False):  # else there are no values
            self.run(*pytree.tree_map(_detached, (args, kwargs)))

    def check(self, trainer: pl.Trainer | None) -> None:
        """Refuse a checkpoint closure where nothing says when a checkpoint is written.

        Raises:
            RuntimeError: outside of a DataExecutor and a Trainer.
        """
        if self.on_checkpoint and not (trainer or _spans or _running()):
            raise RuntimeError(
                f"The checkpoint closure {_name(self.function)} was called outside of a"
                " DataExecutor and of a Trainer's run: nothing says which steps have a checkpoint."
                "\n  Remedy: for batch in DataExecutor(loader, checkpoint_steps=100): ..."
            )

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        trainer: pl.Trainer | None = None,
        call: object | None = None,
    ) -> None:
        """Run the function with concrete values, if it is due.

        Args:
            args: its positional arguments.
            kwargs: its others.
            trainer: whose step called it; None looks for one that runs.
            call: which of the step's calls it is; a checkpoint takes the last values of each.
        """
        if not self.on_checkpoint:
            if not _spans or _spans[-1].is_activation_step:
                self.function(*args, **kwargs)
            return
        trainer = trainer or (None if _spans else _running())
        self.check(trainer)
        if trainer is not None:
            due = functools.partial(self.function, *args, **kwargs)
            # the last step before the checkpoint counts: its values take the place of earlier ones
            _remembered.setdefault(trainer, {})[call or self] = due
        elif _spans[-1].is_checkpoint_step:
            self.function(*args, **kwargs)


def step_closure(function: Callable[_Arguments, Any]) -> Callable[_Arguments, None]:
    """Make a function that runs on the host after each step, with concrete values.

        @step_closure
        def show(loss):
            print(loss.item())

    Called inside a step on CSX it is part of the program: its tensors are outputs, detached, as
    they were at the call; what came with the batch is that of each; its other arguments are those
    of the trace. It runs after every step, in the order of the calls, and what it raises reaches
    the caller of the step, whose work is done.
    Called elsewhere it runs at once. In a ``DataExecutor`` with ``activation_steps=n`` it runs on
    the steps that are multiples of n, and on the last.

    Args:
        function: a function or a method; its result is dropped.
    """
    return _wrapped(function, on_checkpoint=False)


def checkpoint_closure(function: Callable[_Arguments, Any]) -> Callable[_Arguments, None]:
    """Make a function that runs on the host when a checkpoint is due.

    In a ``DataExecutor`` it runs on the steps that are multiples of ``checkpoint_steps``, and on
    the last. In a Trainer's run it is given the values of the last step before a checkpoint, after
    the checkpoint was written, once.

    Args:
        function: a function or a method; its result is dropped.

    Raises:
        RuntimeError: when it is called outside of both.
    """
    return _wrapped(function, on_checkpoint=True)


def _wrapped(
    function: Callable[_Arguments, Any], on_checkpoint: bool
) -> Callable[_Arguments, None]:
    kind = "checkpoint_closure" if on_checkpoint else "step_closure"
    if not callable(function):
        remedy = ""
        if isinstance(function, (staticmethod, classmethod)):
            remedy = f" Put @{type(function).__name__} above @{kind}."
        raise TypeError(f"{kind} takes a function; got {type(function).__name__}.{remedy}")
    closure = Closure(function, on_checkpoint)

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        closure.call(args, kwargs)

    vars(call)[_MARK] = closure
    return call


def is_closure(function: Any) -> bool:
    """Whether a function was made by ``step_closure`` or ``checkpoint_closure``."""
    return isinstance(vars(function).get(_MARK), Closure)


def call_and_run(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function eagerly, and then run the closures that it called."""
    calls: list[tuple[Closure, Any]] = []

    def note(closure: Closure, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure.check(None)
        # copies: what comes later in the step may change them in place
        calls.append((closure, pytree.tree_map(_copied, (args, kwargs))))

    with running(note=note):
        result = function(*args, **kwargs)
    for closure, values in calls:
        closure.run(*values)
    return result


@contextlib.contextmanager
def spanned(span: Span) -> Iterator[None]:
    """While the block runs, ``span`` says which steps closures run on."""
    _spans.append(span)
    try:
        yield
    finally:
        _spans.remove(span)


def current_span() -> Span | None:
    """The innermost loop over batches, None outside of one."""
    return _spans[-1] if _spans else None


def watch_trainer(trainer: pl.Trainer) -> None:
    """Let checkpoint closures know a Trainer: it must call ``checkpoint_written``."""
    _trainers.add(trainer)


def checkpoint_written(trainer: pl.Trainer) -> None:
    """Run the checkpoint closures that steps of a Trainer's have called since the last one."""
    for due in _remembered.pop(trainer, {}).values():
        due()


def _running() -> pl.Trainer | None:
    running = (t for t in _trainers if t.state.status == TrainerStatus.RUNNING)
    return next(running, None)


def _name(function: Any) -> str:
    return f"{getattr(function, '__name__', type(function).__name__)}()"


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
