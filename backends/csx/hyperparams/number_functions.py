"""Functions of torch, and of Python's ``math``, on traced numbers.

Words: a *number* is a ``TracedNumber``, or a float64 scalar computed from one. Eagerly a number is
a Python float, which never widens what it meets, and ``alpha=`` and ``value=`` take only that. Here
a number is an operand: brought to the dtype that the function would compute in eagerly, and
multiplied out where the function takes only Python's numbers. What has no such form takes the
number's value, with a guard.

An eager kernel computes narrow floats (bfloat16, float16) in float32 and rounds its result once.
What stands for one here is several operations, which are rounded in the same places: checked bit
for bit against torch 2.13 on CPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.nn.functional import batch_norm

from fulgurite.backends.csx.graph.dtypes import NARROW, moved_statistics
from fulgurite.backends.csx.graph.update import UPDATE
from fulgurite.backends.csx.hyperparams.traced_float import (
    TracedNumber,
    as_number,
    is_traced,
    is_whole,
    plain,
    tensor_or_value,
)
from fulgurite.backends.patches import Patch, patches_of


def call_with_numbers(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a torch function whose arguments may hold numbers."""
    scaled = kwargs and any(_scales(kwargs.get(key)) for key in ("alpha", "beta", "value"))
    if not scaled and not _holds_number(args) and not _holds_number(kwargs.values()):
        return func(*args, **kwargs)
    result = call_rounding_once(_call, func, args, kwargs)
    scalar = isinstance(result, Tensor) and not result.ndim and result.dtype is torch.float64
    return as_number(result) if scalar else result


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    if func is UPDATE:  # whose numbers are Python's, also where its tensors have no dimensions
        return func(*args, **kwargs)
    name = getattr(func, "__name__", "")
    if name.startswith("_foreach_"):
        return _foreach(name.removeprefix("_foreach_"), args, kwargs)
    base = name if name.startswith("__") else name.rstrip("_")
    if base in _OVERRIDES:
        result = _OVERRIDES[base](base, *args, **kwargs)
        if result is not NotImplemented:
            return args[0].copy_(result) if name == f"{base}_" else result
    return _with_operands(func, args, kwargs)


def _holds_number(values: Iterable[Any]) -> bool:
    """Whether there is a number among arguments, alone or in lists and tuples.

    Asked on every call of a trace: 1 µs, where torch's pytree takes 4 (measured).
    """
    return any(
        _holds_number(value) if type(value) in (list, tuple) else is_traced(value)
        for value in values
    )


def _scales(value: object) -> bool:
    """Whether ``alpha=value`` must be multiplied out: for a number, and for a tensor ``lr``.

    A tensor is one where no gradient is computed, as in an optimizer's step.
    """
    if is_traced(value):
        return True
    return isinstance(value, FakeTensor) and not value.ndim and not torch.is_grad_enabled()


def _with_operands(func: Any, args: Any, kwargs: Any) -> Any:
    """Call ``func`` with numbers as tensors; where it takes only Python's own, by value."""
    leaves = pytree.tree_leaves((args, kwargs))
    dtype = _dtype_of_scalars(leaves)

    def operand(leaf: Any) -> Any:
        if not is_traced(leaf):
            return leaf
        tensor = tensor_or_value(leaf)
        return tensor if dtype is None else tensor.to(dtype)

    try:
        return func(*pytree.tree_map(operand, args), **pytree.tree_map(operand, kwargs))
    # where torch takes only Python's numbers it refuses a tensor, or tries to read it on the host
    except (TypeError, DataDependentOutputException):
        if not any(isinstance(leaf, TracedNumber) for leaf in pytree.tree_leaves((args, kwargs))):
            raise

    def value(leaf: Any) -> Any:
        return plain(leaf, f"{getattr(func, '__name__', func)}()")

    return func(*pytree.tree_map(value, args), **pytree.tree_map(value, kwargs))


def _dtype_of_scalars(leaves: list[Any]) -> torch.dtype | None:
    """What Python's numbers beside these arguments are computed in; None where float64 is right.

    A float64 scalar does not widen a tensor of floats that has dimensions.
    """
    others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not is_traced(leaf)]
    if not others or any(t.ndim and t.is_floating_point() for t in others):
        return None
    scalar = 1 if all(is_whole(leaf) for leaf in leaves if is_traced(leaf)) else 1.0
    dtype = torch.result_type(others[0], scalar)
    for other in others[1:]:
        dtype = torch.promote_types(dtype, torch.result_type(other, scalar))
    return dtype


def _multiply(a: Any, b: Any) -> Any:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return call_with_numbers(torch.mul, (a, b), {})
    return a * b


