"""Python values that a step reads while it is traced: the program keeps them as they were then.

Reading one works, and warns once per line of the user's. Here are Lightning's counters, dicts and
loggers, clocks and random numbers; ``attributes`` has what modules hold. Not everything can be
seen: docs/steps.md lists what is frozen without a warning, such as ``datetime.now`` and numpy's
generator objects, whose types are written in C, or a function that an object or a closure holds.
(``sys.setprofile`` would see calls of every kind, but looks at all calls of a trace.)

These values are others on every batch, and the user has been warned that the program keeps the
first. So ``Reads`` records what the first trace read, and gives a later trace of the step the same
again: only what nobody was warned of can then make another program of it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import secrets
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.loggers.logger import DummyLogger
from torch.optim.lr_scheduler import LRScheduler

from fulgurite.backends.csx.contract.proxies import make_counter, make_proxy, refused_at
from fulgurite.backends.csx.diagnostics.mentions import TYPE, mentions
from fulgurite.backends.csx.diagnostics.trace_errors import PUBLIC
from fulgurite.backends.csx.diagnostics.user_lines import (
    UserLine,
    is_library,
    package_of,
    user_line,
)
from fulgurite.backends.csx.graph.rng import note_draw
from fulgurite.backends.csx.hyperparams.counts import OF_MODULES
from fulgurite.backends.csx.hyperparams.run_numbers import (
    COUNTERS,
    EPOCH,
    FOLLOWED,
    INDEX,
    KEPT,
    LAST,
)
from fulgurite.backends.patches import Patch, caller, patched, patches_of
from fulgurite.backends.step_context import step_context
from fulgurite.backends.torch_versions import CHECKED


class Reads:
    """What a trace read of frozen values, in order: recorded, and given to later traces again."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Any]] = {}
        self.begin(replays=False)

    def begin(self, *, replays: bool) -> None:
        """A trace begins: its reads are recorded, or with ``replays`` it gets those on record."""
        self.replays = replays
        self._positions: dict[str, int] = {}

    def value(self, name: str, value: Any) -> Any:
        """What the step gets that reads ``value`` now."""
        # the first trace has written to the real one, and a later one must not write that again
        if self.replays and name in ("logger", "loggers"):
            quiet = DummyLogger()
            return value and ([quiet] * len(value) if name == "loggers" else quiet)
        return self._next(name, lambda: value)

    def call(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the step gets that calls a clock or a random function now."""
        generator = getattr(function, "__self__", args[0] if args else None)
        states = _STATES.get(_kind(generator))
        if states is None:
            value = self._next(name, lambda: function(*args, **kwargs))
            if not self.replays:  # the step may change what it got: a generator
                self._kept[name][-1] = copy.deepcopy(value)
            return copy.deepcopy(value) if self.replays else value
        # shuffle(x) returns nothing that could be given again: the generator is set back instead
        get, put = (getattr(generator, method) for method in states)
        now = get()
        before = self._next(name, lambda: now)
        if before is now:
            return function(*args, **kwargs)
        put(before)  # the same numbers again
        return function(*args, **kwargs)

    def _next(self, name: str, now: Callable[[], Any]) -> Any:
        kept, i = self._kept.setdefault(name, []), self._positions.get(name, 0)
        if not self.replays:
            value = now()
            kept.append(dict(value) if isinstance(value, dict) else value)
            return value
        self._positions[name] = i + 1
        return kept[min(i, len(kept) - 1)] if kept else now()


_STATES = {"Random": ("getstate", "setstate"), "RandomState": ("get_state", "set_state")}


def _kind(generator: Any) -> str:
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return "Random"
    return "RandomState" if type(generator).__name__ == "RandomState" else ""


def frozen_value(name: str, value: Any) -> Any:
    """What a step gets that reads ``value``: that, or in a later trace what the first one read."""
    reads: Reads | None = step_context.get().reads
    return value if reads is None else reads.value(name, value)


def is_replaying() -> bool:
    """Whether a step is traced again, and gets the values that its first trace read."""
    reads: Reads | None = step_context.get().reads
    return reads is not None and reads.replays


def frozen_call(name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a step gets that calls a clock or a random function: as ``frozen_value``."""
    reads: Reads | None = step_context.get().reads
    return function(*args, **kwargs) if reads is None else reads.call(name, function, args, kwargs)


_FOLLOWED = (
    "it in arithmetic and comparisons alone, which the program follows (in (1, 3) is one), without"
    " float(), int(), an f-string, an index, or the key of a dict or set (but of a remainder by 4"
    " at most: x[batch_idx % 2])"
)
_COUNT = (
    f"{_FOLLOWED}; or a host hook (on_train_batch_start, on_train_batch_end), which runs on every"
    " batch"
)
_EVALUATED = (
    "on_{stage}_batch_end(self, outputs, batch, batch_idx), which runs on the host after every"
    " batch and is given what the step returned:\n"
    "      if batch_idx == 0: self.example = outputs  # after: return x[:4]\n"
    "    or on_{stage}_batch_start(self, batch, batch_idx), before it"
)
_METRICS = "a host hook such as on_train_batch_end; or a buffer that on_train_epoch_start sets"
_LOGGER = 'self.log("name", value); or fulgurite.step_closure, which runs on the host every step'
_REMEDIES = {
    "global_step": _COUNT,
    "current_epoch": f"{_FOLLOWED}; or a buffer that on_train_epoch_start sets"
    " (self.beta.fill_(...))",
    "callback_metrics": _METRICS,
    "logged_metrics": _METRICS,
    "progress_bar_metrics": _METRICS,
    "logger": _LOGGER,
    "loggers": _LOGGER,
    "get_last_lr()": 'optimizer.param_groups[0]["lr"], which is traced',
}
_OF_BOTH = ("global_step", "current_epoch", "logger", "loggers")
_METRIC_DICTS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_PROPERTIES: dict[type, tuple[str, ...]] = {
    pl.LightningModule: _OF_BOTH,
    pl.Trainer: (*_OF_BOTH, "is_last_batch", *_METRIC_DICTS),
}
_SHOWN: set[tuple[str, str, int]] = set()  # name, file and line: each warns once in a run
_ATTRIBUTES = "fulgurite.backends.csx.contract.attributes"  # named: it imports this file
PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))

