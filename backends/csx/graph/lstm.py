"""``torch.lstm``, each layer one operation: oneDNN's where it runs, written out for the compiler.

torch's own operation of a layer cannot stand in a program: run without gradients it keeps nothing
for its backward pass, and traced, both gradients of its biases are one tensor.
Shapes: T steps, B rows, I inputs, H hidden; the 4H gates are input, forget, cell and output, as in
``torch.nn.LSTM``. ``kept`` is what the backward pass needs: oneDNN's own bytes, or, written out,
each step's gates and its cell, [T, B, 5H].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_aten = torch.ops.aten


def lstm(
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.lstm`` of dense float32 without projection; it draws what oneDNN's way draws.

    Args:
        x: [T, B, I], or [B, T, I] if ``batch_first``.
        states: the first outputs and cells, each [layers * directions, B, H].
        weights: of each layer and direction [4H, I] and [4H, H], with two biases [4H].

    Returns:
        Outputs [T, B, H * directions], or batch first; the last outputs and cells.
    """
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    h, c = (state.contiguous() for state in states)
    directions, each = 1 + bidirectional, 4 if has_biases else 2
    last: list[tuple[Tensor, Tensor]] = []
    for layer in range(layers):
        outputs = []
        for reverse in (False, True)[:directions]:
            i = len(last)
            of_x, of_h, *biases = weights[i * each : (i + 1) * each]
            given = x, of_x, of_h, *(biases or (None, None)), h[i], c[i]
            output, *ends, _ = LAYER(*given, reverse, torch.is_grad_enabled())
            outputs.append(output)
            last.append((ends[0], ends[1]))
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and training and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    hs, cs = (torch.stack(of_all) for of_all in zip(*last, strict=True))
    return x.transpose(0, 1) if batch_first else x, hs, cs


def flops_of_layer(x: Tensor, of_x: Tensor, of_h: Tensor) -> int:
    """The products of a layer's forward pass; those of its backward pass are twice as many."""
    return 2 * x.shape[0] * x.shape[1] * (of_x.numel() + of_h.numel())


def _written_out(*operands: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A layer in tensor operations; its operands, as those below, are the schema's (_LIBRARY)."""
    x, of_x, of_h, bias_x, bias_h, h, c, reverse, _ = operands
    given = x.flatten(0, 1) @ of_x.t()
    if bias_x is not None and bias_h is not None:
        given = given + (bias_x + bias_h)
    given = given.view(*x.shape[:2], -1)
    # each place is filled below; backwards in time if "reverse" says so
    outputs, kept = [h] * len(x), [h] * len(x)
    for t in _order(x, reverse):
        i, f, g, o = (given[t] + h @ of_h.t()).chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = f * c + i * g
        h = o * c.tanh()
        outputs[t], kept[t] = h, torch.cat([i, f, g, o, c], 1)
    return torch.stack(outputs), h, c, torch.stack(kept)


def _backward_written_out(*operands: Any) -> tuple[Tensor, ...]:
    to_outputs, to_h, to_c = operands[:3]
    x, of_x, of_h, _, _, first_h, first_c, outputs, _, _, kept, reverse = operands[3:]
    hidden = first_h.shape[1]
    gates, cells = kept[..., : 4 * hidden], kept[..., 4 * hidden :]
    dh = torch.zeros_like(first_h) if to_h is None else to_h
    dc = torch.zeros_like(first_c) if to_c is None else to_c
    to_gates = [dh] * len(x)
    steps = _order(x, reverse)
    for k in reversed(range(len(steps))):
        t = steps[k]
        before = cells[steps[k - 1]] if k else first_c
        if to_outputs is not None:
            dh = dh + to_outputs[t]
        i, f, g, o = gates[t].chunk(4, 1)
        c = cells[t].tanh()
        dc = dc + dh * o * (1 - c * c)
        parts = dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g * g)
        to_gates[t] = torch.cat([*parts, dh * c * o * (1 - o)], 1)
        dc, dh = dc * f, to_gates[t] @ of_h
    rest = outputs[1:] if reverse else outputs[:-1]
    first = first_h.unsqueeze(0)
    hs = torch.cat([rest, first] if reverse else [first, rest])
    whole = torch.stack(to_gates).flatten(0, 1)
    to_bias = whole.sum(0)
    to_x = (whole @ of_x).view(x.shape)
    of_inputs = whole.t() @ x.flatten(0, 1), whole.t() @ hs.flatten(0, 1)
    # both biases have the same gradient; torch's own operation returns one tensor for both, which a
    # traced operation must not
    return to_x, *of_inputs, to_bias, to_bias.clone(), dh, dc


def _order(x: Tensor, reverse: bool) -> list[int]:
    steps = list(range(len(x)))
    return steps[::-1] if reverse else steps


