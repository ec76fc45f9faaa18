"""Small reinforcement learning runs, as users of Lightning write them.

Environments are a few lines of torch, stepped on the host or recorded before. Each function trains
for about twenty steps with the Trainer that `make_trainer(**options)` makes, and returns what two
runs should agree on. The caller seeds torch before each call; its `make_trainer` adds quiet options
of its own beneath those given.
"""

import copy
import csv
import itertools
import math
import random
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from programs.common import Losses, results
from torch import nn
from torch.distributions import Beta, Categorical, Normal, TanhTransform, TransformedDistribution
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, random_split


def mlp(*sizes, act=nn.Tanh, out=nn.Identity):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1], out())


class CartPole:
    """Poles on n carts; those that fall begin again."""

    def __init__(self, n, seed=0):
        self.g = torch.Generator().manual_seed(seed)
        self.n = n
        self.state = self.fresh()

    def fresh(self):
        return 0.1 * torch.rand(self.n, 4, generator=self.g) - 0.05

    def step(self, action):
        x, v, angle, spin = self.state.unbind(1)
        force = 20.0 * action - 10
        push = (force + 0.05 * spin**2 * angle.sin()) / 1.1
        spin_rate = (9.8 * angle.sin() - angle.cos() * push) / (0.7 - 0.045 * angle.cos() ** 2)
        rate = push - 0.045 * spin_rate * angle.cos()
        dt = 0.05
        new = torch.stack([x + dt * v, v + dt * rate, angle + dt * spin, spin + dt * spin_rate], 1)
        done = (new[:, 0].abs() > 2.4) | (new[:, 2].abs() > 0.3)
        self.state = torch.where(done[:, None], self.fresh(), new)
        return new, torch.ones(self.n) - done.float(), done


