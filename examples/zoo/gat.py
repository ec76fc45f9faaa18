"""PyTorch Geometric's graph attention network GAT, which finds the communities of one drawn graph.

The whole graph is the batch, as in the paper, so shapes never change. Each node's edge to itself is
added to the data: GAT would remove and add them in every step, and how many depends on values.

Shapes: x [400, 16], edge_index [2, E], y [400], train [400] (bool).
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GAT
from torch_geometric.utils import add_self_loops, stochastic_blockmodel_graph

from fulgurite import Trainer

NODES, COMMUNITIES = 400, 4


class GraphAttention(pl.LightningModule):
    """Two layers of four heads, with dropout of attention; the loss is of one node in five."""

    def __init__(self):
        super().__init__()
        options = {"heads": 4, "dropout": 0.5, "add_self_loops": False}
        self.gat = GAT(16, 32, num_layers=2, out_channels=COMMUNITIES, **options)

    def training_step(self, graph, batch_idx):
        scores = self.gat(graph.x, graph.edge_index)
        losses = nn.functional.cross_entropy(scores, graph.y, reduction="none")
        loss = (losses * graph.train).sum() / graph.train.sum()
        self.log("loss", loss, prog_bar=True, batch_size=1)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3, weight_decay=5e-4)


def loader():
    """A graph whose nodes are joined more often within their community."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        within = 0.09 * torch.eye(COMMUNITIES) + 0.01
        edges = stochastic_blockmodel_graph([NODES // COMMUNITIES] * COMMUNITIES, within)
    graph = Data(
        x=torch.randn(NODES, 16, generator=generator),
        edge_index=add_self_loops(edges, num_nodes=NODES)[0],
        y=torch.arange(NODES) // (NODES // COMMUNITIES),
        train=torch.rand(NODES, generator=generator) < 0.2,
    )
    return DataLoader([graph], batch_size=1)


if __name__ == "__main__":
    Trainer(device="CSX", max_epochs=200).fit(GraphAttention(), loader())
