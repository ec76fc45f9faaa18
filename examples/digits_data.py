"""The handwritten digits as loaders that a parameter file makes.

    train_dataloader: {data_processor: digits_data.pictures, split: train, batch_size: 32}

Shapes: B pictures of a batch; a batch is pictures [B, 1, 8, 8] and labels [B].
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

SPLITS = {"train": slice(0, 1280), "val": slice(1280, 1536), "test": slice(1536, 1792)}


def pictures(split: str, batch_size: int, shuffle: bool = False) -> DataLoader[Any]:
    """Whole batches of one of the splits: 1280, 256 and 256 pictures."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    part = order[SPLITS[split]]
    dataset = TensorDataset(images[part], labels[part])
    return DataLoader(dataset, batch_size, shuffle=shuffle, drop_last=True)
