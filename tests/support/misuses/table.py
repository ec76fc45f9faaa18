"""The table: group -> misuses, in the order of the document."""

from __future__ import annotations

from typing import Any

from misuses.program import Code, Misuse

SHOW = """
@fulgurite.step_closure
def show(value):
    print(f"{value.item():.3f}")
"""


def _row(name: str, title: str, rule: str, step: str, good: str = "", **rest: Any) -> Misuse:
    """A misuse whose two programs differ in their step alone, but for what ``rest`` says.

    ``init``, ``top``, ``hooks``, ``after`` and ``batches`` are of both programs; with the prefix
    ``good_`` of the corrected one, with ``bad_`` of the other.
    """
    parts = ("init", "top", "hooks", "after", "batches")
    both = {part: rest.pop(part) for part in parts if part in rest}
    own = {
        side: {part: rest.pop(f"{side}_{part}") for part in parts if f"{side}_{part}" in rest}
        for side in ("bad", "good")
    }
    corrected = Code(step=good, **{**both, **own["good"]}) if good or own["good"] else None
    bad = Code(step=step, **{**both, **own["bad"]})
    return Misuse(name=name, title=title, rule=rule, bad=bad, good=corrected, **rest)


CONDITIONS = [
    _row(
        "if",
        "`if tensor:`",
        "condition",
        """
        if loss > 1:  # <-
            loss = loss * 2
        """,
        "loss = torch.where(loss > 1, loss * 2, loss)",
        jax="if loss > 1:\n    loss = loss * 2",
    ),
    _row(
        "while",
        "`while tensor:`",
        "condition",
        """
        while loss > 1:  # <-
            loss = loss / 2
        """,
        """
        for _ in range(4):
            loss = torch.where(loss > 1, loss / 2, loss)
        """,
        jax="while loss > 1:\n    loss = loss / 2",
    ),
    _row(
        "assert",
        "`assert tensor`",
        "condition",
        "assert torch.isfinite(loss)  # <-",
        "check(torch.isfinite(loss))",
        good_top="@fulgurite.step_closure\ndef check(finite):\n    assert finite\n",
        jax="assert jnp.isfinite(loss)",
    ),
    _row(
        "and",
        "`a and b`, `not a`",
        "condition",
        "loss = loss * ((out.mean() > 0) and (out.std() > 1))  # <-",
        "loss = loss * ((out.mean() > 0) & (out.std() > 1))",
        jax="loss = loss * ((out.mean() > 0) and (out.std() > 1))",
    ),
    _row(
        "max",
        "`max(t1, t2)`, `min`, `sorted`",
        "condition",
        "loss = max(loss, out.mean())  # <-",
        "loss = torch.maximum(loss, out.mean())",
        jax="loss = max(loss, out.mean())",
    ),
    _row(
        "in",
        "`t in list`",
        "condition",
        "loss = loss * (out.argmax() in [y[0], y[1]])  # <-",
        "loss = loss * (out.argmax() == y[:2]).any()",
        jax="loss = loss * (out.argmax() in [y[0], y[1]])",
    ),
    _row(
        "equal",
        "`torch.equal`, `torch.allclose`",
        "condition",
        "loss = loss * (1 if torch.allclose(out, -out) else 2)  # <-",
        "loss = loss * torch.where((out - -out).abs().max() <= 1e-5, 1, 2)",
        jax="loss = loss * (1 if jnp.allclose(out, -out) else 2)",
    ),
    _row(
        "helper",
        "in a helper function",
        "condition",
        "loss = positive(loss)",
        "loss = loss.abs()",
        bad_top="""
        def positive(value):
            return value if value > 0 else -value  # <-
        """,
        jax="def positive(t):\n    return t if t > 0 else -t\nloss = positive(loss)",
    ),
    _row(
        "comprehension",
        "in a list comprehension",
        "condition",
        "loss = loss + sum([row.sum() for row in out if row[0] > 0])  # <-",
        "loss = loss + torch.where(out[:, 0] > 0, out.sum(1), 0).sum()",
        jax="loss = loss + sum([row.sum() for row in out if row[0] > 0])",
    ),
    _row(
        "library",
        "in a function of a library",
        "condition",
        "loss = loss + nn.utils.get_total_norm([out], error_if_nonfinite=True)  # <-",
        "loss = loss + nn.utils.get_total_norm([out])",
    ),
]

