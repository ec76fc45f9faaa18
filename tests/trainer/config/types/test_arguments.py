"""Arguments against signatures: each mistake at its place, classes at any depth."""

from __future__ import annotations

import enum
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import pytest
import torch
import torchmetrics
from lightning.pytorch.profilers import Profiler, SimpleProfiler
from torch import nn

from fulgurite.config.document.problems import Path, Problem
from fulgurite.config.types.classes import Classes
from fulgurite.config.types.report import Call, Report
from fulgurite.config.types.signatures import names_of, signature_of
from fulgurite.config.types.values import check_arguments, check_value


def problems(kind: Any, value: Any) -> list[tuple[str, str]]:
    report = Report(Classes())
    check_value(kind, value, (), report)
    return [(".".join(map(str, problem.path)), problem.text) for problem in report.problems]


def wrong_arguments(target: Any, given: dict[Any, Any], path: Path) -> list[Problem]:
    report = Report(Classes())
    check_arguments(target, given, path, report)
    return report.problems


def good(kind: Any, value: Any) -> Any:
    report = Report(Classes())
    found = check_value(kind, value, (), report)
    assert report.problems == []
    return found


class Color(enum.Enum):
    RED = 1


@dataclass
class Sizes:
    width: int
    depth: int = 1


@pytest.mark.parametrize(
    ("kind", "value", "found"),
    [
        (int, 3, 3),
        (int, "3", 3),
        (float, 3, 3.0),
        (float, "1e-3", 0.001),
        (int | None, None, None),
        (bool, True, True),
        (str, "yes", "yes"),
        (str | int, "3", "3"),
        (bool | str, "yes", "yes"),
        (Literal["a", 1], "a", "a"),
        (list[int], [1, 2], [1, 2]),
        (tuple[float, float], [1, 2], (1.0, 2.0)),
        (tuple[int, ...], [1, 2, 3], (1, 2, 3)),
        (set[int], [1, 1], {1}),
        (dict[str, int], {"a": 1, 2: 3}, {"a": 1, "2": 3}),
        (dict[int, str], {2: "b"}, {2: "b"}),
        (list, [1, "a"], [1, "a"]),
        (Any, {"a": [1]}, {"a": [1]}),
        (list[int] | int | None, 3, 3),
        (list[int] | int | None, [3], [3]),
        (pathlib.Path, "a/b", pathlib.Path("a/b")),
        (str | timedelta | dict[str, int], {"hours": 1}, {"hours": 1}),
        (Color, "RED", Color.RED),
        (type[nn.Module], "torch.nn.GELU", nn.GELU),
        (Callable[[Any], Any], "torch.nn.functional.relu", nn.functional.relu),
        (
            Callable[[torch.Tensor], torch.Tensor] | None,
            "torch.nn.functional.relu",
            nn.functional.relu,
        ),
        ("Unresolved", 3, 3),
    ],
)
def test_a_value_of_its_type_is_taken(kind: Any, value: Any, found: Any) -> None:
    taken_as = good(kind, value)
    assert taken_as == found
    assert type(taken_as) is type(found)


@pytest.mark.parametrize(
    ("kind", "value", "told"),
    [
        (int | None, "many", ("", "expected int or null; got 'many'.")),
        (int, None, ("", "expected int; got null.")),
        (int, 1.5, ("", "expected int; got 1.5.")),
        (int, 1e4, ("", "expected int; got 10000.0. Write 10000.")),
        (int, True, ("", "expected int; got true.")),
        (float, "NaN", ("", "expected float; got 'NaN'. Write .nan.")),
        (float, "-inf", ("", "expected float; got '-inf'. Write -.inf.")),
        (float | None, "None", ("", "expected float or null; got 'None'. Write null.")),
        (bool, "yes", ("", "expected bool; got 'yes'. Write true or false.")),
        (bool, 1, ("", "expected bool; got 1. Write true or false.")),
        (bool | None, "Off", ("", "expected bool or null; got 'Off'. Write true or false.")),
        (str, 3, ("", "expected str; got 3.")),
        (Literal["min", "max"], "mix", ("", "expected 'min' or 'max'; got 'mix'. Did you mean")),
        (list[int], 3, ("", "expected a list of int; got 3.")),
        (list[int], {"a": 1}, ("", "expected a list of int; got a mapping of a.")),
        (list[int], [1, "x", 2], ("1", "expected int; got 'x'.")),
        (list[list[int]] | None, [[1], [2, "x"]], ("1.1", "expected int; got 'x'.")),
        (dict[str, int], {"a": 1, "b": []}, ("b", "expected int; got [].")),
        (dict[str, int] | None, 3, ("", "expected a mapping to int or null; got 3.")),
        (tuple[int, int], [1], ("", "expected a list of 2; got 1 items.")),
        (tuple[int, int], [1, "x"], ("1", "expected int; got 'x'.")),
        (Callable[..., Any], "torch.no_such", ("", "expected the path of a function; got")),
        (Sizes, {"width": "w"}, ("width", "expected int; got 'w'.")),
        (Sizes | None, {}, ("", "Sizes needs width (int), which is not given.")),
        (list[Sizes], [{"width": 1, "dept": 2}], ("0.dept", "Sizes takes no 'dept'. Did you mean")),
        (torchmetrics.Metric, 3, ("", "expected Metric; got 3.")),
        (torchmetrics.Metric, "MeanMetri", ("", "no metric is named 'MeanMetri'. Did you mean")),
        (
            dict[str, torchmetrics.Metric],
            {"a": {"MeanMetric": {"nan_strateg": 1}}, "b": "MeanMetric"},
            ("a.MeanMetric.nan_strateg", "MeanMetric takes no 'nan_strateg'."),
        ),
        (
            list[nn.Module] | nn.Module | None,
            [{"Linear": {"in_features": 1}}],
            ("0.Linear", "Linear needs out_features (int), which is not given."),
        ),
        (
            Profiler | str | None,
            {"SimpleProfiler": {"dirpath": 3}},
            ("SimpleProfiler.dirpath", "expected str, Path or null; got 3."),
        ),
        (Any, [{"class_path": "torch.nn.Lineax"}], ("0.class_path", "torch.nn has no 'Lineax'.")),
    ],
)
def test_another_value_is_told_at_its_place(kind: Any, value: Any, told: tuple[str, str]) -> None:
    [(path, text)] = problems(kind, value)
    assert path == told[0]
    assert text.startswith(told[1])
    assert "\n" not in text