def _sum(name: str, base: Any, *rest: Any, alpha: Any = 1, **others: Any) -> Any:
    """``add``, ``sub`` and ``rsub``; the old form ``add(base, alpha, other)`` too."""
    if len(rest) == 2:
        alpha, rest = rest[0], rest[1:]
    other = rest[0] if rest else others["other"]
    if not _scales(alpha):
        return NotImplemented
    if name == "rsub":
        base, other = other, base
    function = torch.add if name == "add" else torch.sub
    result = call_with_numbers(function, (base, _multiply(other, alpha)), {})
    return result if others.get("out") is None else others["out"].copy_(result)


def _product_sum(name: str, base: Any, *rest: Any, value: Any = 1, **others: Any) -> Any:
    """``addcmul`` and ``addcdiv``; the old form ``addcmul(base, value, a, b)`` too."""
    if len(rest) == 3:
        value, rest = rest[0], rest[1:]
    named = [others[key] for key in ("tensor1", "tensor2") if key in others]
    first, second = *rest, *named
    if not _scales(value):
        return NotImplemented
    product = first * second if name == "addcmul" else first / second
    result = call_with_numbers(torch.add, (base, _multiply(product, value)), {})
    return result if others.get("out") is None else others["out"].copy_(result)


_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "addmm": torch.mm,
    "addmv": torch.mv,
    "addr": torch.outer,
    "baddbmm": torch.bmm,
    "addbmm": lambda a, b: torch.bmm(a, b).sum(0),
}


def _matrix_sum(name: str, base: Any, a: Any, b: Any, **factors: Any) -> Any:
    """``beta * base + alpha * (a @ b)``.

    Narrow floats would be rounded once more: there the factors are taken by value, with a guard.
    """
    if a.dtype.itemsize < 4 or factors.keys() - {"alpha", "beta"}:
        return NotImplemented
    product = _multiply(_PRODUCTS[name](a, b), factors.get("alpha", 1))
    return _multiply(base, factors.get("beta", 1)) + product


def _lerp(name: str, start: Any, end: Any, weight: Any) -> Any:
    """torch's own two formulas; each is right for every weight, and differs in rounding only."""
    if not isinstance(weight, TracedNumber):
        return NotImplemented
    moved = end - start
    if weight.observe("abs({}) < 0.5", lambda value: abs(value) < 0.5):
        return start + _multiply(moved, weight)
    return end - _multiply(moved, as_number(1 - weight.tensor))


def _clamp(name: str, x: Any, min: Any = None, max: Any = None) -> Any:
    """``clamp`` with both bounds as tensors, for torch does not take a tensor and a number."""
    bounds = {"min": min, "max": max}
    given = {key: as_tensor(bound) for key, bound in bounds.items() if bound is not None}
    return _with_operands(torch.clamp, (x,), given)


def _quantile(name: str, x: Tensor, q: Any, *rest: Any, **options: Any) -> Any:
    """``quantile``, which takes a tensor of the input's type, and rounds a number to that."""
    if not is_traced(q):
        return NotImplemented
    return getattr(torch, name)(x, tensor_or_value(q).to(x.dtype), *rest, **options)


def _scatter(
    name: str,
    x: Tensor,
    dim: Any,
    index: Tensor,
    src: Any = None,
    value: Any = None,
    **options: Any,
) -> Any:
    """``scatter`` of a number, which is one for each place."""
    number = src if value is None else value
    if not is_traced(number):
        return NotImplemented
    placed = tensor_or_value(number).to(x.dtype).expand(index.shape)
    return x.scatter(dim, index, placed, **options)


def as_tensor(value: Any) -> Any:
    """A number, or a Python number, as a float64 scalar."""
    value = tensor_or_value(value)
    if isinstance(value, Tensor):
        return value
    return as_number(torch.full((), value, dtype=torch.float64))


def _filled(name: str, *args: Any, dtype: Any = None, **options: Any) -> Any:
    """``full``, ``full_like``, ``new_full``: a new tensor, as if the number were Python's."""
    args = (*args, *(options.pop(key) for key in ("size", "fill_value") if key in options))
    *place, number = args
    if not is_traced(number):
        return NotImplemented
    like = place[0] if isinstance(place[0], Tensor) else None
    dtype = dtype or (like.dtype if like is not None else _natural_dtype(number))
    make: Any = {"full": torch.empty, "full_like": torch.empty_like, "new_full": Tensor.new_empty}[
        name
    ]
    return make(*place, dtype=dtype, **options).copy_(tensor_or_value(number))


def _natural_dtype(number: Any) -> torch.dtype:
    """What ``torch.tensor(number)`` has eagerly."""
    return torch.int64 if is_whole(number) else torch.get_default_dtype()


