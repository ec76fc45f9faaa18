"""What a traced step may not do, function by function: which error it is, and what to write.

A table from torch's functions to the errors; ``function_mode`` looks into it on every call.
Remedies are code to paste.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulgurite.backends.csx.contract.watched import names_stand_in
from fulgurite.backends.csx.diagnostics.errors import (
    ConditionalOnTensor,
    DynamicShape,
    HostRead,
    RandomStateSet,
    TensorPrinted,
    TraceError,
    UnsupportedDtype,
    UnsupportedInput,
)
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, raised_at, user_modules

CHOOSE = "compute both sides, and choose:\n      x = torch.where(condition, a, b)"
CHOSEN_BY = {
    "max": "torch.maximum(a, b)",
    "min": "torch.minimum(a, b)",
    "sorted": "torch.stack([a, b]).sort().values",
    "any": "torch.where(x.any(), a, b)",
    "all": "torch.where(x.all(), a, b)",
}
"""Functions of Python's that ask tensors for their truth, and what to write for them."""
ASSERT = (
    "torch.where for a choice; to look at values, a step closure:\n"
    "      @fulgurite.step_closure\n"
    "      def check(ok):  # runs on the host after every step: check(condition)\n"
    "          assert ok"
)
READ_LATER = (
    'leave it a tensor: x.detach() in a computation, self.log("name", x); to look at it:\n'
    "      @fulgurite.step_closure\n"
    "      def show(value):  # runs on the host after every step: show(value)\n"
    "          print(value.item())"
)
MATHEMATICS = READ_LATER.replace(
    "in a computation", "in a computation, torch.sqrt(x) for math.sqrt(x)", 1
)
INDEX = (
    "torch.stack(items)[i] for items[i]; for range(i), a range of fixed length and\n"
    "      x = torch.where(step < i, changed, x)  # for step in range(10)"
)
MASKS = (
    "keep the shape, and use a mask:\n"
    "      torch.where(mask, x, 0).sum() / mask.sum()  # for x[mask].mean()\n"
    '      (F.cross_entropy(x, y, reduction="none") * mask).sum() / mask.sum()  # for a loss'
)
WINDOW = (
    "a mask over positions keeps the shape:\n"
    "      torch.where(torch.arange(len(x), device=x.device) < n, x, 0)  # for x[:n], x [N]\n"
    "      x[n + torch.arange(4)]  # for x[n : n + 4], read or written"
)
DEVICE = "leave the device out, or take one that fits: device=x.device, device=self.device"
SINGLE = "float32: x.float(), dtype=torch.float32, and in the dataset"
SEED_ONCE = (
    "lightning.seed_everything(seed) before fit; the step's draws then differ from step to step"
    " and follow it"
)


def choice(source: str) -> str:
    """The remedy for a line that asks a tensor for its truth."""
    if source.startswith("assert"):
        return ASSERT
    found = re.search(rf"(?<![\w.])({'|'.join(CHOSEN_BY)})\(", source)
    if found is None:
        return CHOOSE
    return f"for {found[1]}(...), in tensor operations:\n      {CHOSEN_BY[found[1]]}"


class Misuse(NamedTuple):
    """What was done, as the error says it."""

    error: type[TraceError]
    done: str
    remedy: str


_READ: dict[Any, str] = {
    Tensor.item: "read by .item()",
    Tensor.tolist: "read by .tolist()",
    Tensor.numpy: "read by .numpy()",
    Tensor.__array__: "turned into a numpy array",
    Tensor.__float__: "read by float()",
    Tensor.__int__: "read by int()",
    Tensor.__complex__: "read by complex()",
    Tensor.__index__: "used as a Python index",
    Tensor.__reduce_ex__: "pickled or saved",
    Tensor.data_ptr: "asked for its address",
}
_ASKED: dict[Any, str] = {
    Tensor.__bool__: "used as a Python condition",
    Tensor.__contains__: "searched by Python's `in`",
    torch.equal: "compared by torch.equal",
    torch.allclose: "compared by torch.allclose",
    Tensor.equal: "compared by .equal()",
    Tensor.allclose: "compared by .allclose()",
}
_PRINTED = (Tensor.__repr__, Tensor.__format__)