class Pendulum:
    """n pendulums to be held upright by a torque between -1 and 1."""

    def __init__(self, n, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.angle = torch.rand(n, generator=g) * 6 - 3
        self.speed = torch.rand(n, generator=g) * 2 - 1

    @property
    def obs(self):
        return torch.stack([self.angle.cos(), self.angle.sin(), self.speed / 8], dim=1)

    def step(self, action):
        wrapped = torch.atan2(self.angle.sin(), self.angle.cos())
        cost = wrapped**2 + 0.1 * self.speed**2 + 0.001 * action**2
        self.speed = (self.speed + 0.75 * self.angle.sin() + 0.3 * action).clamp(-8, 8)
        self.angle = self.angle + 0.05 * self.speed
        return self.obs, -cost / 10


def pendulum_transitions(n=320, seed=0):
    """Recorded by a random policy: observation, action, reward, next observation."""
    g = torch.Generator().manual_seed(seed)
    env, rows = Pendulum(32, seed), []
    for _ in range(n // 32):
        obs, action = env.obs, torch.rand(32, generator=g) * 2 - 1
        after, reward = env.step(action)
        rows.append((obs, action.unsqueeze(1), reward, after))
    return TensorDataset(*(torch.cat(column) for column in zip(*rows, strict=True)))


def cartpole_transitions(n=320, seed=0):
    """Recorded by a random policy: observation, action, reward, next observation, end."""
    g = torch.Generator().manual_seed(seed)
    env, rows = CartPole(32, seed), []
    for _ in range(n // 32):
        obs, action = env.state, torch.randint(0, 2, (32,), generator=g)
        after, reward, done = env.step(action)
        rows.append((obs, action, reward, after, done))
    return TensorDataset(*(torch.cat(column) for column in zip(*rows, strict=True)))


def cartpole_rollouts(time, seed=0):
    """The same as 32 pieces of some time steps, [32, time, ...]."""
    columns = cartpole_transitions(32 * time, seed).tensors
    return [c.view(time, 32, *c.shape[1:]).transpose(0, 1).contiguous() for c in columns]


# Bandits


class BanditPolicy(L.LightningModule):
    def __init__(self, arms=5, features=6):
        super().__init__()
        self.policy = nn.Linear(features, arms)
        self.register_buffer("baseline", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        context, payoffs = batch
        pi = Categorical(logits=self.policy(context))
        arm = pi.sample()
        reward = payoffs.gather(1, arm.unsqueeze(1)).squeeze(1)
        loss = -((reward - self.baseline) * pi.log_prob(arm)).mean() - 0.01 * pi.entropy().mean()
        self.baseline.lerp_(reward.mean(), 0.1)
        self.log("reward", reward.mean(), on_step=True, on_epoch=True, prog_bar=True)
        self.log("total_reward", reward.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def bandit_data(n=320):
    g = torch.Generator().manual_seed(0)
    context = torch.randn(n, 6, generator=g)
    payoffs = context @ torch.randn(6, 5, generator=g) + 0.1 * torch.randn(n, 5, generator=g)
    return TensorDataset(context, payoffs)


def contextual_bandit_policy_gradient(make_trainer):
    """A linear policy for a contextual bandit, a moving baseline in a buffer, entropy bonus."""
    model, losses = BanditPolicy(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(bandit_data(), batch_size=32))
    return results(trainer, model, losses)


class LinearThompson(L.LightningModule):
    """A Bayesian regression for each arm, in closed form: nothing is descended."""

    def __init__(self, arms=5, features=6, noise=0.3):
        super().__init__()
        self.automatic_optimization = False
        self.noise = noise
        self.register_buffer("precision", torch.eye(features).repeat(arms, 1, 1))
        self.register_buffer("moment", torch.zeros(arms, features))
        self.register_buffer("regret", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        context, payoffs = batch
        mean = torch.linalg.solve(self.precision, self.moment)
        root = torch.linalg.cholesky(torch.linalg.inv(self.precision))
        noise = torch.randn(len(context), *mean.shape, device=self.device)
        theta = mean + self.noise * torch.einsum("aij,naj->nai", root, noise)
        arm = torch.einsum("nai,ni->na", theta, context).argmax(dim=1)
        reward = payoffs.gather(1, arm[:, None]).squeeze(1)
        chosen = F.one_hot(arm, len(mean)).float()
        self.precision += torch.einsum("na,ni,nj->aij", chosen, context, context)
        self.moment += torch.einsum("na,n,ni->ai", chosen, reward, context)
        missed = (payoffs.amax(1) - reward).mean()
        self.regret += missed
        self.log("regret", self.regret)
        return missed

    def configure_optimizers(self):
        pass


def linear_thompson_sampling_closed_form(make_trainer):
    """Thompson sampling by linear algebra on buffers, without an optimizer."""
    model, losses = LinearThompson(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(bandit_data(), batch_size=32))
    return results(trainer, model, losses)


# Policy gradients


class PolicyRollouts(IterableDataset):
    """Plays with the present policy; yields observations, actions and returns."""

    def __init__(self, policy, batches, n=8, time=6, gamma=0.95):
        self.policy, self.batches, self.time, self.gamma = policy, batches, time, gamma
        self.env = CartPole(n)

    @torch.no_grad()
    def play(self):
        observations, actions, rewards, ends = [], [], [], []
        for _ in range(self.time):
            obs = self.env.state
            action = torch.multinomial(self.policy(obs).softmax(-1), 1).squeeze(1)
            _, reward, done = self.env.step(action)
            observations.append(obs)
            actions.append(action)
            rewards.append(reward)
            ends.append(done.float())
        value, returns = torch.zeros(len(reward)), []
        for r, d in zip(reversed(rewards), reversed(ends), strict=True):
            value = r + self.gamma * value * (1 - d)
            returns.insert(0, value)
        return torch.cat(observations), torch.cat(actions), torch.cat(returns)

    def __iter__(self) -> Iterator:
        for _ in range(self.batches):
            yield self.play()


class Reinforce(L.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.policy = mlp(4, 16, 2)

    def training_step(self, batch, batch_idx):
        obs, action, returns = batch
        returns = (returns - returns.mean()) / (returns.std() + 1e-8)
        log_prob = F.log_softmax(self.policy(obs), dim=-1)
        chosen = log_prob[range(len(action)), action]
        loss = -(chosen * returns).mean()
        self.log("pg_loss", loss, batch_size=len(obs))
        return loss

    def train_dataloader(self):
        return DataLoader(PolicyRollouts(self.policy, batches=10), batch_size=None)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def reinforce_on_policy_iterable(make_trainer):
    """REINFORCE on a cart-pole that an IterableDataset plays with the present weights."""
    model, losses = Reinforce(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model)
    return results(trainer, model, losses, state=model.policy(torch.zeros(1, 4)))


class RunningReward(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.trunk = mlp(4, 16, 16)
        self.actor, self.critic = nn.Linear(16, 2), nn.Linear(16, 1)
        self.running_reward = 0.0

    def training_step(self, batch, batch_idx):
        obs, action, reward, after, done = batch
        h = self.trunk(obs)
        pi, value = Categorical(logits=self.actor(h)), self.critic(h).squeeze(1)
        with torch.no_grad():
            target = reward + 0.95 * self.critic(self.trunk(after)).squeeze(1) * ~done
        loss = -(pi.log_prob(action) * (target - value.detach())).mean()
        loss = loss + F.smooth_l1_loss(value, target)
        self.running_reward = 0.05 * reward.mean().item() + 0.95 * self.running_reward
        self.log("running_reward", self.running_reward)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def actor_critic_running_reward_as_float(make_trainer):
    """One-step actor-critic that keeps its running reward as a Python number, by .item()."""
    model, losses = RunningReward(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(cartpole_transitions(), batch_size=32))
    return results(trainer, model, losses, running=model.running_reward)


def orthogonal(layer, gain=2**0.5):
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class A2C(L.LightningModule):
    def __init__(self, gamma=0.95, entropy=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.trunk = nn.Sequential(orthogonal(nn.Linear(4, 24)), nn.ReLU(), nn.LayerNorm(24))
        self.pi = orthogonal(nn.Linear(24, 2), 0.01)
        self.v = orthogonal(nn.Linear(24, 1), 1.0)
        self.explained = torchmetrics.ExplainedVariance()

    def training_step(self, batch, batch_idx):
        obs, action, reward, after, done = batch
        h = self.trunk(obs)
        values, pi = self.v(h).squeeze(-1), Categorical(logits=self.pi(h))
        with torch.no_grad():
            value = self.v(self.trunk(after[:, -1])).squeeze(-1)
            returns = torch.empty_like(reward)
            for t in range(reward.shape[1] - 1, -1, -1):
                value = reward[:, t] + self.hparams.gamma * value * (~done[:, t])
                returns[:, t] = value
        advantage = returns - values
        policy = -(pi.log_prob(action) * advantage.detach()).mean()
        self.explained(values.detach().flatten(), returns.flatten())
        self.log("explained", self.explained, on_step=False, on_epoch=True)
        self.log_dict({"policy": policy, "value": advantage.square().mean()}, on_epoch=True)
        return policy + 0.5 * advantage.square().mean() - self.hparams.entropy * pi.entropy().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.RMSprop(
            self.parameters(), lr=2e-3, alpha=0.99, eps=1e-5, centered=True
        )
        decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
        return [optimizer], [{"scheduler": decay, "interval": "step"}]


def a2c_n_step_returns(make_trainer):
    """A2C on recorded pieces: n-step returns in a loop, centered RMSprop, a falling rate."""
    data = TensorDataset(*cartpole_rollouts(5))
    model, losses = A2C(), Losses()
    trainer = make_trainer(max_epochs=5, callbacks=[losses], gradient_clip_val=0.5)
    trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True))
    return results(trainer, model, losses)


@dataclass
class PPOConfig:
    clip: float = 0.2
    gamma: float = 0.97
    lam: float = 0.9
    value: float = 0.5
    entropy: float = 0.01
    time: int = 5
    envs: int = 16


class PPO(L.LightningModule):
    """Collects with the present policy in train_dataloader, which each second epoch calls again."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.actor, self.critic = mlp(4, 16, 2), mlp(4, 16, 1)
        self.env = CartPole(config.envs, seed=1)
        self.frames = 0

    @torch.no_grad()
    def collect(self):
        c, rows = self.config, []
        for _ in range(c.time):
            obs = self.env.state
            pi = Categorical(logits=self.actor(obs))
            action = pi.sample()
            _, reward, done = self.env.step(action)
            rows.append((obs, action, pi.log_prob(action), self.critic(obs)[:, 0], reward, done))
        obs, action, log_prob, value, reward, done = map(torch.stack, zip(*rows, strict=True))
        following = torch.cat([value[1:], self.critic(self.env.state).T])
        alive = 1 - done.float()
        delta = reward + c.gamma * following * alive - value
        advantage, running = torch.zeros_like(delta), torch.zeros(c.envs)
        for t in reversed(range(c.time)):
            running = delta[t] + c.gamma * c.lam * alive[t] * running
            advantage[t] = running
        self.frames += advantage.numel()
        flat = (obs, action, log_prob, advantage, advantage + value)
        return TensorDataset(*(t.flatten(0, 1) for t in flat))

    def train_dataloader(self):
        return DataLoader(self.collect(), batch_size=16, shuffle=True, drop_last=True)

    def training_step(self, batch, batch_idx):
        obs, action, old, advantage, target = batch
        pi = Categorical(logits=self.actor(obs))
        log_ratio = pi.log_prob(action) - old
        ratio = log_ratio.exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = ratio.clamp(1 - self.config.clip, 1 + self.config.clip)
        policy = -torch.min(ratio * advantage, clipped * advantage).mean()
        value = F.mse_loss(self.critic(obs).squeeze(-1), target)
        entropy = pi.entropy().mean()
        self.log("approx_kl", ((ratio - 1) - log_ratio).mean())
        self.log("clip_fraction", ((ratio - 1).abs() > self.config.clip).float().mean())
        return policy + self.config.value * value - self.config.entropy * entropy

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3, eps=1e-5)


class StopOnKL(L.Callback):
    def __init__(self, limit):
        self.limit, self.seen = limit, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        kl = trainer.callback_metrics["approx_kl"].item()
        self.seen.append(kl)
        if kl > self.limit:
            trainer.should_stop = True


def ppo_collected_every_second_epoch(make_trainer):
    """PPO: GAE on the host, the loader made anew every second epoch, a callback that watches KL."""
    model, losses, stop = PPO(PPOConfig()), Losses(), StopOnKL(0.5)
    trainer = make_trainer(
        max_epochs=4,
        callbacks=[losses, stop],
        gradient_clip_val=0.5,
        reload_dataloaders_every_n_epochs=2,
    )
    trainer.fit(model)
    return results(trainer, model, losses, kl=stop.seen, frames=model.frames)


class MinibatchPPO(L.LightningModule):
    def __init__(self, epochs=2, minibatches=2):
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters()
        self.mean = mlp(3, 16, 1, out=nn.Tanh)
        self.log_std = nn.Parameter(torch.full((1,), -0.5))
        self.critic = mlp(3, 16, 1, act=nn.ELU)

    def training_step(self, batch, batch_idx):
        obs, action, reward, after = batch
        optimizer = self.optimizers()
        with torch.no_grad():
            old = Normal(self.mean(obs), self.log_std.exp()).log_prob(action).sum(-1)
            values = self.critic(obs).squeeze(-1)
            target = reward + 0.95 * self.critic(after).squeeze(-1)
            advantage = target - values
        for _ in range(self.hparams.epochs):
            for rows in torch.randperm(len(obs)).chunk(self.hparams.minibatches):
                pi = Normal(self.mean(obs[rows]), self.log_std.exp())
                ratio = (pi.log_prob(action[rows]).sum(-1) - old[rows]).exp()
                a = advantage[rows]
                surrogate = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
                v = self.critic(obs[rows]).squeeze(-1)
                limited = values[rows] + (v - values[rows]).clamp(-0.2, 0.2)
                v_loss = torch.maximum((v - target[rows]) ** 2, (limited - target[rows]) ** 2)
                loss = -surrogate.mean() + 0.5 * v_loss.mean() - 0.001 * pi.entropy().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                norm = nn.utils.clip_grad_norm_(self.parameters(), 0.5)
                optimizer.step()
        self.log("norm", norm)
        self.log("std", self.log_std.exp().mean(), on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def ppo_minibatches_inside_the_step(make_trainer):
    """PPO under manual optimization: two passes over two random minibatches in each step."""
    model, losses = MinibatchPPO(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(pendulum_transitions(), batch_size=32))
    return results(trainer, model, losses)


class VTrace(L.LightningModule):
    def __init__(self, gamma=0.95, actions=2):
        super().__init__()
        self.gamma = gamma
        self.core = nn.GRU(4, 16, batch_first=True)
        self.heads = nn.ModuleDict({"pi": nn.Linear(16, actions), "v": nn.Linear(16, 1)})

    def training_step(self, batch, batch_idx):
        obs, action, reward, after, done = batch
        h, _ = self.core(torch.cat([obs, after[:, -1:]], dim=1))
        v = self.heads["v"](h).squeeze(-1)
        pi = Categorical(logits=self.heads["pi"](h[:, :-1]))
        log_prob = pi.log_prob(action)
        discount = self.gamma * (~done).float()
        with torch.no_grad():
            rho = (log_prob - math.log(0.5)).exp()
            clipped, c = rho.clamp(max=1.0), rho.clamp(max=1.0)
            delta = clipped * (reward + discount * v[:, 1:] - v[:, :-1])
            correction, corrections = torch.zeros_like(delta[:, 0]), []
            for t in reversed(range(delta.shape[1])):
                correction = delta[:, t] + discount[:, t] * c[:, t] * correction
                corrections.append(correction)
            vs = v[:, :-1] + torch.stack(corrections[::-1], dim=1)
            following = torch.cat([vs[:, 1:], v[:, -1:]], dim=1)
            advantage = clipped * (reward + discount * following - v[:, :-1])
        policy = -(log_prob * advantage).sum(1).mean()
        baseline = 0.5 * (vs - v[:, :-1]).square().sum(1).mean()
        self.log_dict({"policy": policy, "baseline": baseline, "rho": rho.mean()})
        return policy + baseline - 0.01 * pi.entropy().sum(1).mean()

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), lr=1e-3, eps=0.01)


def impala_vtrace_gru(make_trainer):
    """IMPALA's learner: V-trace on recorded pieces, a GRU core, a norm clipped by Lightning."""
    data = TensorDataset(*cartpole_rollouts(4, seed=3))
    model, losses = VTrace(), Losses()
    trainer = make_trainer(
        max_epochs=5, callbacks=[losses], gradient_clip_val=40.0, gradient_clip_algorithm="norm"
    )
    trainer.fit(model, DataLoader(data, batch_size=8))
    return results(trainer, model, losses)


class NaturalGradient(L.LightningModule):
    """Conjugate gradients on Fisher products; the critic has an optimizer."""

    def __init__(self, max_kl=0.01):
        super().__init__()
        self.automatic_optimization = False
        self.max_kl = max_kl
        self.policy, self.critic = mlp(4, 8, 2), mlp(4, 8, 1)

    def fisher_product(self, kl_grad, v):
        parameters = list(self.policy.parameters())
        products = torch.autograd.grad((kl_grad * v).sum(), parameters, retain_graph=True)
        return torch.cat([p.flatten() for p in products]) + 0.1 * v

    def training_step(self, batch, batch_idx):
        obs, action, reward, after, done = batch
        value = self.critic(obs).squeeze(1)
        with torch.no_grad():
            target = reward + 0.95 * self.critic(after).squeeze(1) * (~done)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        v_loss = F.mse_loss(value, target)
        self.manual_backward(v_loss)
        optimizer.step()

        advantage = (target - value).detach()
        log_p = self.policy(obs).log_softmax(-1)
        old = log_p.detach()
        parameters = list(self.policy.parameters())
        surrogate = (log_p.gather(1, action[:, None]).squeeze(1) * advantage).mean()
        g = torch.cat(
            [p.flatten() for p in torch.autograd.grad(surrogate, parameters, retain_graph=True)]
        )
        kl = (old.exp() * (old - log_p)).sum(1).mean()
        kl_grad = torch.cat(
            [p.flatten() for p in torch.autograd.grad(kl, parameters, create_graph=True)]
        )
        x, r, p = torch.zeros_like(g), g.clone(), g.clone()
        for _ in range(3):
            ap = self.fisher_product(kl_grad, p)
            alpha = r.dot(r) / (p.dot(ap) + 1e-10)
            x = x + alpha * p
            new = r - alpha * ap
            p = new + (new.dot(new) / (r.dot(r) + 1e-10)) * p
            r = new
        scale = torch.sqrt(2 * self.max_kl / (x.dot(self.fisher_product(kl_grad, x)) + 1e-10))
        with torch.no_grad():
            vector_to_parameters(parameters_to_vector(parameters) + scale * x, parameters)
        self.log("scale", scale)
        self.log("residual", r.norm())
        return v_loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.critic.parameters(), lr=1e-2)


def natural_policy_gradient(make_trainer):
    """Natural gradient: Fisher products by two gradients, three rounds of conjugate gradients."""
    model, losses = NaturalGradient(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(cartpole_transitions(), batch_size=32))
    return results(trainer, model, losses)


class EvolutionStrategy(L.LightningModule):
    def __init__(self, population=12, sigma=0.1):
        super().__init__()
        self.automatic_optimization = False
        self.half, self.sigma = population // 2, sigma
        self.policy = mlp(3, 8, 1, out=nn.Tanh)

    def fitness(self, parameters, obs):
        action = functional_call(self.policy, parameters, (obs,)).squeeze(-1)
        wanted = (-2 * obs[:, 1] - obs[:, 2]).clamp(-1, 1)
        return -(action - wanted).square().mean()

    @torch.no_grad()
    def training_step(self, batch, batch_idx):
        obs = batch[0]
        center = dict(self.policy.named_parameters())
        noise = {}
        for name, p in center.items():
            e = torch.randn(self.half, *p.shape, device=p.device)
            noise[name] = torch.cat([e, -e])
        candidates = {k: p + self.sigma * noise[k] for k, p in center.items()}
        scores = vmap(self.fitness, in_dims=(0, None))(candidates, obs)
        ranks = scores.argsort().argsort().float()
        weights = ranks / (len(ranks) - 1) - 0.5
        optimizer = self.optimizers()
        for name, p in center.items():
            p.grad = -torch.tensordot(weights, noise[name], dims=1) / (len(ranks) * self.sigma)
        optimizer.step()
        optimizer.zero_grad()
        self.log("best", scores.max(), prog_bar=True, on_step=True, on_epoch=True, reduce_fx="max")
        return -scores.mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.policy.parameters(), lr=0.02)


def evolution_strategy_vmap(make_trainer):
    """Evolution strategies: mirrored noise, ranks, functional_call under vmap, p.grad by hand."""
    model, losses = EvolutionStrategy(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(pendulum_transitions(), batch_size=32))
    return results(trainer, model, losses)


# Q-learning


class Transition(NamedTuple):
    state: torch.Tensor
    action: int
    reward: float
    done: bool
    after: torch.Tensor


class Replay:
    def __init__(self, capacity, seed=0):
        self.rows = deque(maxlen=capacity)
        self.rng = random.Random(seed)

    def append(self, row):
        self.rows.append(row)

    def sample(self, n):
        return self.rng.sample(list(self.rows), n)


class ReplaySamples(IterableDataset):
    """As many transitions as an epoch takes, drawn when it begins."""

    def __init__(self, replay, n):
        self.replay, self.n = replay, n

    def __iter__(self):
        yield from self.replay.sample(self.n)


class Agent:
    """Plays one cart-pole, with a random action now and then."""

    def __init__(self, replay, seed=0):
        self.env, self.replay, self.rng = CartPole(1, seed), replay, random.Random(seed)

    @torch.no_grad()
    def play_step(self, net, epsilon):
        state = self.env.state
        if self.rng.random() < epsilon:
            action = self.rng.randrange(2)
        else:
            action = int(net(state).argmax(dim=1).item())
        after, reward, done = self.env.step(torch.tensor([action]))
        row = Transition(state[0], action, float(reward[0]), bool(done[0]), after[0])
        self.replay.append(row)
        return row.reward, row.done


class DQN(L.LightningModule):
    def __init__(self, gamma=0.95, sync=4, fill=200, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net, self.target = mlp(4, 24, 2, act=nn.ReLU), mlp(4, 24, 2, act=nn.ReLU)
        self.target.load_state_dict(self.net.state_dict())
        self.replay = Replay(400)
        self.agent = Agent(self.replay)
        for _ in range(fill):
            self.agent.play_step(self.net, epsilon=1.0)
        self.total_reward = 0.0

    def dqn_loss(self, batch):
        q = self.net(batch.state).gather(1, batch.action.long().unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            best = self.target(batch.after).max(1)[0]
            best = best.masked_fill(batch.done, 0.0)
        return F.mse_loss(q, best * self.hparams.gamma + batch.reward.float())

    def train_dataloader(self):
        return DataLoader(ReplaySamples(self.replay, 160), batch_size=16)

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=self.hparams.lr)


class TutorialDQN(DQN):
    """As in Lightning's tutorial: the agent plays within the step."""

    def training_step(self, batch, nb_batch):
        epsilon = max(0.05, 1.0 - self.global_step / 20)
        reward, _ = self.agent.play_step(self.net, epsilon)
        self.total_reward += reward
        loss = self.dqn_loss(batch)
        if self.global_step % self.hparams.sync == 0:
            self.target.load_state_dict(self.net.state_dict())
        self.log_dict({"reward": reward, "train_loss": loss})
        return loss


class HostDQN(DQN):
    """The agent plays, and the target follows, after the step."""

    def training_step(self, batch, batch_idx):
        loss = self.dqn_loss(batch)
        self.log("td_loss", loss, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        epsilon = max(0.05, 1.0 - self.global_step / 20)
        for _ in range(2):
            reward, _ = self.agent.play_step(self.net, epsilon)
            self.total_reward += reward
        self.log("total_reward", self.total_reward, on_step=True, on_epoch=False)
        if self.global_step % self.hparams.sync == 0:
            self.target.load_state_dict(self.net.state_dict())


def dqn_plays_inside_training_step(make_trainer):
    """Lightning's DQN tutorial: play_step, epsilon and target sync inside training_step."""
    model, losses = TutorialDQN(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model)
    return results(trainer, model, losses, reward=model.total_reward)


def dqn_plays_after_the_step(make_trainer):
    """DQN with replay in a deque, played in on_train_batch_end; a hard target update there too."""
    model, losses = HostDQN(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model)
    return results(trainer, model, losses, reward=model.total_reward, rows=len(model.replay.rows))


class Dueling(nn.Module):
    def __init__(self, actions=2):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 24), nn.ReLU())
        self.value = nn.Linear(24, 1)
        self.advantage = nn.Linear(24, actions)

    def forward(self, x):
        h = self.features(x)
        a = self.advantage(h)
        return self.value(h) + a - a.mean(dim=1, keepdim=True)


class DoubleDueling(L.LightningModule):
    def __init__(self, tau=0.05):
        super().__init__()
        self.q = Dueling()
        self.q_target = copy.deepcopy(self.q)
        for p in self.q_target.parameters():
            p.requires_grad = False
        self.tau = tau
        self.loss_fn = nn.SmoothL1Loss()
        self.mean_q = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        s, a, r, s2, d = batch
        q = self.q(s)
        with torch.no_grad():
            best = self.q(s2).argmax(1, keepdim=True)
            y = r + 0.95 * self.q_target(s2).gather(1, best).squeeze(1) * (1 - d.float())
        loss = self.loss_fn(q.gather(1, a[:, None]).squeeze(1), y)
        self.mean_q.update(q.detach())
        self.log("mean_q", self.mean_q, on_step=True, on_epoch=True)
        with torch.no_grad():
            for t, p in zip(self.q_target.parameters(), self.q.parameters(), strict=True):
                t.copy_(self.tau * p + (1 - self.tau) * t)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.q.parameters(), lr=3e-3, amsgrad=True)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4, eta_min=1e-4),
        }


def double_dueling_dqn_soft_target(make_trainer):
    """Double, dueling DQN on recorded transitions; the target follows a little in each step."""
    model, losses = DoubleDueling(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(cartpole_transitions(), batch_size=32, shuffle=True))
    return results(trainer, model, losses)


class Categorical51(L.LightningModule):
    def __init__(self, atoms=11, low=0.0, high=10.0, gamma=0.9):
        super().__init__()
        self.save_hyperparameters()
        self.net = mlp(4, 24, 2 * atoms, act=nn.SiLU)
        self.target = mlp(4, 24, 2 * atoms, act=nn.SiLU)
        self.register_buffer("support", torch.linspace(low, high, atoms))

    def on_train_epoch_start(self):
        self.target.load_state_dict(self.net.state_dict())

    def project(self, after, reward, done):
        h = self.hparams
        step = (h.high - h.low) / (h.atoms - 1)
        p = self.target(after).view(-1, 2, h.atoms).softmax(-1)
        best = (p * self.support).sum(-1).argmax(1)
        p = p[torch.arange(len(p)), best]
        z = (reward[:, None] + (~done)[:, None] * h.gamma * self.support).clamp(h.low, h.high)
        b = (z - h.low) / step
        lower, upper = b.floor().long(), b.ceil().long()
        lower = torch.where((upper > 0) & (lower == upper), lower - 1, lower)
        upper = torch.where((lower < h.atoms - 1) & (lower == upper), upper + 1, upper)
        out = torch.zeros_like(p)
        out.scatter_add_(1, lower, p * (upper.float() - b))
        out.scatter_add_(1, upper, p * (b - lower.float()))
        return out

    def training_step(self, batch, batch_idx):
        obs, action, reward, after, done = batch
        with torch.no_grad():
            wanted = self.project(after, reward, done)
        logits = self.net(obs).view(-1, 2, self.hparams.atoms)
        log_p = logits[torch.arange(len(obs)), action].log_softmax(-1)
        elementwise = -(wanted * log_p).sum(-1)
        self.log("kl", (elementwise + (wanted * (wanted + 1e-8).log()).sum(-1)).mean())
        return elementwise.mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=3e-3, eps=1e-4)


def c51_distributional(make_trainer):
    """C51: the projected target distribution by scatter_add_, synced when an epoch begins."""
    model, losses = Categorical51(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(cartpole_transitions(), batch_size=32))
    return results(trainer, model, losses)


class NoisyLinear(nn.Module):
    def __init__(self, cin, cout, sigma=0.5):
        super().__init__()
        bound = 1 / cin**0.5
        self.mu_w = nn.Parameter(torch.empty(cout, cin).uniform_(-bound, bound))
        self.mu_b = nn.Parameter(torch.empty(cout).uniform_(-bound, bound))
        self.sigma_w = nn.Parameter(torch.full((cout, cin), sigma * bound))
        self.sigma_b = nn.Parameter(torch.full((cout,), sigma * bound))
        self.register_buffer("eps_w", torch.zeros(cout, cin))
        self.register_buffer("eps_b", torch.zeros(cout))

    def reset_noise(self):
        a, b = (torch.randn(n) for n in self.mu_w.shape)
        a, b = a.sign() * a.abs().sqrt(), b.sign() * b.abs().sqrt()
        self.eps_w.copy_(a.outer(b))
        self.eps_b.copy_(a)

    def forward(self, x):
        if not self.training:
            return F.linear(x, self.mu_w, self.mu_b)
        return F.linear(
            x, self.mu_w + self.sigma_w * self.eps_w, self.mu_b + self.sigma_b * self.eps_b
        )


class PrioritizedRows(IterableDataset):
    def __init__(self, data, batches, n=16, alpha=0.6, beta=0.4):
        self.columns, self.batches, self.n = data.tensors, batches, n
        self.alpha, self.beta = alpha, beta
        self.priorities = torch.ones(len(data))
        self.g = torch.Generator().manual_seed(0)

    def __iter__(self):
        for _ in range(self.batches):
            p = self.priorities**self.alpha
            index = torch.multinomial(p / p.sum(), self.n, generator=self.g)
            weight = (len(p) * p[index] / p.sum()) ** -self.beta
            rows = tuple(c[index] for c in self.columns)
            yield {"rows": rows, "index": index, "weight": weight / weight.max()}


class NoisyQuantiles(L.LightningModule):
    """Quantile regression with noisy layers and prioritized replay."""

    def __init__(self, replay, quantiles=8):
        super().__init__()
        self.replay, self.n = replay, quantiles
        self.net = nn.Sequential(NoisyLinear(4, 24), nn.ReLU(), NoisyLinear(24, 2 * quantiles))
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        taus = (torch.arange(quantiles) + 0.5) / quantiles
        self.register_buffer("taus", taus.view(1, -1, 1), persistent=False)

    def training_step(self, batch, batch_idx):
        obs, action, reward, after, done = batch["rows"]
        for m in self.net.modules():
            if isinstance(m, NoisyLinear):
                m.reset_noise()
        rows = torch.arange(len(obs), device=self.device)
        q = self.net(obs).view(-1, 2, self.n)[rows, action]
        with torch.no_grad():
            q2 = self.target(after).view(-1, 2, self.n)
            best = self.net(after).view(-1, 2, self.n).mean(-1).argmax(1)
            y = reward[:, None] + 0.9 * q2[rows, best] * (~done)[:, None]
        u = y[:, None, :] - q[:, :, None]
        huber = F.huber_loss(
            q[:, :, None].expand_as(u), y[:, None, :].expand_as(u), reduction="none"
        )
        per_row = ((self.taus - (u.detach() < 0).float()).abs() * huber).mean(2).sum(1)
        loss = (per_row * batch["weight"]).mean()
        self.log("loss", loss, batch_size=len(obs))
        return {"loss": loss, "error": u.detach().abs().mean((1, 2))}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.replay.priorities[batch["index"]] = outputs["error"] + 1e-3
        with torch.no_grad():
            for t, p in zip(self.target.parameters(), self.net.parameters(), strict=True):
                t.data.mul_(0.95).add_(p.data, alpha=0.05)

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=1e-3, eps=1.5e-4)