def _run(*operands: Any) -> Any:
    """oneDNN's layer, which keeps something only where gradients are on."""
    *given, reverse, keeps = operands
    x, hidden = given[0], given[5].shape[1]
    how: Any = reverse, [], _LSTM, hidden, 1, given[3] is not None, False, False, keeps
    # the kernel looks at the gradient mode to know whether to keep something for the backward pass,
    # and programs run without gradients
    with torch.set_grad_enabled(keeps), torch._C._AutoDispatchBelowAutograd():
        *results, kept = _aten.mkldnn_rnn_layer.default(*_for_kernel(*given), *how)
    return *results, x.new_empty(0, dtype=torch.uint8) if kept is None else kept


def _run_backward(*operands: Any) -> Any:
    to, given, (*results, kept, reverse) = operands[:3], operands[3:10], operands[10:]
    how: Any = reverse, _LSTM, given[5].shape[1], 1, given[3] is not None, True, False, [], False
    layer = _for_kernel(*given)
    return _aten.mkldnn_rnn_layer_backward.default(*layer, *results, *to, *how, kept)


def _for_kernel(
    x: Tensor, of_x: Tensor, of_h: Tensor, bias_x: Any, bias_h: Any, h: Tensor, c: Tensor
) -> tuple[Tensor, ...]:
    """A layer's operands as oneDNN's takes them: with biases, and in order, as not all lie."""
    biases = (of_x.new_zeros(len(of_x)) if one is None else one for one in (bias_x, bias_h))
    return x.contiguous(), of_x, of_h, *biases, h.contiguous(), c.contiguous()


def _fake(*operands: Any) -> tuple[Tensor, ...]:
    x, _, _, _, _, h, _, _, keeps = operands
    size = _bytes_kept(*x.shape, h.shape[1]) if keeps else 0
    outputs = x.new_empty(*x.shape[:2], h.shape[1])
    kept = x.new_empty(size, dtype=torch.uint8)
    return outputs, torch.empty_like(h), torch.empty_like(h), kept


@functools.cache
def _bytes_kept(steps: int, rows: int, inputs: int, hidden: int) -> int:
    """How many bytes oneDNN's layer keeps, which it alone knows."""
    with _disable_current_modes():
        sizes = (steps, rows, inputs), (4 * hidden, inputs), (4 * hidden, hidden)
        x, of_x, of_h = map(torch.zeros, sizes)
        h = torch.zeros(rows, hidden)
        kept: Tensor = _run(x, of_x, of_h, None, None, h, h, False, True)[-1]
        return kept.numel()


def _fake_backward(*operands: Any) -> tuple[Tensor, ...]:
    x, of_x, of_h, _, _, h, c = operands[3:10]
    to_bias = of_x.new_empty(len(of_x))
    return (
        *map(torch.empty_like, (x, of_x, of_h)),
        to_bias,
        to_bias.clone(),
        *map(torch.empty_like, (h, c)),
    )


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.reverse, _ = inputs
    ctx.mark_non_differentiable(output[-1])
    # outputs that no loss reaches have no gradient, rather than zeros to compute with
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, *to: Tensor | None) -> tuple[Tensor | None, ...]:
    saved: Any = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph: of what is written out, torch has the derivatives
        given = [one for one in saved[:7] if one is not None and one.requires_grad]
        results = _written_out(*(*saved[:7], ctx.reverse, True))[:3]
        asked = [i for i in range(3) if to[i] is not None]
        found = torch.autograd.grad(
            [results[i] for i in asked], given, [to[i] for i in asked], create_graph=True
        )
        by = dict(zip(map(id, given), found, strict=True))
        return *(by.get(id(one)) for one in saved[:7]), None, None
    found = LAYER_BACKWARD(*to[:3], *saved, ctx.reverse)
    biases = saved[3] is not None
    return *(its if biases or i not in (3, 4) else None for i, its in enumerate(found)), None, None


_LSTM = 2
"""oneDNN's number of this kind of layer."""
_OPERANDS = "Tensor x, Tensor of_x, Tensor of_h, Tensor? bias_x, Tensor? bias_h, Tensor h, Tensor c"
_LIBRARY: Any = torch.library.Library("fulgurite", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    f"lstm_layer({_OPERANDS}, bool reverse, bool keeps) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    f"lstm_layer_backward(Tensor? to_outputs, Tensor? to_h, Tensor? to_c, {_OPERANDS}, "
    "Tensor outputs, Tensor last_h, Tensor last_c, Tensor kept, bool reverse) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("lstm_layer", _run, "CompositeExplicitAutograd")
_LIBRARY.impl("lstm_layer_backward", _run_backward, "CompositeExplicitAutograd")
torch.library.register_fake("fulgurite::lstm_layer", _fake, lib=_LIBRARY)
torch.library.register_fake("fulgurite::lstm_layer_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd(
    "fulgurite::lstm_layer", _gradients, setup_context=_keep, lib=_LIBRARY
)
LAYER: Any = torch.ops.fulgurite.lstm_layer.default
LAYER_BACKWARD: Any = torch.ops.fulgurite.lstm_layer_backward.default

WRITTEN_OUT: dict[Any, Any] = {LAYER: _written_out, LAYER_BACKWARD: _backward_written_out}
"""Decompositions of both."""