READS = [
    _row(
        "item",
        "`t.item()`",
        "read",
        'self.log("accuracy", (out.argmax(1) == y).float().mean().item())  # <-',
        'self.log("accuracy", (out.argmax(1) == y).float().mean())',
        jax="accuracy = (out.argmax(1) == y).mean().item()",
    ),
    _row(
        "float",
        "`float(t)`, `int(t)`, `math.sqrt(t)`",
        "float",
        "loss = loss * float(out.mean())  # <-",
        "loss = loss * out.mean().detach()",
        jax="loss = loss * float(out.mean())",
    ),
    _row(
        "index",
        "`python_list[t]`, `range(t)`",
        "index",
        "loss = loss * [1.0, 2.0, 3.0, 4.0][y[0]]  # <-",
        "loss = loss * torch.tensor([1.0, 2.0, 3.0, 4.0])[y[0]]",
        jax="loss = loss * [1.0, 2.0, 3.0, 4.0][y[0]]",
    ),
    _row(
        "tolist",
        "`t.tolist()`",
        "read",
        "loss = loss * sum(out[0].tolist())  # <-",
        "loss = loss * out[0].detach().sum()",
        jax="loss = loss * sum(out[0].tolist())",
    ),
    _row(
        "numpy",
        "`t.numpy()`, `np.asarray(t)`",
        "read",
        "loss = loss * float(out.detach().numpy().mean())  # <-",
        "loss = loss * out.detach().mean()",
        jax="import numpy\nloss = loss * float(numpy.asarray(out).mean())",
    ),
    _row(
        "cpu",
        '`t.cpu()`, `t.to("cpu")`',
        "read",
        'loss = loss * out.detach().to("cpu").mean()  # <-',
        "loss = loss * out.detach().mean()",
        jax="loss = loss * jax.device_get(out).mean()",
    ),
    _row(
        "print",
        "`print(t)`",
        "print",
        'print("loss", loss)  # <-',
        "show(loss)",
        good_top=SHOW,
        jax='print("loss", loss)',
    ),
    _row(
        "format",
        '`f"{t:.3f}"`',
        "print",
        'text = f"{loss:.3f}"  # <-',
        "show(loss)",
        good_top=SHOW,
        jax='text = f"{loss:.3f}"',
    ),
    _row(
        "logging",
        '`logging.info("%s", t)`',
        "print",
        'logging.getLogger("model").warning("loss %s", loss)  # <-',
        'self.log("loss", loss)',
        bad_top="import logging",
        jax='import logging\nlogging.getLogger("model").warning("loss %s", loss)',
    ),
    _row(
        "save",
        "`torch.save(t)`, `pickle.dumps(t)`",
        "read",
        "torch.save(out, io.BytesIO())  # <-",
        "keep(out)",
        bad_top="import io",
        good_top="""
        import io

        @fulgurite.step_closure
        def keep(value):
            torch.save(value, io.BytesIO())
        """,
        jax="import pickle\npickle.dumps(out)",
    ),
    _row(
        "is_nonzero",
        "`torch.is_nonzero(t)`",
        "value",
        "loss = loss * torch.is_nonzero(loss)  # <-",
        "loss = loss * (loss != 0)",
    ),
    _row(
        "address",
        "`t.data_ptr()`",
        "read",
        "seen = {out.data_ptr(): out}  # <-",
        "seen = {id(out): out}",
    ),
    _row(
        "lambda",
        "in a lambda",
        "read",
        "loss = loss * (lambda row: row.max().item())(out[0])  # <-",
        "loss = loss * (lambda row: row.max().detach())(out[0])",
        jax="loss = loss * (lambda row: row.max().item())(out[0])",
    ),
    _row(
        "caught",
        "an error that `except` hides",
        "read",
        """
        try:
            loss = loss * loss.item()  # <-
        except Exception:
            pass
        """,
        "loss = loss * loss.detach()",
        jax="try:\n    loss = loss * loss.item()\nexcept Exception:\n    pass",
    ),
    _row(
        "backward",
        "in the backward of an own function",
        "read",
        "loss = Clipped.apply(loss)",
        "loss = Clipped.apply(loss)",
        bad_top="""
        class Clipped(torch.autograd.Function):
            @staticmethod
            def forward(ctx, value):
                return value.clone()

            @staticmethod
            def backward(ctx, gradient):
                return gradient * min(1.0, gradient.item())  # <-
        """,
        good_top="""
        class Clipped(torch.autograd.Function):
            @staticmethod
            def forward(ctx, value):
                return value.clone()

            @staticmethod
            def backward(ctx, gradient):
                return gradient * gradient.clamp(max=1.0)
        """,
    ),
    _row(
        "optimizer",
        "in an optimizer of one's own",
        "read",
        "",
        "",
        top="""
        class Clipping(torch.optim.SGD):
            pass
        """,
        bad_top="""
        class Clipping(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure=None):
                loss = closure()
                for p in self.param_groups[0]["params"]:
                    p.sub_(p.grad / (1 + p.grad.norm().item()))  # <-
                return loss
        """,
        good_top="""
        class Clipping(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure=None):
                loss = closure()
                for p in self.param_groups[0]["params"]:
                    p.sub_(p.grad / (1 + p.grad.norm()))
                return loss
        """,
        hooks="""
        def configure_optimizers(self):
            return Clipping(self.parameters(), lr=0.1)
        """,
    ),
]