def noisy_quantile_dqn_prioritized(make_trainer):
    """QR-DQN with noisy layers; errors of each step set the priorities of the next draws."""
    replay = PrioritizedRows(cartpole_transitions(), batches=10)
    model, losses = NoisyQuantiles(replay), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(replay, batch_size=None))
    return results(trainer, model, losses, priorities=replay.priorities)


class QTable(L.LightningModule):
    """A table of values for a grid of 4 by 4, as an embedding."""

    def __init__(self, gamma=0.9):
        super().__init__()
        self.gamma = gamma
        self.table = nn.Embedding(16, 4)
        nn.init.zeros_(self.table.weight)
        self.visits = torchmetrics.SumMetric()

    def training_step(self, batch, batch_idx):
        state, action, reward, after, done = batch.values()
        q = self.table(state).take_along_dim(action[:, None], 1)[:, 0]
        target = reward + self.gamma * self.table(after).amax(1).detach() * done.logical_not()
        self.visits.update(done)
        self.log("goals", self.visits, on_step=False, on_epoch=True)
        return 0.5 * (target - q).square().sum()

    def on_train_epoch_end(self):
        self.greedy = self.table.weight.argmax(dim=1).tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class GridSteps(Dataset):
    """Every step from every place of a grid, as dicts of Python numbers."""

    moves = ((-1, 0), (1, 0), (0, -1), (0, 1))

    def __len__(self):
        return 64

    def __getitem__(self, i):
        state, action = divmod(i, 4)
        row, column = divmod(state, 4)
        row = min(3, max(0, row + self.moves[action][0]))
        column = min(3, max(0, column + self.moves[action][1]))
        after = 4 * row + column
        goal = after == 15
        return {
            "state": state,
            "action": action,
            "reward": torch.tensor(1.0 if goal else -0.04),
            "after": after,
            "done": goal,
        }


