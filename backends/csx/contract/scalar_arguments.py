"""Tensors where torch takes only Python's own numbers: which argument it is, and what to write.

``F.leaky_relu(x, t)`` reads the value of ``t``, which has none while the step is traced. The same
in tensor operations has a form of its own for each function: the tables. Their code calls the
first tensor ``x``, the next ones ``y`` and ``z``, and the tensor that should be a number ``t``.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType, TracebackType
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

from fulgurite.backends.csx.diagnostics.errors import DynamicShape, ScalarArgument, TraceError
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, is_library, top_package

_UNKNOWN = object()
ANY = (
    "a Python number that does not come from data: self.k, x.shape[0]; where a schedule changes"
    " it, one of optimizer.param_groups.\n      Or the formula in operations on tensors"
)
FIXED_SIZE = "a size from shapes or Python numbers: x.shape[0], self.size"
_SAME_SHAPE = "the largest size, from Python numbers, and a mask over what is not wanted:\n      "

MULTIPLIED_OUT = {
    "add.alpha": "x + t * y",
    "sub.alpha": "x - t * y",
    "subtract.alpha": "x - t * y",
    "rsub.alpha": "y - t * x",
    "addcmul.value": "x + t * y * z",
    "addcdiv.value": "x + t * y / z",
    "addmm.alpha": "x + t * (y @ z)",
    "addmm.beta": "t * x + y @ z",
    "addmv.alpha": "x + t * (y @ z)",
    "addmv.beta": "t * x + y @ z",
    "addr.alpha": "x + t * torch.outer(y, z)",
    "addr.beta": "t * x + torch.outer(y, z)",
    "baddbmm.alpha": "x + t * (y @ z)",
    "baddbmm.beta": "t * x + y @ z",
    "addbmm.alpha": "x + t * (y @ z).sum(0)",
    "addbmm.beta": "t * x + (y @ z).sum(0)",
    "index_add.alpha": "x.index_add(0, y, t * z)",
    "full": "torch.zeros(shape) + t",
    "full_like": "torch.zeros_like(x) + t",
    "new_full": "x.new_zeros(shape) + t",
    "scalar_tensor": "t.clone()",
    "pad.value": "F.pad(x - t, pad) + t",
    "clamp": "x.clamp(min=low).clamp(max=high)",
    "clip": "x.clamp(min=low).clamp(max=high)",
    "nan_to_num.nan": "torch.where(x.isnan(), t, x)",
    "isclose": "(x - y).abs() <= t",
    "logit.eps": "torch.logit(torch.minimum(torch.maximum(x, t), 1 - t))",
    "round.decimals": "(x * 10**t).round() / 10**t",
    "gradient.spacing": "torch.gradient(x)[0] / t",
    "trapezoid.dx": "t * torch.trapezoid(x)",
    "leaky_relu": "torch.where(x > 0, x, t * x)",
    "elu": "torch.where(x > 0, x, t * torch.expm1(x.clamp(max=0)))",
    "celu": "torch.where(x > 0, x, t * torch.expm1(x.clamp(max=0) / t))",
    "hardtanh": "x.clamp(min=low).clamp(max=high)",
    "threshold.threshold": "torch.where(x > t, x, value)",
    "threshold.value": "torch.where(x > threshold, x, t)",
    "softplus.beta": "F.softplus(t * x) / t",
    "hardshrink": "torch.where(x.abs() > t, x, 0)",
    "softshrink": "x.sign() * F.relu(x.abs() - t)",
    "huber_loss.delta": "t**2 * F.huber_loss(x / t, y / t)",
    "smooth_l1_loss.beta": "t * F.smooth_l1_loss(x / t, y / t)",
    "cross_entropy.label_smoothing": (
        "(1 - t) * F.cross_entropy(x, y) - t * x.log_softmax(1).mean()"
    ),
    "margin_ranking_loss.margin": "F.relu(t - z * (x - y)).mean()",
    "triplet_margin_loss.margin": (
        "F.relu(F.pairwise_distance(x, y) - F.pairwise_distance(x, z) + t).mean()"
    ),
    "cosine_embedding_loss.margin": (
        "c = F.cosine_similarity(x, y); torch.where(z == 1, 1 - c, F.relu(c - t)).mean()"
    ),
    "hinge_embedding_loss.margin": "torch.where(y == 1, x, F.relu(t - x)).mean()",
    "scaled_dot_product_attention.scale": "F.scaled_dot_product_attention(x * t, y, z, scale=1.0)",
    **dict.fromkeys(
        ("norm.p", "norm.ord", "vector_norm.ord", "linalg_vector_norm.ord", "linalg_norm.ord"),
        "(x.abs() ** t).sum() ** (1 / t)",
    ),
    "normalize.p": "x / ((x.abs() ** t).sum(1, keepdim=True) ** (1 / t))",
    "pairwise_distance.p": "((x - y).abs() ** t).sum(-1) ** (1 / t)",
    "clip_grad_norm.max_norm": (
        "grads = [p.grad for p in self.parameters()]\n"
        "      norm = torch.nn.utils.get_total_norm(grads)\n"
        "      for g in grads: g.mul_((t / (norm + 1e-6)).clamp(max=1))"
    ),
    "clip_grad_value.clip_value": ("for p in self.parameters(): p.grad.copy_(p.grad.clamp(-t, t))"),
    "dropout": "x * (torch.rand_like(x) >= t) / (1 - t)",
    "dropout1d": "x * (torch.rand_like(x[..., :1]) >= t) / (1 - t)",
    "dropout2d": "x * (torch.rand_like(x[..., :1, :1]) >= t) / (1 - t)",
    "dropout3d": "x * (torch.rand_like(x[..., :1, :1, :1]) >= t) / (1 - t)",
    "rrelu": "torch.where(x > 0, x, x * (lower + (upper - lower) * torch.rand_like(x)))",
    "normal": "mean + std * torch.randn(shape)",
    "log_normal": "torch.exp(mean + std * torch.randn(shape))",
    "uniform": "low + (high - low) * torch.rand(shape)",
    "exponential": "torch.empty(shape).exponential_() / t",
    "cauchy": "median + sigma * torch.empty(shape).cauchy_()",
    "bernoulli": "(torch.rand(shape) < t).float()",
    "randint": "(torch.rand(shape) * t).long()",
    "random": "(torch.rand(shape) * t).floor()",
    "roll": "x[(torch.arange(len(x)) - t) % len(x)]  # along dimension 0",
    "select": "x[t], x[:, t]",
    "narrow.start": "x[t + torch.arange(length)]  # along dimension 0",
    "kthvalue": "x.sort(-1).values[:, t - 1]  # of x [N, M]",
    "triu": (
        "torch.where(j - i >= t, x, 0), of x [N, M] with\n"
        "      i, j = torch.arange(N)[:, None], torch.arange(M)"
    ),
    "tril": (
        "torch.where(j - i <= t, x, 0), of x [N, M] with\n"
        "      i, j = torch.arange(N)[:, None], torch.arange(M)"
    ),
}
"""What to write for a function, or for one of its arguments."""

SIZED = {
    **dict.fromkeys(
        (
            *("zeros", "ones", "empty", "full.size", "rand", "randn", "arange", "eye", "randperm"),
            *("linspace.steps", "logspace.steps", "new_zeros", "new_ones", "new_empty"),
            *("randint.size", "normal.size", "multinomial.num_samples", "vander", "combinations"),
            *("reshape", "view", "expand", "repeat", "tile", "unflatten", "broadcast_to"),
            *("chunk", "split", "tensor_split", "diag", "diagonal", "diag_embed", "pad.pad"),
            *("unfold", "fold", "interpolate", "upsample", "pixel_shuffle", "pixel_unshuffle"),
            *("histc.bins", "bincount.minlength", "stft", "adaptive_avg_pool1d"),
            *("adaptive_avg_pool2d", "adaptive_max_pool1d", "adaptive_max_pool2d", "avg_pool1d"),
            *("avg_pool2d", "max_pool1d", "max_pool2d", "conv1d", "conv2d", "conv3d"),
        ),
        FIXED_SIZE,
    ),
    "topk": _SAME_SHAPE + "x.sort(-1, descending=True).values  # and of it the first t:\n      "
    "torch.arange(x.shape[-1]) < t",
    "narrow.length": _SAME_SHAPE + "torch.where(torch.arange(len(x)) < t, x, 0)  # of x [N]",
    "one_hot": "the number of classes: one_hot(x, num_classes=10)",
    "repeat_interleave": "repeats as a Python number, or output_size=",
    "pack_padded_sequence": "the padded batch, and the output where each sequence ends:"
    " out[torch.arange(len(out)), lengths - 1]",
    "linalg_lstsq": "torch.linalg.pinv(a) @ b",
    "ctc_loss": "a loss in tensor operations over the padded targets; torch's own sizes its table"
    " by the longest target",
}
"""Functions, or arguments of them, that make a shape: what to give them or to write instead."""


class Place(NamedTuple):
    """A tensor in the place of a Python number."""

    function: str
    argument: str
    tensor: Any  # or the text of an expression


def refused_scalar(place: Place, tensor: str, line: UserLine | None) -> TraceError:
    """The error for a tensor of the trace in the place of a Python number.

    Args:
        place: which argument it is.
        tensor: what the tensor is called.
        line: the user's.
    """
    function = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", place.function).lower()  # of a class
    function = function.strip("_")
    keys = (f"{function}.{place.argument}", function)
    size = next((SIZED[key] for key in keys if key in SIZED), None)
    form = next((MULTIPLIED_OUT[key] for key in keys if key in MULTIPLIED_OUT), None)
    if size is not None and keys[0] not in MULTIPLIED_OUT:
        return DynamicShape(
            f"The shape of the result of {place.function}() depends on the values of"
            f" {in_sentence(tensor)}; a static program has fixed shapes.",
            line=line,
            remedy=size,
        )
    return ScalarArgument(
        f"{tensor} was given as {place.argument}= of {place.function}(), which takes only Python's"
        " own numbers there.",
        line=line,
        remedy=ANY
        if form is None
        else f"the same in tensor operations, with {place.argument} = t:\n      {form}",
    )


def in_sentence(name: str) -> str:
    """The name of a tensor, for the middle of a sentence."""
    name = name.replace("A tensor", "a tensor", 1)
    return name.replace("The result", "the result", 1)


def place_in_call(
    function: Any, args: Any, kwargs: Any, is_scalar: Callable[[Any], bool]
) -> Place | None:
    """Which argument of a call must be a Python number, and is a tensor.

    Args:
        function: torch's; its name where no more is known.
        args: what it was given.
        kwargs: by name.
        is_scalar: whether a value is a tensor without dimensions that has no value.
    """
    found: list[tuple[bool, Place]] = []
    for key, given in (*enumerate(args), *kwargs.items()):
        leaves = [given.start, given.stop] if type(given) is slice else pytree.tree_leaves(given)
        for leaf in filter(is_scalar, leaves):
            argument, takes_tensors = _argument(function, key, len(args))
            if argument:
                found.append((takes_tensors, Place(_name(function), argument, leaf)))
    found.sort(key=lambda one: one[0])
    return found[0][1] if found else None


def _argument(function: Any, key: int | str, count: int) -> tuple[str, bool]:
    """The name of an argument, and whether it may be a tensor; no name if it always is one."""
    if isinstance(function, FunctionType):
        parameters = list(inspect.signature(function).parameters.values())
        by_name = {one.name: one for one in parameters}
        one = (
            by_name.get(key) if isinstance(key, str) else parameters[min(key, len(parameters) - 1)]
        )
        if one is None:
            return str(key), False
        return one.name, "Tensor" in str(one.annotation)
    found = list(_schema_arguments(_name(function), key, count))
    names = [one.name for one in found if "Tensor" not in str(one.type)]
    return (names[0] if names else ""), len(names) < len(found)


def _schema_arguments(name: str, key: int | str, count: int) -> Iterator[Any]:
    """What the overloads that take ``count`` arguments have in one place.

    None may: sizes are often given one by one, for a list.
    """
    lists: list[list[Any]] = []
    for form in (name, f"{name}_", f"linalg_{name}", f"special_{name}", f"_{name}"):
        for schema in torch._C._jit_get_schemas_for_operator(f"aten::{form}"):
            if isinstance(key, str):
                yield from (one for one in schema.arguments if one.name == key)
            elif not schema.overload_name.endswith("out"):
                lists.append([one for one in schema.arguments if not one.kwarg_only])
    enough = [one for one in lists if len(one) >= count] or lists
    yield from (one[min(int(key), len(one) - 1)] for one in enough if one)


def _name(function: Any) -> str:
    name = function if isinstance(function, str) else getattr(function, "__name__", str(function))
    return str(name).lstrip("_")


def place_in_frames(frames: Iterator[FrameType], is_scalar: Callable[[Any], bool]) -> Place | None:
    """The same among the parameters of torch's own Python functions, the outermost first."""
    for frame in frames:
        code = frame.f_code
        for argument in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            value = frame.f_locals.get(argument)
            if is_scalar(value):
                made = code.co_name == "__init__"  # a module
                kind = type(frame.f_locals.get("self")).__name__
                return Place(kind if made else _name(code.co_name), argument, value)
    return None


