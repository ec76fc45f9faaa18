"""The kernel library: which operations torch has a kernel for that programs may use, a row each.

The library of a wafer is a list of hand-written kernels; an operation of a program is in it, or is
generated, or runs on the host. Here the list is of torch's kernels for the CPU: the function in C++
of each operation, and the file that it is in, below ``aten/src/ATen/native`` of torch 2.13.
What is missing, as ``erfinv``, ``cumsum``, ``sort`` or ``fft``, is generated where the policy and
the compiler can, and else runs on the host's path: which, on a host fabric, is this CPU too.
``tests/tools/document_library.py`` makes a page of it, with the operations that it lacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LibraryKernel:
    """A kernel of torch's: its function in C++, and the file that has it."""

    function: str
    source: str


_ROWS = """
BinaryOps.cpp
    add ufunc_add_CPU
    sub sub_out
    mul mul_out
    div div_out
    remainder remainder_out
    fmod fmod_out
    maximum maximum_out
    minimum minimum_out
    eq eq_Scalar_out
    ne ne_Scalar_out
    lt lt_Scalar_out
    le le_Scalar_out
    gt gt_Scalar_out
    ge ge_Scalar_out
    logical_and logical_and_out
    logical_or logical_or_out
    logical_xor logical_xor_out
    bitwise_and bitwise_and_out
    bitwise_or bitwise_or_out
    bitwise_xor bitwise_xor_out
    tanh_backward tanh_backward_out
    sigmoid_backward sigmoid_backward_out
UnaryOps.cpp
    abs abs_out
    neg neg_out
    exp exp_out
    expm1 expm1_out
    log log_out
    log1p log1p_out
    sqrt sqrt_out
    rsqrt rsqrt_out
    sin sin_out
    cos cos_out
    tanh tanh_out
    sigmoid sigmoid_out
    erf erf_out
    floor floor_out
    ceil ceil_out
    round round_decimals_out
    trunc trunc_out
    sign sign_out
    reciprocal reciprocal_out
    logical_not logical_not_out
    bitwise_not bitwise_not_out
    isnan isnan
Pow.cpp
    pow pow_Scalar_out
TensorCompare.cpp
    where where_self_out
    clamp clamp_Tensor_out
    clamp_min clamp_min_Tensor_out
    clamp_max clamp_max_Tensor_out
    max max_unary_out
    min min_unary_out
PointwiseOps.cpp
    addcmul addcmul_out
    addcdiv addcdiv_out
Lerp.cpp
    lerp lerp_Scalar
ReduceOps.cpp
    sum sum_out
    mean mean_out
    amax amax_out
    amin amin_out
    any any_all_out
    all all_all_out
    argmax argmax_out
    argmin argmin_out
    var var_out
    var_mean var_mean
Activation.cpp
    relu relu
    gelu gelu_out_cpu
    gelu_backward gelu_backward_out_cpu
    leaky_relu leaky_relu_out
    leaky_relu_backward leaky_relu_backward_out
    silu silu_out
    silu_backward silu_backward_out
    elu elu_out
    elu_backward elu_backward_out
    threshold_backward threshold_backward_out
    hardtanh hardtanh_out
    hardtanh_backward hardtanh_backward
SoftMax.cpp
    _softmax softmax_cpu_out
    _softmax_backward_data softmax_backward_cpu_out
    _log_softmax log_softmax_cpu_out
    _log_softmax_backward_data log_softmax_backward_cpu_out
LinearAlgebra.cpp
    mm mm_out_cpu
    addmm addmm_out_cpu
    bmm bmm_out_cpu
    baddbmm baddbmm_out_cpu
Convolution.cpp
    convolution convolution
    convolution_backward convolution_backward
layer_norm.cpp
    native_layer_norm layer_norm_cpu
    native_layer_norm_backward layer_norm_backward_cpu
group_norm.cpp
    native_group_norm native_group_norm
    native_group_norm_backward native_group_norm_backward
Normalization.cpp
    native_batch_norm batch_norm_cpu_out
    native_batch_norm_backward batch_norm_backward_cpu
    _native_batch_norm_legit _batch_norm_legit_no_stats_cpu_out
Embedding.cpp
    embedding embedding_symint
    embedding_dense_backward embedding_dense_backward_cpu
TensorAdvancedIndexing.cpp
    index index_out
    index_put index_put
    gather gather_out
    scatter scatter_reduce_out
    scatter_add scatter_add
    index_select index_select_out_cpu_
TensorShape.cpp
    cat cat_out_cpu
    stack stack
    _unsafe_view _unsafe_view
    slice_backward slice_backward
Fill.cpp
    fill fill
Copy.cpp
    copy copy
    _to_copy _to_copy
    clone clone
TensorFactories.cpp
    full full
    arange arange_out
    scalar_tensor scalar_tensor
    empty empty_cpu
    empty_like empty_like
    full_like full_like
    zeros zeros_symint
    zeros_like zeros_like
    ones ones
    ones_like ones_like
DilatedMaxPool2d.cpp
    max_pool2d_with_indices max_pool2d_with_indices_out_cpu
    max_pool2d_with_indices_backward max_pool2d_with_indices_backward_out_cpu
AveragePool2d.cpp
    avg_pool2d avg_pool2d_out_cpu
    avg_pool2d_backward avg_pool2d_backward_out_cpu
AdaptiveAveragePooling.cpp
    _adaptive_avg_pool2d adaptive_avg_pool2d_cpu
    _adaptive_avg_pool2d_backward adaptive_avg_pool2d_backward_cpu
transformers/attention.cpp
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward \
    _scaled_dot_product_flash_attention_cpu_backward
Distributions.cpp
    bernoulli bernoulli_out
    normal normal_out
    uniform uniform_
Dropout.cpp
    native_dropout native_dropout_cpu
    native_dropout_backward native_dropout_backward
Loss.cpp
    mse_loss mse_loss_out
    mse_loss_backward mse_loss_backward
LossNLL.cpp
    nll_loss_forward nll_loss_forward_out_cpu
    nll_loss_backward nll_loss_backward_out_cpu
"""

_ALIASES = {
    "prims.convert_element_type": "_to_copy",
    "prims.device_put": "_to_copy",
    "prims.iota": "arange",
    "prims._low_memory_max_pool_with_offsets": "max_pool2d_with_indices",
    "prims._low_memory_max_pool_offsets_to_indices": "max_pool2d_with_indices",
}
"""What decompositions are called that a kernel of the library does."""


def _read(rows: str) -> dict[str, LibraryKernel]:
    found, source = {}, ""
    for row in rows.strip().splitlines():
        words = row.split()
        if len(words) == 1:
            [source] = words
        else:
            operation, function = words
            found[operation] = LibraryKernel(function, source)
    return found


LIBRARY: dict[str, LibraryKernel] = _read(_ROWS)
"""By the name of the operation, without namespace and overload."""


def has(target: Any) -> bool:
    """Whether the library has a kernel for the operation that a node of a graph calls."""
    full = str(target).rpartition(".")[0]  # without the overload
    namespace, _, name = full.partition(".")
    return namespace == "fulgurite" or _ALIASES.get(full, name.removesuffix("_")) in LIBRARY
