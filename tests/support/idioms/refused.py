"""What does not work in a static program: the error that must come, and what to write instead."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from idioms.base import Example, F, Manual
from models import CLASSES
from torch import Tensor, nn

from fulgurite.backends.csx.diagnostics.trace_errors import (
    ConditionalOnTensor,
    DynamicShape,
    HostRead,
    RandomStateSet,
    StateBornInStep,
    TraceError,
    UnsupportedDtype,
    UnsupportedState,
)


class Refused(Example):
    """An idiom that is an error; the first line of a subclass's docstring says which."""

    error: type[TraceError]
    why: str  # it cannot be
    instead: str  # to be written
    remedy: str  # part of the message's; the line that it names is marked "# here"


def words(x: Tensor) -> Tensor:
    """[16, 8] -> numbers of words [16, 8] below 6."""
    return (x * 2).long().clamp(-3, 2) + 3


class PackedSequence(Refused):
    """`pack_padded_sequence`"""

    error = DynamicShape
    why = "the length of packed data is the sum of the lengths"
    instead = (
        "the padded batch, and `out[torch.arange(len(out)), lengths - 1]`, or a mask in the loss;"
        " a bidirectional one as in [variable_lengths.md](variable_lengths.md)"
    )
    remedy = "out[torch.arange(len(out)), lengths - 1]"

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(2, 6, batch_first=True), nn.Linear(6, CLASSES)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        lengths = (x > 0).sum(1).clamp(1, 4)
        packed = nn.utils.rnn.pack_padded_sequence(  # here
            x.view(len(x), 4, 2), lengths, batch_first=True, enforce_sorted=False
        )
        return F.cross_entropy(self.head(self.layer(packed)[1][-1]), y)


class SparseEmbedding(Refused):
    """`nn.Embedding(sparse=True)`, `nn.EmbeddingBag(sparse=True)`"""

    error = DynamicShape
    why = "a sparse gradient has as many rows as different words were seen"
    instead = "`sparse=False`"
    remedy = "sparse=False"

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, CLASSES, sparse=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.table(words(x)).mean(1), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.table.parameters(), lr=0.1)


class SparseMatrix(Refused):
    """`to_sparse()` and `torch.sparse` in the step"""

    error = DynamicShape
    why = "how many elements are stored depends on values"
    instead = "dense matrices, or `index_add` along edges"
    remedy = "dense tensors"

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        adjacency = (x @ x.T > 0).float().to_sparse()  # here
        return super().loss(torch.sparse.mm(adjacency, x), y)


class SparseBuffer(Refused):
    """A sparse tensor in a buffer or attribute"""

    error = UnsupportedState
    why = "a program's state is dense memory"
    instead = "`.to_dense()`, or edges as index tensors and `index_add`"
    remedy = "self.adjacency = self.adjacency.to_dense()"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(16).to_sparse())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(torch.sparse.mm(self.adjacency, x), y)


class NestedTensor(Refused):
    """Nested tensors"""

    error = DynamicShape
    why = "their rows have lengths of their own"
    instead = "`pad_sequence` and a mask"
    remedy = "pad_sequence"

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged)  # here
        return super().loss(rows.values(), y)


class CtcLoss(Refused):
    """`ctc_loss`"""

    error = DynamicShape
    why = "torch sizes its table by the longest target"
    instead = "a loss in tensor operations over the padded targets"
    remedy = "padded targets"

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.net(x).log_softmax(1).view(4, 4, CLASSES)
        lengths = torch.full((4,), 4), torch.full((4,), 2)
        return F.ctc_loss(logits, y.view(4, 4)[:, :2] % 3 + 1, *lengths)  # here


class LeastSquares(Refused):
    """`torch.linalg.lstsq`"""

    error = DynamicShape
    why = "its residuals exist only at full rank"
    instead = "`torch.linalg.pinv(a) @ b`, or `solve` of the normal equations"
    remedy = "torch.linalg.pinv(a) @ b"

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        solution = torch.linalg.lstsq(x.T @ x, x.T).solution  # here
        return super().loss(x, y) + solution.square().mean()


class RepeatsOfData(Refused):
    """`repeat_interleave(x, counts)`"""

    error = DynamicShape
    why = "the sum of the counts is the length"
    instead = "`output_size=` where it is known, or a mask"
    remedy = "output_size="

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + x.repeat_interleave(y, dim=0).mean()  # here


