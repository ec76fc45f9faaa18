"""Numbers and strings of a batch, and batch_idx, in every kind of function: they are constants.

None of Python's, numpy's or torch's functions lets a stand-in be seen, and none reads one unseen.
"""

from __future__ import annotations

import copy
import datetime
import decimal
import json
import math
import operator
import os
import pickle
import random
import re
import struct
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fulgurite
from fulgurite.backends import reset_backend
from fulgurite.backends.csx.contract.frozen_reads import FrozenValueWarning
from fulgurite.backends.csx.diagnostics.trace_errors import InputChanged, RandomStateSet

X = torch.arange(12.0).reshape(3, 4) / 7
Y = torch.tensor([0, 1, 2])


def matched(n: Any) -> int:
    match n:
        case 0 | 1:
            return 1
        case int():
            return 2
        case _:
            return 3


INTEGERS: dict[str, Callable[[Any], Any]] = {
    # torch: numbers, sizes, dimensions, indices
    "tensor": lambda n: torch.tensor(n),
    "tensor of a list": lambda n: torch.tensor([n, 1]),
    "as_tensor": lambda n: torch.as_tensor(n),
    "scalar_tensor": lambda n: torch.scalar_tensor(n),
    "full": lambda n: torch.full((3,), n),
    "full of a size": lambda n: torch.full((n,), 1.0),
    "full_like": lambda n: torch.full_like(X, n),
    "new_full": lambda n: X.new_full((n,), n),
    "arange": lambda n: torch.arange(n),
    "arange from": lambda n: torch.arange(n, 10, n),
    "linspace": lambda n: torch.linspace(0, n, n),
    "zeros": lambda n: torch.zeros(n),
    "zeros of sizes": lambda n: torch.zeros((n, n + 1)),
    "Size": lambda n: torch.zeros(torch.Size([n, 1])),
    "eye": lambda n: torch.eye(n),
    "clamp": lambda n: torch.clamp(X, n),
    "clamp max": lambda n: X.clamp(max=n),
    "where": lambda n: torch.where(X > 1, n, X),
    "one_hot of a number": lambda n: F.one_hot(torch.zeros(1).long(), num_classes=n),
    "roll": lambda n: X.roll(n),
    "roll over a dimension": lambda n: X.roll(n, 1),
    "view": lambda n: X.view(n, -1),
    "reshape": lambda n: X.reshape((n, 6)),
    "sum over": lambda n: X.sum(dim=n - 1),
    "cumsum over": lambda n: X.cumsum(operator.index(n) - 1),
    "add": lambda n: X + n,
    "radd": lambda n: n + X,
    "rsub": lambda n: n - X,
    "rtruediv": lambda n: n / (X + 1),
    "mul": lambda n: torch.mul(X, n),
    "power": lambda n: X**n,
    "power of": lambda n: n**X,
    "less": lambda n: n > X,
    "equal": lambda n: n == X,
    "alpha": lambda n: torch.add(X, X, alpha=n),
    "index": lambda n: X[n],
    "slice": lambda n: X[:n],
    "slice of a column": lambda n: X[:, n:],
    "setitem": lambda n: X.clone().index_fill(0, Y, n),
    "topk": lambda n: X.topk(n).values,
    "chunk": lambda n: X.chunk(n)[0],
    "split": lambda n: X.split([n, 1])[0],
    "repeat": lambda n: X.repeat(n, 1),
    "expand": lambda n: X[:1].expand(n, 4),
    "narrow": lambda n: X.narrow(0, 0, n),
    "pad": lambda n: F.pad(X, (n, 0)),
    "pool": lambda n: F.avg_pool1d(X[None], n),
    "interpolate": lambda n: F.interpolate(X[None], scale_factor=n),
    "repeat_interleave": lambda n: X.repeat_interleave(n, dim=0),
    "dropout in eval": lambda n: F.dropout(X, n / 10, training=False),
    "stack": lambda n: torch.stack([X, X], n),
    "fill_": lambda n: X.clone().fill_(n),
    "vander": lambda n: torch.vander(X[0], n),
    "norm": lambda n: torch.linalg.vector_norm(X, n),
    # Python
    "arithmetic": lambda n: ((n + 1) * 3 - n // 2) % 5 - n**2 + (n << 1) - (-n) + divmod(n, 2)[1],
    "bits": lambda n: (n & 1) | (n ^ 3) | (~n) | (1 & n),
    "reversed arithmetic": lambda n: 10 // n + 10 % n + 2**n + (1 << n) + (10 - n),
    "comparison": lambda n: (0 < n < 5, n == 2, n != 2, n in (1, 2), n in {2: 1}),
    "condition": lambda n: 1 if n else 2,
    "math": lambda n: math.sqrt(n) + math.exp(n) + math.comb(5, n) + math.pow(n, 2) + math.floor(n),
    "range": lambda n: list(range(n)) + [1, 2, 3][n:] + [5] * n,
    "indexing": lambda n: [1, 2, 3][n],
    "max": lambda n: max(n, 1) + min(1, n) + sum([n, n]) + abs(n) + round(n) + pow(n, 2, 3),
    "sorted": lambda n: sorted([3, n, 1]),
    "conversions": lambda n: (int(n), float(n), complex(n), bool(n), str(n), repr(n), bin(n)),
    "formats": lambda n: f"{n} {n:03d} {n!r} " + "%d %s" % (n, n) + "{:>4}".format(n),  # noqa: UP031, UP032
    "methods": lambda n: (n.bit_length(), n.real, n.numerator, n.to_bytes(2, "big"), n.conjugate()),
    "hash": lambda n: hash(n),
    "dict key": lambda n: {2: "two", 3: "three"}[n],
    "match": matched,
    "json": lambda n: json.dumps({"n": n}),
    "pickle": lambda n: pickle.loads(pickle.dumps(n)),
    "deepcopy": lambda n: copy.deepcopy([n])[0] + 1,
    "struct": lambda n: struct.pack("i", n),
    "timedelta": lambda n: datetime.timedelta(days=n).days,
    "decimal": lambda n: int(decimal.Decimal(n)),
    "Random": lambda n: list(str(n).zfill(n)),
    "sleep": lambda n: time.sleep(n / 1e6) or n.__index__(),
    "sleep itself": lambda n: (lambda: time.sleep(n - n))() or 1 + n,
    "chr": lambda n: chr(n + 64) + chr(n),
    "bytes": lambda n: bytes(n) + bytes([n]),
    "string times": lambda n: "ab" * n,
    "namespace": lambda n: getattr(operator, "add")(n, 1),  # noqa: B009
    # numpy
    "np.array": lambda n: float(np.array([n, 1]).sum()),
    "np.zeros": lambda n: np.zeros(n).shape[0],
    "np.exp": lambda n: float(np.exp(n)),
    "np.float32": lambda n: float(np.float32(n)),
    "np.arange": lambda n: np.arange(n).tolist(),
    "np.full": lambda n: np.full(3, n).tolist(),
    "np index": lambda n: int(np.arange(5)[n]),
    "np multiplied": lambda n: (np.ones(2) * n).tolist() + (n * np.ones(2)).tolist(),
    "np.int64": lambda n: int(np.int64(n)),
    "np.clip": lambda n: np.clip(np.arange(5), 0, n).tolist(),
    "from numpy": lambda n: torch.from_numpy(np.full(3, n)),
}
FLOATS: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda f: torch.tensor(f),
    "tensor of a list": lambda f: torch.tensor([f, 1.0]),
    "full": lambda f: torch.full((3,), f),
    "arange": lambda f: torch.arange(0, 2, f),
    "clamp": lambda f: X.clamp(min=f),
    "where": lambda f: torch.where(X > 1, f, X),
    "masked_fill": lambda f: X.masked_fill(X > 1, f),
    "leaky_relu": lambda f: F.leaky_relu(X - 1, f),
    "lerp": lambda f: torch.lerp(X, X + 1, f),
    "dropout": lambda f: F.dropout(X, f, training=False),
    "Dropout": lambda f: nn.Dropout(f).eval()(X),
    "smoothing": lambda f: F.cross_entropy(X, Y, label_smoothing=f),
    "quantile": lambda f: X.quantile(f),
    "alpha": lambda f: torch.add(X, X, alpha=f),
    "value": lambda f: X.addcmul(X, X, value=f),
    "pad": lambda f: F.pad(X, (1, 0), value=f),
    "multiplied": lambda f: f * X + X / f - f,
    "python": lambda f: (f + 1, round(f), math.floor(f), f.is_integer(), f"{f:.2f}", max(f, 1), -f),
    "math": lambda f: math.log(f) + math.cos(f) + math.isnan(f),
    "conversion": lambda f: (int(f), float(f), str(f), bool(f), f.hex(), f.as_integer_ratio()),
    "sleep": lambda f: time.sleep(f) if f < 0.1 else f + 1,
    "json": lambda f: json.dumps([f]),
    "numpy": lambda f: (float(np.exp(f)), np.array([f, 2.0]).tolist(), float(np.float64(f))),
    "pickle": lambda f: pickle.loads(pickle.dumps(f)),
}
STRINGS: dict[str, Callable[[Any], Any]] = {
    "join": lambda s: "-".join([s, "x"]),
    "added": lambda s: "a" + s + "b",
    "added to itself": lambda s: s + s * 2,
    "formats": lambda s: f"{s} {s!r} {s:>20}" + "%s" % s + "{}".format(s),  # noqa: UP031, UP032
    "in a dict": lambda s: s in {"seg/1.png": 1},
    "in a string": lambda s: s in "a seg/1.png b",
    "contains": lambda s: "seg" in s,
    "key": lambda s: {"seg/1.png": 1, "seg/2.png": 2}[s],
    "equal": lambda s: (s == "seg/1.png", s != "x", s < "t", s in ["seg/1.png"]),
    "methods": lambda s: (s.upper(), s.split("/"), s.startswith("seg"), s.encode(), s.index("/")),
    "length": lambda s: (len(s), s[0], s[-4:], list(s), bool(s), sorted(s)),
    "path": lambda s: (os.path.join("a", s), os.path.join(s, "b"), Path(s).stem),
    "basename": lambda s: os.path.basename(s) + os.path.splitext(s)[1],
    "match": lambda s: re.match(r"(\w+)/", s).group(1),  # type: ignore[union-attr]
    "sub": lambda s: re.sub(r"\d", "x", s),
    "open": lambda s: os.path.exists(s),
    "json": lambda s: json.dumps({"s": s}) + json.dumps({s: 1}),
    "json loads": lambda s: json.loads('"' + s + '"'),
    "getattr": lambda s: getattr(torch, "add" if s else "mul", None) is torch.add,
    "by name": lambda s: getattr(operator, s.replace("seg/1.png", "add"))(1, 2),
    "a name": lambda s: hasattr(operator, s),
    "conversion": lambda s: int(s.replace("seg/", "").replace(".png", "")),
    "hash": lambda s: hash(s) == hash("seg/1.png"),
    "translate": lambda s: "x/y".replace("x", s) + "a,b".split(s)[0],
    "startswith": lambda s: "seg/1.png and more".startswith(s),
    "crc": lambda s: __import__("zlib").crc32(s.encode()),
    "ord": lambda s: ord(s[0]) + ord(s[-1]),
    "keywords": lambda s: dict(**{s: 1})[s],
    "numpy": lambda s: np.array([s, "b"]).tolist(),
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "copy": lambda s: copy.deepcopy({"s": s})["s"] + "!",
    "sorted": lambda s: sorted([s, "a"]),
    "set": lambda s: {s, "a"} == {"a", "seg/1.png"},
    "iter": lambda s: [c for c in s] + [*s],  # noqa: C416
    "a device": lambda s: torch.zeros(2, device=s.replace("seg/1.png", "cpu")),
}
CASES = [
    *[(f"int {name}", use, 2, 3) for name, use in INTEGERS.items()],
    *[(f"float {name}", use, 0.5, 0.25) for name, use in FLOATS.items()],
    *[(f"str {name}", use, "seg/1.png", "seg/2.png") for name, use in STRINGS.items()],
]