_thread: int | None = None  # that traces, and wants warnings


class FrozenValueWarning(UserWarning):
    """A Python value that the step read is a constant of the program from then on."""


class FrozenValueNote(FrozenValueWarning):
    """Python of the step changes a value that the program does not follow: a note, of an audit.

    It happens once, and eagerly on every batch. With the next value the step's Python gave the same
    program; with a later one it may give another, which is not looked for.
    """


FrozenValueWarning.__module__ = FrozenValueNote.__module__ = PUBLIC


def forget_warned_lines() -> None:
    """Let every line warn again: a run begins."""
    _SHOWN.clear()
    FOLLOWED.clear()
    KEPT.clear()
    OF_MODULES.clear()


def warned_in(code: CodeType, without: str = "") -> bool:
    """Whether a line of a function warned in this run, of something else than ``without``."""
    lines = {line for *_, line in code.co_lines() if line is not None}
    return any(
        file == code.co_filename and line in lines and name != without
        for name, file, line in _SHOWN
    )


def warn(name: str, text: str, line: UserLine | None, remedy: str) -> None:
    """Warn once of ``name`` on a line; nothing where no trace wants warnings, or has no line."""
    if _thread != threading.get_ident() or line is None or is_replaying():
        return
    line = line.inside or line  # of an installed model the line in its own code
    key = (name, line.file, line.line)
    if key not in _SHOWN:
        message = f"{text}, in {line}. Use {remedy}."
        warnings.warn_explicit(message, FrozenValueWarning, line.file, line.line)
        _SHOWN.add(key)


