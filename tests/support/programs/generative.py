"""Small generative trainings, as users of Lightning write them.

VAEs, GANs, diffusion, flows, energies and autoregressive models. Each function trains for about
twenty steps with the Trainer that `make_trainer(**options)` makes, and returns what two runs should
agree on. The caller seeds torch before each call; its `make_trainer` adds quiet options of its own
beneath those given.
"""

import copy
import itertools
import math
import tempfile
from collections import deque
from dataclasses import dataclass, field

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from programs.common import Losses
from sklearn.datasets import load_digits, make_moons
from torch import nn
from torch.distributions import (
    Categorical,
    Independent,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    kl_divergence,
)
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Logged(L.Callback):
    """What every training step logged."""

    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.values.append({k: v.clone() for k, v in trainer.callback_metrics.items()})


def results(trainer, model, seen, **more):
    return {
        "losses" if isinstance(seen, Losses) else "logged": seen.values,
        "metrics": dict(trainer.callback_metrics),
        "weights": model.state_dict(),
        **more,
    }


def digits(n=160, batch_size=16, flat=True, labels=True, shuffle=False):
    """A loader of digits between 0 and 1."""
    data = load_digits()
    x = torch.tensor(data.images[:n] / 16, dtype=torch.float32)
    x = x.flatten(1) if flat else x.unsqueeze(1)
    tensors = (x, torch.tensor(data.target[:n])) if labels else (x,)
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size, shuffle=shuffle)


def moons(n=320, batch_size=32):
    x, _ = make_moons(n, noise=0.05, random_state=0)
    return DataLoader(TensorDataset(torch.tensor(x, dtype=torch.float32)), batch_size=batch_size)


def mlp(*sizes, act=nn.ReLU):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


# Variational autoencoders


class VAE(L.LightningModule):
    def __init__(self, latent=4, hidden=32, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = mlp(64, hidden, 2 * latent)
        self.decoder = mlp(latent, hidden, 64)

    def reparametrize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + std * torch.randn_like(std)

    def elbo(self, x):
        mu, logvar = self.encoder(x).chunk(2, dim=-1)
        logits = self.decoder(self.reparametrize(mu, logvar))
        bce = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / len(x)
        return bce, kl

    def training_step(self, batch, batch_idx):
        bce, kl = self.elbo(batch[0])
        self.log_dict({"bce": bce, "kl": kl}, prog_bar=True, on_epoch=True)
        return bce + kl

    def validation_step(self, batch, batch_idx):
        bce, kl = self.elbo(batch[0])
        self.log("val_elbo", -(bce + kl))

    @torch.no_grad()
    def on_validation_epoch_end(self):
        z = torch.randn(4, self.hparams.latent, device=self.device)
        self.drawn = torch.sigmoid(self.decoder(z))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def vae_digits(make_trainer):
    """The plain VAE: BCE and KL, pictures drawn after each validation."""
    model, losses = VAE(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], num_sanity_val_steps=0)
    trainer.fit(model, digits(shuffle=True), digits(64))
    return results(trainer, model, losses, drawn=model.drawn, hparams=dict(model.hparams))


class AnnealedVAE(VAE):
    def training_step(self, batch, batch_idx):
        bce, kl = self.elbo(batch[0])
        beta = min(1.0, self.current_epoch / 3)
        self.log("beta", beta)
        return bce + beta * kl


def vae_beta_by_current_epoch(make_trainer):
    """A VAE whose KL weight grows with self.current_epoch."""
    model, losses = AnnealedVAE(), Losses()
    trainer = make_trainer(max_epochs=3, callbacks=[losses])
    trainer.fit(model, digits(112))
    return results(trainer, model, losses)


@dataclass
class VAEConfig:
    latent: int = 4
    free_bits: float = 0.1
    warmup_epochs: int = 2
    widths: list = field(default_factory=lambda: [32, 16])


class ConditionalVAE(L.LightningModule):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.encoder = mlp(74, *config.widths, act=nn.SiLU)
        self.mu = nn.Linear(config.widths[-1], config.latent)
        self.scale = nn.Sequential(nn.Linear(config.widths[-1], config.latent), nn.Softplus())
        self.decoder = mlp(config.latent + 10, *reversed(config.widths), 64, act=nn.SiLU)
        self.register_buffer("beta", torch.tensor(0.0))

    def on_train_epoch_start(self):
        self.beta.fill_(min(1.0, (self.current_epoch + 1) / self.config.warmup_epochs))

    def training_step(self, batch, batch_idx):
        x, y = batch
        c = F.one_hot(y, num_classes=10).float()
        h = self.encoder(torch.cat([x, c], dim=-1))
        q = Normal(self.mu(h), self.scale(h) + 1e-4)
        z = q.rsample()
        out = Normal(self.decoder(torch.cat([z, c], dim=-1)), 0.3)
        nll = -Independent(out, 1).log_prob(x).mean()
        kl = kl_divergence(q, Normal(torch.zeros_like(z), torch.ones_like(z))).mean(0)
        kl = kl.clamp(min=self.config.free_bits).sum()
        self.log("kl", kl, on_step=False, on_epoch=True)
        self.log("beta", self.beta)
        return nll + self.beta * kl

    def predict_step(self, batch, batch_idx):
        c = F.one_hot(batch[1], num_classes=10).float()
        z = torch.zeros(len(c), self.config.latent, device=c.device)
        return {"labels": batch[1], "pictures": self.decoder(torch.cat([z, c], dim=-1))}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def conditional_vae_distributions(make_trainer):
    """A VAE given the label: Normal.rsample, kl_divergence, free bits, beta in a buffer."""
    model, losses = ConditionalVAE(VAEConfig()), Losses()
    trainer = make_trainer(max_epochs=3, callbacks=[losses], gradient_clip_val=5.0)
    trainer.fit(model, digits(112))
    return results(trainer, model, losses, drawn=trainer.predict(model, digits(32)))


class LadderVAE(L.LightningModule):
    """Two levels of latents, convolutions, top-down prior."""

    def __init__(self):
        super().__init__()
        self.up1 = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU()
        )
        self.up2 = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.LeakyReLU(), nn.Flatten())
        self.q2 = nn.Linear(64, 8)
        self.down = nn.Sequential(nn.Linear(4, 64), nn.LeakyReLU(), nn.Unflatten(1, (16, 2, 2)))
        self.prior1 = nn.ConvTranspose2d(16, 8, 4, 2, 1)
        self.q1 = nn.Conv2d(16, 8, 1)
        self.out = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(4, 1, 3, padding=1))

    def gaussian(self, parameters):
        mu, raw = parameters.chunk(2, dim=1)
        return Normal(mu, F.softplus(raw) + 0.01)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        h1 = self.up1(x)
        q2 = self.gaussian(self.q2(self.up2(h1)))
        z2 = q2.rsample()
        p1 = self.gaussian(self.prior1(self.down(z2)))
        q1 = self.gaussian(self.q1(torch.cat([h1, p1.mean, p1.stddev], dim=1)))
        logits = self.out(q1.rsample())
        rec = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum((1, 2, 3))
        kl2 = kl_divergence(q2, Normal(0.0, 1.0)).sum(1)
        kl1 = kl_divergence(q1, p1).sum((1, 2, 3))
        for name, part in zip(("rec", "kl1", "kl2"), (rec, kl1, kl2), strict=True):
            self.log(name, part.mean(), batch_size=len(x))
        return (rec + kl1 + kl2).mean()

    def configure_optimizers(self):
        q1 = {"params": self.q1.parameters(), "lr": 1e-3}
        rest = [p for n, p in self.named_parameters() if not n.startswith("q1.")]
        return torch.optim.Adamax([{"params": rest}, q1], lr=3e-3)


def ladder_vae_two_levels(make_trainer):
    """A hierarchical VAE with convolutions, KL against a learned prior, Adamax in two groups."""
    model, losses = LadderVAE(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], gradient_clip_val=10.0)
    trainer.fit(model, digits(flat=False, labels=False, shuffle=True))
    return results(trainer, model, losses)