def gridworld_q_table(make_trainer):
    """Q-learning in an embedding on a grid world; the greedy actions as a list of numbers."""
    model, losses = QTable(), Losses()
    trainer = make_trainer(max_epochs=6, callbacks=[losses])
    trainer.fit(model, DataLoader(GridSteps(), batch_size=16))
    return results(trainer, model, losses, greedy=model.greedy)


class EligibilityTraces(L.LightningModule):
    """TD(lambda) by hand: traces are buffers that live on from batch to batch."""

    def __init__(self, n=8, gamma=0.95, lam=0.8, alpha=0.05):
        super().__init__()
        self.automatic_optimization = False
        self.gamma, self.lam, self.alpha = gamma, lam, alpha
        self.weight = nn.Parameter(torch.zeros(9))
        self.register_buffer("trace", torch.zeros(n, 9))

    def features(self, obs):
        return torch.cat([obs, obs.square(), torch.ones_like(obs[:, :1])], dim=1)

    def training_step(self, batch, batch_idx):
        obs, _, reward, after, done = batch
        with torch.no_grad():
            x, x2 = self.features(obs), self.features(after)
            delta = reward + self.gamma * (x2 @ self.weight) * (~done) - x @ self.weight
            self.trace = self.gamma * self.lam * self.trace + x
            self.weight += self.alpha * (delta[:, None] * self.trace).mean(0)
            self.trace *= (~done)[:, None]
        self.log("delta", delta.abs().mean(), on_step=True, on_epoch=True)
        return delta.square().mean()

    def configure_optimizers(self):
        return None


def td_lambda_traces(make_trainer):
    """TD(lambda) with eligibility traces kept in a buffer from step to step."""
    columns = [c.transpose(0, 1).contiguous() for c in cartpole_rollouts(10)]
    data = [tuple(c[t, :8] for c in columns) for t in range(10)]
    model, losses = EligibilityTraces(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(data, batch_size=None))
    return results(trainer, model, losses)


class MixedAgents(nn.Module):
    """One network for all agents, and a mixture whose weights follow from the state."""

    def __init__(self, agents=3, obs=4, actions=3, state=6, embed=8):
        super().__init__()
        self.agents = agents
        self.agent = mlp(obs + agents, 16, actions, act=nn.ReLU)
        self.w1 = nn.Linear(state, agents * embed)
        self.b1 = nn.Linear(state, embed)
        self.w2 = nn.Linear(state, embed)
        self.b2 = mlp(state, embed, 1, act=nn.ReLU)

    def utilities(self, obs):
        who = torch.eye(self.agents, device=obs.device).expand(len(obs), -1, -1)
        return self.agent(torch.cat([obs, who], dim=-1))

    def forward(self, q, state):
        w1 = self.w1(state).abs().view(len(q), self.agents, -1)
        h = F.elu(torch.bmm(q.unsqueeze(1), w1).squeeze(1) + self.b1(state))
        return (h * self.w2(state).abs()).sum(1) + self.b2(state).squeeze(1)


class QMix(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.mixed = MixedAgents()
        self.old = None

    def setup(self, stage):
        self.old = copy.deepcopy(self.mixed).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        obs, state, action, reward, available, obs2, state2 = batch
        q = self.mixed.utilities(obs).gather(2, action.unsqueeze(2)).squeeze(2)
        with torch.no_grad():
            q2 = self.old.utilities(obs2).masked_fill(~available, -1e9).amax(2)
            y = reward + 0.9 * self.old(q2, state2)
        loss = F.mse_loss(self.mixed(q, state), y)
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self):
        self.old.load_state_dict(self.mixed.state_dict())

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.mixed.parameters(), lr=2e-3)


def qmix_monotonic_mixing(make_trainer):
    """QMIX: a hypernetwork with absolute weights, unavailable actions masked, old copy in setup."""
    g = torch.Generator().manual_seed(0)
    n = 160
    available = torch.rand(n, 3, 3, generator=g) > 0.3
    available[..., 0] = True
    data = TensorDataset(
        torch.randn(n, 3, 4, generator=g),
        torch.randn(n, 6, generator=g),
        torch.randint(0, 3, (n, 3), generator=g),
        torch.rand(n, generator=g),
        available,
        torch.randn(n, 3, 4, generator=g),
        torch.randn(n, 6, generator=g),
    )
    model, losses = QMix(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], gradient_clip_val=10.0)
    trainer.fit(model, DataLoader(data, batch_size=16))
    return results(trainer, model, losses)


# Continuous control


class SquashedActor(nn.Module):
    def __init__(self, obs=3, actions=1):
        super().__init__()
        self.body = mlp(obs, 24, 24, act=nn.ReLU, out=nn.ReLU)
        self.mu, self.log_std = nn.Linear(24, actions), nn.Linear(24, actions)

    def forward(self, obs):
        h = self.body(obs)
        mu, log_std = self.mu(h), self.log_std(h)
        log_std = -5 + 3.5 * (torch.tanh(log_std) + 1)
        pi = Normal(mu, log_std.exp())
        u = pi.rsample()
        log_prob = pi.log_prob(u) - 2 * (math.log(2) - u - F.softplus(-2 * u))
        return torch.tanh(u), log_prob.sum(-1)


class TwinQ(nn.Module):
    def __init__(self, obs=3, actions=1):
        super().__init__()
        self.q1 = mlp(obs + actions, 24, 1, act=nn.ReLU)
        self.q2 = mlp(obs + actions, 24, 1, act=nn.ReLU)

    def forward(self, obs, action):
        x = torch.cat([obs, action], dim=-1)
        return self.q1(x).squeeze(-1), self.q2(x).squeeze(-1)