@pytest.fixture(autouse=True)
def on_csx() -> Iterator[None]:
    reset_backend()
    fulgurite.backend("CSX", autogen_policy="disabled")
    yield
    reset_backend()


def assert_equal(got: Any, wanted: Any) -> None:
    if isinstance(wanted, Tensor):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted)
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            assert_equal(a, b)
    else:
        assert got == wanted
        assert type(got) is type(wanted)


@pytest.mark.parametrize(
    ("use", "first", "second"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_a_value_of_the_batch_is_a_constant_that_was_read(
    use: Any, first: Any, second: Any
) -> None:
    @fulgurite.trace
    def step(x: Tensor, value: Any) -> Any:
        return x + 1, use(value)

    for _ in range(2):
        assert_equal(step(X, first)[1], use(first))
    with pytest.raises(InputChanged, match=rf"value was {first!r} when .* read it, and now"):
        step(X, second)


def test_a_value_is_of_its_type() -> None:
    @fulgurite.trace
    def step(x: Tensor, *values: Any) -> Any:
        kinds = int, float, str
        return x + 1, [[isinstance(value, kind) for kind in kinds] for value in values]

    wanted = [[True, False, False], [False, True, False], [False, False, True]]
    assert step(X, 2, 0.5, "a")[1] == wanted
    assert step(X, 3, 0.25, "b")[1] == wanted  # a type is no value


class Predicts(pl.LightningModule):
    """``use`` sees the index of the batch, which begins with 0."""

    def __init__(self, use: Any) -> None:
        super().__init__()
        self.use = use

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0] * 1, self.use(batch_idx)


def predicted(use: Any) -> tuple[list[Any], list[warnings.WarningMessage]]:
    data = [(torch.ones(2),), (torch.ones(2),)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        results = make_trainer(True).predict(Predicts(use), DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    frozen = [one for one in seen if one.category is FrozenValueWarning]
    return [extra for _, extra in results], frozen


INDEX = [
    ("arange", lambda i: torch.arange(i + 2)),
    ("one_hot", lambda i: F.one_hot(torch.zeros(2).long() * X[0, 0].long(), num_classes=i + 3)),
    ("roll", lambda i: X.roll(i)),
    ("index", lambda i: X[i]),
    ("slice", lambda i: X[i : i + 2]),
    ("json", lambda i: json.dumps({"i": i})),
    ("decimal", lambda i: str(decimal.Decimal(i))),
    ("timedelta", lambda i: datetime.timedelta(i).days),
    ("seed", lambda i: (random.seed(i), 1)[1]),
    ("numpy", lambda i: np.arange(5)[i].item()),
    ("numpy seed", lambda i: np.random.SeedSequence(i).entropy is not None),
    ("generator", lambda i: torch.Generator().manual_seed(i) is not None),
]


FOLLOWED = {
    "tensor": lambda i: torch.tensor(i),
    "full": lambda i: torch.full((3,), i),
    "clamp": lambda i: X.clamp(i),
    "where": lambda i: torch.where(X > 1, i, X),
}


@pytest.mark.parametrize("use", FOLLOWED.values(), ids=FOLLOWED)
def test_torch_s_functions_follow_the_index_of_the_batch(use: Any) -> None:
    results, seen = predicted(use)
    assert_equal(results, [use(0), use(1)])
    assert seen == []


@pytest.mark.parametrize("use", [use for _, use in INDEX], ids=[name for name, _ in INDEX])
def test_the_index_of_the_batch_is_its_first_with_one_warning(use: Any) -> None:
    results, seen = predicted(use)
    assert_equal(results, [use(0), use(0)])
    own = [one for one in seen if "batch_idx was read" in str(one.message)]
    assert len(own) == 1
    assert own[0].filename == __file__
    assert "ValueProxy" not in "".join(str(one.message) for one in seen)


def test_drawing_from_a_generator_seeded_by_the_index_is_an_error_on_that_line() -> None:
    def draw(index: Any) -> Any:
        return torch.rand(2, generator=torch.Generator().manual_seed(index))

    with pytest.raises(RandomStateSet) as error:
        predicted(draw)
    assert error.value.line is not None
    assert error.value.line.source.startswith("return torch.rand(2")


def test_an_error_of_the_users_own_is_that_error() -> None:
    def wrong(index: Any) -> Any:
        return index.nothing

    with pytest.raises(AttributeError, match="'int' object has no attribute 'nothing'"):
        predicted(wrong)

    def mixed(index: Any) -> Any:
        return "a" + index

    with pytest.raises(TypeError, match=r"can only concatenate str|must be str") as error:
        predicted(mixed)
    assert "ValueProxy" not in str(error.value)


def test_the_remedy_of_an_index_in_evaluation_names_its_hooks() -> None:
    def first(index: Any) -> Any:
        return 1 if int(index) == 0 else 2

    _, [warning] = predicted(first)
    text = str(warning.message)
    assert "on_predict_batch_end(self, outputs, batch, batch_idx)" in text
    assert "global_step" not in text
