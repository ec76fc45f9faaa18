"""Values that a hook changes before the second epoch, and the step's Python reads: one class each.

``read`` is what the step multiplies its loss by; ``change`` is called in ``on_train_epoch_start``.
"""

from __future__ import annotations

import array
import collections
import collections.abc
import dataclasses
import enum
import fractions
import functools
import os
import sys
import types
from decimal import Decimal
from pathlib import PurePath
from typing import Any, ClassVar, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from models import Classifier
from torch import Tensor, nn

KINDS: dict[str, type[Value]] = {}


class Value(Classifier):
    """A step that reads a value, and a hook that changes it."""

    def __init_subclass__(cls) -> None:
        KINDS[cls.__name__] = cls

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(8, 4)), torch.optim.SGD)
        self.prepare()

    def prepare(self) -> None:
        """Make the value."""

    def read(self) -> Any:
        """What the step multiplies its loss by."""

    def change(self) -> None:
        """Change the value."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.change()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1]) * self.read()


# -- objects ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float


@dataclasses.dataclass
class Inner:
    scale: float = 1.0


@dataclasses.dataclass
class Outer:
    inner: Inner = dataclasses.field(default_factory=Inner)


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Plain:
    other: ClassVar[dict[str, float]] = {"a": 1.0}

    def __init__(self) -> None:
        self._scale = 1.0

    @property
    def scale(self) -> float:
        return self._scale

    def __call__(self) -> float:
        return self._scale

    def __mul__(self, other: Any) -> Any:
        return other * self._scale

    def __getitem__(self, key: Any) -> float:
        return self._scale

    def __len__(self) -> int:
        return int(self._scale)

    def times(self) -> float:
        return 3.0


class Pair(NamedTuple):
    a: float
    b: float


class Holder:
    scale = 1.0
    table: ClassVar[list[float]] = [1.0]

    @staticmethod
    def factor() -> float:
        return 1.0

    @classmethod
    def of_class(cls) -> float:
        return cls.scale


class AFrozenDataclass(Value):
    def prepare(self) -> None:
        self.config = Frozen(1.0)

    def read(self) -> Any:
        return self.config.scale

    def change(self) -> None:
        self.config = Frozen(2.0)


class AFieldOfAField(Value):
    def prepare(self) -> None:
        self.config = Outer()

    def read(self) -> Any:
        return self.config.inner.scale

    def change(self) -> None:
        self.config.inner = Inner(2.0)


class Slotted(Value):
    def prepare(self) -> None:
        self.config = Slots()

    def read(self) -> Any:
        return self.config.scale

    def change(self) -> None:
        self.config.scale = 2.0


class AProperty(Value):
    def prepare(self) -> None:
        self.config = Plain()

    def read(self) -> Any:
        return self.config.scale

    def change(self) -> None:
        self.config._scale = 2.0


class ACallableObject(AProperty):
    def read(self) -> Any:
        return self.config()


class AnOperator(AProperty):
    def read(self) -> Any:
        return self.config * 1.0


class AnItem(AProperty):
    def read(self) -> Any:
        return self.config["a"]


class ALength(AProperty):
    def read(self) -> Any:
        return len(self.config)


class AnObjectReplaced(AProperty):
    def change(self) -> None:
        self.config = Plain()
        self.config._scale = 2.0


class AnInstancesMethod(AProperty):
    def read(self) -> Any:
        return self.config.times()

    def change(self) -> None:
        self.config.times = lambda: 2.0  # type: ignore[method-assign]


class ANamedTuple(Value):
    def prepare(self) -> None:
        self.config = Pair(1.0, 1.0)

    def read(self) -> Any:
        return self.config.a

    def change(self) -> None:
        self.config = self.config._replace(a=2.0)


class ANamespace(Value):
    def prepare(self) -> None:
        self.config = types.SimpleNamespace(scale=1.0)

    def read(self) -> Any:
        return self.config.scale

    def change(self) -> None:
        self.config.scale = 2.0


class AFraction(Value):
    def prepare(self) -> None:
        self.ratio = fractions.Fraction(1, 2)

    def read(self) -> Any:
        return float(self.ratio)

    def change(self) -> None:
        self.ratio = fractions.Fraction(2, 3)


class ADecimal(Value):
    def prepare(self) -> None:
        self.ratio = Decimal("0.5")

    def read(self) -> Any:
        return float(self.ratio)

    def change(self) -> None:
        self.ratio = Decimal("0.75")


class APath(Value):
    def prepare(self) -> None:
        self.path = PurePath("a")

    def read(self) -> Any:
        return 2.0 if self.path.name == "a" else 1.0

    def change(self) -> None:
        self.path = PurePath("b")


class AFlag(enum.Flag):
    A = 1
    B = 2


class AnEnumInAnObject(ANamespace):
    def prepare(self) -> None:
        self.config = types.SimpleNamespace(scale=AFlag.A)

    def read(self) -> Any:
        return self.config.scale.value

    def change(self) -> None:
        self.config.scale = AFlag.B


# -- containers ------------------------------------------------------------------------------------


class AKeyAdded(Value):
    def prepare(self) -> None:
        self.weights = {"a": 1.0}

    def read(self) -> Any:
        return sum(self.weights.values())

    def change(self) -> None:
        self.weights["b"] = 2.0


class AKeyAskedFor(AKeyAdded):
    def read(self) -> Any:
        return self.weights.get("b", 1.0)


class AKeyGone(AKeyAdded):
    def prepare(self) -> None:
        self.weights = {"a": 1.0, "b": 2.0}

    def change(self) -> None:
        del self.weights["b"]


class AnOrder(AKeyAdded):
    def prepare(self) -> None:
        self.weights = {"a": 1.0, "b": 2.0}

    def read(self) -> Any:
        return next(iter(self.weights.values()))

    def change(self) -> None:
        self.weights["a"] = self.weights.pop("a")


class ASetThatGrew(Value):
    def prepare(self) -> None:
        self.seen = {1}

    def read(self) -> Any:
        return len(self.seen)

    def change(self) -> None:
        self.seen.add(2)


class AMember(ASetThatGrew):
    def read(self) -> Any:
        return 2.0 if 2 in self.seen else 1.0

    def change(self) -> None:
        self.seen = frozenset({2})  # type: ignore[assignment]


class AListThatGrew(Value):
    def prepare(self) -> None:
        self.items = [1.0]

    def read(self) -> Any:
        return len(self.items)

    def change(self) -> None:
        self.items.append(2.0)


class AListOfObjects(AListThatGrew):
    def prepare(self) -> None:
        self.items = [Inner()]  # type: ignore[list-item]

    def read(self) -> Any:
        return sum(one.scale for one in self.items)  # type: ignore[attr-defined]

    def change(self) -> None:
        self.items.append(Inner())  # type: ignore[arg-type]


class ADeque(AListThatGrew):
    def prepare(self) -> None:
        self.items = collections.deque([1.0, 2.0], maxlen=2)  # type: ignore[assignment]

    def read(self) -> Any:
        return self.items[0]


class ACounter(Value):
    def prepare(self) -> None:
        self.counts = collections.Counter("a")

    def read(self) -> Any:
        return self.counts.total()

    def change(self) -> None:
        self.counts.update("ab")


class AChainMap(Value):
    def prepare(self) -> None:
        self.maps = collections.ChainMap({}, {"a": 1.0})

    def read(self) -> Any:
        return self.maps["a"]

    def change(self) -> None:
        self.maps["a"] = 2.0


class AUserDict(AChainMap):
    def prepare(self) -> None:
        self.maps = collections.UserDict(a=1.0)  # type: ignore[assignment]


class AMappingProxy(Value):
    def prepare(self) -> None:
        self.own = {"a": 1.0}
        self.proxy = types.MappingProxyType(self.own)

    def read(self) -> Any:
        return self.proxy["a"]

    def change(self) -> None:
        self.own["a"] = 2.0


class Nested(Value):
    def prepare(self) -> None:
        self.tree = {"a": [{"b": (1.0, [1.0])}]}

    def read(self) -> Any:
        return self.tree["a"][0]["b"][1][0]  # type: ignore[index]

    def change(self) -> None:
        self.tree["a"][0]["b"][1][0] = 2.0  # type: ignore[index]


# -- arrays ----------------------------------------------------------------------------------------


class AnArrayReplaced(Value):
    def prepare(self) -> None:
        self.table = np.ones(3)

    def read(self) -> Any:
        return float(self.table.sum())

    def change(self) -> None:
        self.table = np.full(3, 2.0)


class AnArrayFilled(AnArrayReplaced):
    def change(self) -> None:
        self.table[1] = 2.0


class AnArrayAsTensor(AnArrayReplaced):  # one that is filled is followed
    def read(self) -> Any:
        return torch.tensor(self.table, dtype=torch.float32).sum()


class AViewOfAnArray(AnArrayFilled):
    def prepare(self) -> None:
        self.whole = np.ones(6)
        self.table = self.whole[::2]

    def change(self) -> None:
        self.whole[:] = 2.0


class APythonArray(Value):
    def prepare(self) -> None:
        self.table = array.array("d", [1.0])

    def read(self) -> Any:
        return self.table[0]

    def change(self) -> None:
        self.table[0] = 2.0


class ABytearray(APythonArray):
    def prepare(self) -> None:
        self.table = bytearray(b"\x01")  # type: ignore[assignment]

    def change(self) -> None:
        self.table[0] = 2


# -- functions and classes -------------------------------------------------------------------------


def once() -> float:
    return 1.0


def twice(scale: float = 2.0) -> float:
    return scale


class AFunction(Value):
    def prepare(self) -> None:
        self.function = once

    def read(self) -> Any:
        return self.function()

    def change(self) -> None:
        self.function = twice


class ADefault(AFunction):
    def prepare(self) -> None:
        twice.__defaults__ = (2.0,)
        self.function = twice

    def change(self) -> None:
        twice.__defaults__ = (3.0,)


class APartial(AFunction):
    def prepare(self) -> None:
        self.function = functools.partial(twice, scale=1.0)

    def change(self) -> None:
        self.function = functools.partial(twice, scale=2.0)


class ABoundMethod(Value):
    def prepare(self) -> None:
        self.config = Plain()
        self.function = self.config.times

    def read(self) -> Any:
        return self.function()

    def change(self) -> None:
        self.function = self.config.__call__


class AMethodOfTheInstance(Value):
    def factor(self) -> float:
        return 1.0

    def read(self) -> Any:
        return self.factor()

    def change(self) -> None:
        self.factor = lambda: 2.0  # type: ignore[method-assign]


class AMethodOfTheClass(AMethodOfTheInstance):
    def factor(self) -> float:
        return 1.0

    def change(self) -> None:
        type(self).factor = lambda self: 2.0  # type: ignore[method-assign]


class ALayersForward(Value):
    def read(self) -> Any:
        return 1.0

    def change(self) -> None:
        forward = self.net[0].forward
        self.net[0].forward = lambda x: forward(x) * 2


class AnotherClasssAttribute(Value):
    def prepare(self) -> None:
        Holder.scale = 1.0

    def read(self) -> Any:
        return Holder.scale

    def change(self) -> None:
        Holder.scale = 2.0


class AClasssMethod(AnotherClasssAttribute):
    def read(self) -> Any:
        return Holder.of_class()


class AStaticMethod(Value):
    def read(self) -> Any:
        return Holder.factor()

    def change(self) -> None:
        Holder.factor = staticmethod(twice)  # type: ignore[method-assign, assignment]


class AClasssList(Value):
    def read(self) -> Any:
        return sum(Holder.table)

    def change(self) -> None:
        Holder.table.append(2.0)


class AnAttributeOfAName(Value):
    def prepare(self) -> None:
        self.weight_a = [1.0]

    def read(self) -> Any:
        return getattr(self, "weight_" + "ab"[0])[0]

    def change(self) -> None:
        self.weight_a[0] = 2.0


class ANestedFunction(Value):
    def prepare(self) -> None:
        scale = [1.0]

        def inner() -> float:
            return scale[0]

        self.inner, self.scale = inner, scale

    def read(self) -> Any:
        return self.inner()

    def change(self) -> None:
        self.scale.append(3.0)
        self.scale[0] = 2.0


# -- elsewhere -------------------------------------------------------------------------------------

SETTINGS = {"scale": 1.0}
SCALES = np.ones(2)


class AGlobal(Value):
    def prepare(self) -> None:
        SETTINGS.clear()
        SETTINGS["scale"] = 1.0

    def read(self) -> Any:
        return SETTINGS.get("other", 1.0)

    def change(self) -> None:
        SETTINGS["other"] = 2.0


class AGlobalArray(Value):
    def read(self) -> Any:
        return SCALES.sum()

    def change(self) -> None:
        SCALES[:] = 2.0


class AModulesGlobal(Value):
    def prepare(self) -> None:
        self.space = sys.modules[__name__]
        self.space.renamed = once  # type: ignore[attr-defined]

    def read(self) -> Any:
        return self.space.renamed()

    def change(self) -> None:
        self.space.renamed = twice  # type: ignore[attr-defined]


class TheEnvironment(Value):
    def prepare(self) -> None:
        os.environ["SCALE_OF_A_TEST"] = "1.0"

    def read(self) -> Any:
        return float(os.environ["SCALE_OF_A_TEST"])

    def change(self) -> None:
        os.environ["SCALE_OF_A_TEST"] = "2.0"


class TheTrainer(Value):
    def on_fit_start(self) -> None:
        self.trainer.scale = 1.0  # type: ignore[attr-defined]

    def read(self) -> Any:
        return self.trainer.scale  # type: ignore[attr-defined]

    def change(self) -> None:
        self.trainer.scale = 2.0  # type: ignore[attr-defined]


class ACallbacksValue(Value):
    def configure_callbacks(self) -> Any:
        self.other = Scales()
        return [self.other]

    def read(self) -> Any:
        return self.other.table["a"]

    def change(self) -> None:
        self.other.table["a"] = 2.0


class Scales(pl.Callback):
    def __init__(self) -> None:
        self.table = {"a": 1.0}


class AnOptimizersValue(Value):
    def configure_optimizers(self) -> Any:
        return Scaled(self.parameters(), lr=0.1)

    def read(self) -> Any:
        return 1.0

    def change(self) -> None:
        optimizer: Any = self.trainer.optimizers[0]
        optimizer.factors.append(2.0)


class Scaled(torch.optim.SGD):
    """Its gradients are multiplied by a number."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.factors = [1.0]

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(sum(self.factors))
        super().step()
        return loss