class SAC(L.LightningModule):
    """Draws its own batches from a memory in buffers; the loader only counts steps."""

    def __init__(self, n=256, gamma=0.95, tau=0.05, batch_size=16):
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters()
        self.actor, self.critic = SquashedActor(), TwinQ()
        self.critic_target = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.zeros(()))
        self.target_entropy = -1.0
        sizes = {"obs": (3,), "action": (1,), "reward": (), "after": (3,)}
        for name, size in sizes.items():
            self.register_buffer(f"memory_{name}", torch.zeros(n, *size), persistent=False)
        self.env = Pendulum(32)
        self.place = 0

    @torch.no_grad()
    def explore(self, steps=1):
        for _ in range(steps):
            obs = self.env.obs
            action, _ = self.actor(obs)
            after, reward = self.env.step(action.squeeze(1))
            rows = slice(self.place, self.place + 32)
            self.memory_obs[rows], self.memory_action[rows] = obs, action
            self.memory_reward[rows], self.memory_after[rows] = reward, after
            self.place = (self.place + 32) % self.hparams.n

    def on_train_start(self):
        self.explore(8)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx % 2 == 0:
            self.explore()

    def training_step(self, batch, batch_idx):
        h = self.hparams
        rows = torch.randint(h.n, (h.batch_size,), device=self.device)
        obs, action = self.memory_obs[rows], self.memory_action[rows]
        reward, after = self.memory_reward[rows], self.memory_after[rows]
        opt_critic, opt_actor, opt_alpha = self.optimizers()
        alpha = self.log_alpha.exp().detach()

        with torch.no_grad():
            a2, logp2 = self.actor(after)
            y = reward + h.gamma * (torch.min(*self.critic_target(after, a2)) - alpha * logp2)
        q1, q2 = self.critic(obs, action)
        critic_loss = F.mse_loss(q1, y) + F.mse_loss(q2, y)
        opt_critic.zero_grad()
        self.manual_backward(critic_loss)
        opt_critic.step()

        a, logp = self.actor(obs)
        actor_loss = (alpha * logp - torch.min(*self.critic(obs, a))).mean()
        opt_actor.zero_grad()
        self.manual_backward(actor_loss)
        opt_actor.step()

        alpha_loss = -(self.log_alpha * (logp.detach() + self.target_entropy)).mean()
        opt_alpha.zero_grad()
        self.manual_backward(alpha_loss)
        opt_alpha.step()

        with torch.no_grad():
            for t, p in zip(self.critic_target.parameters(), self.critic.parameters(), strict=True):
                t.data.lerp_(p.data, h.tau)
        self.log_dict(
            {"critic": critic_loss, "actor": actor_loss, "alpha": alpha}, batch_size=h.batch_size
        )
        return critic_loss

    def train_dataloader(self):
        return DataLoader(range(20), batch_size=None)

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.critic.parameters(), lr=3e-3),
            torch.optim.Adam(self.actor.parameters(), lr=1e-3),
            torch.optim.Adam([self.log_alpha], lr=1e-2),
        )


def sac_memory_in_buffers(make_trainer):
    """SAC: twin critics, learned temperature, three optimizers, explored on the host."""
    model, losses = SAC(), Losses()
    trainer = make_trainer(max_epochs=1, callbacks=[losses])
    trainer.fit(model)
    return results(trainer, model, losses, place=model.place, memory=model.memory_reward)


class TD3(L.LightningModule):
    def __init__(self, policy_delay=2):
        super().__init__()
        self.automatic_optimization = False
        self.policy_delay = policy_delay
        self.actor = mlp(3, 24, 1, act=nn.ReLU, out=nn.Tanh)
        self.critic = TwinQ()
        self.old_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.old_critic = copy.deepcopy(self.critic).requires_grad_(False)
        self.updates = 0

    def critic_loss(self, batch):
        obs, action, reward, after = batch
        with torch.no_grad():
            noise = (0.2 * torch.randn_like(action)).clamp(-0.5, 0.5)
            a2 = (self.old_actor(after) + noise).clamp(-1, 1)
            y = reward + 0.95 * torch.min(*self.old_critic(after, a2))
        q1, q2 = self.critic(obs, action)
        return F.mse_loss(q1, y) + F.mse_loss(q2, y)

    def training_step(self, batch, batch_idx):
        self.updates += 1
        critic_opt, actor_opt = self.optimizers()
        loss = self.critic_loss(batch)
        critic_opt.zero_grad()
        self.manual_backward(loss)
        critic_opt.step()
        if self.updates % self.policy_delay == 0:
            actor_loss = -self.critic(batch[0], self.actor(batch[0]))[0].mean()
            actor_opt.zero_grad()
            self.manual_backward(actor_loss)
            actor_opt.step()
            for old, new in ((self.old_actor, self.actor), (self.old_critic, self.critic)):
                for t, p in zip(old.parameters(), new.parameters(), strict=True):
                    t.data.copy_(0.995 * t.data + 0.005 * p.data)
        self.log("critic_loss", loss)
        return loss

    def configure_optimizers(self):
        critic = torch.optim.Adam(self.critic.parameters(), lr=3e-3)
        return critic, torch.optim.Adam(self.actor.parameters(), lr=1e-3)


def td3_delayed_by_a_counter(make_trainer):
    """TD3: every second step moves the actor and the targets, counted by self.updates."""
    model, losses = TD3(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(pendulum_transitions(), batch_size=32))
    return results(trainer, model, losses, updates=model.updates)


class OrnsteinUhlenbeck:
    def __init__(self, n, theta=0.15, sigma=0.2, seed=0):
        self.theta, self.sigma, self.state = theta, sigma, torch.zeros(n)
        self.g = torch.Generator().manual_seed(seed)

    def __call__(self):
        noise = torch.randn(self.state.shape, generator=self.g)
        self.state = (1 - self.theta) * self.state + self.sigma * noise
        return self.state


class FreshTransitions(IterableDataset):
    """Each batch is the present policy's, with correlated noise, beside older ones."""

    def __init__(self, module, batches):
        self.module, self.batches = module, batches
        self.env, self.noise = Pendulum(16, seed=2), OrnsteinUhlenbeck(16)
        self.old = deque(maxlen=8)

    def __len__(self):
        return self.batches

    def __iter__(self):
        for i in range(self.batches):
            with torch.no_grad():
                obs = self.env.obs
                action = (self.module.actor(obs).squeeze(1) + self.noise()).clamp(-1, 1)
            after, reward = self.env.step(action)
            new = (obs, action.unsqueeze(1), reward, after)
            before = self.old[i % len(self.old)] if self.old else new
            self.old.append(new)
            yield [torch.cat(pair) for pair in zip(new, before, strict=True)]