SCALARS = [
    _row(
        "alpha",
        "`torch.add(x, y, alpha=t)`",
        "scalar_argument",
        "loss = torch.add(loss, out.mean(), alpha=out.std().detach())  # <-",
        "loss = loss + out.std().detach() * out.mean()",
    ),
    _row(
        "value",
        "`torch.addcdiv(x, a, b, value=t)`",
        "scalar_argument",
        "loss = torch.addcdiv(out, out, out.exp(), value=out.std().detach()).mean()  # <-",
        "loss = (out + out.std().detach() * out / out.exp()).mean()",
    ),
    _row(
        "full",
        "`torch.full(shape, t)`",
        "scalar_argument",
        "loss = loss + torch.full((4,), out.std()).mean()  # <-",
        "loss = loss + (torch.zeros(4) + out.std()).mean()",
        jax="loss = loss + jnp.full((4,), out.std()).mean()",
    ),
    _row(
        "leaky_relu",
        "`F.leaky_relu(x, t)`, `F.elu(x, t)`",
        "scalar_argument",
        "loss = loss + F.leaky_relu(out, out.std().detach()).mean()  # <-",
        "loss = loss + torch.where(out > 0, out, out.std().detach() * out).mean()",
    ),
    _row(
        "dropout_p",
        "`F.dropout(x, p=t)`, `nn.Dropout(t)`",
        "scalar_argument",
        "loss = loss + nn.Dropout(out.detach().mean().sigmoid())(out).mean()  # <-",
        """
        p = out.detach().mean().sigmoid()
        loss = loss + (out * (torch.rand_like(out) >= p) / (1 - p)).mean()
        """,
    ),
    _row(
        "roll",
        "`x.roll(t)`",
        "scalar_argument",
        "loss = loss + (out * out.roll(y[0], 0)).mean()  # <-",
        "loss = loss + (out * out[(torch.arange(len(out)) - y[0]) % len(out)]).mean()",
    ),
]

SHAPES = [
    _row(
        "mask",
        "`x[x > 0]`, `masked_select`",
        "shape",
        "loss = loss + out[out > 0].mean()  # <-",
        "loss = loss + torch.where(out > 0, out, 0).sum() / (out > 0).sum()",
        jax="loss = loss + out[out > 0].mean()",
    ),
    _row(
        "nonzero",
        "`t.nonzero()`, `torch.where(t)`",
        "shape",
        "loss = loss * len((y == 1).nonzero())  # <-",
        "loss = loss * (y == 1).sum()",
        jax="loss = loss * len(jnp.nonzero(y == 1)[0])",
    ),
    _row(
        "unique",
        "`t.unique()`",
        "shape",
        "loss = loss * len(y.unique())  # <-",
        "loss = loss * (y[None] == torch.arange(4)[:, None]).any(1).sum()",
        jax="loss = loss * len(jnp.unique(y))",
    ),
    _row(
        "slice",
        "`x[:t]`",
        "slice",
        "loss = loss + out[: y.max()].sum()  # <-",
        """
        mask = torch.arange(len(out)) < y.max()
        loss = loss + torch.where(mask[:, None], out, 0).sum()
        """,
        jax="loss = loss + out[: y.max()].sum()",
    ),
    _row(
        "size",
        "`torch.zeros(t)`, `torch.arange(t)`",
        "shape",
        "loss = loss + torch.arange(y.max()).sum()  # <-",
        "loss = loss + torch.where(torch.arange(4) < y.max(), torch.arange(4), 0).sum()",
        jax="loss = loss + jnp.arange(y.max()).sum()",
    ),
    _row(
        "repeat",
        "`repeat_interleave(t)`",
        "shape",
        "loss = loss + out.repeat_interleave(y, 0).sum()  # <-",
        "loss = loss + (out * y[:, None]).sum()",
        jax="loss = loss + jnp.repeat(out, y, 0).sum()",
    ),
    _row(
        "one_hot",
        "`one_hot(t)` without `num_classes`",
        "shape",
        "loss = loss + (F.one_hot(y) * out).sum()  # <-",
        "loss = loss + (F.one_hot(y, num_classes=4) * out).sum()",
        jax="loss = loss + (jax.nn.one_hot(y, y.max() + 1) * out).sum()",
    ),
    _row(
        "nested",
        "`torch.nested.nested_tensor(rows)`",
        "nested",
        """
        rows = torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged)  # <-
        loss = loss + rows.to_padded_tensor(0.0).mean()
        """,
        """
        rows = nn.utils.rnn.pad_sequence([x[:3], x[3:]], batch_first=True)
        loss = loss + rows.mean()
        """,
    ),
    _row(
        "sparse",
        "`t.to_sparse()`",
        "sparse",
        "loss = loss + torch.sparse.mm(x.to_sparse(), self.net.weight.T).mean()  # <-",
        "loss = loss + (x @ self.net.weight.T).mean()",
    ),
]

