"""What travels as float32 arrives to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fulgurite.backends.csx.distributed.reduction import _pieces, _whole

LARGE = torch.tensor([0, 1, -1, 2**22, -(2**22) - 1, 2**48 + 3, 2**63 - 1, -(2**63)])
REAL = torch.tensor([0.0, 1e-45, -1.5, 3e38, float("inf"), float("nan")])


@pytest.mark.parametrize(
    "value",
    [
        LARGE,
        LARGE.int(),
        LARGE.to(torch.uint8),
        LARGE.bool(),
        REAL,
        REAL.half(),
        REAL.bfloat16(),
        REAL.double() / 3,
        torch.complex(REAL, REAL.flip(0)),
    ],
    ids=lambda value: str(value.dtype),
)
def test_a_tensor_is_what_its_pieces_were_made_of(value: Tensor) -> None:
    pieces = _pieces(value)
    assert {piece.dtype for piece in pieces} <= {torch.float32, torch.float64}
    found = _whole([piece + 0.0 for piece in pieces], value)  # as the others' zeros are added
    assert found.dtype == value.dtype
    torch.testing.assert_close(found, value, rtol=0, atol=0, equal_nan=True)
