"""transformers' BERT, tiny and untrained, fills in bytes of Python's own argparse.

Shapes: B pieces of a batch; bytes [B, 64].
"""

import argparse
import inspect

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM

from fulgurite import Trainer

LENGTH, MASK = 64, 256


class Bert(pl.LightningModule):
    """Two layers of width 128; 15 % of the bytes are hidden, other ones each time."""

    def __init__(self):
        super().__init__()
        self.model = BertForMaskedLM(
            BertConfig(
                vocab_size=257,
                hidden_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=256,
                max_position_embeddings=LENGTH,
            )
        )

    def training_step(self, text, batch_idx):
        hidden = torch.rand(text.shape) < 0.15
        loss = self.model(
            input_ids=text.masked_fill(hidden, MASK), labels=text.masked_fill(~hidden, -100)
        ).loss
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
    Trainer(device="CSX", max_epochs=5).fit(Bert(), loader())