def warn_frozen(
    name: str, value: Any, remedy: str = "", done: str = "read", line: UserLine | None = None
) -> None:
    """Warn that ``name`` was read: on the line of the user's that runs now, unless one is given."""
    kept = "that happens once"
    if value is not None or done == "read":
        shown = repr(value) if isinstance(value, PLAIN_TYPES) else f"a {type(value).__name__}"
        kept = f"the program keeps its value, {shown}"
    text = f"{name} was {done} while the step was traced; {kept}"
    warn(name, text, line or user_line(), remedy or _REMEDIES[name])


def note_of_audit(name: str, text: str, line: UserLine, is_draw: bool) -> None:
    """Note what happens once, though the step's code would do it on every batch.

    Args:
        name: what changed.
        text: how.
        line: where.
        is_draw: it is a random generator, whose functions could not be watched.
    """
    if is_draw:
        if (line.file, line.line) not in {(file, at) for _, file, at in _SHOWN}:
            _SHOWN.add((name, line.file, line.line))
            message = f"{name} drew while the step was traced; the program keeps what it drew"
            message += f", in {line}. Use {RANDOM}."
            warnings.warn_explicit(message, FrozenValueWarning, line.file, line.line)
        return
    # of what the first trace has warned of, nothing more
    if not any(name.startswith(shown) for shown, *_ in _SHOWN):
        _SHOWN.add((name, line.file, line.line))
        message = (
            f"{text} by the step's Python, in {line}; in the run it happens once, for that Python"
            " runs once. Where another value gives another program (if calls > 10: ...), the run"
            " does not follow it. What is to change on every batch changes in on_train_batch_end,"
            " which runs on the host; what the step computes with is a buffer."
        )
        warnings.warn_explicit(message, FrozenValueNote, line.file, line.line)


def is_users(frame: FrameType) -> bool:
    """Whether a frame is the user's, in the thread that traces and wants warnings."""
    return _wants_warnings() and not is_library(_reader(frame))


def is_models(frame: FrameType) -> bool:
    """Whether a frame is the user's, or that of an installed package: a model may come from one."""
    if not _wants_warnings():
        return False
    frame = _reader(frame)
    return package_of(frame) != ""


def _wants_warnings() -> bool:
    return _thread == threading.get_ident()


def _reader(frame: FrameType) -> FrameType:
    frame = caller(frame)
    if frame.f_globals.get("__name__") == _ATTRIBUTES and frame.f_back is not None:
        frame = caller(frame.f_back)  # a module's property, whose reader went through there
    return frame


def frozen_index(batch_idx: int, stage: str = "") -> Any:
    """``batch_idx`` for a step that is traced: a stand-in that warns when it is read.

    Args:
        batch_idx: of the first batch.
        stage: which hooks to advise where it is not training's.
    """
    remedy = _EVALUATED.format(stage=stage) if stage else _COUNT
    return _counter(INDEX, batch_idx, remedy)


def _counter(name: str, value: int, remedy: str = "") -> Any:
    """What a step gets that asks for a counter of the run."""
    trace = step_context.get().trace
    if trace is None:  # the step runs as it is
        return value
    seen = frozen_value(name, value)
    note = noting(name, seen, remedy)
    if step_context.get().reads is None:  # Python runs on every batch, and has its values
        return make_proxy(value, note, name)
    return make_counter(seen, note, name, lambda: trace.run_number(name, value, seen, note))


def warn_of_types(codes: Iterable[CodeType], followed: Iterable[Any]) -> None:
    """Warn where functions of a step ask for the type of a number that they find a stand-in for.

    ``followed`` are names of such numbers, besides those of counters.
    """
    known = {*COUNTERS, *followed}
    for code in codes:
        is_step = code.co_name.endswith("_step") and code.co_argcount > 2  # self, batch, batch_idx
        names = known.union(code.co_varnames[2:3]) if is_step else known
        for said in mentions(code):
            if said.owner == TYPE and said.name in names:
                text = f"type({said.name}) is that of what stands for it while a step is traced"
                remedy = "isinstance(value, int), which sees through it"
                warn(f"type({said.name})", text, UserLine.at(code, said.line), remedy)