class VectorQuantizer(nn.Module):
    """Codes that follow by moving averages."""

    def __init__(self, codes=12, dim=4, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("codebook", torch.randn(codes, dim))
        self.register_buffer("cluster_size", torch.ones(codes))
        self.register_buffer("embed_avg", self.codebook.clone())

    def forward(self, z):
        flat = z.reshape(-1, z.shape[-1])
        distances = (
            flat.pow(2).sum(1, keepdim=True)
            - 2 * flat @ self.codebook.t()
            + self.codebook.pow(2).sum(1)
        )
        index = distances.argmin(dim=1)
        quantized = F.embedding(index, self.codebook).view_as(z)
        if self.training:
            with torch.no_grad():
                one_hot = F.one_hot(index, len(self.codebook)).type_as(flat)
                self.cluster_size.mul_(self.decay).add_(one_hot.sum(0), alpha=1 - self.decay)
                self.embed_avg.mul_(self.decay).add_(one_hot.t() @ flat, alpha=1 - self.decay)
                total = self.cluster_size.sum()
                smoothed = (self.cluster_size + 1e-5) / (total + 1e-5 * len(one_hot[0])) * total
                self.codebook.copy_(self.embed_avg / smoothed.unsqueeze(1))
        commitment = F.mse_loss(z, quantized.detach())
        return z + (quantized - z).detach(), commitment, index


class VQVAE(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))
        self.quantize = VectorQuantizer()
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(4, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 1, 1)
        )

    def forward(self, x):
        z = self.encoder(x).permute(0, 2, 3, 1)
        quantized, commitment, index = self.quantize(z)
        return self.decoder(quantized.permute(0, 3, 1, 2)), commitment, index

    def training_step(self, batch, batch_idx):
        out, commitment, index = self(batch[0])
        rec = F.mse_loss(out, batch[0])
        used = torch.bincount(index, minlength=12).float() / index.numel()
        self.log("perplexity", torch.exp(-(used * (used + 1e-10).log()).sum()), prog_bar=True)
        return rec + 0.25 * commitment

    def predict_step(self, batch, batch_idx):
        return self(batch[0])[2].view(len(batch[0]), -1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def vqvae_moving_codes(make_trainer):
    """A VQ-VAE: codes as moving averages in buffers, the straight-through estimator."""
    model, losses = VQVAE(), Losses()
    trainer = make_trainer(max_steps=20, callbacks=[losses])
    trainer.fit(model, digits(flat=False, shuffle=True))
    return results(trainer, model, losses, codes=trainer.predict(model, digits(32, flat=False)))


class GumbelVAE(L.LightningModule):
    def __init__(self, variables=4, classes=6):
        super().__init__()
        self.shape = (variables, classes)
        self.encoder = mlp(64, 32, variables * classes, act=nn.GELU)
        self.decoder = mlp(variables * classes, 32, 64, act=nn.GELU)
        self.register_buffer("temperature", torch.tensor(1.0))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        logits = self.encoder(x).view(-1, *self.shape)
        z = F.gumbel_softmax(logits, tau=self.temperature, hard=False)
        out = torch.sigmoid(self.decoder(z.flatten(1)))
        rec = F.binary_cross_entropy(out, x, reduction="none").sum(-1)
        log_q = logits.log_softmax(-1)
        kl = (log_q.exp() * (log_q + math.log(self.shape[1]))).sum((1, 2))
        self.log("temperature", self.temperature, reduce_fx="min", on_epoch=True, on_step=True)
        return (rec + kl).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.temperature.mul_(0.97).clamp_(min=0.5)

    def configure_optimizers(self):
        return torch.optim.NAdam(self.parameters(), lr=3e-3)


def gumbel_softmax_vae(make_trainer):
    """Categorical latents by Gumbel-softmax; the temperature falls in on_train_batch_end."""
    model, losses = GumbelVAE(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, digits(labels=False))
    return results(trainer, model, losses)


class IWAE(VAE):
    def training_step(self, batch, batch_idx, k=4):
        x = batch[0].unsqueeze(1).expand(-1, k, -1)
        mu, logvar = self.encoder(x).chunk(2, dim=-1)
        q = torch.distributions.Normal(mu, (0.5 * logvar).exp())
        z = q.rsample()
        log_p = Normal(0, 1).log_prob(z).sum(-1)
        log_x = -F.binary_cross_entropy_with_logits(self.decoder(z), x, reduction="none").sum(-1)
        log_w = log_x + log_p - q.log_prob(z).sum(-1)
        bound = torch.logsumexp(log_w, dim=1) - math.log(k)
        self.log("ess", 1 / log_w.softmax(1).square().sum(1).mean())
        return -bound.mean()


def importance_weighted_autoencoder(make_trainer):
    """IWAE with four samples a picture; the Trainer overfits five batches."""
    model, losses = IWAE(latent=3), Losses()
    trainer = make_trainer(max_epochs=4, callbacks=[losses], overfit_batches=5)
    trainer.fit(model, digits())
    return results(trainer, model, losses)


# Adversaries


class DCGAN(L.LightningModule):
    def __init__(self, latent=8, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Unflatten(1, (latent, 1, 1)),
            nn.ConvTranspose2d(latent, 16, 4, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False),
            nn.Sigmoid(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Dropout2d(0.1),
            nn.Conv2d(8, 1, 4),
            nn.Flatten(),
        )
        self.apply(self.init_weights)

    @staticmethod
    def init_weights(m):
        if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.normal_(m.weight, 0.0, 0.05)

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch, batch_idx):
        (imgs,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(imgs.shape[0], self.hparams.latent).type_as(imgs)

        self.toggle_optimizer(optimizer_g)
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
        fake = torch.zeros(imgs.size(0), 1).type_as(imgs)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self):
        betas = (0.5, 0.999)
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=betas)
        return [opt_g, opt_d], []


def dcgan_toggled_optimizers(make_trainer):
    """Lightning's GAN example: generator first, toggled optimizers, nothing returned."""
    model, logged = DCGAN(), Logged()
    trainer = make_trainer(max_epochs=2, callbacks=[logged])
    trainer.fit(model, digits(flat=False, labels=False))
    with torch.no_grad():
        drawn = model.eval()(torch.linspace(-1, 1, 32).view(4, 8))
    return results(trainer, model, logged, drawn=drawn)


class ClippedWGAN(L.LightningModule):
    def __init__(self, n_critic=4, clip=0.05):
        super().__init__()
        self.automatic_optimization = False
        self.n_critic, self.clip = n_critic, clip
        self.generator = mlp(4, 24, 2)
        self.critic = mlp(2, 24, 1, act=nn.LeakyReLU)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        opt_g, opt_c = self.optimizers()
        z = torch.randn(len(x), 4, device=self.device)
        c_loss = self.critic(self.generator(z).detach()).mean() - self.critic(x).mean()
        opt_c.zero_grad()
        self.manual_backward(c_loss)
        opt_c.step()
        for p in self.critic.parameters():
            p.data.clamp_(-self.clip, self.clip)
        if (batch_idx + 1) % self.n_critic == 0:
            g_loss = -self.critic(self.generator(z)).mean()
            opt_g.zero_grad()
            self.manual_backward(g_loss)
            opt_g.step()
        self.log("c_loss", c_loss)
        return c_loss

    def configure_optimizers(self):
        return (
            torch.optim.RMSprop(self.generator.parameters(), lr=5e-3),
            torch.optim.RMSprop(self.critic.parameters(), lr=5e-3),
        )


def wgan_generator_every_fourth_batch(make_trainer):
    """WGAN with clipped weights; the generator moves where batch_idx says so."""
    model, losses = ClippedWGAN(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, moons())
    return results(trainer, model, losses)


class WGANGP(L.LightningModule):
    def __init__(self, critic_steps=3, penalty=10.0):
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters()
        self.generator = nn.Sequential(
            nn.Linear(4, 32, bias=False),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, 64),
            nn.Sigmoid(),
        )
        self.critic = nn.Sequential(
            nn.Linear(64, 32), nn.LayerNorm(32), nn.LeakyReLU(0.2), nn.Linear(32, 1)
        )

    def gradient_penalty(self, real, fake):
        alpha = torch.rand(len(real), 1, device=real.device)
        between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        out = self.critic(between)
        (grads,) = torch.autograd.grad(
            out, between, grad_outputs=torch.ones_like(out), create_graph=True, retain_graph=True
        )
        return ((grads.norm(2, dim=1) - 1) ** 2).mean()

    def training_step(self, batch, batch_idx):
        x, _ = batch
        opt_c, opt_g = self.optimizers()
        for _ in range(self.hparams.critic_steps):
            fake = self.generator(torch.randn(len(x), 4)).detach()
            penalty = self.gradient_penalty(x, fake)
            wasserstein = self.critic(fake).mean() - self.critic(x).mean()
            opt_c.zero_grad()
            self.manual_backward(wasserstein + self.hparams.penalty * penalty)
            opt_c.step()
        g_loss = -self.critic(self.generator(torch.randn(len(x), 4))).mean()
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.log_dict({"wasserstein": wasserstein, "penalty": penalty}, prog_bar=True)
        return {"loss": g_loss, "penalty": penalty.detach()}

    def on_train_epoch_end(self):
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        opt_c = torch.optim.Adam(self.critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
        decay = [torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.7) for o in (opt_c, opt_g)]
        return [opt_c, opt_g], decay


