"""docs/precision.md says what runs in which type under ``*-mixed``; here torch is asked."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import assert_same_run, both
from models import Classifier, loader
from torch import Tensor, nn
from torch.nn import functional

DOCUMENT = Path(__file__).parents[4] / "docs" / "precision.md"
LOW, FULL, WIDEST = "in the 16-bit type", "in float32", "in the widest type of their inputs"


def documented() -> dict[str, list[str]]:
    """The names in each row of the table; ``fft_*`` stands for all that begin so."""
    [table] = re.findall(
        r"<!-- autocast: .*?-->(.*?)<!-- autocast ends", DOCUMENT.read_text(), re.S
    )
    rows = re.findall(r"^\| (in .*?) \| (.*) \|$", table, re.MULTILINE)
    return {row: re.findall(r"`(.*?)`", names) for row, names in rows}


def registered() -> set[str]:
    """What torch casts on a CPU; names with an underscore before them are its own affair."""
    found = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    names = {name.removeprefix("aten::").partition(".")[0] for name in found}
    return {name for name in names if not name.startswith("_")}


def test_the_table_has_what_torch_casts() -> None:
    rows = documented()
    assert list(rows) == [LOW, FULL, WIDEST]
    names = [name for row in rows.values() for name in row]
    assert len(names) == len(set(names))
    families = tuple(name[:-1] for name in names if name.endswith("*"))
    here = {name for name in names if hasattr(torch.ops.aten, name)}  # 2.14 has no qr, no cholesky
    plain = {name for name in here if not name.endswith("*")}
    assert plain <= registered()
    assert all(name.startswith(families) for name in registered() - plain)


SQUARE = torch.eye(4) + 0.1
IMAGE, VOLUME = torch.randn(1, 2, 6, 6), torch.randn(1, 2, 6, 6, 6)
PROBES: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: functional.linear(x, SQUARE.to(x.dtype)),
    "matmul": lambda x: x @ x,
    "mm": lambda x: torch.mm(x, x),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "addmm": lambda x: torch.addmm(x, x, x),
    "conv1d": lambda x: functional.conv1d(x[None], x[:, :, None]),
    "conv2d": lambda x: functional.conv2d(IMAGE.to(x.dtype), torch.ones(2, 2, 3, 3, dtype=x.dtype)),
    "linalg_vecdot": lambda x: torch.linalg.vecdot(x, x),
    "scaled_dot_product_attention": lambda x: functional.scaled_dot_product_attention(
        x[None, None], x[None, None], x[None, None]
    ),
    "prelu": lambda x: functional.prelu(x, torch.ones(1, dtype=x.dtype)),
    "mse_loss": lambda x: functional.mse_loss(x, x),
    "cross_entropy_loss": lambda x: functional.cross_entropy(x, torch.arange(4)),
    "nll_loss": lambda x: functional.nll_loss(x, torch.arange(4)),
    "kl_div": lambda x: functional.kl_div(x, x, reduction="batchmean"),
    "binary_cross_entropy_with_logits": lambda x: functional.binary_cross_entropy_with_logits(x, x),
    "huber_loss": lambda x: functional.huber_loss(x, x),
    "prod": lambda x: x.prod(),
    "cdist": lambda x: torch.cdist(x, x),
    "quantile": lambda x: torch.quantile(x, 0.5),
    "trace": lambda x: torch.trace(x),
    "avg_pool3d": lambda x: functional.avg_pool3d(VOLUME.to(x.dtype), 2),
    "max_pool3d": lambda x: functional.max_pool3d(VOLUME.to(x.dtype), 2),
    "reflection_pad1d": lambda x: functional.pad(x, (1, 1), mode="reflect"),
    "grid_sampler": lambda x: functional.grid_sample(
        IMAGE.to(x.dtype), torch.zeros(1, 3, 3, 2, dtype=x.dtype), align_corners=False
    ),
    "fft_*": lambda x: torch.fft.irfft(x),
    "linalg_*": lambda x: torch.linalg.inv(x),
}
ELSEWHERE: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + x,
    "gelu": functional.gelu,
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: functional.layer_norm(x, (4,)),
    "sum": lambda x: x.sum(),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PROBES)
def test_operations_run_in_the_type_of_their_row(name: str, dtype: torch.dtype) -> None:
    expected = {LOW: dtype, FULL: torch.float32}
    [row] = [row for row, names in documented().items() if name in names]
    with torch.autocast("cpu", dtype=dtype):
        given = [PROBES[name](SQUARE.to(one)).dtype for one in (torch.float32, dtype)]
    assert given == [expected[row]] * 2


@pytest.mark.parametrize("name", ["cat", "stack"])
def test_joined_tensors_take_the_widest_type(name: str) -> None:
    assert name in documented()[WIDEST]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        joined = getattr(torch, name)([SQUARE, SQUARE.to(torch.bfloat16)])
    assert joined.dtype is torch.float32


@pytest.mark.parametrize("name", ELSEWHERE)
def test_everything_else_keeps_the_type_of_its_input(name: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = [ELSEWHERE[name](SQUARE.to(one)).dtype for one in (torch.float32, torch.bfloat16)]
    assert given == [torch.float32, torch.bfloat16]


class Grids(Classifier):
    """Its loss is of a grid, whose points are products."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        theta = self.net(batch[0]).view(-1, 2, 3)
        grid = functional.affine_grid(theta, [len(theta), 1, 3, 5], align_corners=False)
        assert grid.dtype is torch.bfloat16
        return grid.float().square().mean()


@pytest.mark.numbers
def test_a_grids_points_are_16_bit_products() -> None:
    runs = both(lambda: Grids(nn.Linear(8, 6)), lambda: (loader(96),), precision="bf16-mixed")
    assert_same_run(*runs)