DEVICES = [
    _row(
        "cuda",
        '`t.to("cuda")`, `device="cuda"`',
        "device",
        'loss = loss + torch.zeros((), device="cuda")  # <-',
        "loss = loss + torch.zeros((), device=loss.device)",
    ),
    _row(
        "double",
        "`t.double()`, `dtype=torch.float64`",
        "double",
        "loss = loss + out.double().mean().float()  # <-",
        "loss = loss + out.float().mean()",
        jax="loss = loss + out.astype(jnp.float64).mean()",
    ),
    _row(
        "double_batch",
        "a float64 batch that the step computes with",
        "double",
        "loss = loss + (x2 - out).square().mean()  # <-",
        "loss = loss + (x2.float() - out).square().mean()",
        bad_hooks="",
        init="",
        top="x2 = torch.ones(4, dtype=torch.float64)",
        jax="",
    ),
    _row(
        "second_narrow",
        "float16 and bfloat16 in one step",
        "second_narrow",
        "loss = loss + (out.bfloat16().mean() + out.half().mean()).float()  # <-",
        "loss = loss + (out.bfloat16().mean() + out.bfloat16().mean()).float()",
        jax="loss = loss + (out.astype(jnp.bfloat16).mean() + out.astype(jnp.float16).mean())",
    ),
    _row(
        "seed",
        "`torch.manual_seed` in the step",
        "seed",
        """
        torch.manual_seed(0)  # <-
        loss = loss + torch.randn(()) * out.mean()
        """,
        "loss = loss + torch.randn(()) * out.mean()",
    ),
    _row(
        "message",
        "`torch.distributed.all_reduce` in the step",
        "message",
        """
        spread = out.detach().std()
        torch.distributed.all_reduce(spread)  # <-
        loss = loss / (1 + spread)
        """,
        """
        spread = self.trainer.strategy.reduce(out.detach().std(), reduce_op="sum")
        loss = loss / (1 + spread)
        """,
    ),
    _row(
        "generator",
        "`torch.randn(..., generator=g)`",
        "generator",
        "loss = loss + torch.randn((), generator=self.generator) * out.mean()  # <-",
        "loss = loss + torch.randn(()) * out.mean()",
        bad_init="self.generator = torch.Generator().manual_seed(0)",
    ),
]