def test_huge_and_deep_values_are_told_short() -> None:
    deep: Any = 0
    for _ in range(40):
        deep = [deep]
    for value in (deep, 10**400, "x" * 10_000, [1] * 1000):
        [(_, text)] = problems(dict[str, int], value)
        assert len(text) < 200


class Net(nn.Module):
    def __init__(
        self,
        metric: torchmetrics.Metric,
        profiler: Profiler | None = None,
        layers: list[nn.Module] | None = None,
        sizes: Sizes | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        free: Any = None,
        untyped=None,  # type: ignore[no-untyped-def]
    ) -> None:
        super().__init__()
        self.given = (metric, profiler, layers, sizes, optimizer, free, untyped)


def test_classes_in_arguments_are_made_with_the_object() -> None:
    report = Report(Classes())
    arguments = check_arguments(
        Net,
        {
            "metric": {"multiclassaccuracy": {"num_classes": 3}},
            "profiler": {"name": "SimpleProfiler", "dirpath": "runs"},
            "layers": [
                "GELU",
                {
                    "class_path": "torch.nn.Linear",
                    "init_args": {"in_features": 1, "out_features": 2},
                },
            ],
            "sizes": {"width": 3},
            "optimizer": "torch.optim.Adam",
            "free": {"a": {"class_path": "torch.nn.ReLU"}},
            "untyped": [1],
        },
        (),
        report,
    )
    assert report.problems == []
    call = Call(path=(), name="Net", target=Net, arguments=arguments)
    metric, profiler, layers, sizes, optimizer, free, untyped = call().given
    assert isinstance(metric, torchmetrics.classification.MulticlassAccuracy)
    assert isinstance(profiler, SimpleProfiler)
    assert [type(layer) for layer in layers] == [nn.GELU, nn.Linear]
    assert sizes == Sizes(3)
    assert isinstance(optimizer(nn.Linear(1, 1).parameters()), torch.optim.Adam)
    assert isinstance(free["a"], nn.ReLU)
    assert call().given[2][0] is not layers[0], "each call makes its own"
    assert untyped == [1]
    assert call().given[6] is not untyped


class Parent:
    def __init__(self, width: int = 1) -> None: ...


class Resolved(Parent):
    def __init__(self, depth: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)


class Kept:
    def __init__(self, depth: int = 1, **kwargs: Any) -> None:
        self.kwargs = kwargs


class Popped:
    def __init__(self, **kwargs: Any) -> None:
        self.depth = kwargs.pop("depth", 1)


class Unread:
    def __init__(self, **kwargs: Any) -> None: ...


def forwards(depth: int, **kwargs: Any) -> Any:
    return Parent(**kwargs)


@pytest.mark.parametrize(
    ("target", "names", "open_ended"),
    [
        (Resolved, ["depth", "width"], False),
        (forwards, ["depth", "width"], False),
        (Popped, ["depth"], False),
        (Kept, ["depth"], True),
        (Unread, [], False),
        (dict, [], True),
    ],
)
def test_further_arguments_are_followed_as_far_as_the_code_says(
    target: Any, names: list[str], open_ended: bool
) -> None:
    assert names_of(target) == names
    assert signature_of(target).open_ended is open_ended


def test_unknown_arguments_pass_only_where_nothing_can_be_known() -> None:
    assert wrong_arguments(Kept, {"anything": [1]}, ()) == []
    [problem] = wrong_arguments(Resolved, {"widht": 1}, ("m",))
    assert problem.path == ("m", "widht")
    assert problem.text.startswith("Resolved takes no 'widht'. Did you mean 'width'?")
    [problem] = wrong_arguments(Kept, {1: 2}, ())
    assert problem.text.startswith("Kept takes no 1.")


def test_all_mistakes_come_at_once() -> None:
    found = wrong_arguments(Net, {"layers": 3, "sizes": {"depth": "d"}, "extra": 1}, ("m",))
    assert [".".join(map(str, problem.path)) for problem in found] == [
        *("m.layers", "m.sizes.depth", "m.sizes", "m.extra", "m"),
    ]


def test_without_imports_nothing_of_the_users_is_imported() -> None:
    report = Report(Classes(imports=False))
    given = {
        "metric": "no_such_package.Metric",
        "layers": [{"class_path": "no_such_package.Layer", "init_args": {"anything": 1}}],
        "optimizer": "no_such_package.make",
        "free": {"class_path": "no_such_package.Thing"},
    }
    check_arguments(Net, given, (), report)
    assert report.problems == []
    check_arguments(Net, {"metric": "torchmetrics.MeanMetri"}, (), report)
    assert len(report.problems) == 1
