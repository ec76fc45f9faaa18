"""Results of a traced operation lie where its kernel puts them.

For operands that lie turned (``x.transpose(1, 2)``), torch says otherwise of some operations while
a step is traced, batch norm among them. A ``reshape`` of such a result was a view in the program
and is a copy in stock Lightning: what is written into it was then seen by who reads the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite.backends.patches import Patch, patches_of
from fulgurite.backends.torch_versions import CHECKED

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


def laid_out_by_kernels() -> Iterator[Patch]:
    """A patch that asks an operation's kernel where its results lie, if an operand lies turned."""
    dispatch = FakeTensorMode._dispatch_impl

    def asked(self: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in _OTHERWISE and _lies_turned(args):
            return _as_the_kernel(self, func, args, kwargs)
        return dispatch(self, func, types, args, kwargs)

    why = "for operands that lie turned, torch says of some operations what their kernels do not do"
    return patches_of(FakeTensorMode, {"_dispatch_impl": asked}, why=why, checked=CHECKED)


def _lies_turned(args: Any) -> bool:
    return any(isinstance(one, Tensor) and not one.is_contiguous() for one in args)


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