STATE = [
    _row(
        "grows",
        "`self.seen = torch.cat([self.seen, x])`",
        "replaced_state",
        "self.seen = torch.cat([self.seen, out.detach()])  # <-",
        "self.seen.append(out.detach())",
        bad_init="self.seen = torch.zeros(0, 4)",
        good_init="self.seen = []",
    ),
    _row(
        "window",
        "the last losses, of which there are more after every step, and the step reads them",
        "born",
        """
        self.window.append(loss.detach())
        loss = loss / sum(self.window)  # <-
        """,
        """
        self.window.append(loss.detach())
        loss = loss / sum(self.window)
        """,
        top="import collections",
        bad_init="self.window = collections.deque(maxlen=8)",
        good_init="self.window = collections.deque([torch.ones(())] * 8, maxlen=8)",
    ),
    _row(
        "born_count",
        "a Python number that counts beside a tensor that the first step makes",
        "born",
        """
        if not self.memory:
            self.memory = {"sum": loss.detach(), "count": 1}
        else:
            self.memory["sum"] = self.memory["sum"] + loss.detach()  # <-
            self.memory["count"] += 1
        loss = loss * self.memory["count"] / self.memory["sum"]
        """,
        """
        if not self.memory:
            self.memory = {"sum": loss.detach(), "count": torch.ones(())}
        else:
            self.memory["sum"] = self.memory["sum"] + loss.detach()
            self.memory["count"] = self.memory["count"] + 1
        loss = loss * self.memory["count"] / self.memory["sum"]
        """,
        bad_init="self.memory = {}",
        good_init="self.memory = {}",
    ),
    _row(
        "born_shared",
        "`self.start = self.net.weight.detach()`, another name of a weight that is trained",
        "born_shared",
        """
        if self.start is None:
            self.start = self.net.weight.detach()  # <-
        loss = loss + (self.net.weight - self.start).pow(2).sum()
        """,
        """
        if self.start is None:
            self.start = self.net.weight.detach().clone()
        loss = loss + (self.net.weight - self.start).pow(2).sum()
        """,
        bad_init="self.start = None",
        good_init="self.start = None",
    ),
    _row(
        "read_list",
        "a list of tensors that grows and is read",
        "growing_list",
        """
        self.outs.append(loss.detach())
        loss = loss / torch.stack(self.outs).mean()  # <-
        """,
        """
        self.total += loss.detach()
        self.count += 1
        loss = loss * self.count / self.total
        """,
        bad_init="self.outs = []",
        good_init="""
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("count", torch.zeros(()))
        """,
    ),
    _row(
        "global",
        "a global tensor changed in place",
        "foreign",
        "TOTAL.add_(loss.detach())  # <-",
        "self.total.add_(loss.detach())",
        bad_top="TOTAL = torch.zeros(())",
        good_init='self.register_buffer("total", torch.zeros(()))',
        jax="TOTAL = jnp.zeros(())\nTOTAL = TOTAL.at[()].add(loss)",
    ),
    _row(
        "global_view",
        "a part of a global tensor changed",
        "foreign",
        "COUNTS[0] = loss.detach()  # <-",
        "self.counts[0] = loss.detach()",
        bad_top="COUNTS = torch.zeros(4)",
        good_init='self.register_buffer("counts", torch.zeros(4))',
    ),
    _row(
        "data",
        "`p.data = ` of another shape",
        "data",
        "self.net.bias.data = torch.zeros(3)  # <-",
        "self.net.bias.data = self.net.bias.data * 0.9",
    ),
    _row(
        "module",
        "a module made in the step",
        "new_module",
        "self.head = nn.Linear(4, 4)",
        "loss = loss + self.head(out).mean()",
        good_init="self.head = nn.Linear(4, 4)",
    ),
    _row(
        "dict_parameter",
        "a dict with a tensor that is to be trained",
        "untrained",
        'loss = loss * self.scales["loss"]',
        'loss = loss * self.scales["loss"]',
        bad_init='self.scales = {"loss": torch.ones((), requires_grad=True)}',
        good_init='self.scales = nn.ParameterDict({"loss": torch.ones(())})',
    ),
    _row(
        "thread",
        "a thread that computes",
        "thread",
        """
        with ThreadPoolExecutor(1) as pool:
            loss = loss + pool.submit(out.mean).result()  # <-
        """,
        "loss = loss + out.mean()",
        bad_top="from concurrent.futures import ThreadPoolExecutor",
    ),
    _row(
        "group",
        'a `param_group["lr"]` that the step sets to a tensor',
        "number_set",
        'self.optimizers().param_groups[0]["lr"] = 0.1 * loss.detach()  # <-',
        'self.optimizers().param_groups[0]["lr"].copy_(0.1 * loss.detach())',
        good_hooks="""
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=torch.tensor(0.1))
        """,
    ),
    _row(
        "count",
        "an optimizer that counts in a list",
        "python_count",
        "",
        "",
        bad_top="""
        class Counting(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure=None):
                loss = closure()
                self.counts[0] += 1
                for p in self.param_groups[0]["params"]:
                    p.sub_(p.grad / self.counts[0])
                return loss
        """,
        good_top="""
        class Counting(torch.optim.SGD):
            count = 0

            @torch.no_grad()
            def step(self, closure=None):
                loss = closure()
                self.count += 1
                for p in self.param_groups[0]["params"]:
                    p.sub_(p.grad / self.count)
                return loss
        """,
        hooks="""
        def configure_optimizers(self):
            optimizer = Counting(self.parameters(), lr=0.1)
            optimizer.counts = [0]
            return optimizer
        """,
    ),
]