def wgan_gp_critic_loop(make_trainer):
    """WGAN-GP: three critic updates in each step, double backward, schedulers by epoch."""
    model, losses = WGANGP(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, digits(shuffle=True))
    return results(trainer, model, losses)


class ConditionalNorm(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.bn = nn.BatchNorm2d(channels, affine=False)
        self.embed = nn.Embedding(classes, 2 * channels)
        nn.init.ones_(self.embed.weight[:, :channels].data)
        nn.init.zeros_(self.embed.weight[:, channels:].data)

    def forward(self, x, y):
        gamma, beta = self.embed(y)[:, :, None, None].chunk(2, dim=1)
        return gamma * self.bn(x) + beta


class ProjectionGAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.first = nn.Linear(8, 8 * 16)
        self.cbn = ConditionalNorm(8, 10)
        self.last = nn.Sequential(
            nn.Upsample(scale_factor=2), nn.Conv2d(8, 1, 3, padding=1), nn.Tanh()
        )
        self.features = nn.Sequential(
            spectral_norm(nn.Conv2d(1, 16, 3, 2, 1)),
            nn.LeakyReLU(0.1),
            spectral_norm(nn.Conv2d(16, 16, 3, 2, 1)),
            nn.LeakyReLU(0.1),
        )
        self.linear = spectral_norm(nn.Linear(16, 1))
        self.project = spectral_norm(nn.Embedding(10, 16))

    def generate(self, z, y):
        return self.last(F.relu(self.cbn(self.first(z).view(-1, 8, 4, 4), y)))

    def discriminate(self, x, y):
        h = self.features(x).sum(dim=(2, 3))
        return self.linear(h).squeeze(1) + (self.project(y) * h).sum(1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = 2 * x - 1
        opt_d, opt_g = self.optimizers()
        with opt_d.toggle_model():
            fake = self.generate(torch.randn(len(x), 8), y).detach()
            d_loss = F.relu(1 - self.discriminate(x, y)).mean()
            d_loss = d_loss + F.relu(1 + self.discriminate(fake, y)).mean()
            self.manual_backward(d_loss)
            opt_d.step()
            opt_d.zero_grad()
        with opt_g.toggle_model():
            other = torch.randint(10, (len(x),), device=self.device)
            g_loss = -self.discriminate(self.generate(torch.randn(len(x), 8), other), other).mean()
            self.manual_backward(g_loss)
            opt_g.step()
            opt_g.zero_grad()
        self.log("d_loss", d_loss)
        self.log("g_loss", g_loss)

    def configure_optimizers(self):
        g = [*self.first.parameters(), *self.cbn.parameters(), *self.last.parameters()]
        d = [*self.features.parameters(), *self.linear.parameters(), *self.project.parameters()]
        opt_d = torch.optim.Adam(d, lr=4e-4, betas=(0.0, 0.9))
        opt_g = torch.optim.Adam(g, lr=1e-4, betas=(0.0, 0.9))
        return opt_d, opt_g


def sngan_projection_hinge(make_trainer):
    """Spectral norm, conditional batch norm, projection of labels, hinge loss, two rates."""
    model, logged = ProjectionGAN(), Logged()
    trainer = make_trainer(max_epochs=2, callbacks=[logged])
    trainer.fit(model, digits(flat=False))
    return results(trainer, model, logged)


class CycleGAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

        def generator():
            return nn.Sequential(
                nn.ReflectionPad2d(1),
                nn.Conv2d(1, 8, 3, bias=False),
                nn.InstanceNorm2d(8),
                nn.ReLU(),
                nn.Conv2d(8, 1, 3, padding=1),
                nn.Tanh(),
            )

        self.g_ab, self.g_ba = generator(), generator()
        self.d = nn.ModuleDict(
            {
                k: nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 3))
                for k in "ab"
            }
        )

    def training_step(self, batch, batch_idx):
        a, b = batch
        opt_g, opt_d = self.optimizers()
        fake_b, fake_a = self.g_ab(a), self.g_ba(b)

        self.toggle_optimizer(opt_g)
        score_a, score_b = self.d["a"](fake_a), self.d["b"](fake_b)
        gan = F.mse_loss(score_a, torch.ones_like(score_a))
        gan = gan + F.mse_loss(score_b, torch.ones_like(score_b))
        cycle = F.l1_loss(self.g_ba(fake_b), a) + F.l1_loss(self.g_ab(fake_a), b)
        identity = F.l1_loss(self.g_ba(a), a) + F.l1_loss(self.g_ab(b), b)
        g_loss = gan + 10 * cycle + 5 * identity
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        self.toggle_optimizer(opt_d)
        d_loss = torch.zeros((), device=self.device)
        for name, real, fake in (("a", a, fake_a), ("b", b, fake_b)):
            on_real, on_fake = self.d[name](real), self.d[name](fake.detach())
            d_loss = d_loss + 0.5 * ((on_real - 1).square().mean() + on_fake.square().mean())
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        self.log_dict({"loss/g": g_loss, "loss/d": d_loss, "cycle": cycle}, on_epoch=True)
        return {"loss": g_loss.detach() + d_loss.detach()}

    def configure_optimizers(self):
        both = itertools.chain(self.g_ab.parameters(), self.g_ba.parameters())
        opt_g = torch.optim.Adam(both, lr=2e-3, betas=(0.5, 0.999))
        opt_d = torch.optim.Adam(self.d.parameters(), lr=2e-3, betas=(0.5, 0.999))
        return opt_g, opt_d


def cyclegan_two_domains(make_trainer):
    """CycleGAN: least squares, cycles and identity, one optimizer for both generators."""
    x = next(iter(digits(128, 128, flat=False)))[0] * 2 - 1
    data = DataLoader(TensorDataset(x, -x.flip(-1).roll(5, 0)), batch_size=8)
    model, losses = CycleGAN(), Losses()
    trainer = make_trainer(max_epochs=1, limit_train_batches=12, callbacks=[losses])
    trainer.fit(model, data)
    return results(trainer, model, losses)


class Pix2Pix(L.LightningModule):
    def __init__(self, accumulate=2):
        super().__init__()
        self.automatic_optimization = False
        self.accumulate = accumulate
        self.down = nn.Conv2d(1, 8, 4, 2, 1)
        self.up = nn.ConvTranspose2d(8, 8, 4, 2, 1)
        self.last = nn.Conv2d(9, 1, 3, padding=1)
        self.patch = nn.Sequential(
            nn.Conv2d(2, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 3, padding=1)
        )
        self.l1 = torchmetrics.MeanAbsoluteError()

    def generate(self, x):
        h = F.dropout(F.relu(self.up(F.leaky_relu(self.down(x), 0.2))), 0.3, training=True)
        return torch.sigmoid(self.last(torch.cat([x, h], 1)))

    def training_step(self, batch, batch_idx):
        edges, target = batch
        opt_g, opt_d = self.optimizers()
        opt_d.zero_grad()
        opt_g.zero_grad()
        for e, t in zip(edges.chunk(self.accumulate), target.chunk(self.accumulate), strict=True):
            fake = self.generate(e)
            real_score = self.patch(torch.cat([e, t], 1))
            fake_score = self.patch(torch.cat([e, fake.detach()], 1))
            d_loss = F.softplus(-real_score).mean() + F.softplus(fake_score).mean()
            self.manual_backward(d_loss / self.accumulate)
        self.clip_gradients(opt_d, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        opt_d.step()
        for e, t in zip(edges.chunk(self.accumulate), target.chunk(self.accumulate), strict=True):
            fake = self.generate(e)
            adv = F.softplus(-self.patch(torch.cat([e, fake], 1))).mean()
            g_loss = adv + 10 * F.l1_loss(fake, t)
            self.manual_backward(g_loss / self.accumulate)
        opt_g.step()
        self.log("d", d_loss)
        self.log("g", g_loss)
        return g_loss

    def test_step(self, batch, batch_idx):
        self.l1(self.generate(batch[0]), batch[1])
        self.log("test_l1", self.l1)

    def configure_optimizers(self):
        parts = (self.down, self.up, self.last)
        g = torch.optim.Adam([p for m in parts for p in m.parameters()], lr=2e-3)
        return g, torch.optim.Adam(self.patch.parameters(), lr=1e-3)


def pix2pix_accumulated_by_hand(make_trainer):
    """From edges to digits: patch discriminator first, two micro-batches, dropout as noise."""
    x = next(iter(digits(160, 160, flat=False)))[0]
    edges = (x - F.avg_pool2d(x, 3, 1, 1)).clamp(min=0)
    data = TensorDataset(edges, x)
    model, losses = Pix2Pix(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(data, batch_size=16, shuffle=True))
    tested = trainer.test(model, DataLoader(data, batch_size=80), verbose=False)
    return results(trainer, model, losses, tested=tested)


class InfoGAN(L.LightningModule):
    def __init__(self, codes=4):
        super().__init__()
        self.automatic_optimization = False
        self.codes = codes
        self.generator = mlp(4 + codes + 1, 32, 64, act=nn.Softplus)
        self.trunk = nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.2), nn.LeakyReLU(0.2))
        self.real = nn.Linear(32, 1)
        self.q = nn.Linear(32, codes + 2)

    def latents(self, n):
        code = Categorical(logits=torch.zeros(n, self.codes)).sample()
        slope = torch.empty(n, 1).uniform_(-1, 1)
        z = torch.cat([torch.randn(n, 4), F.one_hot(code, self.codes).float(), slope], 1)
        return z, code, slope

    def training_step(self, batch, batch_idx):
        (x,) = batch
        opt_g, opt_d, opt_q = self.optimizers()
        z, code, slope = self.latents(len(x))
        fake = self.generator(z).sigmoid()
        ones, zeros = torch.ones(len(x), 1), torch.zeros(len(x), 1)
        bce = F.binary_cross_entropy_with_logits

        d_loss = bce(self.real(self.trunk(x)), 0.9 * ones)
        d_loss = d_loss + bce(self.real(self.trunk(fake.detach())), zeros)
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()

        g_loss = bce(self.real(self.trunk(fake)), ones)
        opt_g.zero_grad()
        self.manual_backward(g_loss, retain_graph=True)
        opt_g.step()

        logits, mean, log_std = self.q(self.trunk(self.generator(z).sigmoid())).split(
            [self.codes, 1, 1], dim=1
        )
        info = F.cross_entropy(logits, code)
        info = info + 0.1 * F.gaussian_nll_loss(mean, slope, (2 * log_std).exp())
        opt_q.zero_grad()
        self.manual_backward(info)
        opt_q.step()
        self.log_dict({"d": d_loss, "g": g_loss, "info": info})
        return info

    def configure_optimizers(self):
        g = torch.optim.Adam(self.generator.parameters(), lr=2e-3)
        d = torch.optim.Adam([*self.trunk.parameters(), *self.real.parameters()], lr=1e-3)
        q = torch.optim.Adam([*self.generator.parameters(), *self.q.parameters()], lr=1e-3)
        return g, d, q


