"""FLOPs of training GPT-3, counted from a traced training step, beside those of its paper.

    python tests/tools/gpt3_flops.py [--up-to 8]

Brown et al. 2020, "Language Models are Few-Shot Learners" (arXiv:2005.14165): Table 2.1 has the
configurations, Table D.1 parameters, tokens and the FLOPs of the whole training. Its rule: each
parameter takes part in one multiplication and one addition a token forward, and in twice as many
backward, so 6 FLOPs a parameter and token; the products of queries, keys and values are not counted
("ignoring attention").

The same is counted here: all products of a program but those of attention, by the tokens of the
table. A difference is left, below 1.3 %: parameters that are in no product (biases, norms,
positions), which Table D.1 counts, and its rounding.

Widths: Table 2.1 has 5140 for the 13B model, whose 40 heads of 128 are 5120 wide, and 24 heads of
128 for the XL model, which is 2048 wide: 5120 and 16 heads are used.

The weights are memory that nobody touches, so that a model of any size is traced. Shapes: B windows
of a batch, T tokens, D width, H heads, K = D / H.
"""

from __future__ import annotations

import argparse
import logging
import mmap
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fulgurite
from fulgurite.backends import reset_backend
from fulgurite.backends.csx.graph.products import Product

VOCABULARY, CONTEXT = 50257, 2048
BATCH = 2
MAP_NORESERVE = 0x4000  # asm-generic/mman.h; Python 3.11 does not name it


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A row of Table 2.1 and its row of Table D.1."""

    name: str
    layers: int
    width: int
    heads: int
    parameters_millions: int
    flops: float
    tokens: float = 300e9


TABLE = tuple(
    Published(
        name=f"GPT-3 {row[0]}",
        layers=row[1],
        width=row[2],
        heads=row[3],
        parameters_millions=row[4],
        flops=row[5],
    )
    for row in (
        ("Small", 12, 768, 12, 125, 2.25e20),
        ("Medium", 24, 1024, 16, 356, 6.41e20),
        ("Large", 24, 1536, 16, 760, 1.37e21),
        ("XL", 24, 2048, 16, 1_320, 2.38e21),
        ("2.7B", 32, 2560, 32, 2_650, 4.77e21),
        ("6.7B", 32, 4096, 32, 6_660, 1.20e22),
        ("13B", 40, 5120, 40, 12_850, 2.31e22),
        ("175B", 96, 12288, 96, 174_600, 3.14e23),
    )
)


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv_BT3HK = self.qkv(self.norms[0](x_BTD)).unflatten(-1, (3, self.heads, -1))
        q_BHTK, k_BHTK, v_BHTK = qkv_BT3HK.permute(2, 0, 3, 1, 4).unbind()
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.out(y_BHTK.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.norms[1](x_BTD))))


class GPT(LightningModule):
    """GPT-2's model, whose embeddings are its last layer too."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        x_BTD = self.embed(tokens) + self.place.weight
        logits = F.linear(self.norm(self.blocks(x_BTD)), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def untouched(like: Tensor) -> Tensor:
    """Zeros of a shape that take address space and no memory, until somebody touches them."""
    size = like.numel() * like.element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=like.dtype).view(like.shape)


def model(layers: int, width: int, heads: int) -> GPT:
    """A model whose weights are untouched memory."""
    with torch.device("meta"):
        made = GPT(layers, width, heads)
    for module in made.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(untouched(weight)))
    return made


def products(made: GPT) -> tuple[Product, ...]:
    """The products of its training program, which is traced and not run."""
    tokens = torch.zeros(BATCH, 2, CONTEXT, dtype=torch.int64).unbind(1)
    loader: DataLoader[Any] = DataLoader([tokens], batch_size=None)  # type: ignore[arg-type]
    reset_backend()
    trainer = fulgurite.Trainer(
        backend=fulgurite.backend("CSX", validate_only=True),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(made, loader)
    [program] = trainer.strategy.programs  # type: ignore[attr-defined]
    return tuple(program.entries[0].products)


def is_attention(product: Product) -> bool:
    """Whether a product is one of queries with keys, or of what they give with values."""
    return "scaled_dot_product" in product.operation


def training_flops(row: Published) -> tuple[float, float]:
    """FLOPs of the training in the table's row: by the paper's rule, and of attention."""
    counts = [0, 0]
    for product in products(model(row.layers, row.width, row.heads)):
        counts[is_attention(product)] += product.flops
    steps = row.tokens / (BATCH * CONTEXT)
    return counts[0] * steps, counts[1] * steps


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--up-to", type=int, default=len(TABLE), help="rows")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print("| model | parameters | Table D.1 | counted | apart | attention adds | traced in |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in TABLE[: options.up_to]:
        began = time.perf_counter()
        counted, attention = training_flops(row)
        apart, more = counted / row.flops - 1, attention / counted
        print(
            f"| {row.name} | {row.parameters_millions:,} M | {row.flops:.2e} | {counted:.3e} |"
            f" {apart:+.1%} | {more:.1%} | {time.perf_counter() - began:.0f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
