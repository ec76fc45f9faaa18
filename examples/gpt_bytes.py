"""A small GPT over the bytes of Python's own standard library, trained as one static program.

    python examples/gpt_bytes.py [--device CSX|CPU|GPU] [--compare] [--epochs 4] [--out runs/gpt]

The data is already on your disk: the source files of the interpreter that runs this. Ends with the
bits per byte on files that were not trained on (guessing takes 8), the steps per second, and a
sample of the Python that the model writes. With --compare the same module is trained by stock
Lightning too, from the same seed.

Shapes: B windows of a batch, T tokens of context, D width, H heads, K = D / H, V vocabulary,
W = T + 1 bytes of a window; a tensor's name ends in its shape.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from side_by_side import Record, compare
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

import fulgurite
from fulgurite import Trainer, backend

VOCABULARY = 256  # every byte is a token
CONTEXT = 64
BATCH_SIZE = 8
VALIDATION_BATCHES = 64
PROMPT, SAMPLE = "def read(", 400


class Attention(nn.Module):
    """Causal self-attention over H heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv_BT3HK = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1))
        q_BHTK, k_BHTK, v_BHTK = qkv_BT3HK.permute(2, 0, 3, 1, 4).unbind()
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return self.out(y_BHTK.transpose(1, 2).flatten(2))


class SquaredReLU(nn.Module):
    """Of So et al., arXiv:2109.08668."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class Block(nn.Module):
    """Attention, then a two-layer network."""

    def __init__(self, width: int, heads: int, between: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads)
        self.network_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.between = between
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.down(self.between(self.up(self.network_norm(x_BTD))))


def between(name: str) -> nn.Module:
    """What stands between the two layers of a block."""
    return SquaredReLU() if name == "squared_relu" else fulgurite.nn.nonlinearity(name)


class GPT(pl.LightningModule):
    """A decoder-only transformer over bytes, with learned positions.

    Args:
        layers, width, heads, context: its size; 0.86 million weights by default.
        learning_rate: the highest of the schedule.
        nonlinearity: of the blocks: "squared_relu", or a name of ``fulgurite.nn.nonlinearity``.
    """

    def __init__(
        self,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        context: int = CONTEXT,
        learning_rate: float = 3e-3,
        nonlinearity: str = "squared_relu",
    ) -> None:
        super().__init__()
        self.context, self.learning_rate = context, learning_rate
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(
            *(Block(width, heads, between(nonlinearity)) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._initialize)

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
        if isinstance(module, Block):  # each block begins as the identity
            nn.init.zeros_(module.attention.out.weight)
            nn.init.zeros_(module.down.weight)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V] of each next token."""
        x_BTD = self.token(tokens_BT) + self.position.weight[: tokens_BT.shape[1]]
        return self.head(self.norm(self.blocks(x_BTD)))

    def bits_per_byte(self, bytes_BW: Tensor) -> Tensor:
        """How many bits the model needs for a byte, on average over all but each window's first."""
        tokens_BW = bytes_BW.long()
        logits_BTV = self(tokens_BW[:, :-1])
        nats = F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BW[:, 1:].flatten())
        return nats / math.log(2)

    def training_step(self, bytes_BW: Tensor) -> Tensor:
        bits = self.bits_per_byte(bytes_BW)
        self.log("bits_per_byte", bits, prog_bar=True)
        return bits * math.log(2)

    def validation_step(self, bytes_BW: Tensor) -> None:
        self.log("val_bits_per_byte", self.bits_per_byte(bytes_BW), prog_bar=True)

    def configure_optimizers(self) -> Any:
        """AdamW that decays matrices only, a warm-up over 5 % of the steps, then a cosine to 0."""
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=self.learning_rate,
            betas=(0.9, 0.95),
        )
        steps = int(self.trainer.estimated_stepping_batches)
        warm_up = max(1, steps // 20)

        def factor(step: int) -> float:
            cosine = (1 + math.cos(math.pi * min(step, steps) / steps)) / 2
            return min(1.0, (step + 1) / warm_up) * cosine

        schedule = LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: str, count: int, temperature: float = 0.8) -> str:
        """The prompt and ``count`` sampled bytes: plain eager PyTorch on the trained weights."""
        tokens = list(prompt.encode())
        for _ in range(count):
            window_BT = torch.tensor([tokens[-self.context :]], device=self.device)
            logits_V = self(window_BT)[0, -1] / temperature
            tokens.append(int(torch.multinomial(logits_V.softmax(-1), 1)))
        return bytes(tokens).decode(errors="replace")


class Windows(Dataset[Tensor]):
    """Windows of T + 1 bytes, one after another; a list of indices fetches a whole batch at once.

    One gather a batch instead of a Python call and a copy for each row.
    """

    def __init__(self, paths: Iterable[Path], context: int = CONTEXT) -> None:
        data = bytearray(b"".join(path.read_bytes() for path in paths))
        self.windows = torch.frombuffer(data, dtype=torch.uint8).unfold(0, context + 1, context)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, rows: list[int]) -> Tensor:
        return self.windows[rows]


def windows(split: str, steps: int = 150, context: int = CONTEXT) -> DataLoader[Any]:
    """Training windows, drawn anew each epoch of ``steps`` batches, or validation windows.

    Each twentieth file is for validation.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = ("site-packages", "dist-packages", "test")
    files = sorted(root.glob("*.py"))
    for folder in sorted(root.iterdir()):
        if folder.is_dir() and folder.name not in left_out:
            files += sorted(folder.rglob("*.py"))
    order: Iterable[int]
    if split == "train":
        data = Windows((path for i, path in enumerate(files) if i % 20), context)
        order = RandomSampler(data, num_samples=steps * BATCH_SIZE)
    else:
        data = Windows(files[::20], context)
        order = range(0, len(data), max(1, len(data) // (VALIDATION_BATCHES * BATCH_SIZE)))
    return DataLoader(
        data, sampler=BatchSampler(order, BATCH_SIZE, drop_last=True), batch_size=None
    )


def loaders(steps: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Training and validation windows."""
    return windows("train", steps), windows("val")


def main(arguments: list[str] | None = None) -> float:
    """Train, report and write some Python; returns the validation bits per byte."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="CSX", help="CSX, CPU or GPU")
    parser.add_argument("--compare", action="store_true", help="train in stock Lightning too")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150, help="training steps an epoch")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="folder of results")
    parser.add_argument("--autogen-policy", help="CSX only; 'disabled' compiles nothing")
    options = parser.parse_args(arguments)

    pl.seed_everything(0, verbose=False)
    train, val = loaders(options.steps)
    record = Record()
    checkpoint = ModelCheckpoint(monitor="val_bits_per_byte", filename="best")
    where: dict[str, Any] = {"device": options.device}
    if options.autogen_policy:
        where = {"backend": backend(options.device, autogen_policy=options.autogen_policy)}
    trainer = Trainer(
        **where,
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        logger=CSVLogger(options.out.parent, name=options.out.name),
        log_every_n_steps=10,
        callbacks=[record, checkpoint],
    )
    module = GPT()
    trainer.fit(module, train, val)

    bits = float(trainer.callback_metrics["val_bits_per_byte"])
    print(f"\nbits per byte  {bits:.2f}, from {float(record.losses[0]) / math.log(2):.2f}")
    print(f"steps per s    {record.steps_per_s:.0f}")
    print(f"checkpoint     {checkpoint.best_model_path}")
    print(f"\n{module.generate(PROMPT, SAMPLE)}")
    if options.compare:
        compare(record, GPT, *loaders(options.steps), epochs=options.epochs)
    return bits


if __name__ == "__main__":
    main()