def infogan_three_optimizers(make_trainer):
    """InfoGAN: categorical and continuous codes; two optimizers share the generator."""
    model, losses = InfoGAN(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, digits(labels=False))
    return results(trainer, model, losses)


class AdversarialAutoencoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.encoder = mlp(64, 32, 3)
        self.decoder = nn.Sequential(mlp(3, 32, 64), nn.Sigmoid())
        self.critic = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))
        self.rec_loss = nn.MSELoss()
        self.adv_loss = nn.BCEWithLogitsLoss()

    def training_step(self, batch, batch_idx):
        x, _ = batch
        ae, disc, gen = self.optimizers(use_pl_optimizer=True)
        sch_ae, sch_disc, _ = self.lr_schedulers()

        rec = self.rec_loss(self.decoder(self.encoder(x)), x)
        ae.zero_grad()
        self.manual_backward(rec)
        ae.step()

        self.encoder.eval()
        prior = self.critic(torch.randn(len(x), 3))
        code = self.critic(self.encoder(x).detach())
        d = self.adv_loss(prior, torch.ones_like(prior))
        d = d + self.adv_loss(code, torch.zeros_like(code))
        disc.zero_grad()
        self.manual_backward(d)
        disc.step()

        self.encoder.train()
        fooled = self.critic(self.encoder(x))
        g = self.adv_loss(fooled, torch.ones_like(fooled))
        gen.zero_grad()
        self.manual_backward(g)
        gen.step()
        sch_ae.step()
        sch_disc.step()
        self.log("rec", rec, prog_bar=True)
        self.log("d", d)
        self.log("g", g)
        return rec

    def configure_optimizers(self):
        ae = torch.optim.Adam([*self.encoder.parameters(), *self.decoder.parameters()], lr=3e-3)
        disc = torch.optim.SGD(self.critic.parameters(), lr=0.05, momentum=0.5)
        gen = torch.optim.Adam(self.encoder.parameters(), lr=1e-3)
        schedulers = [
            torch.optim.lr_scheduler.CosineAnnealingLR(ae, 20),
            torch.optim.lr_scheduler.StepLR(disc, 8),
            torch.optim.lr_scheduler.ConstantLR(gen),
        ]
        return [ae, disc, gen], schedulers


def adversarial_autoencoder_manual_schedulers(make_trainer):
    """Three optimizers in one step, schedulers stepped in the step, modes switched in it."""
    model, losses = AdversarialAutoencoder(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, digits(shuffle=True))
    rates = [o.param_groups[0]["lr"] for o in trainer.optimizers]
    return results(trainer, model, losses, rates=rates)


class ModulatedConv(nn.Module):
    """StyleGAN2's convolution: weights scaled by a style, and demodulated."""

    def __init__(self, cin, cout, style):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(cout, cin, 3, 3) / (3 * cin**0.5))
        self.to_style = nn.Linear(style, cin)
        self.noise = nn.Parameter(torch.zeros(()))
        nn.init.ones_(self.to_style.bias)

    def forward(self, x, w):
        n, c, height, width = x.shape
        weight = self.weight * self.to_style(w)[:, None, :, None, None]
        weight = weight * torch.rsqrt(weight.pow(2).sum((2, 3, 4), keepdim=True) + 1e-8)
        out = F.conv2d(
            x.reshape(1, n * c, height, width), weight.flatten(0, 1), padding=1, groups=n
        )
        out = out.view(n, -1, height, width)
        out = out + self.noise * torch.randn(n, 1, height, width, device=x.device)
        return F.leaky_relu(out, 0.2) * 2**0.5


class StyleGAN(L.LightningModule):
    def __init__(self, z=8, r1=1.0):
        super().__init__()
        self.automatic_optimization = False
        self.z, self.r1 = z, r1
        self.mapping = mlp(z, 16, 8, act=nn.LeakyReLU)
        self.const = nn.Parameter(torch.randn(1, 8, 4, 4))
        self.conv1, self.conv2 = ModulatedConv(8, 8, 8), ModulatedConv(8, 8, 8)
        self.to_rgb = nn.Conv2d(8, 1, 1)
        self.critic = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(129, 1)
        )

    def generate(self, n):
        z = torch.randn(n, self.z, device=self.device)
        w = self.mapping(z * torch.rsqrt(z.square().mean(1, keepdim=True) + 1e-8))
        x = self.conv1(self.const.expand(n, -1, -1, -1), w)
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        return self.to_rgb(self.conv2(x, w))

    def discriminate(self, x):
        h = self.critic[2](self.critic[1](self.critic[0](x)))
        spread = (x.var(dim=0, unbiased=False) + 1e-8).sqrt().mean().expand(len(x), 1)
        return self.critic[3](torch.cat([h, spread], dim=1))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        g_opt, d_opt = self.optimizers()
        d_opt.zero_grad(set_to_none=True)
        real = x.detach().requires_grad_(True)
        score = self.discriminate(real)
        (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
        r1 = slope.square().sum((1, 2, 3)).mean()
        fake = self.discriminate(self.generate(len(x)).detach())
        d_loss = F.softplus(-score).mean() + F.softplus(fake).mean() + 0.5 * self.r1 * r1
        self.manual_backward(d_loss)
        d_opt.step()
        g_opt.zero_grad(set_to_none=True)
        g_loss = F.softplus(-self.discriminate(self.generate(len(x)))).mean()
        self.manual_backward(g_loss)
        g_opt.step()
        self.log_dict({"r1": r1, "d": d_loss, "g": g_loss})
        return {"loss": d_loss, "r1": r1}

    def configure_optimizers(self):
        critic = set(self.critic.parameters())
        rest = [p for p in self.parameters() if p not in critic]
        slow = list(map(id, self.mapping.parameters()))
        groups = [
            {"params": [p for p in rest if id(p) not in slow]},
            {"params": [p for p in rest if id(p) in slow], "lr": 2e-5},
        ]
        g = torch.optim.Adam(groups, lr=2e-3, betas=(0.0, 0.99))
        d = torch.optim.Adam(self.critic.parameters(), lr=2e-3, betas=(0.0, 0.99))
        return [g, d]


class AverageGenerator(L.Callback):
    """A copy of the model whose weights are a moving average."""

    def __init__(self, decay=0.95):
        self.decay, self.average = decay, None

    def on_train_start(self, trainer, pl_module):
        self.average = AveragedModel(
            pl_module.mapping, multi_avg_fn=get_ema_multi_avg_fn(self.decay)
        )

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.average.update_parameters(pl_module.mapping)


def stylegan_modulated_r1_averaged(make_trainer):
    """Modulated convolutions, noise, R1 by double backward, AveragedModel on the host."""
    model, losses, average = StyleGAN(), Losses(), AverageGenerator()
    trainer = make_trainer(max_epochs=2, callbacks=[losses, average])
    trainer.fit(model, digits(80, 8, flat=False, labels=False))
    return results(trainer, model, losses, averaged=average.average.state_dict())


# Diffusion and scores


def time_embedding(t, dim):
    half = dim // 2
    frequencies = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half)
    angles = t[:, None].float() * frequencies[None]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class TimeBlock(nn.Module):
    def __init__(self, channels, time):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(time, 2 * channels)
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x, t):
        scale, shift = self.time(F.silu(t))[:, :, None, None].chunk(2, dim=1)
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.norm2(h) * (1 + scale) + shift
        return x + self.conv2(F.silu(h))


