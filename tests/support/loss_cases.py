"""The losses of ``fulgurite.nn`` in programs, beside torch's own: values and gradients.

B rows, C classes, D features, T places of a row.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fulgurite
from fulgurite.backends.csx.compile.fabric import Loaded
from fulgurite.backends.csx.compile.host.host_fabric import HostFabric
from fulgurite.backends.csx.compile.programs.kernels import Maker

B, C, D, T = 6, 5, 4, 3
REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True)
class Case:
    """A loss with arguments, and what it is given: the tensors of floats get gradients.

    Args:
        name: of the class.
        kinds: of each tensor (``KINDS``) with its shape.
        arguments: of the class; a tuple stands for a tensor of as many positive numbers.
    """

    name: str
    kinds: tuple[tuple[str, tuple[int, ...]], ...]
    arguments: dict[str, Any] = field(default_factory=dict)

    def make(self, home: Any, dtype: torch.dtype, **more: Any) -> nn.Module:
        """The loss, of ``torch.nn`` or ``fulgurite.nn``."""
        given = {
            name: torch.tensor(value, dtype=dtype) if isinstance(value, tuple) else value
            for name, value in self.arguments.items()
        }
        loss: nn.Module = getattr(home, self.name)(**given, **more)
        return loss

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        """Tensors of the case, the same every time."""
        torch.manual_seed(0)
        made = [KINDS[kind](shape) for kind, shape in self.kinds]
        return [x.to(dtype) if x.is_floating_point() else x for x in made]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of its tensors."""
        return [shape for _, shape in self.kinds]

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"{self.name}({given}) of {list(self.kinds[0][1])}"


def _classes(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, C, shape)


def _some_ignored(shape: tuple[int, ...]) -> Tensor:
    classes = _classes(shape)
    classes.view(-1)[1::3] = 2
    return classes


KINDS: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "real": torch.randn,
    "log": lambda shape: torch.randn(shape).log_softmax(min(1, len(shape) - 1)),
    "share": lambda shape: torch.rand(shape) * 0.98 + 0.01,
    "sign": lambda shape: torch.randint(0, 2, shape) * 2.0 - 1.0,
    "count": lambda shape: torch.poisson(torch.full(shape, 3.0)),
    "class": _classes,
    "class, 2 often": _some_ignored,
}
FIXED = ("sign", "count")
"""Kinds of floats that are data."""

BD = (B, D)
_OF_TWO = (("real", BD), ("real", BD))
_OF_SHARES = (("share", BD), ("share", BD))
_OF_TRIPLETS = (("real", BD), ("real", BD), ("real", BD))
_WEIGHT_C, _WEIGHT_D = (0.5, 2.0, 1.0, 0.25, 3.0), (0.5, 2.0, 1.0, 0.25)


def _of_classes(*more: int, kind: str = "real") -> tuple[tuple[str, tuple[int, ...]], ...]:
    return (kind, (B, C, *more)), ("class, 2 often", (B, *more))


def distance(a: Tensor, b: Tensor) -> Tensor:
    """The largest difference of two vectors."""
    return (a - b).abs().amax(-1)


FIRST = (
    Case("BCELoss", _OF_SHARES, {"weight": _WEIGHT_D}),
    Case("BCEWithLogitsLoss", (("real", BD), ("share", BD)), {"pos_weight": _WEIGHT_D}),
    Case("CosineEmbeddingLoss", (*_OF_TWO, ("sign", (B,))), {"margin": 0.1}),
    Case(
        "CrossEntropyLoss",
        _of_classes(),
        {"weight": _WEIGHT_C, "ignore_index": 2, "label_smoothing": 0.1},
    ),
    Case("GaussianNLLLoss", (*_OF_TWO, ("share", BD)), {"full": True}),
    Case("HingeEmbeddingLoss", (("real", BD), ("sign", BD)), {"margin": 0.5}),
    Case("HuberLoss", _OF_TWO, {"delta": 0.7}),
    Case("KLDivLoss", (("log", BD), ("share", BD))),
    Case("L1Loss", _OF_TWO),
    Case("MarginRankingLoss", (("real", (B,)), ("real", (B,)), ("sign", (B,))), {"margin": 0.2}),
    Case("MSELoss", _OF_TWO),
    Case("MultiLabelSoftMarginLoss", (("real", BD), ("share", BD)), {"weight": _WEIGHT_D}),
    Case("MultiMarginLoss", _of_classes(), {"p": 2, "margin": 0.7, "weight": _WEIGHT_C}),
    Case("NLLLoss", _of_classes(kind="log"), {"weight": _WEIGHT_C, "ignore_index": 2}),
    Case("PoissonNLLLoss", (("real", BD), ("count", BD)), {"full": True}),
    Case("SmoothL1Loss", _OF_TWO, {"beta": 0.6}),
    Case("TripletMarginLoss", _OF_TRIPLETS, {"swap": True}),
    Case("TripletMarginWithDistanceLoss", _OF_TRIPLETS, {"swap": True}),
)
"""One of each loss."""