def _tensor(name: str, *args: Any, dtype: Any = None, **options: Any) -> Any:
    """``torch.tensor`` and its kin of a number, or of lists and tuples of numbers."""
    data = args[-1] if args else options["data"]
    if isinstance(data, Tensor):
        return NotImplemented if dtype is None else data.to(dtype)
    leaves = pytree.tree_leaves(data)
    wanted = torch.int64
    for leaf in leaves:
        own = _natural_dtype(leaf) if is_traced(leaf) else torch.result_type(leaf, leaf)
        wanted = torch.promote_types(wanted, own)
    if name == "new_tensor":
        dtype = dtype or args[0].dtype

    def stack(value: Any) -> Tensor:
        if isinstance(value, (list, tuple)):
            return torch.stack([stack(item) for item in value])
        tensor: Tensor = as_tensor(value)
        # torch.tensor copies: what is changed in place later must not be the number itself
        return tensor.clone()

    result = stack(data).to(dtype or wanted)
    return result.requires_grad_(bool(options.get("requires_grad")))


def _item(name: str, x: Any, *place: Any) -> Any:
    """Indexing: a number in the index is an int."""
    index, *value = pytree.tree_map(plain, place[:1]) + place[1:]
    if value:
        Tensor.__setitem__(x, index, tensor_or_value(value[0]))
        return x
    return Tensor.__getitem__(x, index)


def _batch_norm(
    name: str, x: Tensor, mean: Any, variance: Any, *, momentum: Any, training: bool, **options: Any
) -> Any:
    """``F.batch_norm`` with a momentum that is a number, as ``momentum=None`` makes it."""
    if mean is None or not is_traced(momentum) or not training:
        return NotImplemented
    # the kernel takes Python's numbers alone, so the running statistics are written here and the
    # kernel is given none
    if mean.dtype in NARROW:
        moved = moved_statistics(x, mean, variance, tensor_or_value(momentum))
        for running, value in zip((mean, variance), moved, strict=True):
            running.copy_(value)
    else:
        now = torch.var_mean(x.detach().to(mean.dtype), [0, *range(2, x.ndim)])
        for running, value in zip((variance, mean), now, strict=True):
            running.add_(_multiply(value - running, momentum))
    return batch_norm(x, None, None, training=True, **options)


_OVERRIDES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "sub", "subtract", "rsub"), _sum),
    **dict.fromkeys(("addcmul", "addcdiv"), _product_sum),
    **dict.fromkeys(_PRODUCTS, _matrix_sum),
    "lerp": _lerp,
    **dict.fromkeys(("clamp", "clip"), _clamp),
    **dict.fromkeys(("full", "full_like", "new_full"), _filled),
    **dict.fromkeys(("tensor", "as_tensor", "scalar_tensor", "new_tensor", "asarray"), _tensor),
    **dict.fromkeys(("__getitem__", "__setitem__"), _item),
    "batch_norm": _batch_norm,
    "scatter": _scatter,
    **dict.fromkeys(("quantile", "nanquantile"), _quantile),
}


def _multiplied_in_place(x: Tensor, y: Any) -> Any:
    """The kernel of ``_foreach_mul_`` alone rounds a number to a narrow type (torch 2.13)."""
    rounds = is_traced(y) and x.dtype in NARROW
    return call_with_numbers(torch.mul, (x, _in_type(y, x.dtype) if rounds else y), {})


_EACH: dict[str, Callable[..., Any]] = {
    "mul_": _multiplied_in_place,
    "maximum": lambda x, y: call_with_numbers(torch.clamp, (x,), {"min": y}),
    "minimum": lambda x, y: call_with_numbers(torch.clamp, (x,), {"max": y}),
    "norm": torch.linalg.vector_norm,
}


def _foreach(name: str, args: Any, kwargs: Any) -> Any:
    """Call a ``torch._foreach_*`` function once for each tensor of its lists."""
    count = next(len(arg) for arg in args if isinstance(arg, (list, tuple)))
    base = name.rstrip("_")
    # the functions on lists call their factors otherwise than those on tensors
    if base in ("addcmul", "addcdiv") and (len(args) == 4 or "scalars" in kwargs):
        kwargs = {"value": kwargs["scalars"] if "scalars" in kwargs else args[3]}
        args = args[:3]

    def nth(i: int) -> Callable[[Any], Any]:
        def pick(arg: Any) -> Any:
            # scalars for each tensor may come as one tensor, too
            listed = isinstance(arg, (list, tuple)) or (isinstance(arg, Tensor) and arg.ndim)
            return arg[i] if listed else arg

        return pick

    function = (
        _EACH.get(name) or _EACH.get(base) or getattr(torch, base, None) or getattr(Tensor, base)
    )
    results = []
    for i in range(count):
        pick = nth(i)
        own = {("other" if key == "scalar" else key): pick(arg) for key, arg in kwargs.items()}
        results.append(call_with_numbers(function, tuple(map(pick, args)), own))
    if not name.endswith("_"):
        return tuple(results)
    for tensor, result in zip(args[0], results, strict=True):
        tensor.copy_(result)
    return None


