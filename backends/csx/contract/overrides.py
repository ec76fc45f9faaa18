"""Static forms of torch functions whose ordinary form looks at values, and of indices.

One computes what torch does, or returns ``NotImplemented`` where it does not apply. Indices with
tensors in them get a form that reads no value and has a static shape. Checked against torch 2.13.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite.backends.csx.contract.proxies import holds_tensors
from fulgurite.backends.csx.graph.lstm import lstm
from fulgurite.backends.csx.hyperparams.torch_optim import without_mkldnn
from fulgurite.backends.csx.hyperparams.traced_float import is_traced, is_whole, tensor_or_value
from fulgurite.backends.patches import applied, patches_of
from fulgurite.backends.torch_versions import CHECKED

ValueOf = Callable[[Tensor], Tensor | None]


class SplitIndex(NamedTuple):
    """An index in two: ``rest`` without its tensors, ``places`` of these in what that gives."""

    rest: tuple[Any, ...]
    places: list[Any]

    def rest_of(self, x: Tensor) -> Tensor:
        """``x[rest]``."""
        whole = all(type(item) is slice and item == slice(None) for item in self.rest)
        return x if whole else x[self.rest]


def without_scalars(x: Tensor, index: Any) -> SplitIndex | None:
    """``x[i]``, ``x[0, :, i]`` with integer tensors [] for i; None for any other index.

    torch reads such an ``i`` on the host; an index of tensors alone is an operation.
    """
    items = index if isinstance(index, tuple) else (index,)
    scalars = [isinstance(i, FakeTensor) and not i.ndim and not is_traced(i) for i in items]
    plain = [i is None or i is ... or type(i) is int or _is_plain_slice(i) for i in items]
    if not any(scalars) or not all(map(operator.or_, scalars, plain)):
        return None
    tensors = [i for i, scalar in zip(items, scalars, strict=True) if scalar]
    if any(i.is_floating_point() or i.dtype is torch.bool for i in tensors):
        return None
    unnamed = x.ndim - sum(i is not None and i is not ... for i in items)
    places: list[Any] = []
    for item, scalar in zip(items, scalars, strict=True):
        if scalar:
            places.append(item)
        elif item is ...:
            places += [None] * unnamed
        elif type(item) is not int:
            places.append(None)
    rest = [slice(None) if scalar else i for i, scalar in zip(items, scalars, strict=True)]
    return SplitIndex(tuple(rest), places)


def _is_plain_slice(item: object) -> bool:
    if type(item) is not slice:
        return False
    return not any(isinstance(bound, Tensor) for bound in (item.start, item.stop, item.step))


def at(places: list[Any], x: Tensor, *value: Any) -> Tensor:
    """``x[places]``, or with a value ``x[places] = value``."""
    if not value:
        found: Tensor = torch.ops.aten.index.Tensor(x, places)
        return found
    given = torch.as_tensor(value[0]).to(x.dtype)
    changed: Tensor = torch.ops.aten.index_put_.default(x, places, given)
    return changed


def without_known_masks(index: Any, value_of: ValueOf) -> Any:
    """An index with the places that its masks choose, where these have a value while tracing."""
    items: list[Any] = []
    for item in index if isinstance(index, tuple) else (index,):
        mask = isinstance(item, Tensor) and item.dtype == torch.bool and item.ndim > 0
        value = value_of(item) if mask else None
        if value is None:
            items.append(item)
        else:
            with DisableTorchFunction(), _disable_current_modes():
                items += value.nonzero(as_tuple=True)
    return tuple(items) if isinstance(index, tuple) or len(items) > 1 else items[0]


def _static_bincount(args: Any, kwargs: Any) -> Any:
    """``bincount(x, minlength=n)`` of values below n: the one form whose shape is known.

    On CPU torch makes its result longer where a value needs it, which no static program can.
    torchmetrics' confusion matrices and macro averages rest on it. A value of n or more is an error
    of the index check when the program runs.
    """
    names = ("input", "weights", "minlength")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    size = given.get("minlength", 0)
    if not size:
        return NotImplemented
    x, weights = given["input"], given.get("weights")
    ones = torch.ones_like(x, dtype=torch.int64) if weights is None else weights
    return torch.zeros(size, dtype=ones.dtype).scatter_add(0, x.to(torch.int64), ones)


def _stacked(args: Any, kwargs: Any) -> Any:
    """``torch.tensor([t1, t2])``, which eagerly reads values: here it stacks traced tensors.

    Lightning's ``grad_norm`` rests on it.
    """

    def built(data: Any) -> Tensor:
        if isinstance(data, (list, tuple)):
            return torch.stack([built(item) for item in data])
        if is_traced(data):
            number: Tensor = tensor_or_value(data)
            return number.to(torch.int64 if is_whole(data) else torch.get_default_dtype())
        return data.detach() if isinstance(data, Tensor) else torch.tensor(data)

    data = args[0] if args else kwargs["data"]
    is_sequence = isinstance(data, (list, tuple))
    if not is_sequence or not holds_tensors(data):
        return NotImplemented
    options = {key: kwargs[key] for key in ("dtype", "device") if kwargs.get(key) is not None}
    return built(data).to(**options).requires_grad_(kwargs.get("requires_grad", False))


def _lstm(args: Any, kwargs: Any) -> Any:
    """``torch.lstm``: a layer is one operation where oneDNN computes it, else its steps."""
    of_onednn, device = _is_of_onednn(*args, **kwargs), args[0].device.type
    mixed = torch.is_autocast_enabled(device)
    if of_onednn and not mixed:
        return lstm(*args, **kwargs)
    with without_mkldnn():
        found = torch.lstm(*args, **kwargs)
    if of_onednn:  # autocast has it compute, and return, the 16-bit type
        return tuple(one.to(torch.get_autocast_dtype(device)) for one in found)
    return found


def _is_of_onednn(x: Tensor, states: Any, *others: Any) -> bool:
    """Whether oneDNN would compute: float32, no packed sequence, no projection, no functorch."""
    if isinstance(states, Tensor) or x.dtype is not torch.float32 or not x.numel():
        return False
    plain = not torch._C._functorch.maybe_current_level()
    return plain and states[0].shape == states[1].shape and torch._C._get_mkldnn_enabled()


def _gaussian_nll(args: Any, kwargs: Any) -> Any:
    """``F.gaussian_nll_loss`` without its look at the variances: negative ones count as eps."""
    why, no_look = "negative variances would be looked for on the host", {"any": lambda x: False}
    with applied(patches_of(torch, no_look, why=why, checked=CHECKED)):
        return nn.functional.gaussian_nll_loss(*args, **kwargs)


def _copied(args: Any, kwargs: Any) -> Any:
    """``copy.deepcopy`` of a leaf; torch's own asks for the address of its memory."""
    tensor, memo = args
    if not tensor.is_leaf or not isinstance(tensor, FakeTensor):
        return NotImplemented
    values = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        copied: Tensor = nn.Parameter(values, requires_grad=tensor.requires_grad)
    else:
        copied = values.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = copied
    return copied


