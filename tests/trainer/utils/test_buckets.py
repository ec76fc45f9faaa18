"""PadToBuckets: batches of a few sizes, filled up where that was said."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from fulgurite.utils.data import PadToBuckets


class Pair(NamedTuple):
    tokens: Tensor
    labels: Tensor


def rows(*lengths: int) -> list[Tensor]:
    return [torch.full((n,), 7) for n in lengths]


def padded(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True)


def test_a_batch_gets_the_next_size() -> None:
    collate = PadToBuckets(padded, sizes=(16, 4, 8))
    loader = DataLoader(rows(3, 4, 5, 2, 16, 9), 2, collate_fn=collate)
    assert [tuple(batch.shape) for batch in loader] == [(2, 4), (2, 8), (2, 16)]
    batch = collate(rows(3, 5))
    assert batch.tolist() == [[7] * 3 + [0] * 5, [7] * 5 + [0] * 3]


@pytest.mark.parametrize(
    ("make", "value", "take"),
    [
        (lambda x, y: {"tokens": x, "labels": y}, {"labels": -100}, lambda b: (b["labels"], b)),
        (lambda x, y: UserDict(tokens=x, labels=y), {"labels": -100}, lambda b: (b["labels"], b)),
        (lambda x, y: (x, y), {1: -100}, lambda b: (b[1], b)),
        (lambda x, y: [x, y], {1: -100}, lambda b: (b[1], b)),
        (Pair, {"labels": -100}, lambda b: (b.labels, b)),
    ],
)
def test_what_is_named_is_padded_and_the_batch_keeps_its_kind(
    make: Any, value: Any, take: Any
) -> None:
    def collate(samples: list[Tensor]) -> Any:
        return make(padded(samples), padded(samples))

    labels, batch = take(PadToBuckets(collate, sizes=[6], value=value)(rows(2, 3)))
    assert labels.tolist() == [[7, 7, 0, -100, -100, -100], [7, 7, 7, -100, -100, -100]]
    assert type(batch) is type(make(labels, labels))
    tokens = batch[0] if isinstance(batch, (list, tuple)) else batch["tokens"]
    assert tokens.shape == (2, 3)


def test_a_number_is_for_every_tensor_that_has_the_dimension() -> None:
    def collate(samples: list[Tensor]) -> Any:
        x = padded(samples)
        return {"x": x.float(), "y": torch.zeros(2), "more": [x], "n": 3}

    batch = PadToBuckets(collate, sizes=[4], value=True)(rows(2, 3))
    assert batch["x"].tolist() == [[7, 7, 0, 1], [7, 7, 7, 1]]
    assert batch["x"].dtype == torch.float32
    assert batch["y"].shape == (2,)
    assert batch["more"][0].shape == (2, 4)
    assert batch["n"] == 3


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"sizes": []}, ValueError, "one positive number or more"),
        ({"sizes": [0, 3]}, ValueError, r"got \(0, 3\)"),
        ({"sizes": [4], "dim": -1}, ValueError, "dim must not be negative"),
        ({"sizes": [2]}, ValueError, "A batch has size 3 in dimension 1, and the largest"),
        ({"sizes": [4], "value": {"x": 0}}, TypeError, "the batch is a Tensor. Give a number"),
    ],
)
def test_what_cannot_be_is_an_error(options: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        PadToBuckets(padded, **options)(rows(2, 3))


def test_a_name_that_the_batch_has_not() -> None:
    collate = PadToBuckets(lambda samples: {"x": padded(samples)}, sizes=[4], value={"y": 0})
    with pytest.raises(KeyError, match=r"names 'y', and the batch has \['x'\]"):
        collate(rows(2, 3))