def noting(name: str, seen: float, remedy: str = _COUNT) -> Callable[..., None]:
    """What is called where Python takes the value of a number that changes from step to step."""

    def note(line: UserLine | None = None, value: float | None = None) -> None:
        found = line or refused_at(name) or user_line()
        if found is not None:
            KEPT.add((found.file, found.function))
        warn_frozen(name, seen if value is None else value, remedy, line=found)

    return note


@contextlib.contextmanager
def frozen_hook_arguments(module: pl.LightningModule) -> Iterator[None]:
    """Let ``optimizer_step`` and ``optimizer_zero_grad`` get arguments that warn when read."""

    def with_proxies(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(epoch: int, batch_idx: int, *rest: Any, **named: Any) -> Any:
            return hook(_counter(EPOCH, epoch), frozen_index(batch_idx), *rest, **named)

        return call

    names = ("optimizer_step", "optimizer_zero_grad")
    with patched([(module, name, with_proxies(getattr(module, name))) for name in names]):
        yield


@contextlib.contextmanager
def warn_of_frozen_reads() -> Iterator[None]:
    """Let this thread warn; outside of it, all warnings of this file are silent."""
    global _thread
    before, _thread = _thread, threading.get_ident()
    try:
        yield
    finally:
        _thread = before


def reads_of_lightning() -> Iterator[Patch]:
    """Patches after which the user's reads of Lightning's counters, metrics and loggers warn."""
    why = "the program keeps the value that the first step read, so the user is warned"
    for owner, names in _PROPERTIES.items():
        properties = {name: _property(vars(owner)[name], name) for name in names}
        yield from patches_of(owner, properties, why=why, checked="lightning 2.6")
    rates = {"get_last_lr": _last_lr(LRScheduler.get_last_lr)}
    yield from patches_of(LRScheduler, rates, why=why, checked=CHECKED)


def _property(original: property, name: str) -> property:
    def read(self: Any) -> Any:
        assert original.fget is not None
        value = original.fget(self)
        if step_context.get().reads is not None and is_models(frame := sys._getframe(1)):
            if name == LAST:
                return _answer(name, value)
            if name in COUNTERS:
                return _counter(name, value)
            warn_frozen(name, value)
            if is_users(frame):  # a package's value may not change: an audit would see it
                return frozen_value(name, value)
        return value

    return property(read, original.fset)


def _answer(name: str, value: bool) -> bool:
    seen = frozen_value(name, value)
    step_context.get().trace.note_answer(name, seen)
    return bool(seen)


def _last_lr(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_last_lr(self: LRScheduler) -> Any:
        value = original(self)
        if is_models(sys._getframe(1)):
            warn_frozen("get_last_lr()", value[0] if len(value) == 1 else value, done="called")
            return frozen_value("get_last_lr()", value)
        return value

    return get_last_lr


_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_TEXTS = ("ctime", "localtime", "gmtime", "strftime")
_TIME = "on_train_batch_start and on_train_batch_end, which run on the host, to take the time"
_SECRETS = ("choice", "randbelow", "randbits", "token_bytes", "token_hex", "token_urlsafe")
_ANEW = ", which draw{} anew on every step"
RANDOM = (
    f"torch.rand, torch.randint or torch.randperm{_ANEW.format('')}; or, for what the host does"
    " with it (an environment, a replay buffer), on_train_batch_end, which runs on every batch"
)
_DRAWN = {
    "beta": "torch.distributions.Beta(a, b).sample()",
    "betavariate": "torch.distributions.Beta(a, b).sample()",
    "dirichlet": "torch.distributions.Dirichlet(concentration).sample()",
    "gamma": "torch.distributions.Gamma(shape, 1 / scale).sample()",
    "gammavariate": "torch.distributions.Gamma(alpha, 1 / beta).sample()",
    "exponential": "torch.empty(size).exponential_(1 / scale)",
    "expovariate": "torch.empty(()).exponential_(rate)",
    "normal": "mean + std * torch.randn(size)",
    "randn": "torch.randn(size)",
    "standard_normal": "torch.randn(size)",
    "gauss": "mean + std * torch.randn(())",
    "normalvariate": "mean + std * torch.randn(())",
    "uniform": "torch.empty(size).uniform_(low, high)",
    "binomial": "torch.bernoulli(torch.full(size, p))",
    "poisson": "torch.poisson(torch.full(size, rate))",
    "permutation": "x[torch.randperm(len(x))]",
    "shuffle": "x[torch.randperm(len(x))]",
    "sample": "x[torch.randperm(len(x))[:k]]",
    "choice": "x[torch.randint(len(x), (k,))], with weights x[torch.multinomial(weights, k)]",
    "choices": "x[torch.randint(len(x), (k,))], with weights x[torch.multinomial(weights, k)]",
}
"""What draws in a program as functions of Python's and NumPy's generators do."""
_OF_STATE = ("getstate", "setstate", "get_state", "set_state", "get_bit_generator")


def impure_functions() -> Iterator[Patch]:
    """Patches after which the user's calls in a step warn."""
    clocks = (*_CLOCKS, *(f"{clock}_ns" for clock in _CLOCKS), *_TEXTS)
    drawn = _methods_of(random, random._inst)
    numpys = (*_methods_of(np.random, np.random.mtrand._rand), "default_rng")
    yield from _warning(time, "time", clocks, _TIME, "Python 3.11")
    yield from _warning(random, "random", drawn, RANDOM, "Python 3.11")
    yield from _warning(random.Random, "random.Random", drawn, RANDOM, "Python 3.11")
    own = [name for name in drawn if name in vars(random.SystemRandom)]
    yield from _warning(random.SystemRandom, "random.SystemRandom", own, RANDOM, "Python 3.11")
    yield from _warning(secrets, "secrets", _SECRETS, RANDOM, "Python 3.11")
    if (stats := sys.modules.get("scipy.stats")) is not None:  # which draw from numpy's generator
        for name in ("rv_continuous", "rv_discrete"):
            kind = getattr(stats, name)
            yield from _warning(kind, f"scipy.stats.{name}", ("rvs",), RANDOM, "scipy 1.17")
    yield from _warning(np.random, "numpy.random", numpys, RANDOM, "numpy 2.4")


def _warning(
    home: Any, label: str, names: Iterable[str], remedy: str, checked: str
) -> Iterator[Patch]:
    """Patches of a home's functions, which messages call ``label`` and the function's name."""
    functions = {
        name: _watched(getattr(home, name), f"{label}.{name}()", remedy, name) for name in names
    }
    why = "the program keeps the value that the first step got, so the user is warned"
    return patches_of(home, functions, why=why, checked=checked)


def _methods_of(module: ModuleType, generator: object) -> list[str]:
    """The functions of a module that are methods of its global generator."""
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__self__", None) is generator and name not in _OF_STATE
    ]


def _watched(
    original: Callable[..., Any], label: str, remedy: str, name: str
) -> Callable[..., Any]:
    draws = remedy == RANDOM
    if draws and name in _DRAWN:
        remedy = _DRAWN[name] + _ANEW.format("s")

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if draws:
            note_draw()
        if not (is_models if draws else is_users)(sys._getframe(1)):
            return original(*args, **kwargs)
        value = frozen_call(label, original, args, kwargs)
        warn_frozen(label, value, remedy, done="called")
        return value

    return watched
