"""What to write instead of giving torch a tensor where it takes only Python's own numbers.

Two tables, by function or by ``function.argument``. Their code calls the first tensor ``x``, the
next ones ``y`` and ``z``, and the tensor that should be a number ``t``.
"""

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
    "clip_grad_norm.max_norm": (
        "grads = [p.grad for p in self.parameters()]\n"
        "      norm = torch.nn.utils.get_total_norm(grads)\n"
        "      for g in grads: g.mul_((t / (norm + 1e-6)).clamp(max=1))"
    ),
    "clip_grad_value.clip_value": "for p in self.parameters(): p.grad.copy_(p.grad.clamp(-t, t))",
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
    " out[torch.arange(len(out)), lengths - 1]",
    "linalg_lstsq": "torch.linalg.pinv(a) @ b",
    "ctc_loss": "the same loss in tensor operations over the padded targets, as in"
    " docs/ctc.md; torch's own sizes its table by the longest target",
}
"""Functions, or arguments of them, that make a shape: what to give them or to write instead."""