class DDPM(L.LightningModule):
    def __init__(self, steps=20, width=8):
        super().__init__()
        self.save_hyperparameters()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
        self.blocks = nn.ModuleList([TimeBlock(width, 16) for _ in range(2)])
        self.last = nn.Conv2d(width, 1, 3, padding=1)
        betas = torch.linspace(1e-3, 0.3, steps)
        self.register_buffer("betas", betas)
        self.register_buffer("alphas_bar", torch.cumprod(1 - betas, dim=0))

    def forward(self, x, t):
        e = self.time(time_embedding(t, 16))
        h = self.first(x)
        for block in self.blocks:
            h = block(h, e)
        return self.last(h)

    def training_step(self, batch, batch_idx):
        x = 2 * batch[0] - 1
        t = torch.randint(0, self.hparams.steps, (len(x),), device=self.device)
        noise = torch.randn_like(x)
        a = self.alphas_bar[t].view(-1, 1, 1, 1)
        loss = F.mse_loss(self(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def predict_step(self, batch, batch_idx):
        x = batch[0]
        for i in reversed(range(0, self.hparams.steps, 5)):
            t = torch.full((len(x),), i, device=x.device, dtype=torch.long)
            a, beta = self.alphas_bar[i], self.betas[i]
            mean = (x - beta / (1 - a).sqrt() * self(x, t)) / (1 - beta).sqrt()
            x = mean + beta.sqrt() * torch.randn_like(x) if i > 0 else mean
        return x

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def ddpm_ema_weight_averaging(make_trainer):
    """DDPM on digits: noise schedule in buffers, Lightning's EMAWeightAveraging, sampling."""
    model, losses = DDPM(), Losses()
    average = EMAWeightAveraging(decay=0.9, update_every_n_steps=1)
    trainer = make_trainer(max_epochs=2, callbacks=[losses, average])
    trainer.fit(model, digits(flat=False))
    noise = TensorDataset(torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    drawn = trainer.predict(model, DataLoader(noise, batch_size=8))
    return results(trainer, model, losses, drawn=drawn)


class GuidedDiffusion(L.LightningModule):
    """Cosine schedule, v-prediction, labels dropped for classifier-free guidance."""

    def __init__(self, steps=50, drop=0.2, guidance=2.0):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(11, 16)
        self.net = mlp(64 + 32, 64, 64, act=nn.SiLU)

    def alpha_sigma(self, t):
        angle = 0.5 * torch.pi * t
        return torch.cos(angle).unsqueeze(-1), torch.sin(angle).unsqueeze(-1)

    def forward(self, x, t, y):
        return self.net(torch.cat([x, time_embedding(100 * t, 16), self.embed(y)], dim=-1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = 2 * x - 1
        y = torch.where(torch.rand(len(y), device=self.device) < self.hparams.drop, 10, y)
        t = (torch.rand(1) + torch.arange(len(x)) / len(x)) % 1
        alpha, sigma = self.alpha_sigma(t)
        noise = torch.randn_like(x)
        v = alpha * noise - sigma * x
        out = self(alpha * x + sigma * noise, t, y)
        snr = (alpha / sigma.clamp(min=1e-2)).square().squeeze(-1)
        weight = torch.minimum(snr, torch.full_like(snr, 5.0)) / (snr + 1)
        loss = (weight * (out - v).square().mean(-1)).mean()
        self.log("loss", loss, on_epoch=True, sync_dist=False)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self, norm_type=2))

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        noise, y = batch
        t = torch.full((len(y),), 0.98, device=self.device)
        nothing = torch.full_like(y, 10)
        plain, given = self(noise, t, nothing), self(noise, t, y)
        alpha, sigma = self.alpha_sigma(t)
        return alpha * noise - sigma * (plain + self.hparams.guidance * (given - plain))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, betas=(0.9, 0.99))
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        chained = torch.optim.lr_scheduler.ChainedScheduler([warmup, cosine], optimizer)
        return [optimizer], [{"scheduler": chained, "interval": "step"}]


def guided_diffusion_v_prediction_accumulated(make_trainer):
    """Classifier-free guidance, v-prediction, two batches accumulated, gradient norms logged."""
    model, losses = GuidedDiffusion(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], accumulate_grad_batches=2)
    trainer.fit(model, digits())
    g = torch.Generator().manual_seed(1)
    wanted = TensorDataset(torch.randn(20, 64, generator=g), torch.arange(10).repeat(2))
    drawn = trainer.predict(model, DataLoader(wanted, batch_size=10))
    return results(trainer, model, losses, drawn=drawn)


class NoiseConditionalScore(L.LightningModule):
    def __init__(self, levels=6):
        super().__init__()
        self.net = mlp(3, 48, 48, 2, act=nn.Tanh)
        self.register_buffer("sigmas", torch.logspace(0, -2, levels))

    def score(self, x, sigma):
        return self.net(torch.cat([x, sigma.log()], dim=-1)) / sigma

    def training_step(self, batch, batch_idx):
        (x,) = batch
        sigma = self.sigmas[torch.randint(len(self.sigmas), (len(x),))].unsqueeze(-1)
        noise = torch.randn_like(x)
        error = sigma * self.score(x + sigma * noise, sigma) + noise
        return 0.5 * error.square().sum(-1).mean()

    def on_train_epoch_end(self):
        # annealed Langevin dynamics, on the host
        x = torch.zeros(8, 2)
        with torch.no_grad():
            for sigma in self.sigmas:
                step = 0.1 * sigma**2
                x = x + step * self.score(x, sigma.expand(8, 1))
                x = x + (2 * step).sqrt() * torch.randn_like(x)
        self.drawn = x
        self.log("spread", x.std())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=3e-3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
                "monitor": "spread",
                "interval": "epoch",
            },
        }


def score_matching_langevin_each_epoch(make_trainer):
    """Denoising score matching at many scales; Langevin samples on the host after each epoch."""
    model, losses = NoiseConditionalScore(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, moons())
    return results(trainer, model, losses, drawn=model.drawn)


