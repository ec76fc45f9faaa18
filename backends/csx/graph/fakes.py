"""What an operation's results look like, found without running it: on torch's fakes.

Torch finds that in some 200 µs an operation. Most operations of a step come again, in the next
layer or the next trace, with arguments of the same layouts: ``results_of`` then makes the results
anew, in 10 to 20 µs (measured, torch 2.13), for a fake has no values and is little but a layout.

Results lie where the kernel puts them. For operands that lie turned (``x.transpose(1, 2)``), torch
says otherwise of some operations while a step is traced, batch norm among them
(``laid_out_by_kernels``). A ``reshape`` of such a result was a view in the program and is a copy in
stock Lightning: what is written into it was then seen by who reads the result. And statistics of
norms are float32 where weights are, which torch says to be of the input's type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite.backends.patches import Patch, patches_of
from fulgurite.backends.torch_versions import CHECKED

_META = torch.device("meta")


class Layout(NamedTuple):
    """What is known of a tensor without its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    is_inference: bool


def layout_of(fake: FakeTensor) -> Layout:
    """The layout of a fake."""
    return Layout(
        fake.shape,
        fake.stride(),
        int(fake.storage_offset()),
        fake.dtype,
        fake.fake_device,
        fake.is_inference(),
    )


_attributes: dict[torch.device, dict[str, Any]] = {}
"""By device, what a new fake has in its ``__dict__`` beside its mode."""