class DDPG(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.actor = nn.Sequential(
            nn.Linear(3, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 1), nn.Tanh()
        )
        self.critic = nn.Bilinear(24, 1, 1)
        self.features = nn.Sequential(nn.Linear(3, 24), nn.LayerNorm(24), nn.ReLU())
        nn.init.uniform_(self.actor[3].weight, -3e-3, 3e-3)
        self.targets = nn.ModuleDict(
            {k: copy.deepcopy(getattr(self, k)) for k in ("actor", "critic", "features")}
        )
        self.targets.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        obs, action, reward, after = batch
        actor_opt, critic_opt = self.optimizers()
        t = self.targets
        with torch.no_grad():
            q2 = t["critic"](t["features"](after), t["actor"](after)).squeeze(1)
        q = self.critic(self.features(obs), action).squeeze(1)
        critic_loss = F.huber_loss(q, reward + 0.95 * q2)
        critic_opt.zero_grad()
        self.manual_backward(critic_loss)
        self.clip_gradients(critic_opt, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        critic_opt.step()

        self.toggle_optimizer(actor_opt)
        actor_loss = -self.critic(self.features(obs), self.actor(obs)).mean()
        actor_opt.zero_grad()
        self.manual_backward(actor_loss)
        actor_opt.step()
        self.untoggle_optimizer(actor_opt)
        for name, target in t.items():
            source = dict(getattr(self, name).named_parameters())
            for key, p in target.named_parameters():
                p.data.mul_(0.98).add_(source[key].data, alpha=0.02)
        self.log("q", q.mean(), prog_bar=True, on_step=True, on_epoch=True, batch_size=len(q))
        return {"loss": critic_loss, "actor_loss": actor_loss.detach()}

    def configure_optimizers(self):
        critic = [*self.critic.parameters(), *self.features.parameters()]
        return [
            torch.optim.Adam(self.actor.parameters(), lr=1e-3),
            torch.optim.Adam(critic, lr=3e-3, weight_decay=1e-2),
        ]


def ddpg_fresh_transitions(make_trainer):
    """DDPG: the loader plays with correlated noise; Bilinear critic, toggles, soft targets."""
    model, losses = DDPG(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(FreshTransitions(model, 10), batch_size=None))
    return results(trainer, model, losses)


class BetaPolicy(L.LightningModule):
    """Advantage-weighted regression with a Beta policy on actions between -1 and 1."""

    def __init__(self, temperature=1.0):
        super().__init__()
        self.temperature = temperature
        self.net = mlp(3, 24, 2, act=nn.Hardtanh, out=nn.Softplus)
        self.value = mlp(3, 24, 1, act=nn.Softsign)

    def training_step(self, batch, batch_idx):
        obs, action, reward, after = batch
        v = self.value(obs).squeeze(-1)
        target = reward + 0.9 * self.value(after).squeeze(-1).detach()
        advantage = (target - v).detach()
        weight = torch.exp(advantage / self.temperature).clamp(max=20.0)
        a, b = (self.net(obs) + 1).unbind(-1)
        scaled = ((action.squeeze(-1) + 1) / 2).clamp(1e-4, 1 - 1e-4)
        log_prob = Beta(a, b).log_prob(scaled)
        self.log("weight", weight.mean(), on_epoch=True)
        return -(weight * log_prob).mean() + F.mse_loss(v, target)

    def configure_optimizers(self):
        return torch.optim.Adadelta(self.parameters(), lr=0.5, rho=0.9)


def advantage_weighted_beta_policy(make_trainer):
    """Advantage-weighted regression, a Beta distribution's log_prob, Adadelta."""
    model, losses = BetaPolicy(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(pendulum_transitions(), batch_size=32))
    return results(trainer, model, losses)


# Offline


class ImplicitQ(L.LightningModule):
    def __init__(self, expectile=0.7, beta=3.0):
        super().__init__()
        self.save_hyperparameters()
        self.q, self.v = TwinQ(), mlp(3, 24, 1, act=nn.ReLU)
        self.policy = mlp(3, 24, 1, act=nn.ReLU, out=nn.Tanh)
        self.log_std = nn.Parameter(torch.zeros(1))
        self.old_q = copy.deepcopy(self.q)
        self.old_q.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        obs, action, reward, after = batch
        with torch.no_grad():
            old = torch.minimum(*self.old_q(obs, action))
            y = reward + 0.95 * self.v(after).squeeze(-1)
        v = self.v(obs).squeeze(-1)
        diff = old - v
        side = torch.where(diff > 0, self.hparams.expectile, 1 - self.hparams.expectile)
        v_loss = (side * diff**2).mean()
        q_loss = sum(F.mse_loss(q, y) for q in self.q(obs, action))
        weight = (self.hparams.beta * diff.detach()).exp().clamp(max=100)
        pi = Normal(self.policy(obs), self.log_std.clamp(-5, 2).exp())
        pi_loss = -(weight * pi.log_prob(action).sum(-1)).mean()
        for name, value in [("v", v_loss), ("q", q_loss), ("pi", pi_loss)]:
            self.log(f"loss/{name}", value, on_step=False, on_epoch=True)
        return v_loss + q_loss + pi_loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for old, new in zip(self.old_q.parameters(), self.q.parameters(), strict=True):
            old.data.lerp_(new.data, 0.05)

    def predict_step(self, batch, batch_idx):
        return {"action": self.policy(batch[0]), "std": self.log_std.exp(), "source": "policy"}

    def configure_optimizers(self):
        groups = [
            {"params": self.q.parameters(), "lr": 3e-3},
            {"params": self.v.parameters(), "lr": 3e-3},
            {"params": [*self.policy.parameters(), self.log_std], "lr": 1e-3, "weight_decay": 1e-4},
        ]
        optimizer = torch.optim.Adam(groups)
        rates = [lambda t: 1.0, lambda t: 1.0, lambda t: 0.5 * (1 + math.cos(math.pi * t / 20))]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def implicit_q_learning_offline(make_trainer):
    """IQL: expectiles, weighted regression, three groups with a schedule each."""
    data = pendulum_transitions()
    model, losses = ImplicitQ(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True))
    predicted = trainer.predict(model, DataLoader(data, batch_size=160))
    return results(trainer, model, losses, predicted=predicted)


class ConservativeQ(L.LightningModule):
    def __init__(self, alpha=1.0, samples=4):
        super().__init__()
        self.alpha, self.samples = alpha, samples
        members = [mlp(4, 16, 1, act=nn.ReLU) for _ in range(3)]
        stacked, _ = stack_module_state(members)
        self.members = nn.ParameterDict(
            {k.replace(".", "_"): nn.Parameter(v.detach()) for k, v in stacked.items()}
        )
        self.names = list(stacked)
        self.base = [members[0].to("meta")]

    def q(self, obs, action):
        x = torch.cat([obs, action], dim=-1)
        weights = {k: self.members[k.replace(".", "_")] for k in self.names}
        out = vmap(lambda w: functional_call(self.base[0], w, (x,)))(weights)
        return out.squeeze(-1)

    def training_step(self, batch, batch_idx):
        obs, action, reward, after = batch
        q = self.q(obs, action)
        many = torch.empty(self.samples, len(obs), 1, device=self.device).uniform_(-1, 1)
        wide = obs.expand(self.samples, -1, -1)
        with torch.no_grad():
            y = reward + 0.95 * self.q(after.expand(self.samples, -1, -1), many).amin(0).amax(0)
        bellman = (q - y).square().mean()
        pushed = torch.logsumexp(self.q(wide, many), dim=1) - math.log(self.samples) - q
        self.log_dict({"bellman": bellman, "pushed": pushed.mean()}, on_epoch=True, on_step=False)
        return bellman + self.alpha * pushed.mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def conservative_q_ensemble_vmap(make_trainer):
    """CQL with an ensemble of critics: stacked weights, functional_call under vmap, logsumexp."""
    model, losses = ConservativeQ(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(pendulum_transitions(), batch_size=32))
    return results(trainer, model, losses)


class DecisionTransformer(L.LightningModule):
    def __init__(self, time=5, dim=16):
        super().__init__()
        self.time = time
        self.rtg, self.obs, self.act = nn.Linear(1, dim), nn.Linear(4, dim), nn.Embedding(2, dim)
        self.when = nn.Embedding(time, dim)
        self.norm = nn.LayerNorm(dim)
        self.attend = nn.MultiheadAttention(dim, 2, bias=False, batch_first=True)
        self.feed = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        )
        self.out = nn.Linear(dim, 2)
        mask = nn.Transformer.generate_square_subsequent_mask(3 * time)
        self.register_buffer("mask", mask, persistent=False)
        self.acc = torchmetrics.classification.MulticlassAccuracy(2, ignore_index=-100)

    def forward(self, rtg, obs, action):
        when = self.when.weight[None]
        parts = (self.rtg(rtg[..., None]) + when, self.obs(obs) + when, self.act(action) + when)
        x = self.norm(torch.stack(parts, dim=2).flatten(1, 2))
        a, _ = self.attend(x, x, x, attn_mask=self.mask, need_weights=False)
        x = x + a
        x = x + self.feed(x)
        return self.out(x.unflatten(1, (self.time, 3))[:, :, 1])

    def training_step(self, batch, batch_idx):
        obs, action, reward, _, done = batch
        rtg = reward.flip(1).cumsum(1).flip(1) / self.time
        alive = torch.cumprod((~done).float(), dim=1)
        target = action.masked_fill(alive == 0, -100)
        logits = self(rtg, obs, action).transpose(1, 2)
        loss = F.cross_entropy(logits, target, ignore_index=-100)
        self.acc(logits, target)
        self.log("acc", self.acc, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        decay, rest = set(), set()
        for name, m in self.named_modules():
            for pn, _ in m.named_parameters(recurse=False):
                full = f"{name}.{pn}" if name else pn
                is_weight = pn.endswith("weight") and isinstance(m, nn.Linear)
                (decay if is_weight else rest).add(full)
        p = dict(self.named_parameters())
        optimizer = torch.optim.AdamW(
            [
                {"params": [p[n] for n in sorted(decay)], "weight_decay": 0.1},
                {"params": [p[n] for n in sorted(rest)], "weight_decay": 0.0},
            ],
            lr=3e-3,
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.LambdaLR(
                    optimizer, lambda s: min(1, (s + 1) / 8)
                ),
                "interval": "step",
            },
        }


def decision_transformer(make_trainer):
    """A decision transformer: returns to go, interleaved tokens, padding as ignored targets."""
    data = TensorDataset(*cartpole_rollouts(5, seed=5))
    model, losses = DecisionTransformer(), Losses()
    trainer = make_trainer(max_epochs=5, callbacks=[losses], gradient_clip_val=0.25)
    trainer.fit(model, DataLoader(data, batch_size=8))
    return results(trainer, model, losses)


# Imitation


class Cloning(L.LightningModule):
    def __init__(self, lr=5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.BatchNorm1d(4), nn.Linear(4, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 2)
        )
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=2)

    def forward(self, obs):
        return self.net(obs)

    def training_step(self, batch, batch_idx):
        obs, action = batch
        loss = F.cross_entropy(self(obs), action, weight=torch.tensor([1.0, 1.2]))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log("val_loss", F.cross_entropy(logits, batch[1]))
        self.log("val_acc", self.accuracy, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)

    def configure_callbacks(self):
        return [EarlyStopping(monitor="val_loss", patience=2, min_delta=0.0)]


def expert(obs):
    return (obs[:, 2] + 0.5 * obs[:, 3] > 0).long()


def behaviour_cloning_csv_log(make_trainer):
    """Cloning an expert; the module's own callbacks, a CSV log read back, checkpoints."""
    obs = cartpole_transitions(448, seed=7).tensors[0]
    whole = TensorDataset(obs, expert(obs))
    train, val = random_split(whole, [384, 64], generator=torch.Generator().manual_seed(1))
    data = L.LightningDataModule.from_datasets(train, val, batch_size=64, num_workers=0)
    model, losses = Cloning(), Losses()
    with tempfile.TemporaryDirectory() as folder:
        saved = ModelCheckpoint(folder, every_n_train_steps=6, save_top_k=-1, filename="{step}")
        trainer = make_trainer(
            max_epochs=3,
            callbacks=[losses, saved],
            logger=CSVLogger(folder, name="log", version=0),
            log_every_n_steps=3,
            enable_checkpointing=True,
        )
        trainer.fit(model, datamodule=data)
        with open(Path(folder) / "log" / "version_0" / "metrics.csv") as f:
            rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(f)]
        files = sorted(path.name for path in Path(folder).glob("*.ckpt"))
        validated = trainer.validate(
            Cloning.load_from_checkpoint(Path(folder) / files[0], map_location="cpu"),
            datamodule=data,
            verbose=False,
        )
    return results(trainer, model, losses, rows=rows, files=files, validated=validated)


class DAgger(L.LightningModule):
    def __init__(self, rounds=3):
        super().__init__()
        self.policy = mlp(4, 16, 2)
        self.env = CartPole(16, seed=3)
        self.observations = []
        self.sizes = []

    @torch.no_grad()
    def visit(self):
        for _ in range(6):
            obs = self.env.state
            self.observations.append(obs)
            self.env.step(self.policy(obs).argmax(1))

    def train_dataloader(self):
        self.visit()
        obs = torch.cat(self.observations)
        self.sizes.append(len(obs))
        return DataLoader(TensorDataset(obs, expert(obs)), batch_size=32, shuffle=True)

    def training_step(self, batch, batch_idx):
        obs, action = batch
        logits = self.policy(obs)
        loss = F.nll_loss(F.log_softmax(logits, 1), action)
        agree = (logits.argmax(1) == action).float()
        self.log("agree", agree.mean(), on_step=False, on_epoch=True, batch_size=len(obs))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def dagger_growing_data(make_trainer):
    """DAgger: each epoch the policy visits more places, which the expert labels."""
    model, losses = DAgger(), Losses()
    trainer = make_trainer(max_epochs=3, callbacks=[losses], reload_dataloaders_every_n_epochs=1)
    trainer.fit(model)
    return results(trainer, model, losses, sizes=model.sizes)


class ActionChunks(L.LightningModule):
    """A recurrent policy that says the next three actions, as a mixture over time."""

    def __init__(self, chunk=3):
        super().__init__()
        self.chunk = chunk
        self.lstm = nn.LSTM(3, 16, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(16, chunk))

    def forward(self, obs):
        out, (h, _) = self.lstm(obs)
        return torch.tanh(self.head(out)), h

    def training_step(self, batch, batch_idx):
        obs, actions = batch["obs"], batch["actions"]
        said, _ = self(obs)
        wanted = actions.unfold(1, self.chunk, 1)
        error = F.l1_loss(said[:, : wanted.shape[1]], wanted, reduction="none")
        decay = torch.exp(-0.3 * torch.arange(self.chunk, device=error.device))
        loss = (error * decay).sum(-1).mean()
        self.log("first", error[..., 0].mean(), on_step=True)
        return loss

    def predict_step(self, batch, batch_idx):
        said, h = self(batch["obs"])
        return {"name": batch["name"], "next": said[:, -1], "memory": h[-1]}

    def configure_optimizers(self):
        optimizer = torch.optim.NAdam(self.parameters(), lr=5e-3)
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=2)]


