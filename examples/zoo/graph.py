"""PyTorch Geometric's graph network GIN on scikit-learn's digits, each a grid of 64 pixels.

All graphs have as many nodes and edges, so that a batch of them always has one shape.

Shapes: B graphs of a batch; x [64 B, 3] (brightness and place), edge_index [2, 224 B], y [B].
"""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, global_mean_pool
from torch_geometric.utils import grid

from fulgurite import Trainer


class GraphNet(pl.LightningModule):
    """Three layers of messages, the mean over a graph's nodes, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.gin = GIN(3, 32, num_layers=3)
        self.head = nn.Linear(32, 10)

    def training_step(self, batch, batch_idx):
        nodes = self.gin(batch.x, batch.edge_index)
        graphs = global_mean_pool(nodes, batch.batch, size=batch.num_graphs)
        loss = nn.functional.cross_entropy(self.head(graphs), batch.y)
        self.log("loss", loss, prog_bar=True, batch_size=batch.num_graphs)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def loader():
    """1,797 graphs, and the digit that each shows."""
    edges, places = grid(8, 8)
    data = load_digits()
    graphs = [
        Data(
            x=torch.cat([torch.tensor(picture).float().view(64, 1) / 16, places / 7], dim=1),
            edge_index=edges,
            y=torch.tensor([label]),
        )
        for picture, label in zip(data.images, data.target, strict=True)
    ]
    return DataLoader(graphs, batch_size=32, shuffle=True, drop_last=True)


if __name__ == "__main__":
    Trainer(device="CSX", max_epochs=5).fit(GraphNet(), loader())