def _affine_grid(args: Any, kwargs: Any) -> Any:
    """``F.affine_grid`` under autocast, whose kernel multiplies in the 16-bit type then."""
    given = dict(zip(("theta", "size", "align_corners"), args, strict=False)) | kwargs
    theta, size, corners = given["theta"], given["size"], bool(given.get("align_corners"))
    if not torch.is_autocast_enabled(theta.device.type):
        return NotImplemented
    same = torch.eye(*theta.shape[1:]).expand(1, -1, -1)
    points = torch.affine_grid_generator(same, [1, *size[1:]], corners).flatten(1, -2)
    points = nn.functional.pad(points, (0, 1), value=1.0).expand(len(theta), -1, -1)
    return torch.bmm(points, theta.transpose(1, 2)).view(len(theta), *size[2:], -1)


def _random_from_zero(args: Any, kwargs: Any) -> Any:
    """``x.random_(low, high)``: the overload of both is called ``from``, no name in code."""
    given = {**dict(zip(("self", "from", "to"), args, strict=False)), **kwargs}
    if given.get("to") is None:
        return NotImplemented
    return given["self"].random_(given["to"] - given["from"]).add_(given["from"])


def _covariance(args: Any, kwargs: Any) -> Any:
    """``torch.cov`` without its look at the number of observations; not with weights."""
    given = {**dict(zip(("input",), args, strict=False)), **kwargs}
    if len(args) > 1 or not (given.keys() <= {"input", "correction"}):
        return NotImplemented
    x: Tensor = given["input"]
    x = x.view(1, -1) if x.ndim < 2 else x
    count = x.shape[1]
    apart = x - (x.sum(1) / count).unsqueeze(1)
    free = max(count - given.get("correction", 1), 0)
    return (apart @ apart.t().conj() / free).squeeze()