class SlicedScore(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.energy = mlp(2, 32, 32, 1, act=nn.Softplus)

    def score(self, x):
        return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    def training_step(self, batch, batch_idx):
        x = batch[0].detach().clone().requires_grad_()
        v = F.normalize(torch.randn_like(x), dim=-1)
        s = self.score(x)
        sv = (s * v).sum()
        hessian = (torch.autograd.grad(sv, x, create_graph=True)[0] * v).sum(-1)
        loss = (hessian + 0.5 * s.square().sum(-1)).mean()
        self.log("hessian", hessian.mean())
        return loss

    @torch.enable_grad()
    def validation_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_()
        self.log("val_score", self.score(x).norm(dim=-1).mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def sliced_score_matching(make_trainer):
    """The score as an energy's gradient, its divergence along random directions."""
    model, losses = SlicedScore(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], inference_mode=False)
    trainer.fit(model, moons(), moons(64))
    return results(trainer, model, losses)


class FlowMatching(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(4))
        self.net = mlp(2 + 8, 48, 48, 2, act=nn.ELU)

    def forward(self, x, t):
        angles = 2 * torch.pi * t * self.frequencies
        return self.net(torch.cat([x, angles.sin(), angles.cos()], dim=-1))

    def training_step(self, batch, batch_idx):
        (x1,) = batch
        x0 = torch.randn_like(x1)
        # pairs by the nearest in a random direction, a cheap transport
        direction = F.normalize(torch.randn(2, device=self.device), dim=0)
        x0 = x0[(x0 @ direction).argsort()]
        x1 = x1[(x1 @ direction).argsort()]
        t = torch.sigmoid(torch.randn(len(x1), 1, device=self.device))
        loss = (self(torch.lerp(x0, x1, t), t) - (x1 - x0)).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def predict_step(self, batch, batch_idx):
        (x,) = batch
        path = [x]
        for i in range(4):
            t = torch.full((len(x), 1), i / 4)
            middle = x + self(x, t) / 8
            x = x + self(middle, t + 1 / 8) / 4
            path.append(x)
        return torch.stack(path, dim=1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3, weight_decay=1e-5)


def flow_matching_midpoint_sampling(make_trainer):
    """Flow matching on moons, pairs sorted along a direction, paths by the midpoint rule."""
    model, losses = FlowMatching(), Losses()
    trainer = make_trainer(max_steps=20, callbacks=[losses], gradient_clip_val=0.5)
    trainer.fit(model, moons())
    noise = TensorDataset(torch.randn(16, 2, generator=torch.Generator().manual_seed(5)))
    return results(
        trainer, model, losses, paths=trainer.predict(model, DataLoader(noise, batch_size=16))
    )


class Consistency(L.LightningModule):
    """Consistency training: two neighbouring noises must lead to the same picture."""

    def __init__(self, sigma_data=0.5, levels=8):
        super().__init__()
        self.sigma_data = sigma_data
        self.net = mlp(65, 48, 64, act=nn.Mish)
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        rho = 7
        ramp = torch.linspace(0, 1, levels)
        self.register_buffer(
            "sigmas", (0.02 ** (1 / rho) * (1 - ramp) + 3 ** (1 / rho) * ramp) ** rho
        )

    def denoise(self, net, x, sigma):
        skip = self.sigma_data**2 / ((sigma - 0.02) ** 2 + self.sigma_data**2)
        out = self.sigma_data * (sigma - 0.02) / (sigma**2 + self.sigma_data**2).sqrt()
        return skip * x + out * net(torch.cat([x, 0.25 * sigma.log()], dim=-1))

    def training_step(self, batch, batch_idx):
        x = batch[0] - 0.5
        n = torch.randint(len(self.sigmas) - 1, (len(x), 1))
        low, high = self.sigmas[n], self.sigmas[n + 1]
        z = torch.randn_like(x)
        with torch.no_grad():
            wanted = self.denoise(self.teacher, x + low * z, low)
        got = self.denoise(self.net, x + high * z, high)
        c = 0.03
        return ((got - wanted).square().sum(-1) + c**2).sqrt().mean() - c

    def on_before_zero_grad(self, optimizer):
        with torch.no_grad():
            for t, p in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                t.mul_(0.9).add_(p, alpha=0.1)

    def configure_optimizers(self):
        return torch.optim.RAdam(self.net.parameters(), lr=2e-3)


def consistency_training(make_trainer):
    """Consistency training with pseudo-Huber loss; the teacher follows in on_before_zero_grad."""
    model, losses = Consistency(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, digits())
    return results(trainer, model, losses)


# Flows


class Coupling(nn.Module):
    def __init__(self, mask, hidden=24):
        super().__init__()
        self.register_buffer("mask", mask)
        self.scale = nn.Sequential(mlp(2, hidden, 2), nn.Tanh())
        self.shift = mlp(2, hidden, 2)

    def forward(self, x):
        fixed = x * self.mask
        s = self.scale(fixed) * (1 - self.mask)
        t = self.shift(fixed) * (1 - self.mask)
        return fixed + (1 - self.mask) * (x * torch.exp(s) + t), s.sum(-1)

    def inverse(self, y):
        fixed = y * self.mask
        s = self.scale(fixed) * (1 - self.mask)
        t = self.shift(fixed) * (1 - self.mask)
        return fixed + (1 - self.mask) * (y - t) * torch.exp(-s)


class RealNVP(L.LightningModule):
    def __init__(self, layers=4):
        super().__init__()
        masks = [torch.tensor([float(i % 2), float((i + 1) % 2)]) for i in range(layers)]
        self.flows = nn.ModuleList(Coupling(m) for m in masks)
        self.register_buffer("loc", torch.zeros(2))
        self.register_buffer("cov", torch.eye(2))

    @property
    def prior(self):
        return MultivariateNormal(self.loc, self.cov)

    def log_prob(self, x):
        total = x.new_zeros(len(x))
        for flow in self.flows:
            x, log_det = flow(x)
            total = total + log_det
        return self.prior.log_prob(x) + total

    def training_step(self, batch, batch_idx):
        loss = -self.log_prob(batch[0]).mean()
        self.log("nll", loss, prog_bar=True)
        self.log("bits", loss / (2 * math.log(2)), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_nll", -self.log_prob(batch[0]).mean())

    def predict_step(self, batch, batch_idx):
        x = batch[0]
        for flow in reversed(self.flows):
            x = flow.inverse(x)
        return x

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=5e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 1e-2, total_steps=20, cycle_momentum=True, anneal_strategy="linear"
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "name": "rate"}]


def realnvp_best_checkpoint(make_trainer):
    """RealNVP on moons, OneCycle with momentum, the best checkpoint validated and inverted."""
    model, losses = RealNVP(), Losses()
    with tempfile.TemporaryDirectory() as folder:
        best = ModelCheckpoint(folder, monitor="val_nll", filename="{epoch}-{step}")
        trainer = make_trainer(max_epochs=2, callbacks=[losses, best], enable_checkpointing=True)
        trainer.fit(model, moons(), moons(64))
        validated = trainer.validate(model, moons(96), ckpt_path="best", verbose=False)
        name = best.best_model_path.rsplit("/", 1)[-1]
    noise = TensorDataset(torch.linspace(-2, 2, 32).view(16, 2))
    drawn = trainer.predict(model, DataLoader(noise, batch_size=8))
    return results(trainer, model, losses, validated=validated, best=name, drawn=drawn)


class ActNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.log_scale = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x):
        if self.initialized.item() == 0:
            with torch.no_grad():
                self.loc.copy_(-x.mean((0, 2, 3), keepdim=True))
                self.log_scale.copy_(-torch.log(x.std((0, 2, 3), keepdim=True) + 1e-6))
            self.initialized.fill_(1)
        log_det = x.shape[2] * x.shape[3] * self.log_scale.sum()
        return self.log_scale.exp() * (x + self.loc), log_det


class InvertibleConv(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(channels, channels))[0])

    def forward(self, x):
        log_det = x.shape[2] * x.shape[3] * torch.linalg.slogdet(self.weight)[1]
        return F.conv2d(x, self.weight[:, :, None, None]), log_det


