"""What is read of a library is what Python says of it, and nothing is said that is not sure."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from fulgurite.config.types import sources
from fulgurite.config.types.classes import Classes
from fulgurite.config.types.signatures import (
    Parameter,
    Signature,
    alternatives,
    signature_of,
    type_names,
)

READ, IMPORTED = Classes(imports=False), Classes()
CATEGORIES = ("optimizer", "scheduler", "callback", "logger", "profiler")
OTHERS = (
    *("fulgurite.trainer.Trainer", "fulgurite.callbacks.Checkpoint"),
    *("fulgurite.backends.csx.config.CSXBackend", "fulgurite.backends.csx.config.CSConfig"),
    *("fulgurite.nn.HuberLoss", "fulgurite.nn.TripletMarginWithDistanceLoss"),
    *("torch.utils.data.DataLoader", "torch.nn.Linear", "torchmetrics.classification.Accuracy"),
)
"""Besides the classes of the categories."""


def agrees(read: Signature, real: Signature) -> bool:
    """Whether what was read refuses nothing that the class takes, and knows all that is closed.

    What a constructor adds to that of its base is read first, where Python may have it last.
    """
    known = {name: item for name, item in real.parameters.items() if name in read.parameters}
    return (
        read.parameters.keys() == known.keys()
        and (read.open_ended or (known == real.parameters and not real.open_ended))
        and all(same(read.parameters[name], item) for name, item in known.items())
    )


def same(read: Parameter, real: Parameter) -> bool:
    """Whether two parameters are the same, but for types that are not in the source."""
    # sorted, for Python makes one of two Unions that differ in their order
    kinds, known = ([type_names((k,)) for k in alternatives(one.kind)] for one in (read, real))
    unknown = any("anything" in name for name in kinds)
    return read.required == real.required and (unknown or sorted(kinds) == sorted(known))


@pytest.mark.parametrize("category", CATEGORIES)
def test_the_classes_that_have_short_names_are_those_that_imports_find(category: str) -> None:
    read = READ.short_names(READ.category(category))
    real = IMPORTED.short_names(IMPORTED.category(category))
    assert list(read) == list(real)
    assert [one.__name__ for one in read.values()] == [one.__name__ for one in real.values()]


@pytest.mark.parametrize("category", CATEGORIES)
def test_what_the_classes_of_a_category_take_is_read_as_it_is(category: str) -> None:
    read = READ.short_names(READ.category(category))
    real = IMPORTED.short_names(IMPORTED.category(category))
    wrong = [n for n in real if not agrees(signature_of(read[n]), signature_of(real[n]))]
    assert wrong == []


@pytest.mark.parametrize("path", OTHERS)
def test_what_other_classes_take_is_read_as_it_is(path: str) -> None:
    assert agrees(signature_of(READ.library(path)), signature_of(IMPORTED.library(path)))


def test_nearly_all_that_optimizers_and_schedulers_take_is_known() -> None:
    for category in ("optimizer", "scheduler"):
        signatures = map(signature_of, READ.short_names(READ.category(category)).values())
        assert not any(signature.open_ended for signature in signatures)


LIBRARY = {
    "__init__.py": """
from kit.nets import *
from kit.nets import _hidden
from .nets import Net as Renamed
raise ImportError("this is not to be run")
""",
    "nets.py": """
from abc import ABC, abstractmethod
from enum import Enum
from typing import Literal, Optional, Union
import numpy as np

__all__ = ["Base", "Net", "function"]
Size = Union[int, Literal["small"]]
made = dict(a=1)

class Colour(Enum):
    RED = 1

class Base(ABC):
    def __init__(self, width: int, depth: "Optional[int]" = None, *, size: Size = 1, **_): ...
    @abstractmethod
    def forward(self): ...

class Net(Base):
    def __init__(self, array: np.ndarray, colour: Colour = Colour.RED, **kwargs):
        super().__init__(3, **kwargs)
    def forward(self): ...

class Open(Base):
    def __init__(self, **kwargs):
        self.kept = kwargs

def function(x: int = 1) -> "Net": ...
def _hidden(): ...
""",
    "more.py": "def __getattr__(name): return 1\n",
}


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of which an import fails."""
    (tmp_path / "kit").mkdir()
    for name, text in LIBRARY.items():
        (tmp_path / "kit" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sources, "LIBRARIES", (*sources.LIBRARIES, "kit"))


@pytest.mark.usefixtures("kit")
def test_a_class_is_read_through_the_modules_that_import_it() -> None:
    net, base = sources.read("kit.Net"), sources.read("kit.nets.Base")
    assert net is sources.read("kit.Renamed") is sources.read("kit.nets.Net")
    assert issubclass(net, base)
    assert (net.__module__, net.__qualname__) == ("kit.nets", "Net")
    assert (inspect.isabstract(base), inspect.isabstract(net)) == (True, False)


@pytest.mark.usefixtures("kit")
def test_kwargs_are_followed_to_the_base_and_open_where_they_are_kept() -> None:
    net = signature_of(sources.read("kit.Net"))
    assert list(net.parameters) == ["array", "colour", "depth", "size"]
    assert [item.required for item in net.parameters.values()] == [True, False, False, False]
    assert not net.open_ended
    assert signature_of(sources.read("kit.nets.Open")).open_ended


@pytest.mark.usefixtures("kit")
def test_types_are_read_in_quotes_and_by_other_names_else_they_are_anything() -> None:
    kinds = {k: one.kind for k, one in signature_of(sources.read("kit.Net")).parameters.items()}
    said = {name: type_names(alternatives(kind)) for name, kind in kinds.items()}
    assert said == {
        "array": "anything",
        "colour": "anything",
        "depth": "int or null",
        "size": "int or 'small'",
    }


@pytest.mark.usefixtures("kit")
def test_a_function_is_read_and_cannot_be_called() -> None:
    function: Any = sources.read("kit.function")
    assert function.__annotations__ == {"return": sources.read("kit.Net")}
    with pytest.raises(NotImplementedError, match="was read, not imported"):
        function()


@pytest.mark.usefixtures("kit")
def test_a_name_that_is_not_there_is_told_and_one_that_may_be_is_not() -> None:
    with pytest.raises(LookupError, match=r"kit\.nets has no 'Nett'\. Did you mean 'Net'\?"):
        sources.read("kit.nets.Nett")
    assert sources.read("kit.more.anything") is Any
    assert sources.read("kit.nets.made") is Any
    with pytest.raises(ImportError, match=r"no source of kit\.nets\.made is installed"):
        READ.library("kit.nets.made")