LEAKS = [
    _row(
        "leak_read",
        "a tensor in a global that the next step reads",
        "leaked_state",
        """
        if "out" in KEPT:
            loss = loss + (out - KEPT["out"]).square().mean()  # <-
        KEPT["out"] = out.detach()
        """,
        """
        moved = (out - self.kept).square().mean()
        loss = loss + torch.where(self.known == 0, 0, moved)
        self.kept.copy_(out.detach())
        self.known.fill_(1)
        """,
        bad_top="KEPT = {}",
        good_init="""
        self.register_buffer("kept", torch.zeros(16, 4))
        self.register_buffer("known", torch.zeros(()))
        """,
    ),
    _row(
        "leak_global",
        "a tensor appended to a global list",
        "leaked",
        "LOSSES.append(loss * 1)  # <-",
        "self.losses.append(loss)",
        top="LOSSES = []",
        bad_after="mean = torch.stack(LOSSES).mean()",
        good_init="self.losses = []",
        good_after="mean = torch.stack(model.losses).mean()",
        jax="global LOSSES\nLOSSES = [loss * 1]",
    ),
    _row(
        "leak_dict",
        "a tensor put into a global dict",
        "leaked",
        'SEEN["out"] = out.detach()  # <-',
        'self.seen["out"] = out.detach()',
        bad_top="SEEN = {}",
        bad_after='print(SEEN["out"])',
        good_init="self.seen = {}",
        good_after='print(model.seen["out"])',
    ),
    _row(
        "leak_object",
        "a tensor put into an object that no module holds",
        "leaked",
        "NOTES.out = out.detach()  # <-",
        "show(out.detach().mean())",
        bad_top="import types\nNOTES = types.SimpleNamespace()",
        bad_after="float(NOTES.out.mean())",
        good_top=SHOW,
    ),
    _row(
        "leak_closure",
        "a tensor that a closure holds",
        "leaked",
        """
        mean = out.mean()  # <-
        self.callback = lambda: mean.item()
        """,
        "self.mean = out.mean()",
        bad_init="self.callback = None",
        bad_after="model.callback()",
        good_init="self.mean = None",
        good_after="model.mean.item()",
    ),
]

LOSSES = [
    _row("none", "`training_step` returns None", "no_loss", "return None", "return loss"),
    _row(
        "detached",
        "a loss that no gradient goes through",
        "no_loss",
        "return loss.detach()",
        "return loss",
    ),
]

FROZEN = [
    _row(
        "batch_idx",
        "the value of `batch_idx` taken",
        "frozen_read",
        "loss = loss * float(1 + batch_idx)  # <-",
        "loss = loss * (1 + batch_idx)",
    ),
    _row(
        "epoch",
        "the value of `self.current_epoch`, `self.global_step` taken",
        "frozen_read",
        "loss = loss * (1 + int(self.current_epoch / 2))  # <-",
        "loss = loss * (1 + self.current_epoch // 2)",
    ),
    _row(
        "time",
        "`time.time()`",
        "frozen_read",
        'print("a step at", time())  # <-',
        "",
        bad_top="from time import time",
        good_top="from time import time",
        good_hooks="""
        def on_train_batch_start(self, batch, batch_idx):
            print("a step at", time())
        """,
        jax='import time\nprint("a step at", time.time())',
    ),
    _row(
        "random",
        "`random.random()`",
        "frozen_read",
        "loss = loss * random.random()  # <-",
        "loss = loss * torch.rand(())",
        bad_top="import random",
        jax="import random\nloss = loss * random.random()",
    ),
    _row(
        "numpy_random",
        "`numpy.random.rand()`",
        "frozen_read",
        "loss = loss * np.random.rand()  # <-",
        "loss = loss * torch.rand(())",
        bad_top="import numpy as np",
        jax="import numpy\nloss = loss * numpy.random.rand()",
    ),
    _row(
        "replay",
        "`self.replay.append(...)`: a replay buffer that the step fills",
        "happens_once",
        "self.replay.append(len(self.replay))  # <-",
        "",
        bad_init="self.replay = []",
        good_init="self.replay = []",
        good_hooks="""
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.replay.append(len(self.replay))
        """,
    ),
    _row(
        "phase",
        '`self.phase = "late"`: a string that the step changes',
        "happens_once",
        'self.phase = "late"  # <-',
        "",
        bad_init='self.phase = "early"',
        good_init='self.phase = "early"',
        good_hooks="""
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.phase = "late"
        """,
    ),
    _row(
        "callback_metrics",
        "`trainer.callback_metrics` read",
        "frozen_read",
        'known = "loss" in self.trainer.callback_metrics  # <-',
        'self.log("loss", loss)',
    ),
    _row(
        "logger",
        "`self.logger` used",
        "frozen_read",
        """
        if self.logger:  # <-
            self.logger.log_metrics({"batches": 1})
        """,
        'self.log("batches", 1.0)',
    ),
    _row(
        "last_lr",
        "`scheduler.get_last_lr()`",
        "frozen_read",
        "loss = loss * (1 + self.lr_schedulers().get_last_lr()[0])  # <-",
        'loss = loss * (1 + self.trainer.optimizers[0].param_groups[0]["lr"])',
        hooks="""
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]
        """,
    ),
]