class Glow(L.LightningModule):
    def __init__(self, depth=2):
        super().__init__()
        self.squeeze = nn.PixelUnshuffle(2)
        self.steps = nn.ModuleList()
        for _ in range(depth):
            net = nn.Sequential(nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 1))
            nn.init.zeros_(net[-1].weight)
            self.steps.append(nn.ModuleList([ActNorm(4), InvertibleConv(4), net]))

    def training_step(self, batch, batch_idx):
        x = batch[0] + torch.rand_like(batch[0]) / 17
        x = self.squeeze(x)
        log_det = 0
        for norm, mix, net in self.steps:
            x, a = norm(x)
            x, b = mix(x)
            first, second = x.chunk(2, dim=1)
            log_s, t = net(first).chunk(2, dim=1)
            s = torch.sigmoid(log_s + 2)
            x = torch.cat([first, (second + t) * s], dim=1)
            log_det = log_det + a + b + s.log().sum((1, 2, 3))
        log_p = Normal(0.0, 1.0).log_prob(x).sum((1, 2, 3))
        loss = -(log_p + log_det).mean() / 64
        self.log("nll", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def glow_data_dependent_actnorm(make_trainer):
    """Glow: ActNorm sets itself up from the first batch, asking initialized.item()."""
    model, losses = Glow(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, digits(flat=False))
    return results(trainer, model, losses)


class PlanarFlow(L.LightningModule):
    def __init__(self, depth=4):
        super().__init__()
        self.u = nn.ParameterList([nn.Parameter(0.1 * torch.randn(2)) for _ in range(depth)])
        self.w = nn.ParameterList([nn.Parameter(0.1 * torch.randn(2)) for _ in range(depth)])
        self.b = nn.Parameter(torch.zeros(depth))

    def training_step(self, batch, batch_idx):
        (z,) = batch
        log_q = Normal(0.0, 1.0).log_prob(z).sum(-1)
        for u, w, b in zip(self.u, self.w, self.b, strict=True):
            inner = w @ u
            u_hat = u + (F.softplus(inner) - 1 - inner) * w / w.square().sum()
            h = torch.tanh(z @ w + b)
            log_q = log_q - torch.log1p((1 - h**2) * (w @ u_hat))
            z = z + u_hat * h.unsqueeze(-1)
        ring = -0.5 * ((z.norm(dim=-1) - 2) / 0.4) ** 2
        sides = torch.logaddexp(
            -0.5 * ((z[:, 0] - 2) / 0.6) ** 2, -0.5 * ((z[:, 0] + 2) / 0.6) ** 2
        )
        return (log_q - ring - sides).mean()

    def configure_optimizers(self):
        return torch.optim.Rprop(self.parameters(), lr=1e-2, etas=(0.6, 1.1))


def planar_flow_reverse_kl(make_trainer):
    """Planar flows fitted to a density: parameter lists, samples as the data."""
    noise = torch.randn(320, 2, generator=torch.Generator().manual_seed(3))
    model, losses = PlanarFlow(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(TensorDataset(noise), batch_size=32))
    return results(trainer, model, losses)


# Autoregressive models


class MaskedLinear(nn.Linear):
    def __init__(self, cin, cout, mask):
        super().__init__(cin, cout)
        self.register_buffer("mask", mask)

    def forward(self, x):
        return F.linear(x, self.mask * self.weight, self.bias)


class MADE(L.LightningModule):
    def __init__(self, hidden=48):
        super().__init__()
        order = torch.arange(64)
        between = torch.arange(hidden) % 63
        self.first = MaskedLinear(64, hidden, (between[:, None] >= order[None]).float())
        self.second = MaskedLinear(hidden, 64, (order[:, None] > between[None]).float())
        self.bpd = torchmetrics.MeanMetric()

    def forward(self, x):
        return self.second(F.relu(self.first(x)))

    def training_step(self, batch, batch_idx):
        x = (batch[0] > 0.5).float()
        loss = F.binary_cross_entropy_with_logits(self(x), x, reduction="none").sum(-1).mean()
        self.bpd(loss / 64 / math.log(2))
        self.log("bpd", self.bpd, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=2e-2, lr_decay=1e-3)


def made_masked_linear(make_trainer):
    """MADE on binarized digits: masked weights in a Linear of one's own."""
    model, losses = MADE(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, digits())
    return results(trainer, model, losses)


class MaskedConv2d(nn.Conv2d):
    def __init__(self, kind, *args, **kwargs):
        super().__init__(*args, **kwargs)
        mask = torch.ones_like(self.weight)
        _, _, h, w = mask.shape
        mask[:, :, h // 2, w // 2 + (kind == "B") :] = 0
        mask[:, :, h // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x):
        self.weight.data *= self.mask
        return super().forward(x)


class PixelCNN(L.LightningModule):
    def __init__(self, levels=4, width=12):
        super().__init__()
        self.levels = levels
        self.net = nn.Sequential(
            MaskedConv2d("A", 1, width, 5, padding=2, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(True),
            MaskedConv2d("B", width, width, 3, padding=1),
            nn.ReLU(True),
            nn.Conv2d(width, levels, 1),
        )

    def training_step(self, batch, batch_idx):
        target = (batch[0] * (self.levels - 1)).round().long().squeeze(1)
        logits = self.net(target.unsqueeze(1).float() / (self.levels - 1))
        loss = F.cross_entropy(logits, target)
        self.log("nats", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adamax(self.parameters(), lr=1e-2)
        return [optimizer], [
            torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.9)
        ]


def pixelcnn_masks_weights_in_place(make_trainer):
    """PixelCNN: weight.data is multiplied by the mask in forward; MultiplicativeLR."""
    model, losses = PixelCNN(), Losses()
    trainer = make_trainer(max_epochs=3, callbacks=[losses])
    trainer.fit(model, digits(112, flat=False))
    return results(trainer, model, losses)


TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. " * 8


class Characters(L.LightningDataModule):
    def __init__(self, length=12, batch_size=8):
        super().__init__()
        self.length, self.batch_size = length, batch_size

    def setup(self, stage=None):
        self.letters = sorted(set(TEXT))
        index = {c: i for i, c in enumerate(self.letters)}
        self.codes = torch.tensor([index[c] for c in TEXT])

    def train_dataloader(self):
        # streams side by side, cut into pieces that follow each other
        per = len(self.codes) // self.batch_size
        streams = self.codes[: per * self.batch_size].view(self.batch_size, per)
        pieces = [
            (streams[:, i : i + self.length], streams[:, i + 1 : i + 1 + self.length])
            for i in range(0, per - self.length - 1, self.length)
        ]
        return DataLoader(pieces, batch_size=None)


class CharLSTM(L.LightningModule):
    def __init__(self, letters, hidden=24, batch_size=8):
        super().__init__()
        self.embed = nn.Embedding(letters, 12)
        self.drop = nn.Dropout(0.1)
        self.lstm = nn.LSTM(12, hidden, batch_first=True)
        self.out = nn.Linear(hidden, letters)
        zeros = torch.zeros(1, batch_size, hidden)
        self.hidden = (zeros, zeros.clone())

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = tuple(h.detach() for h in self.hidden)
        out, self.hidden = self.lstm(self.drop(self.embed(x)), hidden)
        loss = F.cross_entropy(self.out(out).flatten(0, 1), y.flatten())
        self.log("ppl", loss.exp(), batch_size=len(x))
        return loss

    def on_train_epoch_start(self):
        for h in self.hidden:
            h.detach().zero_()

    def on_after_backward(self):
        nn.utils.clip_grad_norm_(self.lstm.parameters(), 0.5)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def char_lstm_truncated_backpropagation(make_trainer):
    """Letters in streams; the LSTM's state is kept for the next batch; clipped after backward."""
    data = Characters()
    data.setup()
    model, losses = CharLSTM(len(data.letters)), Losses()
    trainer = make_trainer(max_epochs=3, callbacks=[losses])
    trainer.fit(model, datamodule=data)
    return results(trainer, model, losses, state=model.hidden)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.gate = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def rotate(self, x):
        length, half = x.shape[-2], x.shape[-1] // 2
        frequency = 100.0 ** (-torch.arange(half, device=x.device) / half)
        angles = torch.arange(length, device=x.device)[:, None] * frequency
        a, b = x.chunk(2, dim=-1)
        return torch.cat(
            [a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        a = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).flatten(2))
        gate, up = self.gate(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class TinyGPT(L.LightningModule):
    def __init__(self, letters, dim=16, depth=2, heads=2):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(letters, dim)
        self.blocks = nn.Sequential(*[Block(dim, heads) for _ in range(depth)])
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, letters, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.embed(tokens))))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits.transpose(1, 2), y)
        z_loss = 1e-4 * logits.logsumexp(-1).square().mean()
        self.log("train/loss", loss, prog_bar=True, batch_size=x.size(0))
        return loss + z_loss

    def predict_step(self, batch, batch_idx):
        tokens = batch[0][:, :4]
        for _ in range(3):
            p = (self(tokens)[:, -1] / 0.8).softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(p, 1)], dim=1)
        return tokens

    def configure_optimizers(self):
        decay = {"params": [p for p in self.parameters() if p.dim() >= 2], "weight_decay": 0.1}
        others = {"params": [p for p in self.parameters() if p.dim() < 2], "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([decay, others], lr=5e-3, betas=(0.9, 0.95))

        def schedule(step, warmup=4, total=24):
            if step < warmup:
                return (step + 1) / warmup
            return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def tiny_gpt_rotary_tied(make_trainer):
    """A GPT: rotary positions, RMSNorm, gated MLP, tied weights, warm-up and cosine, sampling."""
    data = Characters()
    data.setup()
    model, losses = TinyGPT(len(data.letters)), Losses()
    trainer = make_trainer(max_epochs=3, callbacks=[losses], gradient_clip_val=1.0)
    trainer.fit(model, datamodule=data)
    said = trainer.predict(model, data.train_dataloader())
    text = ["".join(data.letters[i] for i in row) for row in said[0].tolist()]
    return results(trainer, model, losses, said=said, text=text)


class CausalConv1d(nn.Conv1d):
    def forward(self, x):
        return super().forward(F.pad(x, ((self.kernel_size[0] - 1) * self.dilation[0], 0)))


class WaveNet(L.LightningModule):
    def __init__(self, levels=16, width=12, dilations=(1, 2, 4)):
        super().__init__()
        self.levels = levels
        self.first = nn.Embedding(levels, width)
        self.filters = nn.ModuleList(
            CausalConv1d(width, 2 * width, 2, dilation=d) for d in dilations
        )
        self.mixes = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in dilations)
        self.out = nn.Sequential(nn.ReLU(), nn.Conv1d(width, levels, 1))

    def encode(self, wave):
        mu = self.levels - 1
        squashed = torch.sign(wave) * torch.log1p(mu * wave.abs()) / math.log1p(mu)
        return ((squashed + 1) / 2 * mu + 0.5).long().clamp(0, mu)

    def forward(self, codes):
        x = self.first(codes).transpose(1, 2)
        skips = 0
        for conv, mix in zip(self.filters, self.mixes, strict=True):
            h = F.glu(conv(x), dim=1)
            residual, skip = mix(h).chunk(2, dim=1)
            x, skips = x + residual, skips + skip
        return self.out(skips)

    def shared_step(self, batch, stage):
        codes = self.encode(batch["wave"])
        loss = F.cross_entropy(self(codes[:, :-1]), codes[:, 1:])
        self.log(f"{stage}_loss", loss, on_epoch=True, on_step=stage == "train")
        return loss

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.shared_step(batch, "val")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


