"""Deep Q-learning (Mnih et al. 2015) that learns to balance a pole on a cart.

The agent plays in ``on_train_batch_end``: what a step of the program cannot do, a hook does.

Shapes: B transitions of a batch; states [B, 4], values of the actions [B, 2].
"""

import math
import random
from collections import deque

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from fulgurite import Trainer


class CartPole:
    """Barto, Sutton and Anderson's cart, as Gymnasium's CartPole-v1 moves it."""

    def __init__(self):
        self.draw = random.Random(0)
        self.reset()

    def reset(self):
        self.state = [self.draw.uniform(-0.05, 0.05) for _ in range(4)]

    def step(self, action):
        """Push left (0) or right (1): the state after it, and whether the pole fell."""
        x, speed, angle, spin = self.state
        push = ((2 * action - 1) * 10 + 0.05 * spin**2 * math.sin(angle)) / 1.1
        turn = 9.8 * math.sin(angle) - math.cos(angle) * push
        turn /= 0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1)
        pull = push - 0.05 * turn * math.cos(angle) / 1.1
        after = [x + 0.02 * speed, speed + 0.02 * pull, angle + 0.02 * spin, spin + 0.02 * turn]
        fell = abs(after[0]) > 2.4 or abs(after[2]) > 0.21
        self.state = after
        if fell:
            self.reset()
        return after, fell


class Replay(IterableDataset):
    """The last 2,000 transitions; as many of them as an epoch takes, drawn when they are needed."""

    def __init__(self, samples):
        self.rows, self.samples = deque(maxlen=2000), samples
        self.draw = random.Random(1)

    def __iter__(self):
        for _ in range(self.samples):
            yield self.draw.choice(self.rows)


def q_net():
    """A value for each action."""
    return nn.Sequential(
        nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )


class DQN(pl.LightningModule):
    """Two nets: one learns, the other says what the next state is worth, and follows."""

    def __init__(self, gamma=0.99):
        super().__init__()
        self.gamma = gamma
        self.net, self.target = q_net(), q_net().requires_grad_(False)
        self.target.load_state_dict(self.net.state_dict())
        self.game, self.replay, self.draw = CartPole(), Replay(32 * 64), random.Random(2)
        for _ in range(500):
            self.play(explore=1.0)

    @torch.no_grad()
    def play(self, explore):
        """One move, at random with probability ``explore``; into the memory."""
        before = self.game.state
        if self.draw.random() < explore:
            action = self.draw.randrange(2)
        else:
            action = int(self.net(torch.tensor(before)).argmax())
        after, fell = self.game.step(action)
        self.replay.rows.append((torch.tensor(before), action, torch.tensor(after), float(fell)))

    def training_step(self, batch, batch_idx):
        before, action, after, fell = batch
        value = self.net(before).gather(1, action[:, None]).squeeze(1)
        best = self.target(after).max(dim=1).values
        wanted = 1 + self.gamma * best * (1 - fell.float())
        loss = nn.functional.smooth_l1_loss(value, wanted)
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.play(explore=max(0.05, 1 - self.global_step / 500))
        if self.global_step % 10 == 0:
            self.target.load_state_dict(self.net.state_dict())

    def train_dataloader(self):
        return DataLoader(self.replay, batch_size=32)

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=1e-3)


if __name__ == "__main__":
    Trainer(device="CSX", max_epochs=20).fit(DQN())