def new_fake(
    mode: FakeTensorMode,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> FakeTensor:
    """A fake in memory of its own."""
    with torch._C._DisableTorchDispatch():
        made = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
    return _fake_of(mode, made, device)


def twin(fake: FakeTensor) -> FakeTensor:
    """Another fake of the same tensor, of which autograd knows nothing."""
    with DisableTorchFunction():
        if _is_plain(fake):
            return _view(fake, layout_of(fake))
        made: FakeTensor = fast_detach(fake.fake_mode, fake)
        return made


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is no more than memory and a layout: not sparse, no complex conjugate."""
    return tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())


def _view(fake: FakeTensor, layout: Layout) -> FakeTensor:
    """A fake of this layout in the memory of another one."""
    with torch._C._DisableTorchDispatch():
        made = torch.empty(0, dtype=layout.dtype, device=_META)
        made.set_(fake.untyped_storage(), layout.offset, layout.shape, layout.stride)
        if not made.is_inference():  # else it has no version
            # nobody has written it: what a step writes is told by that
            torch._C._autograd._unsafe_set_version_counter((made,), (0,))
    return _fake_of(fake.fake_mode, made, layout.device)


def _fake_of(mode: FakeTensorMode, made: Tensor, device: torch.device) -> FakeTensor:
    """A tensor of device meta as a fake, at a fifth of what ``FakeTensor`` takes for it."""
    attributes = _attributes.get(device)
    if attributes is None:
        attributes = _attributes[device] = vars(FakeTensor(mode, made, device))
        del attributes["fake_mode"]  # which must not live on
    fake: FakeTensor = Tensor._make_subclass(
        FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    vars(fake).update(attributes, fake_mode=mode)
    return fake


class _Result(NamedTuple):
    """One result: an argument itself, a view of one (both by place), a new tensor, or None."""

    same_as: int | None = None
    view_of: int | None = None
    layout: Layout | None = None


class _Results(NamedTuple):
    """All results of an operation, and the kind of sequence that they are in."""

    kind: type | None
    results: list[_Result]


_found: dict[tuple[Any, ...], _Results | None] = {}
"""What operations gave, by what they were given; None for those that have to be asked each time."""

_MOST = 1 << 14  # of these, of 2 KB each: a run of very many shapes shall not fill the memory
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_ASKED_EACH_TIME = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
}


def results_of(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operation on fakes of a mode, or make its results anew where they are known."""
    tensors: list[FakeTensor] = []
    with DisableTorchFunction():
        key = _key(mode, func, args, kwargs, tensors)
        found = _found.get(key) if key is not None else None
        if found is not None:
            return _made(mode, found, tensors)
    if key is None or key in _found:
        return func(*args, **kwargs)
    versions = [None if one.is_inference() else one._version for one in tensors]
    result = func(*args, **kwargs)
    with DisableTorchFunction():
        if len(_found) >= _MOST:
            _found.clear()
        after = [None if one.is_inference() else one._version for one in tensors]
        # what an operation does to the layouts of its arguments is not known by its results
        unchanged = after == versions and _key(mode, func, args, kwargs, []) == key
        _found[key] = _described(mode, result, tensors) if unchanged else None
    return result


def _key(
    mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, tensors: list[FakeTensor]
) -> tuple[Any, ...] | None:
    """What the results follow from, None where that is not known; ``tensors`` gets those given."""
    # an operation of the user's may ask for anything
    if func.namespace not in ("aten", "prims") or not _ASKED_EACH_TIME.isdisjoint(func.tags):
        return None
    key = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    key.append(torch._C._get_mkldnn_enabled())  # decides where convolutions put their results
    values = (*args, *kwargs.keys(), *kwargs.values()) if kwargs else args
    if not _describe(mode, values, key, tensors):
        return None
    if len(tensors) > 1:
        memories = [one.untyped_storage()._cdata for one in tensors]
        if len({*memories}) < len(memories):
            objects = [*map(id, tensors)]
            key += map(memories.index, memories)
            key += map(objects.index, objects)
    return tuple(key)


def _describe(mode: FakeTensorMode, values: Any, key: list[Any], tensors: list[FakeTensor]) -> bool:
    """Add arguments to a key, layouts for tensors; False where one is of another kind."""
    key.append(len(values))
    for value in values:
        if isinstance(value, FakeTensor):
            if value.constant is not None or value.fake_mode is not mode or not _is_plain(value):
                return False
            key += (layout_of(value), value.untyped_storage().nbytes())
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            if not _describe(mode, value, key, tensors):
                return False
        elif value is None or isinstance(value, _PLAIN):
            key += (type(value), value)  # for 1, 1.0 and True are equal
        else:
            return False
    return True


def _described(mode: FakeTensorMode, result: Any, tensors: list[FakeTensor]) -> _Results | None:
    """What results are, where others can be made that are like them."""
    kind = type(result) if type(result) in (list, tuple) else None
    seen: Any = (result,) if kind is None else result
    objects = [*map(id, tensors)]
    memories = [one.untyped_storage()._cdata for one in tensors]
    new: set[int] = set()  # memories
    described: list[_Result] = []
    for one in seen:
        if one is None:
            described.append(_Result())
        elif not isinstance(one, FakeTensor) or not _is_plain(one):
            return None
        elif id(one) in objects:
            described.append(_Result(same_as=objects.index(id(one))))
        elif (memory := one.untyped_storage()._cdata) in memories:
            described.append(_Result(view_of=memories.index(memory), layout=layout_of(one)))
        elif memory in new:  # two results in one memory
            return None
        else:
            new.add(memory)
            described.append(_Result(layout=layout_of(one)))
    found = _Results(kind, described)
    made = _made(mode, found, tensors)
    return found if all(map(_is_like, (made,) if kind is None else made, seen)) else None


def _is_like(made: Any, seen: Any) -> bool:
    """Whether a result was made as torch makes it."""
    if made is None or made is seen:
        return True
    plain = type(seen) is FakeTensor and seen.constant is None and not seen.requires_grad
    return (
        (plain and layout_of(made) == layout_of(seen))
        and made.untyped_storage().nbytes() == seen.untyped_storage().nbytes()
        and torch._C._dispatch_keys(made) == torch._C._dispatch_keys(seen)
    )


def _made(mode: FakeTensorMode, found: _Results, tensors: list[FakeTensor]) -> Any:
    """Results like those that were found, of these tensors."""
    made: list[Any] = []
    for same_as, view_of, layout in found.results:
        if layout is None:
            made.append(None if same_as is None else tensors[same_as])
        elif view_of is None:
            made.append(new_fake(mode, layout.shape, layout.stride, layout.dtype, layout.device))
        else:
            made.append(_view(tensors[view_of], layout))
    return made[0] if found.kind is None else found.kind(made)


_aten = torch.ops.aten
_OTHERWISE = {  # all but random and integer ones of torch's own samples, turned (torch 2.13)
    _aten._batch_norm_with_update.default,
    _aten._log_softmax_backward_data.default,
    _aten._native_batch_norm_legit.default,
    _aten._native_batch_norm_legit.no_stats,
    _aten.batch_norm_backward.default,
    _aten.copysign.Tensor,
    _aten.div.Tensor_mode,
    _aten.floor_divide.default,
    _aten.heaviside.default,
    _aten.huber_loss_backward.default,
    _aten.log_sigmoid_forward.default,
    _aten.logaddexp.default,
    _aten.logical_and.default,
    _aten.logical_or.default,
    _aten.logical_xor.default,
    _aten.mse_loss_backward.default,
    _aten.native_batch_norm.default,
    _aten.native_batch_norm_backward.default,
    _aten.native_dropout_backward.default,
    _aten.native_layer_norm_backward.default,
    _aten.pow.Scalar,
    _aten.reflection_pad2d_backward.default,
    _aten.reflection_pad3d.default,
    _aten.reflection_pad3d_backward.default,
    _aten.replication_pad2d_backward.default,
    _aten.replication_pad3d.default,
    _aten.replication_pad3d_backward.default,
    _aten.smooth_l1_loss_backward.default,
    _aten.special_xlog1py.default,
    _aten.xlogy.Tensor,
}


_NORMS = {
    _aten.native_batch_norm.default,
    _aten.native_group_norm.default,
    _aten.native_layer_norm.default,
}


def laid_out_by_kernels() -> Iterator[Patch]:
    """A patch that asks the kernel where torch does not know what its results are.

    If an operand lies turned, or a norm's are of two types.
    """
    dispatch = FakeTensorMode._dispatch_impl

    def asked(self: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if (func in _OTHERWISE and _lies_turned(args)) or (func in _NORMS and _is_mixed(args)):
            return _as_the_kernel(self, func, args, kwargs)
        return dispatch(self, func, types, args, kwargs)

    why = "of turned operands, and of norms' of two types, torch says what their kernels do not do"
    return patches_of(FakeTensorMode, {"_dispatch_impl": asked}, why=why, checked=CHECKED)


def _lies_turned(args: Any) -> bool:
    return any(isinstance(one, Tensor) and not one.is_contiguous() for one in args)


def _is_mixed(args: Any) -> bool:
    return len({one.dtype for one in args if isinstance(one, Tensor)}) > 1


def _as_the_kernel(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run the kernel on uninitialized memory laid out like its operands; fakes of its results."""
    given: list[tuple[Tensor, Tensor]] = []

    def real(fake: Tensor) -> Tensor:
        given.append((fake, torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype)))
        return given[-1][1]

    def fake(real: Tensor) -> Tensor:
        return torch.empty_strided(real.size(), real.stride(), dtype=real.dtype)

    # under the fake mode the operands would be fakes again, and no kernel would run
    with _disable_current_modes(), torch.no_grad():
        reals: Any = pytree.tree_map_only(Tensor, real, (args, kwargs))
        results = func(*reals[0], **reals[1])
    for one, memory in given:
        if memory._version:  # statistics of a norm
            increment_version(one)
    with mode:
        return pytree.tree_map_only(Tensor, fake, results)
