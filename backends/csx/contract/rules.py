"""The table of rules: what is forbidden in a step, and what its user is told to write instead.

To add a rule, write a row of ``RULES``, and a program that breaks it in ``misuses/table.py`` of the
tests. A torch function that is a misuse wherever it is called is named in the row; any other misuse
is refused where it is noticed: ``raise misuse("generator", line)``. ``docs/errors.md`` shows each,
with the rules of other rooms.

What to write where torch takes only Python's own numbers is in two tables, by function or by
``function.argument``: of tensors ``x``, ``y``, ``z``, and ``t``, which should be a number.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulgurite.backends.csx.diagnostics import trace_errors as errors
from fulgurite.backends.csx.diagnostics.trace_errors import TraceError
from fulgurite.backends.csx.diagnostics.user_lines import UserLine

ANY = (
    "a Python number that does not come from data: self.k, x.shape[0]; where a schedule changes"
    " it, one of optimizer.param_groups.\n      Or the formula in operations on tensors"
)
_FIXED_SIZE = "a size from shapes or Python numbers: x.shape[0], self.size"
_GRID = "      i, j = torch.arange(N)[:, None], torch.arange(M)"
_SAME_SHAPE = "the largest size, from Python numbers, and a mask over what is not wanted:\n      "

MULTIPLIED_OUT = {
    "add.alpha": "x + t * y",
    "sub.alpha": "x - t * y",
    "subtract.alpha": "x - t * y",
    "rsub.alpha": "y - t * x",
    "addcmul.value": "x + t * y * z",
    "addcdiv.value": "x + t * y / z",
    **dict.fromkeys(("addmm.alpha", "addmv.alpha", "baddbmm.alpha"), "x + t * (y @ z)"),
    **dict.fromkeys(("addmm.beta", "addmv.beta", "baddbmm.beta"), "t * x + y @ z"),
    "addr.alpha": "x + t * torch.outer(y, z)",
    "addr.beta": "t * x + torch.outer(y, z)",
    "addbmm.alpha": "x + t * (y @ z).sum(0)",
    "addbmm.beta": "t * x + (y @ z).sum(0)",
    "index_add.alpha": "x.index_add(0, y, t * z)",
    "full": "torch.zeros(shape) + t",
    "full_like": "torch.zeros_like(x) + t",
    "new_full": "x.new_zeros(shape) + t",
    "scalar_tensor": "t.clone()",
    "pad.value": "F.pad(x - t, pad) + t",
    **dict.fromkeys(("clamp", "clip", "hardtanh"), "x.clamp(min=low).clamp(max=high)"),
    "nan_to_num.nan": "torch.where(x.isnan(), t, x)",
    "isclose": "(x - y).abs() <= t",
    "logit.eps": "torch.logit(torch.minimum(torch.maximum(x, t), 1 - t))",
    "round.decimals": "(x * 10**t).round() / 10**t",
    "gradient.spacing": "torch.gradient(x)[0] / t",
    "trapezoid.dx": "t * torch.trapezoid(x)",
    "leaky_relu": "torch.where(x > 0, x, t * x)",
    "elu": "torch.where(x > 0, x, t * torch.expm1(x.clamp(max=0)))",
    "celu": "torch.where(x > 0, x, t * torch.expm1(x.clamp(max=0) / t))",
    "threshold.threshold": "torch.where(x > t, x, value)",
    "threshold.value": "torch.where(x > threshold, x, t)",
    "softplus.beta": "F.softplus(t * x) / t",
    "hardshrink": "torch.where(x.abs() > t, x, 0)",
    "softshrink": "x.sign() * F.relu(x.abs() - t)",
    "huber_loss.delta": "t**2 * F.huber_loss(x / t, y / t)",
    "smooth_l1_loss.beta": "t * F.smooth_l1_loss(x / t, y / t)",
    "cross_entropy.label_smoothing": "(1 - t) * F.cross_entropy(x, y)"
    " - t * x.log_softmax(1).mean()",
    "margin_ranking_loss.margin": "F.relu(t - z * (x - y)).mean()",
    "triplet_margin_loss.margin": "F.relu(F.pairwise_distance(x, y) - F.pairwise_distance(x, z)"
    " + t).mean()",
    "cosine_embedding_loss.margin": "c = F.cosine_similarity(x, y); torch.where(z == 1, 1 - c,"
    " F.relu(c - t)).mean()",
    "hinge_embedding_loss.margin": "torch.where(y == 1, x, F.relu(t - x)).mean()",
    "scaled_dot_product_attention.scale": "F.scaled_dot_product_attention(x * t, y, z, scale=1.0)",
    **dict.fromkeys(
        ("norm.p", "norm.ord", "vector_norm.ord", "linalg_vector_norm.ord", "linalg_norm.ord"),
        "(x.abs() ** t).sum() ** (1 / t)",
    ),
    "normalize.p": "x / ((x.abs() ** t).sum(1, keepdim=True) ** (1 / t))",
    "pairwise_distance.p": "((x - y).abs() ** t).sum(-1) ** (1 / t)",
    "clip_grad_norm.max_norm": "grads = [p.grad for p in self.parameters() if p.grad is not None]\n"
    "      norm = torch.nn.utils.get_total_norm(grads)\n"
    "      for g in grads: g.mul_((t / (norm + 1e-6)).clamp(max=1))",
    "clip_grad_value.clip_value": "for p in self.parameters():\n"
    "          if p.grad is not None: p.grad.copy_(p.grad.clamp(-t, t))",
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
    "triu": "torch.where(j - i >= t, x, 0), of x [N, M] with\n" + _GRID,
    "tril": "torch.where(j - i <= t, x, 0), of x [N, M] with\n" + _GRID,
}
"""What to write for a function, or for one of its arguments."""

_WITH_SIZES = """
    zeros ones empty full.size rand randn arange eye randperm linspace.steps logspace.steps
    new_zeros new_ones new_empty randint.size normal.size multinomial.num_samples vander
    combinations reshape view expand repeat tile unflatten broadcast_to chunk split tensor_split
    diag diagonal diag_embed pad.pad unfold fold interpolate upsample pixel_shuffle pixel_unshuffle
    histc.bins bincount.minlength stft adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool1d
    adaptive_max_pool2d avg_pool1d avg_pool2d max_pool1d max_pool2d conv1d conv2d conv3d