def _correlation(args: Any, kwargs: Any) -> Any:
    """``torch.corrcoef``, which is made of ``torch.cov``."""
    covariance = _covariance(args, kwargs)
    if not covariance.ndim:
        return covariance / covariance
    deviation = covariance.diag().sqrt()
    return (covariance / deviation.view(-1, 1) / deviation.view(1, -1)).clamp(-1, 1)


STATIC_FORMS: dict[Any, Callable[[Any, Any], Any]] = {
    torch.bincount: _static_bincount,
    Tensor.bincount: _static_bincount,
    torch.tensor: _stacked,
    torch.lstm: _lstm,
    Tensor.__deepcopy__: _copied,
    Tensor.random_: _random_from_zero,
    **dict.fromkeys((torch.affine_grid_generator, nn.functional.affine_grid), _affine_grid),
    nn.functional.gaussian_nll_loss: _gaussian_nll,
    **dict.fromkeys((torch.cov, Tensor.cov), _covariance),
    **dict.fromkeys((torch.corrcoef, Tensor.corrcoef), _correlation),
}


def _repeated(value_of: ValueOf, args: Any, kwargs: Any) -> Any:
    """``x.repeat_interleave(repeats)`` of known repeats: the places that these name."""
    given = {**dict(zip(("input", "repeats", "dim"), args, strict=False)), **kwargs}
    x, repeats, dim = given["input"], given.get("repeats"), given.get("dim")
    value = value_of(x if repeats is None else repeats)
    if value is None:
        return None
    with DisableTorchFunction(), _disable_current_modes():
        places = torch.repeat_interleave(value)
    literal = torch.ops.aten.lift_fresh.default(places)
    if repeats is None:
        return literal
    return x.flatten().index_select(0, literal) if dim is None else x.index_select(dim, literal)


def _split_at(value_of: ValueOf, args: Any, kwargs: Any) -> Any:
    """``torch.tensor_split(x, places)`` of known places, which are numbers then."""
    given = {**dict(zip(("input", "indices", "dim"), args, strict=False)), **kwargs}
    indices = given.get("indices", given.get("tensor_indices_or_sections"))
    value = value_of(indices) if isinstance(indices, Tensor) else None
    if value is None:
        return None
    with DisableTorchFunction(), _disable_current_modes():
        places = value.tolist()
    return torch.tensor_split(given["input"], places, given.get("dim", 0))


KNOWN_FORMS: dict[Any, Callable[[ValueOf, Any, Any], Any]] = {
    **dict.fromkeys((torch.repeat_interleave, Tensor.repeat_interleave), _repeated),
    **dict.fromkeys((torch.tensor_split, Tensor.tensor_split), _split_at),
}
"""Functions that need the values of one argument alone: what they give where these are known."""