class Demonstrations(Dataset):
    def __init__(self, n=64, time=6):
        env = Pendulum(n, seed=4)
        obs, actions = [], []
        for _ in range(time):
            action = (-2 * env.obs[:, 1] - env.obs[:, 2]).clamp(-1, 1)
            obs.append(env.obs)
            actions.append(action)
            env.step(action)
        self.obs, self.actions = torch.stack(obs, 1), torch.stack(actions, 1)

    def __len__(self):
        return len(self.obs)

    def __getitem__(self, i):
        return {"obs": self.obs[i], "actions": self.actions[i], "name": f"demo-{i}"}


def action_chunks_lstm(make_trainer):
    """Cloning with chunks of actions: two LSTM layers with dropout, unfold, names in the batch."""
    model, losses = ActionChunks(), Losses()
    trainer = make_trainer(max_epochs=5, callbacks=[losses])
    trainer.fit(model, DataLoader(Demonstrations(), batch_size=16, shuffle=True))
    predicted = trainer.predict(model, DataLoader(Demonstrations(16), batch_size=8))
    return results(trainer, model, losses, predicted=predicted)


class GAIL(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.policy = mlp(4, 16, 2)
        self.discriminator = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(6, 16)), nn.ReLU(), nn.Linear(16, 1)
        )
        self.metrics = nn.ModuleDict(
            {k: torchmetrics.classification.BinaryAccuracy() for k in ("expert", "policy")}
        )

    def score(self, obs, action):
        return self.discriminator(torch.cat([obs, action], dim=1)).squeeze(1)

    def training_step(self, batch, batch_idx):
        obs, action = batch
        pi_opt, d_opt = self.optimizers()
        theirs = F.one_hot(action, num_classes=2).float()
        pi = Categorical(logits=self.policy(obs))
        mine_index = pi.sample()
        mine = F.one_hot(mine_index, num_classes=2).float()
        s_expert, s_policy = self.score(obs, theirs), self.score(obs, mine)
        d_loss = F.binary_cross_entropy_with_logits(s_expert, torch.ones_like(s_expert))
        d_loss = d_loss + F.binary_cross_entropy_with_logits(s_policy, torch.zeros_like(s_policy))
        d_opt.zero_grad()
        self.manual_backward(d_loss)
        d_opt.step()
        for name, s, label in (("expert", s_expert, 1), ("policy", s_policy, 0)):
            self.metrics[name].update(s.sigmoid(), torch.full_like(s, label, dtype=torch.long))
            self.log(f"acc/{name}", self.metrics[name], on_step=False, on_epoch=True)

        with torch.no_grad():
            reward = -F.logsigmoid(-self.score(obs, mine))
            reward = (reward - reward.mean()) / (reward.std() + 1e-6)
        pi_loss = -(pi.log_prob(mine_index) * reward).mean() - 0.01 * pi.entropy().mean()
        pi_opt.zero_grad()
        self.manual_backward(pi_loss)
        pi_opt.step()
        return {"loss": d_loss + pi_loss}

    def configure_optimizers(self):
        pi = torch.optim.Adam(self.policy.parameters(), lr=5e-3)
        return pi, torch.optim.Adam(self.discriminator.parameters(), lr=2e-3)


def gail_adversarial_imitation(make_trainer):
    """GAIL: a discriminator of expert and policy, rewards from it, metrics in a ModuleDict."""
    obs = cartpole_transitions(seed=9).tensors[0]
    model, losses = GAIL(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(TensorDataset(obs, expert(obs)), batch_size=32))
    return results(trainer, model, losses)


# Models, goals, preferences, curiosity


class EnsembleLinear(nn.Module):
    def __init__(self, members, cin, cout):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, cin, cout))
        self.bias = nn.Parameter(torch.zeros(members, 1, cout))
        nn.init.trunc_normal_(self.weight, std=1 / (2 * cin**0.5))

    def forward(self, x):
        return torch.baddbmm(self.bias, x, self.weight)


class DynamicsEnsemble(L.LightningModule):
    def __init__(self, members=3, horizon=3, candidates=32):
        super().__init__()
        self.save_hyperparameters()
        self.l1, self.l2 = EnsembleLinear(members, 4, 24), EnsembleLinear(members, 24, 8)
        self.low = nn.Parameter(torch.full((4,), -6.0))
        self.high = nn.Parameter(torch.full((4,), 0.5))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("std", torch.ones(4))

    def fit_scaler(self, obs, action):
        x = torch.cat([obs, action], dim=1)
        self.mean.copy_(x.mean(0))
        self.std.copy_(x.std(0))

    def forward(self, obs, action):
        x = (torch.cat([obs, action], dim=-1) - self.mean) / self.std
        mean, log_var = self.l2(F.silu(self.l1(x))).chunk(2, dim=-1)
        log_var = self.high - F.softplus(self.high - log_var)
        return mean, self.low + F.softplus(log_var - self.low)

    def training_step(self, batch, batch_idx):
        obs, action, reward, after = batch
        k = self.hparams.members
        rows = torch.randint(len(obs), (k, len(obs)), device=self.device)
        mean, log_var = self(obs[rows], action[rows])
        target = torch.cat([after - obs, reward.unsqueeze(1)], dim=1)[rows]
        nll = ((mean - target).square() * torch.exp(-log_var) + log_var).mean((1, 2))
        bounds = 0.01 * (self.high.sum() - self.low.sum())
        for i in range(k):
            self.log(f"nll/{i}", nll[i], on_step=False, on_epoch=True)
        return nll.sum() + bounds

    def predict_step(self, batch, batch_idx):
        """The best of random plans, by the mean of the members."""
        h = self.hparams
        obs = batch[0].repeat_interleave(h.candidates, dim=0)
        plans = torch.rand(len(obs), h.horizon, 1, device=self.device) * 2 - 1
        x, total = obs.expand(h.members, -1, -1), 0.0
        for t in range(h.horizon):
            mean, _ = self(x, plans[:, t].expand(h.members, -1, -1))
            x, total = x + mean[..., :3], total + mean[..., 3]
        best = total.mean(0).view(-1, h.candidates).argmax(1)
        first = plans[:, 0].view(-1, h.candidates, 1)
        return first[torch.arange(len(first)), best]

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3, weight_decay=1e-5)


def dynamics_ensemble_random_shooting(make_trainer):
    """PETS: bootstrapped members by baddbmm, bounded variances, planning by random shooting."""
    data = pendulum_transitions()
    model, losses = DynamicsEnsemble(), Losses()
    model.fit_scaler(*data.tensors[:2])
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(data, batch_size=32))
    planned = trainer.predict(model, DataLoader(data, batch_size=16, sampler=range(32)))
    return results(trainer, model, losses, planned=planned)


class Dreamer(L.LightningModule):
    """A recurrent world model, and an actor trained through what it imagines."""

    def __init__(self, horizon=3, dim=12):
        super().__init__()
        self.automatic_optimization = False
        self.horizon = horizon
        self.embed = nn.Linear(3, dim)
        self.cell = nn.GRUCell(1, dim)
        self.decode, self.reward = nn.Linear(dim, 3), nn.Linear(dim, 1)
        self.actor, self.value = mlp(dim, 16, 2, act=nn.ELU), mlp(dim, 16, 1, act=nn.ELU)

    def training_step(self, batch, batch_idx):
        obs, action, reward, after = batch
        world, actor, critic = self.optimizers()
        h = self.cell(action, torch.tanh(self.embed(obs)))
        model_loss = F.mse_loss(self.decode(h), after) + F.mse_loss(
            self.reward(h).squeeze(-1), reward
        )
        world.zero_grad()
        self.manual_backward(model_loss)
        world.step()

        h = torch.tanh(self.embed(obs)).detach()
        states, gains = [], 0.0
        for t in range(self.horizon):
            mean, raw = self.actor(h).chunk(2, dim=-1)
            base = Normal(mean, F.softplus(raw) + 0.1)
            a = TransformedDistribution(base, TanhTransform()).rsample()
            h = self.cell(a, h)
            states.append(h)
            gains = gains + 0.95**t * self.reward(h).squeeze(-1)
        gains = gains + 0.95**self.horizon * self.value(h).squeeze(-1)
        actor_loss = -gains.mean()
        actor.zero_grad()
        self.manual_backward(actor_loss)
        self.clip_gradients(actor, 1.0, "norm")
        actor.step()

        value = self.value(states[0].detach()).squeeze(-1)
        value_loss = F.mse_loss(value, gains.detach())
        critic.zero_grad()
        self.manual_backward(value_loss)
        critic.step()
        self.log_dict({"model": model_loss, "actor": actor_loss, "value": value_loss})
        return model_loss

    def configure_optimizers(self):
        world = [self.embed, self.cell, self.decode, self.reward]
        return (
            torch.optim.Adam([p for m in world for p in m.parameters()], lr=3e-3),
            torch.optim.Adam(self.actor.parameters(), lr=1e-3),
            torch.optim.Adam(self.value.parameters(), lr=1e-3),
        )


def dreamer_imagined_rollouts(make_trainer):
    """A world model with a GRUCell; the actor's gradient goes through three imagined steps."""
    model, losses = Dreamer(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(pendulum_transitions(), batch_size=32))
    return results(trainer, model, losses)


