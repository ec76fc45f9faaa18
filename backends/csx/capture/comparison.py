"""Two traces of one step: are they the same program, and if not, what differs first?"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fulgurite.backends.csx.capture.host_calls import Accumulator, HostCall, LogCall, NumberCall
from fulgurite.backends.csx.capture.recording import (
    CONSTANT,
    OUTPUTS,
    Number,
    Operand,
    Operation,
    Output,
    Outputs,
    Recording,
)
from fulgurite.backends.csx.contract import ConstantSource
from fulgurite.backends.csx.diagnostics.trace_errors import (
    GraphChanged,
    StateChanged,
)
from fulgurite.backends.csx.diagnostics.user_lines import UserLine
from fulgurite.backends.csx.state import Layout, brief

_REMEDY = (
    "let what changes be something that programs follow:\n"
    "      steps, batches, epochs: self.global_step, batch_idx, self.current_epoch\n"
    "      what a hook sets now and then: an attribute of the module itself (self.k = ...), for a"
    " function one and an if; each value has a program\n"
    "      what the step itself counts: self.k += 1\n"
    "      a number that changes often: a buffer (self.k.fill_(...)) or a tensor of the batch\n"
    "      a branch: torch.where(condition, a, b), which computes both sides\n"
    '      batches of a second loader, for next(self.it): CombinedLoader({"a": loader, "b": other},'
    ' "max_size_cycle") as the loader for fit, of which each batch has both'
)
_NO_OPERATION = Operation("nothing", (), None)
_NO_MORE = Operation(OUTPUTS, (), None)


def same_operations(before: Recording, now: Recording) -> bool:
    """Whether the step's own code made the same operations, of the same constants."""
    pairs = zip(
        before.operations[: before.own_count], now.operations[: now.own_count], strict=False
    )
    return before.own_count == now.own_count and all(
        (was.target, was.arguments) == (is_now.target, is_now.arguments)
        and (
            was.target != CONSTANT
            or _is_same_constant(before.constants[was.arguments], now.constants[is_now.arguments])
        )
        for was, is_now in pairs
    )


def same_results(before: Recording, now: Recording) -> bool:
    """Whether what a step returned, logged and left went to the same places."""
    return _results(before) == _results(now)


def check_same(step: str, before: Recording, now: Recording) -> None:
    """Raise where two traces of a step, the first and a later one, are not the same program.

    Raises:
        GraphChanged: with the first operation, constant or result that differs.
    """
    pairs = enumerate(zip(before.operations, now.operations, strict=False))
    for i, (was, is_now) in pairs:
        if was.target != is_now.target or was.arguments != is_now.arguments:
            raise _changed(step, before, now, i)
        if was.target == CONSTANT:
            constants = before.constants[was.arguments], now.constants[was.arguments]
            if not _is_same_constant(*constants):
                raise _error(step, was, is_now, map(_describe_constant, constants), is_now.line)


def check_results(step: str, before: Recording, now: Recording) -> None:
    """Raise where two traces of a step give other Python values, or log other names.

    Raises:
        GraphChanged: with what was given.
    """
    texts = [_describe_results(one.outputs) for one in (before, now)]
    calls = [[*map(_describe_call, one.outputs.calls)] for one in (before, now)]
    if texts[0] == texts[1] and calls[0] != calls[1]:
        pairs = itertools.zip_longest(*calls, fillvalue="nothing")
        texts = list(next(pair for pair in pairs if pair[0] != pair[1]))
    elif texts[0] == texts[1]:
        leaves = zip(before.outputs.leaves, now.outputs.leaves, strict=False)
        other = next(((a, b) for a, b in leaves if not _is_same_value(a, b)), None)
        if other is None and before.outputs.passed != now.outputs.passed:
            other = before.outputs.passed, now.outputs.passed
        if other is not None:
            texts = [f"a result's {value!r}" for value in other]
    if texts[0] != texts[1]:
        raise _error(step, _NO_MORE, _NO_MORE, texts, None)


def _describe_call(call: HostCall) -> str:
    """What is done on the host after a step, as far as two traces can be compared by it."""
    if isinstance(call, LogCall):
        return f"self.log of {call.key}"
    if isinstance(call, NumberCall):
        return f"{call.name}, which is set"
    return f"a {type(call).__name__}"


PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, np.generic)


def _is_same_value(before: Any, now: Any) -> bool:
    """Whether a result's leaf is the same; objects other than Python values are not compared."""
    if isinstance(before, Output) or isinstance(now, Output):
        return type(before) is type(now)
    if type(before) in (float, np.ndarray):  # NaN equals NaN
        return type(before) is type(now) and repr(before) == repr(now)
    plain = issubclass(type(before), PLAIN) and issubclass(type(now), PLAIN)
    return not plain or type(before) is not type(now) or bool(before == now)


def _is_same_constant(
    before: ConstantSource | Accumulator, now: ConstantSource | Accumulator
) -> bool:
    """A tensor of the same place, or the same tensor, or one of the same values."""
    if isinstance(before, Accumulator) or isinstance(now, Accumulator):
        # their values are sums of an epoch, which Lightning sets to zero again
        return type(before) is type(now) and Layout.of(before.now()) == Layout.of(now.now())
    if before.owner is not None:
        return (before.owner is now.owner and before.path == now.path) or _is_there(before, now)
    return before.tensor is now.tensor or _has_same_values(before.tensor, now.tensor)


def _is_there(before: ConstantSource, now: ConstantSource) -> bool:
    """Whether the place of the one, which is read on every step, holds the other."""
    try:
        return before.now() is now.tensor
    except StateChanged:
        return False


def _has_same_values(a: Tensor, b: Tensor) -> bool:
    if Layout.of(a) != Layout.of(b):
        return False
    left, right = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(left, right)  # byte by byte: NaN equals NaN


def _changed(step: str, before: Recording, now: Recording, i: int) -> GraphChanged:
    """The error for operation ``i``, which differs."""
    was, is_now = before.operations[i], now.operations[i]
    # the rest brings results to their places: the user knows nothing of its operations
    if i >= max(before.own_count, now.own_count):
        return _other_results(step, before, now, was, is_now)
    was, is_now = (one.operations[i] if i < one.own_count else _NO_MORE for one in (before, now))
    names = _name(was.target), _name(is_now.target)
    if names[0] == names[1]:
        names = _describe(before, was), _describe(now, is_now)
    was_kept, is_old = _among(was, now.operations[i:]), _among(is_now, before.operations[i:])
    if was_kept and not is_old:  # what was here comes later, and says nothing about the change
        was, names = _NO_OPERATION, ("nothing", names[1])
    elif is_old and not was_kept:
        is_now, names = _NO_OPERATION, (names[0], "nothing")
    return _error(step, was, is_now, names, is_now.line)


def _other_results(
    step: str, before: Recording, now: Recording, was: Operation, is_now: Operation
) -> GraphChanged:
    """The error where the step computed the same, and then something else became of it."""
    texts = _describe_results(before.outputs), _describe_results(now.outputs)
    if texts[0] == texts[1]:
        operands = zip(_operands(was), _operands(is_now), strict=False)
        a, b = next(((a, b) for a, b in operands if a != b), (None, None))
        was, is_now = _maker(before, a) or was, _maker(now, b) or is_now
        texts = f"the result of {_name(was.target)}", f"the result of {_name(is_now.target)}"
    return _error(step, was, is_now, texts, is_now.line)


def _operands(operation: Operation) -> list[Operand]:
    args = operation.arguments[0]
    return [arg for arg in args if isinstance(arg, Operand)]


def _maker(recording: Recording, operand: Operand | None) -> Operation | None:
    """The operation whose result an operand is; None where it is an input's."""
    if operand is None or operand.kind != "operation":
        return None
    index: int = operand.which
    return recording.operations[index]


def _among(wanted: Operation, operations: list[Operation]) -> bool:
    """Whether the same line runs the same function there."""
    return any((one.target, one.line) == (wanted.target, wanted.line) for one in operations)


def _error(
    step: str, was: Operation, is_now: Operation, texts: Iterable[str], blame: UserLine | None
) -> GraphChanged:
    before, now = texts
    return GraphChanged(
        f"The {step} step was traced again, and is another program than the first time.\n"
        f"  before: {before}{_place(was.line)}\n"
        f"  now:    {now}{_place(is_now.line)}",
        line=blame or is_now.line or was.line,
        remedy=_REMEDY,
    )