def place_of_error(error: TypeError, is_scalar: Callable[[Any], bool]) -> Place | None:
    """The same where torch refused the tensor by itself: what the traceback tells.

    torch looks at ``alpha=`` before any mode does; then the tensor is called what the user's line
    calls it.
    """
    if "FakeTensor" not in str(error):
        return None
    innermost, libraries = None, list[FrameType]()
    traceback = error.__traceback__
    while traceback is not None:
        if is_library(traceback.tb_frame):
            libraries.append(traceback.tb_frame)
        else:
            innermost, libraries = traceback, []
        traceback = traceback.tb_next
    torchs = (frame for frame in libraries if top_package(frame) == "torch")
    place = place_in_frames(torchs, is_scalar)
    if place is None and innermost is not None and not libraries:
        place = _place_in_source(innermost, str(error), is_scalar)
    said = re.match(r"(\w+)\(\): argument '(\w+)'.* must be \w+, not FakeTensor", str(error))
    if place is None and said is not None:
        place = Place(said[1], said[2], "A tensor")
    return place


def _place_in_source(
    traceback: TracebackType, text: str, is_scalar: Callable[[Any], bool]
) -> Place | None:
    """The same by the expression that the user's frame was in."""
    call = _expression(traceback)
    if not isinstance(call, ast.Call) or any(isinstance(a, ast.Starred) for a in call.args):
        return None
    frame = traceback.tb_frame
    names = {**frame.f_globals, **frame.f_locals}

    def value(node: ast.expr) -> Any:
        """The text of an expression that may be such a tensor; in lists those of its items."""
        if isinstance(node, (ast.Tuple, ast.List)):
            return [value(item) for item in node.elts]
        known = _resolved(ast.unparse(node), names)
        may_be = any(isinstance(one, ast.Name) for one in ast.walk(node))
        return ast.unparse(node) if is_scalar(known) or (may_be and known is _UNKNOWN) else None

    path, _, name = ast.unparse(call.func).rpartition(".")
    if not path and name not in names:  # Python's own
        return None
    is_method = bool(path) and not inspect.ismodule(_resolved(path, names))
    args = [*[None] * is_method, *map(value, call.args)]
    kwargs = {one.arg: value(one.value) for one in call.keywords if one.arg is not None}
    said = re.search(r"argument '(\w+)' \(position (\d+)\)", text)
    if said is not None:
        place = int(said[2]) - 1 + is_method
        expression = kwargs.get(said[1]) or (args[place] if place < len(args) else None)
        return Place(name, said[1], f"`{expression}`" if expression else "A tensor")
    found = place_in_call(name, args, kwargs, lambda leaf: isinstance(leaf, str))
    return None if found is None else found._replace(tensor=f"`{found.tensor}`")


def _resolved(path: str, names: dict[str, Any]) -> Any:
    """What dotted names stand for, found without running code; _UNKNOWN where it is not."""
    first, *rest = path.split(".")
    found = names.get(first, _UNKNOWN)
    for name in rest:
        own = getattr(found, "__dict__", {})
        kept = (own, *(own.get(key, {}) for key in ("_parameters", "_buffers", "_modules")))
        found = next((one[name] for one in kept if name in one), _UNKNOWN)
    return found


def _expression(traceback: TracebackType) -> ast.expr | None:
    """The expression that a frame was in when the error came."""
    code = traceback.tb_frame.f_code
    positions = list(code.co_positions())[traceback.tb_lasti // 2]
    first, last, start, end = positions
    if first is None or last is None or start is None or end is None:
        return None
    lines = [linecache.getline(code.co_filename, i).encode() for i in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        return ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except SyntaxError:
        return None