OF_VALUES: dict[Any, Misuse] = {
    **{func: Misuse(HostRead, done, READ_LATER) for func, done in _READ.items()},
    Tensor.__float__: Misuse(HostRead, _READ[Tensor.__float__], MATHEMATICS),
    Tensor.__index__: Misuse(HostRead, _READ[Tensor.__index__], INDEX),
    **{func: Misuse(ConditionalOnTensor, done, CHOOSE) for func, done in _ASKED.items()},
    **dict.fromkeys(_PRINTED, Misuse(TensorPrinted, "printed or formatted", READ_LATER)),
}
"""Functions that need the value of their first tensor, which has none while the step is traced."""


def asked_device(func: Any, args: Any, kwargs: Any) -> str | None:
    """The kind of device that a call names, "cuda"; None where it names none."""
    asked = kwargs.get("device")
    if func is Tensor.cuda:
        asked = "cuda"
    elif asked is None and func is Tensor.to:
        asked = next((arg for arg in args[1:] if isinstance(arg, (str, torch.device))), None)
    return None if asked is None else torch.device(asked).type


def refuse_dtype(what: str, dtype: torch.dtype, line: UserLine | None) -> None:
    """Raise for a result of a dtype that the backend does not have."""
    raise UnsupportedDtype(
        f"{what} is {str(dtype).removeprefix('torch.')}, which CSX does not have. It has float32,"
        " one 16-bit type a run, and integers.",
        line=line,
        remedy=SINGLE,
    )


def check_generator(kwargs: Any, line: Callable[[], UserLine | None]) -> None:
    """Refuse random numbers from another generator than torch's own.

    Raises:
        RandomStateSet: its state would not be the program's.
    """
    if kwargs.get("generator") not in (None, torch.default_generator):
        raise RandomStateSet(
            "The step drew from a generator of its own (generator=...). A program draws from"
            " torch's default generator.",
            line=line(),
            remedy=f"leave generator= out; {SEED_ONCE}",
        )


_SEEDING = ("manual_seed", "seed", "set_rng_state")


def refused_calls(line: Callable[[], UserLine | None]) -> Iterator[tuple[Any, str, Any]]:
    """Changes (see ``patches``) that make errors of functions which the function mode misses."""
    yield from _refused_seeding(line)
    yield from _refused_nesting(line)


def _refused_nesting(line: Callable[[], UserLine | None]) -> Iterator[tuple[Any, str, Any]]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise DynamicShape(
            "The step made a nested tensor: its shape is as long as each of its rows.",
            line=line(),
            remedy="rows padded to one length, and a mask:\n"
            "      torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)",
        )

    for name in ("nested_tensor", "as_nested_tensor", "nested_tensor_from_jagged", "narrow"):
        yield torch.nested, name, refuse


def _refused_seeding(line: Callable[[], UserLine | None]) -> Iterator[tuple[Any, str, Any]]:
    """Functions which set a random state, under every name that the user has for them."""

    def refusal(name: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise RandomStateSet(
                f"torch.{name}() was called in the step. Traced once, it would make every step draw"
                " the same numbers, or none of them.",
                line=line(),
                remedy=SEED_ONCE,
            )

        return refuse

    homes = (torch, torch.random)  # which hold different objects by some of these names
    functions = {id(getattr(home, name)): refusal(name) for name in _SEEDING for home in homes}
    for module in (*homes, *user_modules()):
        for key, value in list(vars(module).items()):
            if id(value) in functions:
                yield module, key, functions[id(value)]


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Say of Python's own errors in a trace what they mean; note the user's line on others."""
    try:
        yield
    except TraceError:
        raise
    except TypeError as error:
        if names_stand_in(error) is None:
            _note_line(error)
            raise
        raise UnsupportedInput(
            "An object of the batch went to a function; a step can only pass it on.",
            line=raised_at(error),
            remedy="turn it into a tensor in collate_fn or on_after_batch_transfer",
        ) from None
    except Exception as error:
        _note_line(error)
        raise


def _note_line(error: Exception) -> None:
    """Note where the user's code was; between it and the error lie a hundred lines of torch's.

    The error says what it would say of eager tensors.
    """
    if any("FakeTensor" in str(arg) for arg in error.args):
        named = [
            re.sub(r"(torch\._subclasses\.fake_tensor\.)?FakeTensor", "Tensor", str(arg))
            for arg in error.args
        ]
        error.args = tuple(named)
    line = raised_at(error)
    if line is not None:
        error.add_note(f"  while the step was traced, at {line}\n      {line.source}")