CHANGED = [
    _row(
        "dtype",
        "a batch of another dtype",
        "batch_changed",
        "",
        "",
        bad_batches="batches[:2] + [(x.half(), y) for x, y in batches[2:]]",
        good_batches="batches[:2] + [(x.half().float(), y) for x, y in batches[2:]]",
    ),
    _row(
        "mode",
        "`self.eval()` in the step",
        "mode_changed",
        "self.net.eval()",
        "",
        good_hooks="""
        def on_train_start(self):
            self.net.eval()
        """,
    ),
    _row(
        "gradient",
        "a host hook reads a gradient, and no code there names `.grad`",
        "no_gradient",
        "",
        "",
        init='self.what = "grad"',
        bad_hooks="""
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.print(getattr(self.net.bias, self.what).norm())  # <-
        """,
        good_hooks="""
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.print(self.net.bias.grad.norm())
        """,
    ),
    _row(
        "layer",
        "a hook puts another layer in the place of one, in the middle of an epoch",
        "module_changed",
        "",
        "",
        bad_hooks="""
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                self.net = nn.Linear(8, 4)  # <-
        """,
        good_hooks="""
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                self.net.load_state_dict(nn.Linear(8, 4).state_dict())
        """,
    ),
    _row(
        "weight_norm",
        "`weight_norm`, `prune` on a layer in the middle of a run",
        "state_changed",
        "",
        "",
        bad_hooks="""
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                torch.nn.utils.parametrizations.weight_norm(self.net)  # <-
        """,
        good_hooks="""
        def configure_model(self):
            if not torch.nn.utils.parametrize.is_parametrized(self.net):
                torch.nn.utils.parametrizations.weight_norm(self.net)
        """,
    ),
    _row(
        "replace",
        "a parameter of another shape",
        "state_changed",
        "",
        "",
        bad_hooks="""
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.net.bias = nn.Parameter(torch.zeros(3))
        """,
        good_hooks="""
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.net.bias.data.zero_()
        """,
    ),
    _row(
        "scheduled",
        "a hook sets a number that a scheduler of `fulgurite.optim` computes",
        "number_changed",
        "",
        "",
        bad_hooks="""
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = fulgurite.optim.lr_scheduler.ConstantLR(optimizer, 0.1)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                self.trainer.optimizers[0].param_groups[0]["lr"] = 0.01
        """,
        good_hooks="""
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            rates = fulgurite.optim.lr_scheduler.PiecewiseConstantLR
            schedule = rates(optimizer, [0.1, 0.01], milestones=[2])
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]
        """,
    ),
]

TABLE: dict[str, list[Misuse]] = {
    "Conditions": CONDITIONS,
    "Reading values on the host": READS,
    "Tensors as Python numbers": SCALARS,
    "Shapes that depend on values": SHAPES,
    "Devices, dtypes and random states": DEVICES,
    "State": STATE,
    "Tensors kept elsewhere": LEAKS,
    "Losses": LOSSES,
    "Python values that stay as they were": FROZEN,
    "What changes after the trace": CHANGED,
}