CASES = (
    *FIRST,
    Case("BCELoss", _OF_SHARES),
    Case("BCELoss", (("share", ()), ("share", ()))),
    Case("BCEWithLogitsLoss", (("real", BD), ("share", BD)), {"weight": _WEIGHT_D}),
    Case("CrossEntropyLoss", _of_classes()),
    Case("CrossEntropyLoss", (("real", (C,)), ("class", ()))),
    Case("CrossEntropyLoss", (("real", (B, C)), ("share", (B, C))), {"weight": _WEIGHT_C}),
    Case("CrossEntropyLoss", (("real", (B, C)), ("share", (B, C))), {"label_smoothing": 0.2}),
    Case("CrossEntropyLoss", _of_classes(T), {"ignore_index": 2}),
    Case("CrossEntropyLoss", _of_classes(T, 2), {"weight": _WEIGHT_C, "label_smoothing": 0.2}),
    Case("CrossEntropyLoss", _of_classes(T, 2, 2), {"ignore_index": 2}),
    Case("GaussianNLLLoss", (*_OF_TWO, ("share", (B, 1))), {"eps": 0.3}),
    Case("GaussianNLLLoss", (*_OF_TWO, ("share", (B,)))),
    Case("HingeEmbeddingLoss", (("real", BD), ("sign", (D,)))),
    Case("KLDivLoss", (("log", BD), ("log", BD)), {"log_target": True}),
    Case("L1Loss", (("real", ()), ("real", ()))),
    Case("MarginRankingLoss", (("real", BD), ("real", BD), ("sign", BD))),
    Case("MSELoss", (("real", (B, T, D)), ("real", (B, T, D)))),
    Case("MultiLabelSoftMarginLoss", (("real", (D,)), ("share", (D,)))),
    Case("MultiMarginLoss", _of_classes()),
    Case("MultiMarginLoss", (("real", (C,)), ("class", ()))),
    Case("MultiMarginLoss", (("real", (C,)), ("class", (1,))), {"p": 2}),
    Case("NLLLoss", (("log", (C,)), ("class", ()))),
    Case("NLLLoss", _of_classes(T, kind="log"), {"weight": _WEIGHT_C}),
    Case("NLLLoss", _of_classes(T, 2, kind="log"), {"ignore_index": 2}),
    Case("PoissonNLLLoss", (("share", BD), ("count", BD)), {"log_input": False}),
    Case("SmoothL1Loss", _OF_TWO, {"beta": 0.0}),
    Case("TripletMarginLoss", _OF_TRIPLETS, {"p": 1.0, "margin": 0.5}),
    Case("TripletMarginLoss", _OF_TRIPLETS, {"p": 3.0}),
    Case("TripletMarginLoss", (("real", (D,)),) * 3),
    Case("TripletMarginWithDistanceLoss", _OF_TRIPLETS, {"distance_function": distance}),
    Case("TripletMarginWithDistanceLoss", _OF_TRIPLETS, {"distance_function": nn.L1Loss()}),
)
"""Every loss with what changes its operations."""

Results = list[tuple[Tensor, list[Tensor]]]
"""The value of each loss, and the gradient of each of its tensors that gets one."""


def results(losses: nn.ModuleList, cases: list[Case], inputs: list[list[Tensor]]) -> Results:
    """Values and gradients: of the sum of all, where each number counts another factor."""
    values, given, total = [], [], torch.zeros(())
    for i, loss in enumerate(losses):
        kinds = [kind for kind, _ in cases[i].kinds]
        tensors = [
            x.detach().requires_grad_(x.is_floating_point() and kind not in FIXED)
            for x, kind in zip(inputs[i], kinds, strict=True)
        ]
        value = loss(*tensors)
        factors = torch.arange(1, value.numel() + 1).view_as(value) / 4
        total = total + (value.float() * factors).sum()
        values.append(value)
        given.append([x for x in tensors if x.requires_grad])
    every = iter(torch.autograd.grad(total, [x for tensors in given for x in tensors]))
    return [
        (value, [next(every) for _ in tensors])
        for value, tensors in zip(values, given, strict=True)
    ]


def program(losses: nn.ModuleList, cases: list[Case]) -> Callable[..., Results]:
    """The same as one program, on the live backend."""

    def step(inputs: list[list[Tensor]]) -> Results:
        return results(losses, cases, inputs)

    return fulgurite.trace(step)


def made(
    home: Any, cases: list[Case], dtype: torch.dtype = torch.float32, **more: Any
) -> nn.ModuleList:
    """The losses of cases."""
    return nn.ModuleList([case.make(home, dtype, **more) for case in cases])


def in_program(case: Case) -> bool:
    """Whether torch's own loss gives in a program what it gives eagerly.

    The decomposition of ``multi_margin_loss`` gives [1] for a single row, the kernel [].
    """
    return case.name != "MultiMarginLoss" or case.shapes[1] != ()


def reductions(case: Case) -> Iterator[str]:
    """Those of a loss: KLDivLoss has one more."""
    yield from REDUCTIONS
    if case.name == "KLDivLoss":
        yield "batchmean"


@contextlib.contextmanager
def loads() -> Iterator[list[Loaded]]:
    """What programs are built while it lasts, in order."""
    found: list[Loaded] = []
    load = HostFabric.load

    def noted(*args: Any, **kwargs: Any) -> Loaded:
        found.append(load(*args, **kwargs))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostFabric, "load", noted)
        yield found


def fused_kernels(loaded: Loaded) -> Counter[str]:
    """How many kernels of a program are of each fused region."""
    return Counter(call.region for call in loaded.kernels().calls if call.region)


def regions(losses: nn.ModuleList) -> Counter[str]:
    """The fused regions that losses ask for."""
    names = [type(loss).__name__ for loss in losses if getattr(loss, "use_autogen", False)]
    return Counter(f"{name} {way}" for name in names for way in ("forward", "backward"))


def makers(loaded: Loaded) -> dict[str, set[Maker]]:
    """Who made what computes each operation, by its name."""
    assert loaded.runs is not None
    nodes = list(loaded.runs.operations())
    found: dict[str, set[Maker]] = {}
    for call in loaded.kernels().calls:
        for i in call.operations:
            found.setdefault(str(nodes[i].target), set()).add(call.maker)
    return found