"""
SIZED = {
    **dict.fromkeys(
        _WITH_SIZES.split(), "a size from shapes or Python numbers: x.shape[0], self.size"
    ),
    "topk": _SAME_SHAPE + "x.sort(-1, descending=True).values  # and of it the first t:\n      "
    "torch.arange(x.shape[-1]) < t",
    "narrow.length": _SAME_SHAPE + "torch.where(torch.arange(len(x)) < t, x, 0)  # of x [N]",
    "one_hot": "the number of classes: one_hot(x, num_classes=10)",
    "repeat_interleave": "repeats as a Python number, or output_size=",
    "pack_padded_sequence": "the padded batch, and the output where each sequence ends:"
    " out[torch.arange(len(out)), lengths - 1]; with bidirectional=True a second RNN over the rows"
    " turned around, as in docs/variable_lengths.md",
    "linalg_lstsq": "torch.linalg.pinv(a) @ b",
    "ctc_loss": "the same loss in tensor operations over the padded targets, as in"
    " docs/ctc.md; torch's own sizes its table by the longest target",
}
"""Functions, or arguments of them, that make a shape: what to give them or to write instead."""


_POOLED = "the number of graphs in a batch, which is known: global_mean_pool(x, batch, size=8)"
_LOOPS = (
    "self loops in the dataset: transform=torch_geometric.transforms.AddRemainingSelfLoops(), and\n"
    "      add_self_loops=False in the layer"
)
_EXPERTS = "experts whose rows are as many for each: model.set_experts_implementation('batched_mm')"
_MOLECULES = (
    "an aggregation of N molecules, as many as are in a batch:\n"
    "      class Mean(MeanAggregation):\n"
    "          def forward(self, H, batch):\n"
    "              index, zeros = batch[:, None].expand_as(H), H.new_zeros(N, H.shape[1])\n"
    "              return zeros.scatter_reduce(0, index, H, 'mean', include_self=False)"
)
IN_PACKAGES = {
    ("torch_geometric", "global_(add|mean|max)_pool"): _POOLED,
    ("torch_geometric", "(add|remove|add_remaining)_self_loops|gcn_norm"): _LOOPS,
    (
        "torch_geometric",
        "to_dense_batch",
    ): "to_dense_batch(x, batch, batch_size=8, max_num_nodes=20)",
    ("torch_geometric", "softmax"): "softmax(src, index, num_nodes=x.size(0))",
    ("torch_geometric", "scatter"): "scatter(src, index, dim_size=x.size(0))",
    ("chemprop", r"\w*Aggregation\.forward"): _MOLECULES,
    ("transformers", r"grouped_mm_\w+|\w*(Experts|SparseMoe\w*)\.forward"): _EXPERTS,
}
"""What to write where a function of a package, by its qualified name, is in the way."""


class Rule(NamedTuple):
    """One misuse, and what the user is told of it.

    Texts and remedies have names in braces, which are filled in where the misuse is noticed.
    """

    error: type[TraceError]
    text: str  # what was done
    remedy: str  # what to write instead: code to paste; empty where it is always made up
    calls: Mapping[Any, str] = MappingProxyType({})  # torch functions, and what {done} says of each


READ_LATER = (
    'leave it a tensor: x.detach() in a computation, self.log("name", x); to look at it:\n'
    "      @fulgurite.step_closure\n"
    "      def show(value):  # runs on the host after every step: show(value)\n"
    "          print(value.item())"
)
MASKS = (
    "keep the shape, and use a mask:\n"
    "      torch.where(mask, x, 0).sum() / mask.sum()  # for x[mask].mean()\n"
    '      (F.cross_entropy(x, y, reduction="none") * mask).sum() / mask.sum()  # for a loss'
)
_SEED_ONCE = (
    "lightning.seed_everything(seed) before fit; the step's draws then differ from step to step"
    " and follow it"
)
METRIC_REMEDY = (
    "self.metric(predictions, y) on a line of its own, then self.log('metric', self.metric): the\n"
    "      host computes the value after the step. Where that is not one number, or is to be that\n"
    "      of all batches so far: self.metric.update(predictions, y) in the step, and\n"
    "      self.metric.compute() in on_train_batch_end() or at the end of the epoch"
)
KEEP = (
    "self.last = x or self.outs.append(x), with an attribute or a list of the module, which are\n"
    "      filled after every step; return x from the step; or pass it to a @fulgurite.step_closure"
)
INITIALIZED = (
    "the step writes it too, so it changes: torch.where(condition, a, b) asks in each step. Where\n"
    "    it says whether something was initialized with data, run one batch before fit through\n"
    "    the code that sets it, after which the step only reads it:\n"
    "      with torch.no_grad():\n"
    "          model(x)  # or model.training_step(batch, 0)"
)
POINTER = (
    "the step writes it too, so it changes. Leave it a tensor:\n"
    "      rows = ({tensor} + torch.arange(n)) % K  # for the next n of a queue of K\n"
    "      self.queue[rows] = new  # self.queue[:, rows] where they are columns\n"
    "      {tensor}.copy_(({tensor} + n) % K)\n"
    "      (torch.rand(k) * {tensor}).long()  # for torch.randint(0, {tensor}, (k,))\n"
    "    and torch.where(condition, a, b) for a branch on it"
)
"""Where a buffer of integers says where something is, or how much of it."""
_NO_VALUE = "{tensor} was {done}, but it has no value while the step is traced."

RULES: dict[str, Rule] = {
    # values
    "condition": Rule(
        errors.ConditionalOnTensor,
        _NO_VALUE,
        "compute both sides, and choose:\n      x = torch.where(condition, a, b)",
        calls={
            Tensor.__bool__: "used as a Python condition",
            Tensor.__contains__: "searched by Python's `in`",
            torch.equal: "compared by torch.equal",
            torch.allclose: "compared by torch.allclose",
            Tensor.equal: "compared by .equal()",
            Tensor.allclose: "compared by .allclose()",
        },
    ),
    "read": Rule(
        errors.HostRead,
        _NO_VALUE,
        READ_LATER,
        calls={
            Tensor.item: "read by .item()",
            Tensor.tolist: "read by .tolist()",
            Tensor.numpy: "read by .numpy()",
            Tensor.__array__: "turned into a numpy array",
            Tensor.__int__: "read by int()",
            Tensor.__complex__: "read by complex()",
            Tensor.__reduce_ex__: "pickled or saved",
            Tensor.data_ptr: "asked for its address",
        },
    ),
    "float": Rule(
        errors.HostRead,
        _NO_VALUE,
        READ_LATER.replace("in a computation", "in a computation, torch.sqrt(x) for math.sqrt(x)"),
        calls={Tensor.__float__: "read by float()"},
    ),
    "index": Rule(
        errors.HostRead,
        _NO_VALUE,
        "torch.stack(items)[i] for items[i]; for range(i), a range of fixed length and\n"
        "      x = torch.where(step < i, changed, x)  # for step in range(10)",
        calls={Tensor.__index__: "used as a Python index"},
    ),
    "print": Rule(
        errors.TensorPrinted,
        _NO_VALUE,
        READ_LATER,
        calls=dict.fromkeys((Tensor.__repr__, Tensor.__format__), "printed or formatted"),
    ),
    "value": Rule(
        errors.HostRead, "{function}() needs the value of {tensor} on the host.", READ_LATER
    ),
    "scalar_argument": Rule(
        errors.ScalarArgument,
        "{tensor} was given as {argument}= of {function}(), which takes only Python's own numbers"
        " there.",
        ANY,
    ),
    # shapes
    "shape": Rule(
        errors.DynamicShape,
        "The shape of the result of {function}() depends on the values of {tensor}; a static"
        " program has fixed shapes.",
        MASKS,
    ),
    "slice": Rule(
        errors.DynamicShape,
        "The shape of a slice depends on the values of {tensor}; a static program has fixed"
        " shapes.",
        "a mask over positions keeps the shape:\n"
        "      torch.where(torch.arange(len(x), device=x.device) < n, x, 0)  # for x[:n], x [N]\n"
        "      x[n + torch.arange(4)]  # for x[n : n + 4], read or written",
    ),
    "sparse": Rule(
        errors.DynamicShape,
        "{what} is sparse: how many elements it has depends on values.",
        "dense tensors; in an embedding sparse=False",
    ),
    "nested": Rule(
        errors.DynamicShape,
        "The step made a nested tensor: its shape is as long as each of its rows.",
        "rows padded to one length, and a mask:\n"
        "      torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)",
    ),
    # devices, dtypes, random states
    "device": Rule(
        errors.UnsupportedDevice,
        "The step asked for device {device!r}. A program's tensors all are where the program runs,"
        " which the step sees as 'cpu'.",
        "leave the device out, or take one that fits: device=x.device, device=self.device",
    ),
    "double": Rule(
        errors.UnsupportedDtype,
        "{what} is {dtype}, and the model's parameters are not. A program has float32, one 16-bit"
        " type a run, and integers; or float64 throughout.",
        "float32: x.float(), dtype=torch.float32, and in the dataset; for all of the model in"
        " float64: Trainer(precision='64-true')",
    ),
    "second_narrow": Rule(
        errors.UnsupportedDtype,
        "{what} is {dtype}. A run has one 16-bit type, and this one's is {first}.",
        "float32 or that type: x.float(), x.to({allowed})",
    ),
    "seed": Rule(
        errors.RandomStateSet,
        "torch.{function}() was called in the step. Traced once, it would make every step draw the"
        " same numbers, or none of them.",
        _SEED_ONCE,
    ),
    "generator": Rule(
        errors.RandomStateSet,
        "The step drew from a generator of its own (generator=...). A program draws from torch's"
        " default generator.",
        f"leave generator= out; {_SEED_ONCE}",
    ),
    "message": Rule(
        errors.UnsupportedInput,
        "The step called torch.distributed.{function}(), which sends a message: no operation of a"
        " program.",
        'self.all_gather(x), or self.trainer.strategy.reduce(x, reduce_op="mean"), which are; or'
        " the call in a hook between steps, such as on_train_batch_end",
    ),
    # what the batch holds, and what the step keeps
    "object": Rule(
        errors.UnsupportedInput,
        "An object of the batch went to a function; a step can only pass it on.",
        "turn it into a tensor in collate_fn or on_after_batch_transfer",
    ),
    "born": Rule(
        errors.StateBornInStep,
        "The step adds {added} to {attribute}, and reads it: another program after every step.",
        "the last n from the start: collections.deque([{zeros}] * n, maxlen=n)",
    ),
    "born_shared": Rule(
        errors.UnsupportedState,
        "The step lets {attribute} be the memory of {other}, and changes it in place.",
        "a copy, {attribute} = value.clone(); or {other} in its place",
    ),
    "growing_list": Rule(
        errors.UnsupportedState,
        "The step puts tensors into {attribute} and reads it: it would find what was there in the"
        " first step, {count}, each time.",
        "read it in a host hook such as on_train_epoch_end; or keep the last n in"
        ' a buffer: self.register_buffer("{name}", torch.zeros([n, ...])) in __init__',
    ),
    "data": Rule(
        errors.UnsupportedState,
        "The step gave {tensor} other .data, {now} for {before}.",
        "keep its shape and dtype",
    ),
    "foreign": Rule(
        errors.ForeignState,
        "The step changes a tensor that no module holds (a global, a closure's).",
        'self.register_buffer("total", torch.zeros(4)) in __init__, and self.total.add_(x) in the'
        " step",
    ),
    "thread": Rule(
        errors.UnsupportedState,
        "The step uses a tensor that was computed where the trace does not see it: in another"
        " thread, or by an earlier trace.",
        "compute it in the step itself, in its own thread",
    ),
    "no_parameter": Rule(
        errors.UnsupportedState,
        "{tensor} requires a gradient, but is no parameter of a module or an optimizer.",
        "nn.ParameterList, nn.ParameterDict, or an attribute of the module",
    ),
    "leaked": Rule(
        errors.LeakedTensor,
        "{tensor} was used{where}, after the trace that made it. It was kept outside of the module,"
        " where no step leaves a value.",
        KEEP,
    ),
    "leaked_state": Rule(
        errors.LeakedTensor,
        "{tensor} is kept in {holder}, and the next step reads it: state that no module holds, and"
        " no program finds.",
        'self.register_buffer("kept", torch.zeros({shape})) in __init__; the step reads\n'
        "      self.kept, and then self.kept.copy_(x)",
    ),
    "not_run": Rule(
        errors.LeakedTensor,
        "{tensor} has no value: the backend builds programs, and runs none.",
        "a step_closure, which is not called then; or a backend without compile_only and"
        " validate_only",
    ),
    # what the host changes between steps
    "frozen_changed": Rule(
        errors.FrozenValueChanged,
        "{attribute} was {before} when the step was traced and read it, and now is {now}. The"
        " program keeps the value that it was traced with.",
        "set it before fit, and leave it",
    ),
    "constant_changed": Rule(
        errors.StateChanged,
        "{tensor} held another kind of tensor when the program was built.",
        "keep its shape and dtype, or register_buffer",
    ),
}
"""Each rule by its id."""

BREAKING_CALLS: dict[Any, tuple[str, str]] = {
    function: (rule, done) for rule, row in RULES.items() for function, done in row.calls.items()
}
"""The torch functions that rows name: the rule that each breaks, and how messages say it."""


def misuse(rule: str, line: UserLine | None, *, remedy: str = "", **found: str) -> TraceError:
    """The error for a step that broke a rule, to be raised.

    Args:
        rule: its id in ``RULES``.
        line: the user's line.
        remedy: in place of the rule's, where what to write depends on what was found.
        found: what the rule has in braces.
    """
    row = RULES[rule]
    if line is not None and "pack_padded_sequence(" in line.source:
        remedy = SIZED["pack_padded_sequence"]
    remedy = in_package(sys._getframe(1)) or remedy or row.remedy.format(**found)
    return row.error(row.text.format(**found), line=line, remedy=remedy)


def in_package(frame: FrameType | None) -> str:
    """What helps with a function of a package in ``IN_PACKAGES`` that led to this frame, if any."""
    packages, found = {package for package, _ in IN_PACKAGES}, ""
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in packages:
            for (its, name), remedy in IN_PACKAGES.items():
                if its == package and re.fullmatch(name, frame.f_code.co_qualname):
                    found = remedy  # of the outermost: the user calls it, or may
        frame = frame.f_back
    return found