class ClassesOfData(Refused):
    """`one_hot(y)` without the number of classes"""

    error = DynamicShape
    why = "the largest label decides"
    instead = "`one_hot(y, num_classes=10)`"
    remedy = "num_classes"

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x), F.one_hot(y).float())  # here


class RowsOfExpert(Refused):
    """A mixture of experts that sends only some rows to each: `x[gate == i]`"""

    error = DynamicShape
    why = "how many rows go where depends on values"
    instead = (
        "every expert over all rows, weighted by the gate (one that no row chose then has a"
        " gradient of zero, not None: momentum goes on); or a fixed capacity with `topk`"
    )
    remedy = "mask"

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        chosen = x[x[:, 0] > 0]  # here
        return super().loss(x, y) + self(chosen).mean()


class GradientScaler(Refused, Manual):
    """`torch.amp.GradScaler` in a manual step"""

    error = HostRead
    why = "it reads on the host whether gradients are finite, and keeps its scale in Python"
    instead = "`precision=` of the Trainer; or the scale in a buffer, `torch.where(finite, g, 0)`"
    remedy = ""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        loss = self.loss(*batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
        return loss.detach()


class BackwardOnCondition(Refused, Manual):
    """A step that is taken only where a value allows it: `if loss < limit: optimizer.step()`"""

    error = ConditionalOnTensor
    why = "the program is the same each time"
    instead = (
        "with plain SGD `p.grad.mul_(torch.where(loss < limit, 1.0, 0.0))` before the step;"
        " an optimizer with state still counts such a step, and decays"
    )
    remedy = "torch.where"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.loss(*batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        if loss < 10:  # here
            optimizer.step()
        return loss.detach()


class LineSearch(Refused):
    """`torch.optim.LBFGS`"""

    error = UnsupportedState
    why = "it evaluates the step as often as values decide"
    instead = "an optimizer with one update a step"
    remedy = "torch.optim.AdamW"

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class ForkedRandomState(Refused):
    """`torch.random.fork_rng`, `set_rng_state`, `manual_seed` in the step"""

    error = RandomStateSet
    why = "set once while traced, it would make each step's draws the same, or undo none"
    instead = "`seed_everything` before fit; the same draws twice: keep them in a variable"
    remedy = "seed_everything"

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            noise = torch.randn_like(x)
        return super().loss(x + noise, y)


class OwnGenerator(Refused):
    """`torch.randn(..., generator=self.generator)`"""

    error = RandomStateSet
    why = "only torch's own generator is part of the program's state"
    instead = "no `generator=`"
    remedy = "leave generator= out"

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.generator)  # here
        return super().loss(x + noise, y)


class DoublePrecision(Refused):
    """`.double()` for a delicate part of the step"""

    error = UnsupportedDtype
    why = "the hardware has no float64"
    instead = (
        "float32 in a stable form: `logsumexp`, `log1p`, sums in another order; a float64 batch may"
        " be moved, stacked and cast"
    )
    remedy = "float32"

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + x.double().cumsum(0).mean().float()  # here


class ScriptedModule(Refused):
    """`torch.jit.script(module)`"""

    error = UnsupportedState
    why = "its tensors live outside of Python"
    instead = "the module itself: the whole step is compiled"
    remedy = "without torch.jit.script"

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit as a whole
            self.net = torch.jit.script(self.net)


class WindowThatFillsUp(Refused):
    """A window of the last values that fills up, `deque(maxlen=8)`, and is read"""

    error = StateBornInStep
    why = "it holds more after every step, and each would be a program of its own"
    instead = "the last n from the start: `deque([torch.zeros([])] * 8, maxlen=8)`"
    remedy = "collections.deque([torch.zeros([])] * n, maxlen=n)"

    def __init__(self) -> None:
        super().__init__()
        self.window: deque[Tensor] = deque(maxlen=8)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        self.window.append(loss.detach())
        return loss / (1 + sum(self.window))  # here


class ModuleConverted(Refused):
    """`self.net.bfloat16()` in the step"""

    error = UnsupportedState
    why = "parameters are the program's state, whose dtype stays"
    instead = "it in `__init__` or `configure_model`; `precision=`"
    remedy = "convert a module in __init__() or configure_model()"

    def forward(self, x: Tensor) -> Tensor:
        return self.net.bfloat16()(x.bfloat16())  # type: ignore[no-any-return]  # here


def refusals() -> Iterator[type[Refused]]:
    """All of them, in order."""
    for kind in list(globals().values()):
        if isinstance(kind, type) and issubclass(kind, Refused) and kind is not Refused:
            yield kind