class Waves(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        t = torch.linspace(0, 1, 33)
        return {"wave": 0.8 * torch.sin(2 * torch.pi * (1 + i % 5) * t + i), "pitch": 1 + i % 5}


def wavenet_validated_within_epochs(make_trainer):
    """Causal dilated convolutions on mu-law codes, validation twice an epoch."""
    model, losses = WaveNet(), Losses()
    trainer = make_trainer(
        max_epochs=2, callbacks=[losses], val_check_interval=0.5, limit_val_batches=2
    )
    trainer.fit(
        model, DataLoader(Waves(160), batch_size=16, shuffle=True), DataLoader(Waves(48), 16)
    )
    return results(trainer, model, losses)


# Energies and mixtures


class EnergyModel(L.LightningModule):
    def __init__(self, memory=128, chain=4):
        super().__init__()
        self.chain = chain
        self.energy = mlp(2, 32, 32, 1, act=nn.SiLU)
        self.register_buffer("memory", torch.rand(memory, 2) * 4 - 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def sample(self, n):
        rows = torch.randperm(len(self.memory), device=self.device)[:n]
        fresh = torch.rand(n, 1, device=self.device) < 0.05
        x = torch.where(fresh, torch.rand(n, 2, device=self.device) * 4 - 2, self.memory[rows])
        for _ in range(self.chain):
            x = x.detach().requires_grad_(True)
            (slope,) = torch.autograd.grad(self.energy(x).sum(), x)
            x = x - 0.1 * slope.clamp(-1, 1) + 0.02 * torch.randn_like(x)
        x = x.detach().clamp(-2.5, 2.5)
        self.memory[rows] = x
        return x

    def training_step(self, batch, batch_idx):
        (real,) = batch
        fake = self.sample(len(real))
        e_real, e_fake = self.energy(real).squeeze(-1), self.energy(fake).squeeze(-1)
        reg = 0.1 * (e_real.square() + e_fake.square()).mean()
        divergence = e_real.mean() - e_fake.mean()
        self.seen += len(real)
        self.log_dict({"divergence": divergence, "reg": reg})
        return divergence + reg

    def on_train_end(self):
        self.count = int(self.seen)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3, betas=(0.0, 0.999))
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.97)]


def energy_model_langevin_memory(make_trainer):
    """An energy model: Langevin chains in the step begin from a memory that they fill again."""
    model, losses = EnergyModel(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], gradient_clip_val=0.1)
    trainer.fit(model, moons())
    return results(trainer, model, losses, count=model.count)


class RBM(L.LightningModule):
    """Contrastive divergence by hand: no optimizer, no backward."""

    def __init__(self, visible=64, hidden=24, lr=0.1, momentum=0.5):
        super().__init__()
        self.automatic_optimization = False
        self.lr, self.momentum = lr, momentum
        self.w = nn.Parameter(0.01 * torch.randn(visible, hidden), requires_grad=False)
        self.a = nn.Parameter(torch.zeros(visible), requires_grad=False)
        self.b = nn.Parameter(torch.zeros(hidden), requires_grad=False)
        self.register_buffer("velocity", torch.zeros(visible, hidden))

    def training_step(self, batch, batch_idx):
        v0 = torch.bernoulli(batch[0])
        p0 = torch.sigmoid(v0 @ self.w + self.b)
        h = torch.bernoulli(p0)
        for _ in range(2):
            v = torch.bernoulli(torch.sigmoid(h @ self.w.t() + self.a))
            p = torch.sigmoid(v @ self.w + self.b)
            h = torch.bernoulli(p)
        self.velocity.mul_(self.momentum).add_((v0.t() @ p0 - v.t() @ p) / len(v0))
        self.w.add_(self.velocity, alpha=self.lr)
        self.a.add_(self.lr * (v0 - v).mean(0))
        self.b.add_(self.lr * (p0 - p).mean(0))
        error = F.mse_loss(torch.sigmoid(p @ self.w.t() + self.a), batch[0])
        self.log("error", error, on_step=True, on_epoch=True)
        return error

    def configure_optimizers(self):
        return None


def rbm_contrastive_divergence_no_optimizer(make_trainer):
    """A restricted Boltzmann machine moved by its own rule: no optimizer at all."""
    model, losses = RBM(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, digits(labels=False))
    return results(trainer, model, losses)


class MixtureDensity(L.LightningModule):
    def __init__(self, components=4):
        super().__init__()
        self.k = components
        self.body = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.heads = nn.ModuleDict({n: nn.Linear(24, components) for n in ("pi", "mu", "sigma")})

    def forward(self, x):
        h = self.body(x)
        mixture = Categorical(logits=self.heads["pi"](h))
        parts = Normal(self.heads["mu"](h), F.softplus(self.heads["sigma"](h)) + 1e-3)
        return MixtureSameFamily(mixture, parts)

    def training_step(self, batch, batch_idx):
        x, y = batch
        nll = -self(x).log_prob(y.squeeze(-1)).mean()
        self.log("nll", nll, prog_bar=True, on_step=True, on_epoch=True)
        return nll

    def predict_step(self, batch, batch_idx):
        d = self(batch[0])
        return d.mean, d.variance

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-3, maximize=False, fused=False)


class LastLosses(L.Callback):
    """A window of losses; its state goes with checkpoints."""

    def __init__(self, size=5):
        self.window = deque(maxlen=size)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.window.append(float(outputs["loss"]))

    def state_dict(self):
        return {"window": list(self.window)}

    def load_state_dict(self, state_dict):
        self.window.extend(state_dict["window"])


def mixture_density_network_resumed(make_trainer):
    """A mixture density network, saved after an epoch and resumed with its callback's state."""
    g = torch.Generator().manual_seed(0)
    y = torch.rand(320, 1, generator=g) * 2 - 1
    x = y + 0.3 * torch.sin(2 * torch.pi * y) + 0.05 * torch.randn(320, 1, generator=g)
    data = DataLoader(TensorDataset(x, y), batch_size=32)
    losses, window = Losses(), LastLosses()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(max_epochs=1, callbacks=[Losses(), LastLosses()])
        trainer.fit(MixtureDensity(), data)
        trainer.save_checkpoint(f"{folder}/first.ckpt")
        model = MixtureDensity()
        trainer = make_trainer(max_epochs=3, callbacks=[losses, window])
        trainer.fit(model, data, ckpt_path=f"{folder}/first.ckpt")
    predicted = trainer.predict(model, data)[:2]
    return results(trainer, model, losses, window=list(window.window), predicted=predicted)


class MaskedDiffusion(L.LightningModule):
    """Discrete diffusion: letters are masked at a random rate, and guessed by an encoder."""

    def __init__(self, letters, dim=16):
        super().__init__()
        self.mask = letters
        self.embed = nn.Embedding(letters + 1, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * dim, letters)
        self.hit = torchmetrics.classification.MulticlassAccuracy(letters, average="micro")

    def training_step(self, batch, batch_idx):
        x, _ = batch
        rate = torch.rand(len(x), 1, device=self.device).clamp(min=0.1)
        hidden = torch.rand(x.shape, device=self.device) < rate
        logits = self.out(self.rnn(self.embed(x.masked_fill(hidden, self.mask)))[0])
        ce = F.cross_entropy(logits.transpose(1, 2), x, reduction="none", label_smoothing=0.05)
        self.hit.update(logits.flatten(0, 1), x.flatten())
        return (ce * hidden / rate).mean()

    def on_train_epoch_end(self):
        self.log("hit", self.hit.compute())
        self.hit.reset()

    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters(), lr=2e-2)


def masked_letters_gru_bf16(make_trainer):
    """Masked letters guessed by a GRU, Adafactor, bf16-mixed, a metric computed by hand."""
    data = Characters()
    data.setup()
    model, losses = MaskedDiffusion(len(data.letters)), Losses()
    trainer = make_trainer(max_epochs=3, callbacks=[losses], precision="bf16-mixed")
    trainer.fit(model, datamodule=data)
    return results(trainer, model, losses)