_ROUND_THEIR_NUMBER = (
    *("add", "radd", "iadd", "sub", "rsub", "isub", "pow", "rpow", "ipow"),
    *("remainder", "mod", "rmod", "imod", "fmod"),
)
"""Whose kernels first round a Python number to the tensor's type; the others take it in float32."""

_ROUND_THEMSELVES = (Tensor.__setitem__, batch_norm, _multiplied_in_place)
"""Functions that are given the narrow tensors themselves."""


def call_rounding_once(call: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
    """``call(func, args, kwargs)``; where numbers meet narrow floats, in float32, rounded once."""
    narrow = _narrow_dtype(args, kwargs)
    if narrow is None or "out" in kwargs or func in _ROUND_THEMSELVES:
        return call(func, args, kwargs)
    rounds_number = getattr(func, "__name__", "").strip("_") in _ROUND_THEIR_NUMBER

    def operand(leaf: Any) -> Any:
        if is_traced(leaf) and rounds_number:
            return _in_type(leaf, narrow)
        return leaf if is_traced(leaf) else widened(leaf)

    wide = [*map(operand, args), *map(operand, kwargs.values())]
    result = call(func, wide[: len(args)], dict(zip(kwargs, wide[len(args) :], strict=True)))
    for given, copy in zip((*args, *kwargs.values()), wide, strict=True):
        if copy is not given and not is_traced(copy) and (copy is result or _is_written(copy)):
            given.copy_(copy)
    if result is wide[0]:  # in place
        return args[0]
    return result.to(narrow) if result.is_floating_point() else result


def _in_type(number: Any, kind: torch.dtype) -> Any:
    """A traced number, rounded to a type."""
    value = tensor_or_value(number)
    return as_number(value.to(kind).to(value.dtype))


def _is_written(fresh: Tensor) -> bool:
    """Whether somebody has written a tensor since it was made."""
    return not fresh.is_inference() and fresh._version > 0


def _narrow_dtype(args: Any, kwargs: Any) -> torch.dtype | None:
    """The narrow type of a call's tensors, if a number is among its arguments."""
    leaves = [*args, *kwargs.values()]
    if not any(map(is_traced, leaves)):
        return None
    tensors = [t for t in leaves if isinstance(t, Tensor) and not is_traced(t)]
    dtypes = {t.dtype for t in tensors if t.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= set(NARROW) else None


def widened(leaf: Any) -> Any:
    is_narrow = isinstance(leaf, Tensor) and leaf.dtype in NARROW
    return leaf.to(torch.float32) if is_narrow else leaf


_ON_TENSORS: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in ("sqrt", "exp", "exp2", "expm1", "log1p")},
    **{name: getattr(torch, name) for name in ("log2", "log10", "sin", "cos", "tan", "atan")},
    **{name: getattr(torch, name) for name in ("sinh", "cosh", "tanh", "asin", "acos", "erf")},
    "fabs": torch.abs,
}
_ASK_THEIR_ARGUMENT = {"floor", "ceil", "trunc"}
"""Functions that call a method of their argument, which a traced number has."""


def traced_math() -> Iterator[Patch]:
    """Patches by which the functions of ``math`` take traced numbers."""
    functions = {
        name: _traced(name, function)
        for name, function in vars(math).items()
        if callable(function) and not name.startswith("_") and name not in _ASK_THEIR_ARGUMENT
    }
    why = "C reads a traced number's value unseen, and the program would keep it"
    return patches_of(math, functions, why=why, checked="Python 3.11")


def _traced(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    on_tensor = _ON_TENSORS.get(name)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(arg, TracedNumber) for arg in args):
            return original(*args, **kwargs)
        if on_tensor is not None:
            return args[0].apply(f"math.{name}({{}})", on_tensor, original)
        if name == "pow":
            return args[0] ** args[1]
        if name == "log":
            return _log(original, *args)
        values = [plain(arg, f"math.{name}") for arg in args]
        return original(*values, **kwargs)

    return function


def _log(original: Callable[[float], float], value: Any, base: Any = None) -> Any:
    def log(x: Any) -> Any:
        traced = isinstance(x, TracedNumber)
        return x.apply("math.log({})", torch.log, original) if traced else original(x)

    return log(value) if base is None else log(value) / log(base)
