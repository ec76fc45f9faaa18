"""transformers' Llama, tiny and untrained, on the bytes of Python's own argparse.

Shapes: B pieces of a batch; bytes [B, 64].
"""

import argparse
import inspect

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from fulgurite import Trainer

LENGTH = 64


class Llama(pl.LightningModule):
    """Two layers of width 128 whose four heads share two keys; the rate falls along a cosine."""

    def __init__(self):
        super().__init__()
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=LENGTH,
            )
        )

    def training_step(self, text, batch_idx):
        loss = self.model(input_ids=text, labels=text).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
        return [optimizer], [{"scheduler": cosine, "interval": "step"}]


def loader():
    """Pieces of 64 bytes, one after the other."""
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return DataLoader(pieces, batch_size=16, shuffle=True, drop_last=True)


if __name__ == "__main__":
    Trainer(device="CSX", max_epochs=5).fit(Llama(), loader())