def _place(line: UserLine | None) -> str:
    return "" if line is None else f", {line.place}: {line.source}"


def _name(target: Any) -> str:
    if target is OUTPUTS:
        return "nothing more"
    if isinstance(target, str):
        return target
    schema = getattr(target, "_schema", None)
    name = getattr(target, "__name__", str(target)) if schema is None else schema.name
    return str(name).rpartition("::")[2]


def _describe(recording: Recording, operation: Operation) -> str:
    """``mul(batch[0], 2)``: an operation with what it reads."""

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, Operand):
            yield _operand(recording, value)
        elif isinstance(value, Number):
            yield value.text
        elif isinstance(value, tuple):
            yield f"[{', '.join(text for item in value for text in texts(item))}]"
        else:
            yield str(value)

    if operation.target in (OUTPUTS, CONSTANT):
        return _name(operation.target)
    args, kwargs = operation.arguments
    shown = [text for item in args for text in texts(item)]
    shown += [f"{key}={text}" for key, value in kwargs for text in texts(value)]
    return f"{_name(operation.target)}({', '.join(shown)})"


def _operand(recording: Recording, operand: Operand) -> str:
    """An input's name, or that of the function whose result it is."""
    while operand.kind == "operation":
        operation = recording.operations[operand.which]
        if operation.target is not operator.getitem:  # of a function with several results
            return _name(operation.target)
        operand = operation.arguments[0][0]
    return str(operand.which)


def _describe_constant(constant: ConstantSource | Accumulator) -> str:
    if isinstance(constant, Accumulator):
        return f"the sum of {constant.call.key}"
    if constant.name:
        return constant.name
    tensor = constant.tensor
    return f"the constant {tensor.tolist()}" if tensor.numel() <= 8 else f"a {brief(tensor)}"


def _describe_results(outputs: Outputs) -> str:
    """What a step returned, set and grew."""
    template = pytree.tree_unflatten(["*"] * outputs.tree.num_leaves, outputs.tree)
    result = str(template["result"]).replace("'*'", "*")
    parts = [f"returned {result}"]
    for verb, places in (("set", outputs.attributes), ("appended to", outputs.lists)):
        names = sorted(str(place.key) for place in places)
        parts += [f"{verb} {', '.join(names)}"] * bool(names)
    return ", ".join(parts)


def _results(recording: Recording) -> dict[Any, Any]:
    """Where the results of a trace go, in a form that is the same in both traces.

    In the first one a list may be new, to which the second one appends: both are lists here.
    """
    outputs = recording.outputs
    template = outputs.template()
    found: dict[Any, Any] = {"result": template["result"], "calls": template["calls"]}
    for place, value in chain(*outputs.filled(template)):
        for name, one in _spread(place.name or place, value):
            found[name] = list(one) if isinstance(one, tuple) else one
    return {
        key: [_resolved(recording, leaf) for leaf in pytree.tree_leaves(value)]
        for key, value in found.items()
    }


def _spread(name: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    """What a place is given, by name: a new dict value by value.

    The second trace finds the dict, and appends to a list in it or sets a key of it.
    """
    if type(value) is not dict or not isinstance(name, str):
        yield name, value
        return
    for key, item in value.items():
        yield from _spread(f"{name}[{key!r}]", item)


def _resolved(recording: Recording, leaf: Any) -> Any:
    """What an output is: the operation or the input that it copies, or a constant."""
    if not isinstance(leaf, Output):
        return repr(leaf) if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)
    computed = recording.operations[-1].arguments[0]  # of OUTPUTS: all results that are tensors
    if leaf.index >= len(computed):
        return recording.outputs.passed[leaf.index - len(computed)]
    operand = computed[leaf.index]
    # what comes after the step's own operations copies results to their places, which in the second
    # trace are others
    while operand.kind == "operation" and operand.which >= recording.own_count:
        arguments = recording.operations[operand.which].arguments[0]
        if not arguments or not isinstance(arguments[0], Operand):
            break
        operand = arguments[0]
    return operand
