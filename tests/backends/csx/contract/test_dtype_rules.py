"""A run has one 16-bit type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import fit
from models import Classifier, loader, mlp
from torch import Tensor

from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedDtype


class TwoTypes(Classifier):
    """Makes results of given types one after another."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__(mlp())
        self.dtypes = dtypes

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for dtype in self.dtypes:
            loss = loss.to(dtype)  # here
        return loss.float()


@pytest.mark.fits
@pytest.mark.parametrize(
    ("options", "dtypes", "text"),
    [
        ({"precision": "cb16-mixed"}, [torch.float16], "to() is float16.*cbfloat16"),
        ({"precision": "bf16-mixed"}, [torch.float16], "to() is float16.*bfloat16"),
        ({}, [torch.float16, torch.bfloat16], "to() is bfloat16.*float16, since test_dtype_rules"),
        ({}, [torch.bfloat16, torch.float16], "to() is float16.*bfloat16, since test_dtype_rules"),
    ],
)
def test_a_second_16_bit_type_is_refused_at_its_line(
    options: dict[str, Any], dtypes: list[torch.dtype], text: str
) -> None:
    with pytest.raises(UnsupportedDtype, match=text.replace("()", r"\(\)")) as caught:
        fit(lambda: TwoTypes(*dtypes), lambda: (loader(),), static=True, max_steps=1, **options)
    assert "loss = loss.to(dtype)  # here" in str(caught.value)


@pytest.mark.fits
def test_one_16_bit_type_is_fine_in_a_float32_run() -> None:
    ours = fit(lambda: TwoTypes(torch.float16), lambda: (loader(),), static=True, max_steps=2)
    assert len(ours.losses) == 2
