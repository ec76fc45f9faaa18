"""transformers' T5, tiny and untrained, that writes the bytes of Python's own argparse backwards.

Shapes: B pieces of a batch; bytes [B, 32], of both sides.
"""

import argparse
import inspect

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration

from fulgurite import Trainer

LENGTH = 32


class T5(pl.LightningModule):
    """An encoder and a decoder of two layers of width 64 each."""

    def __init__(self):
        super().__init__()
        self.model = T5ForConditionalGeneration(
            T5Config(
                vocab_size=256,
                d_model=64,
                d_kv=16,
                d_ff=128,
                num_layers=2,
                num_heads=4,
                decoder_start_token_id=0,
            )
        )

    def training_step(self, text, batch_idx):
        loss = self.model(input_ids=text, labels=text.flip(1)).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader():
    """Pieces of 32 bytes, one after the other."""
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return DataLoader(pieces, batch_size=32, shuffle=True, drop_last=True)


if __name__ == "__main__":
    Trainer(device="CSX", max_epochs=5).fit(T5(), loader())