class RunningMoments(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("count", torch.tensor(1e-4))

    @torch.no_grad()
    def update(self, x):
        n = len(x)
        delta, total = x.mean(0) - self.mean, self.count + n
        m2 = self.var * self.count + x.var(0, unbiased=False) * n
        m2 = m2 + delta.square() * self.count * n / total
        self.mean.add_(delta * n / total)
        self.var.copy_(m2 / total)
        self.count.copy_(total)

    def forward(self, x):
        return ((x - self.mean) / (self.var + 1e-8).sqrt()).clamp(-5, 5)


class Curiosity(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.obs_moments, self.bonus_moments = RunningMoments(4), RunningMoments()
        self.fixed = mlp(4, 24, 8, act=nn.LeakyReLU)
        self.guess = mlp(4, 24, 24, 8, act=nn.LeakyReLU)
        self.fixed.requires_grad_(False)
        self.agent = nn.ModuleDict({"pi": mlp(4, 16, 2), "v": mlp(4, 16, 1)})

    def training_step(self, batch, batch_idx):
        obs, action, reward, after, _ = batch
        self.obs_moments.update(after)
        x = self.obs_moments(after)
        error = (self.guess(x) - self.fixed(x)).square().mean(-1)
        self.bonus_moments.update(error.detach())
        bonus = error.detach() / (self.bonus_moments.var + 1e-8).sqrt()
        keep = torch.rand_like(error) < 0.5
        rnd = (error * keep).sum() / keep.sum().clamp(min=1)
        v = self.agent["v"](obs).squeeze(-1)
        target = reward + 0.1 * bonus
        pi = Categorical(logits=self.agent["pi"](obs))
        policy = -(pi.log_prob(action) * (target - v).detach()).mean()
        self.log("bonus", bonus.mean(), on_step=True, on_epoch=True)
        return {"loss": rnd + policy + F.mse_loss(v, target), "bonus": bonus}

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=2e-3)


def random_network_distillation(make_trainer):
    """Curiosity by a fixed random network; running moments in buffers of two helper modules."""
    bonuses = []
    keep = LambdaCallback(
        on_train_batch_end=lambda trainer, module, outputs, batch, i: bonuses.append(
            outputs["bonus"].mean().item()
        )
    )
    model, losses = Curiosity(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses, keep])
    trainer.fit(model, DataLoader(cartpole_transitions(), batch_size=32))
    return results(trainer, model, losses, bonuses=bonuses)


class HindsightRows(Dataset):
    """Steps towards a goal; for half of them, what was reached later becomes the goal."""

    def __init__(self, episodes=16, time=10):
        g = torch.Generator().manual_seed(0)
        moves = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
        self.rows = []
        for _ in range(episodes):
            goal = torch.randint(0, 6, (2,), generator=g)
            actions = torch.randint(0, 4, (time,), generator=g)
            path = [torch.randint(0, 6, (2,), generator=g)]
            for a in actions:
                path.append((path[-1] + moves[a]).clamp(0, 5))
            for t, a in enumerate(actions.tolist()):
                wanted = path[-1] if t % 2 else goal
                reached = bool((path[t + 1] == wanted).all())
                x = torch.cat([path[t], wanted]).float() / 5
                y = torch.cat([path[t + 1], wanted]).float() / 5
                self.rows.append((x, a, y, reached))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class GoalQ(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.example_input_array = torch.zeros(2, 4)
        self.q = mlp(4, 32, 4, act=nn.ReLU6)
        self.old = copy.deepcopy(self.q)
        self.old.eval()
        for p in self.old.parameters():
            p.requires_grad_(False)
        self.success = torchmetrics.classification.BinaryPrecision()

    def forward(self, x):
        return self.q(x)

    def training_step(self, batch, batch_idx):
        x, action, y, reached = batch
        reward = torch.where(reached, 0.0, -1.0)
        with torch.no_grad():
            target = (reward + 0.9 * self.old(y).amax(1) * ~reached).clamp(-10, 0)
        q = self(x).gather(1, action.view(-1, 1)).view(-1)
        self.success.update((q.detach() > -0.5).float(), reached)
        return (q - target).square().mean() + 1e-4 * self(x).square().mean()

    def on_train_epoch_end(self):
        self.log("precision", self.success.compute())
        self.success.reset()
        for p, o in zip(self.q.parameters(), self.old.parameters(), strict=True):
            o.data = 0.5 * o.data + 0.5 * p.data

    def configure_optimizers(self):
        optimizer = torch.optim.RAdam(self.parameters(), lr=5e-3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
                "interval": "epoch",
                "frequency": 1,
            },
        }


def hindsight_goals(make_trainer):
    """Hindsight goals in the Dataset, booleans in the batch, o.data replaced after each epoch."""
    model, losses = GoalQ(), Losses()
    trainer = make_trainer(max_epochs=3, callbacks=[losses])
    trainer.fit(model, DataLoader(HindsightRows(), batch_size=20, shuffle=True))
    return results(trainer, model, losses)


class RewardModel(L.LightningModule):
    """Preferences between pieces of play, by Bradley and Terry."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 12, 3, padding=1)
        self.out = nn.Conv1d(12, 1, 1)
        self.acc = torchmetrics.classification.BinaryAccuracy()

    def forward(self, piece):
        return self.out(F.leaky_relu(self.conv(piece.transpose(1, 2)))).squeeze(1)

    def training_step(self, batch, batch_idx):
        a, b, preferred = batch
        diff = self(a).sum(1) - self(b).sum(1)
        loss = F.soft_margin_loss(diff, 2.0 * preferred - 1)
        self.acc(diff.sigmoid(), preferred.long())
        self.log("acc", self.acc, on_step=False, on_epoch=True)
        return loss + 1e-3 * self(a).square().mean()

    def on_save_checkpoint(self, checkpoint):
        checkpoint["scale"] = self.out.weight.abs().mean().item()

    def on_load_checkpoint(self, checkpoint):
        self.loaded_scale = checkpoint["scale"]

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def reward_from_preferences_checkpointed(make_trainer):
    """A reward model from preferences; what hooks add to a checkpoint is read again from it."""
    obs = cartpole_rollouts(10, seed=2)[0]
    a, b = obs.repeat(5, 1, 1), obs.roll(1, 0).repeat(5, 1, 1)
    preferred = (a[..., 2].abs().sum(1) < b[..., 2].abs().sum(1)).float()
    model, losses = RewardModel(), Losses()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(max_epochs=2, callbacks=[losses])
        trainer.fit(model, DataLoader(TensorDataset(a, b, preferred), batch_size=16))
        trainer.save_checkpoint(f"{folder}/reward.ckpt", weights_only=True)
        again = RewardModel.load_from_checkpoint(f"{folder}/reward.ckpt", map_location="cpu")
    return results(trainer, model, losses, scale=again.loaded_scale)


class DirectPreference(L.LightningModule):
    """DPO on token sequences, against a frozen copy."""

    def __init__(self, words=12, beta=0.1):
        super().__init__()
        self.beta = beta
        self.policy = nn.ModuleDict(
            {
                "embed": nn.Embedding(words, 12),
                "rnn": nn.RNN(12, 16, nonlinearity="relu", batch_first=True),
                "out": nn.Linear(16, words),
            }
        )
        self.reference = copy.deepcopy(self.policy)
        self.reference.eval().requires_grad_(False)

    def log_prob(self, net, tokens, mask):
        logits = net["out"](net["rnn"](net["embed"](tokens[:, :-1]))[0])
        chosen = logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
        return (chosen * mask[:, 1:]).sum(1)

    def training_step(self, batch, batch_idx):
        tokens = torch.cat([batch["chosen"], batch["rejected"]])
        mask = torch.cat([batch["chosen_mask"], batch["rejected_mask"]])
        mine = self.log_prob(self.policy, tokens, mask)
        with torch.inference_mode():
            theirs = self.log_prob(self.reference, tokens, mask)
        good, bad = (self.beta * (mine - theirs.clone())).chunk(2)
        margin = good - bad
        self.log_dict(
            {
                "rewards/margin": margin.mean(),
                "rewards/accuracy": (margin > 0).float().mean(),
            },
            prog_bar=True,
            batch_size=len(good),
        )
        return -F.logsigmoid(margin).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.policy.parameters(), lr=5e-3)
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.PolynomialLR(optimizer, 20),
                "interval": "step",
            }
        ]


def collate_pairs(rows):
    """Pads answers to eight tokens."""
    out = {}
    for i, name in enumerate(("chosen", "rejected")):
        padded = [F.pad(row[i], (0, 8 - len(row[i]))) for row in rows]
        out[name] = torch.stack(padded)
        out[f"{name}_mask"] = (out[name] != 0).float()
    return out


def direct_preference_optimization(make_trainer):
    """DPO: a frozen reference, padded answers from a collate function, masks, PolynomialLR."""
    g = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(160):
        n, m = torch.randint(4, 9, (2,), generator=g).tolist()
        good = torch.randint(1, 12, (n,), generator=g).sort().values
        rows.append((good, torch.randint(1, 12, (m,), generator=g)))
    model, losses = DirectPreference(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], accumulate_grad_batches=2)
    trainer.fit(model, DataLoader(rows, batch_size=16, collate_fn=collate_pairs))
    return results(trainer, model, losses)


class DiscreteSAC(L.LightningModule):
    """Soft actor-critic with few actions: expectations instead of samples. In bf16-mixed."""

    def __init__(self, alpha=0.2):
        super().__init__()
        self.register_buffer("alpha", torch.tensor(alpha))
        self.pi = mlp(4, 24, 2, act=nn.GELU)
        self.q = nn.ModuleList(mlp(4, 24, 2, act=nn.GELU) for _ in range(2))
        self.old = copy.deepcopy(self.q).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        obs, action, reward, after, done = batch
        with torch.no_grad():
            log_p = self.pi(after).float().log_softmax(-1)
            q = torch.minimum(*(m(after).float() for m in self.old))
            v = (log_p.exp() * (q - self.alpha * log_p)).sum(-1)
            y = reward + 0.95 * v * (~done)
        qs = [m(obs).float() for m in self.q]
        q_loss = sum(F.mse_loss(q.gather(1, action[:, None]).squeeze(1), y) for q in qs)
        log_p = self.pi(obs).float().log_softmax(-1)
        best = torch.minimum(*qs).detach()
        pi_loss = (log_p.exp() * (self.alpha * log_p - best)).sum(-1).mean()
        self.log("entropy", -(log_p.exp() * log_p).sum(-1).mean(), on_step=True, on_epoch=True)
        return q_loss + pi_loss

    def on_before_zero_grad(self, optimizer):
        with torch.no_grad():
            for old, new in zip(self.old.parameters(), self.q.parameters(), strict=True):
                old.lerp_(new, 0.05)

    def on_train_epoch_end(self):
        self.alpha.mul_(0.8)

    def configure_optimizers(self):
        return torch.optim.Adam([*self.pi.parameters(), *self.q.parameters()], lr=3e-3)


def discrete_sac_bf16_two_fits(make_trainer):
    """SAC over two actions in bf16-mixed, fitted twice with new data; alpha falls by epoch."""
    model, losses = DiscreteSAC(), Losses()
    for seed in (0, 1):
        trainer = make_trainer(max_epochs=1, precision="bf16-mixed", callbacks=[losses])
        trainer.fit(model, DataLoader(cartpole_transitions(seed=seed), batch_size=32))
    return results(trainer, model, losses)
