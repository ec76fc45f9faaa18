"""transformers' GPT-2, tiny and untrained, on the bytes of Python's own argparse.

Shapes: B pieces of a batch; bytes [B, 64].
"""

import argparse
import inspect

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from fulgurite import Trainer

LENGTH = 64


class GPT2(pl.LightningModule):
    """Two layers of width 128; dropout as in the original."""

    def __init__(self):
        super().__init__()
        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=256,
                n_positions=LENGTH,
                n_embd=128,
                n_layer=2,
                n_head=4,
                bos_token_id=None,
                eos_token_id=None,
            )
        )

    def training_step(self, text, batch_idx):
        loss = self.model(input_ids=text, labels=text).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader():
    """Pieces of 64 bytes, one after the other."""
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return DataLoader(pieces, batch_size=16, shuffle=True, drop_last=True)


if __name__ == "__main__":
    Trainer(device="CSX", max_epochs=5).fit(GPT2(), loader())
