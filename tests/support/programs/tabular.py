"""Small training programs on tables, graphs, equations and other data of the sciences.

Each function whose one argument is `make_trainer` is a program: it sets up its data and its
LightningModule, trains for about twenty steps and returns a dict of what came out (losses, logged
values, weights, predictions). `make_trainer(**options)` makes the Trainer: options that a program
gives win over the caller's. Data and weights follow from torch's global seed, which the caller sets
before each call.
"""

import copy
import functools
import itertools
import math
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from programs.common import LossNumbers as Losses
from programs.common import weights
from sklearn import datasets
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal
from torch.func import functional_call, grad, grad_and_value, hessian, jacrev, vmap
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
    TensorDataset,
    random_split,
)


@functools.cache
def table(name: str) -> tuple[Tensor, Tensor]:
    """One of scikit-learn's sets, standardized: features float32, classes int64."""
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    x = torch.tensor(StandardScaler().fit_transform(x), dtype=torch.float32)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    y = torch.tensor(y, dtype=torch.float32 if name == "diabetes" else torch.long)
    return x[order], y[order]


def rows(name: str, first: int, last: int) -> TensorDataset:
    x, y = table(name)
    return TensorDataset(x[first:last], y[first:last])


def mlp(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1])


# Regression


class DiabetesRegressor(pl.LightningModule):
    """Standardizes its target by buffers, logs metrics in the units of the target."""

    def __init__(self, mean: float, std: float, hidden: int = 16, lr: float = 5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))
        self.net = nn.Sequential(
            nn.Linear(10, hidden), nn.BatchNorm1d(hidden), nn.GELU(), nn.Linear(hidden, 1)
        )
        self.metrics = torchmetrics.MetricCollection(
            [
                torchmetrics.MeanSquaredError(squared=False),
                torchmetrics.R2Score(),
                torchmetrics.PearsonCorrCoef(),
            ],
            prefix="val_",
        )

    def forward(self, x):
        return self.net(x).squeeze(-1) * self.std + self.mean

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.smooth_l1_loss((self(x) - self.mean) / self.std, (y - self.mean) / self.std)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.metrics.update(self(x), y)

    def on_validation_epoch_end(self):
        self.log_dict(self.metrics.compute())
        self.metrics.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.05)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_MeanSquaredError"},
        }


def diabetes_regression(make_trainer) -> Any:
    """Regression with a standardized target, RMSE, R2, Pearson, plateau, validate after fit."""
    train, val = rows("diabetes", 0, 160), rows("diabetes", 160, 224)
    y = train.tensors[1]
    model, losses = DiabetesRegressor(y.mean().item(), y.std().item()), Losses()
    trainer = make_trainer(max_epochs=4, callbacks=[losses])
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, 32))
    again = trainer.validate(model, DataLoader(val, 32), verbose=False)
    return {
        "losses": losses.values,
        "validated": again,
        "hparams": dict(model.hparams),
        "w": weights(model),
    }


class QuantileNet(pl.LightningModule):
    """Quantiles that cannot cross: the first, and positive steps from it."""

    def __init__(self, quantiles: list[float]):
        super().__init__()
        self.register_buffer("q", torch.tensor(quantiles), persistent=False)
        self.net = mlp(10, 16, len(quantiles), activation=nn.Softplus)

    def forward(self, x):
        first, steps = self.net(x).split([1, len(self.q) - 1], dim=1)
        return torch.cat([first, first + F.softplus(steps).cumsum(1)], dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        error = (y / 100)[:, None] - self(x)
        loss = torch.max(self.q * error, (self.q - 1) * error).sum(1).mean()
        self.log("pinball", loss)
        return loss

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        p = self(x)
        inside = (y / 100 >= p[:, 0]) & (y / 100 <= p[:, -1])
        self.log("coverage", inside.float().mean(), on_epoch=True)
        self.log("width", (p[:, -1] - p[:, 0]).max(), reduce_fx="max")

    def configure_optimizers(self):
        return torch.optim.NAdam(self.parameters(), lr=2e-2)


def quantile_regression(make_trainer) -> Any:
    """Three quantiles at once; coverage and width in test, one loader after the other."""
    model, losses = QuantileNet([0.1, 0.5, 0.9]), Losses()
    trainer = make_trainer(max_epochs=4, callbacks=[losses])
    trainer.fit(model, DataLoader(rows("diabetes", 0, 160), batch_size=32))
    tests = [DataLoader(rows("diabetes", a, a + 64), 32) for a in (160, 224)]
    return {"losses": losses.values, "test": trainer.test(model, tests, verbose=False)}


class Heteroscedastic(pl.LightningModule):
    """Mean and variance; the variance learns after a warm-up by beta-NLL."""

    def __init__(self, beta=0.5):
        super().__init__()
        self.body, self.beta = mlp(10, 24, 24, activation=nn.Tanh), beta
        self.mean, self.log_var = nn.Linear(24, 1), nn.Linear(24, 1)
        nn.init.zeros_(self.log_var.weight)
        self.y_scale = 100.0

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.mean(h).squeeze(-1), F.softplus(self.log_var(h)).squeeze(-1) + 1e-4

    def training_step(self, batch, batch_idx):
        x, y = batch
        mean, var = self(x)
        nll = F.gaussian_nll_loss(mean, y / self.y_scale, var, reduction="none", full=True)
        loss = (nll * var.detach() ** self.beta).mean()
        self.log_dict({"nll": nll.mean(), "sigma": var.sqrt().mean()}, on_epoch=True)
        return loss

    def predict_step(self, batch, batch_idx):
        mean, var = self(batch[0])
        return {"mean": mean * self.y_scale, "std": var.sqrt() * self.y_scale, "index": batch_idx}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def heteroscedastic_regression(make_trainer) -> Any:
    """beta-NLL with a predicted variance; predictions with the index of their batch."""
    loader = DataLoader(rows("diabetes", 0, 320), batch_size=32)
    model, losses = Heteroscedastic(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, loader)
    return {"losses": losses.values, "predictions": trainer.predict(model, loader)}


class MixtureDensity(pl.LightningModule):
    def __init__(self, components=3):
        super().__init__()
        self.net = mlp(1, 16, 3 * components, activation=nn.Tanh)

    def distribution(self, x):
        logits, loc, scale = self.net(x).chunk(3, dim=-1)
        return MixtureSameFamily(
            Categorical(logits=logits), Normal(loc, F.softplus(scale) + 1e-2, validate_args=False)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = -self.distribution(x).log_prob(y).mean()
        self.log("nll", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        d = self.distribution(batch[0])
        self.log("val_nll", -d.log_prob(batch[1]).mean())
        self.log("spread", d.variance.mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-2)


def mixture_density_network(make_trainer) -> Any:
    """The inverse of a wave that has several values, by a mixture of normals."""
    t = torch.rand(192)
    x = t + 0.3 * torch.sin(2 * math.pi * t) + 0.05 * torch.randn(192)
    data = TensorDataset(x[:, None], t)
    model, losses = MixtureDensity(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(data, 16, shuffle=True), DataLoader(data, 64))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class BayesianLinear(nn.Module):
    """Weights drawn anew for each pass; local KL to a standard normal."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.mu = nn.Parameter(torch.randn(outputs, inputs + 1) / inputs**0.5)
        self.rho = nn.Parameter(torch.full((outputs, inputs + 1), -4.0))
        self.kl = torch.tensor(0.0)

    def forward(self, x):
        sigma = F.softplus(self.rho)
        w = self.mu + sigma * torch.randn_like(sigma)
        self.kl = 0.5 * (sigma**2 + self.mu**2 - 1 - 2 * sigma.log()).sum()
        return F.linear(x, w[:, :-1], w[:, -1])


class BayesByBackprop(pl.LightningModule):
    def __init__(self, batches: int):
        super().__init__()
        self.net = nn.Sequential(BayesianLinear(13, 8), nn.ReLU(), BayesianLinear(8, 3))
        self.batches = batches
        self.ece = torchmetrics.CalibrationError(task="multiclass", num_classes=3, n_bins=5)

    def training_step(self, batch, batch_idx):
        x, y = batch
        nll = F.cross_entropy(self.net(x), y, reduction="sum")
        kl = sum(layer.kl for layer in self.net if isinstance(layer, BayesianLinear))
        self.log("kl", kl)
        return nll + kl / self.batches

    def validation_step(self, batch, batch_idx):
        x, y = batch
        p = torch.stack([self.net(x).softmax(-1) for _ in range(3)]).mean(0)
        self.ece.update(p, y)
        self.log("ece", self.ece, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-2)


def bayes_by_backprop(make_trainer) -> Any:
    """Drawn weights, KL kept by the layers, three samples in validation, calibration error."""
    data = rows("wine", 0, 160)
    model, losses = BayesByBackprop(10), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(data, 16), DataLoader(rows("wine", 144, 176), 16))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class GaussianProcess(pl.LightningModule):
    """The exact marginal likelihood by Cholesky; the whole set is one batch."""

    def __init__(self):
        super().__init__()
        self.log_length = nn.Parameter(torch.zeros(2))
        self.log_amplitude = nn.Parameter(torch.tensor(0.0))
        self.log_noise = nn.Parameter(torch.tensor(-1.0))

    def kernel(self, a, b):
        squared = torch.cdist(a / self.log_length.exp(), b / self.log_length.exp()).square()
        return (2 * self.log_amplitude).exp() * torch.exp(-0.5 * squared)

    def factor(self, x):
        noise = (2 * self.log_noise).exp() + 1e-4
        return torch.linalg.cholesky(self.kernel(x, x) + noise * torch.eye(len(x)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        chol = self.factor(x)
        alpha = torch.cholesky_solve(y[:, None], chol).squeeze(1)
        logdet = chol.diagonal().log().sum()
        loss = (0.5 * y @ alpha + logdet + 0.5 * len(x) * math.log(2 * math.pi)) / len(x)
        self.log_dict({"nlml": loss, "noise": self.log_noise.exp()})
        return loss

    def predict_step(self, batch, batch_idx):
        (x, y), query = batch
        chol = self.factor(x)
        k = self.kernel(query, x)
        mean = k @ torch.cholesky_solve(y[:, None], chol)
        v = torch.linalg.solve_triangular(chol, k.T, upper=False)
        return mean.squeeze(1), (2 * self.log_amplitude).exp() - v.square().sum(0)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-2)


def gaussian_process(make_trainer) -> Any:
    """A Gaussian process with ARD lengths, one full batch an epoch, mean and variance predicted."""
    x = torch.rand(24, 2) * 4
    y = torch.sin(x[:, 0]) + 0.1 * torch.randn(24)
    model, losses = GaussianProcess(), Losses()
    trainer = make_trainer(max_epochs=20, callbacks=[losses])
    trainer.fit(model, DataLoader([(x, y)], batch_size=None))
    query = DataLoader([((x, y), torch.rand(8, 2) * 4)], batch_size=None)
    return {
        "losses": losses.values,
        "posterior": trainer.predict(model, query),
        "w": weights(model),
    }


class DeepKernel(pl.LightningModule):
    """Random Fourier features over a learned map, a ridge solved in closed form in each step."""

    def __init__(self, features=16):
        super().__init__()
        self.map = nn.utils.parametrizations.spectral_norm(nn.Linear(10, 6))
        self.register_buffer("omega", torch.randn(6, features))
        self.register_buffer("phase", torch.rand(features) * 2 * math.pi)
        self.log_ridge = nn.Parameter(torch.tensor(0.0))

    def features(self, x):
        return math.sqrt(2 / self.omega.shape[1]) * torch.cos(self.map(x) @ self.omega + self.phase)

    def training_step(self, batch, batch_idx):
        x, y = batch[0], batch[1] / 100
        support, query = self.features(x).chunk(2)
        a, b = y.chunk(2)
        eye = torch.eye(support.shape[1], device=self.device)
        gram = support.T @ support + self.log_ridge.exp() * eye
        w = torch.linalg.solve(gram, support.T @ a)
        loss = F.mse_loss(query @ w, b)
        self.log("query_mse", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def deep_kernel_ridge(make_trainer) -> Any:
    """A differentiable ridge regression on Fourier features under a spectral norm."""
    model, losses = DeepKernel(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(rows("diabetes", 0, 320), batch_size=32))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


# Classification


class TabularNet(pl.LightningModule):
    """Categories by embeddings, numbers by BatchNorm, residual blocks (as in fastai's tables)."""

    def __init__(self, cardinalities=(5, 7, 3), numbers=4, width=16):
        super().__init__()
        self.embeddings = nn.ModuleList(
            nn.Embedding(n, min(8, (n + 1) // 2)) for n in cardinalities
        )
        self.dropout = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(numbers, momentum=0.2)
        total = sum(e.embedding_dim for e in self.embeddings) + numbers
        self.stem = nn.Linear(total, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ELU()) for _ in range(2)
        )
        self.head = nn.Linear(width, 1)
        self.train_auc = torchmetrics.classification.BinaryAUROC(thresholds=10)
        self.ap = torchmetrics.classification.BinaryAveragePrecision(thresholds=10)

    def forward(self, categories, numbers):
        embedded = [e(categories[:, i]) for i, e in enumerate(self.embeddings)]
        x = self.stem(torch.cat([self.dropout(torch.cat(embedded, 1)), self.norm(numbers)], 1))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).squeeze(-1)

    def training_step(self, batch, batch_idx):
        logits = self(batch["categories"], batch["numbers"])
        y = batch["target"]
        self.train_auc(logits, y)
        self.ap(logits, y)
        self.log("train_auc", self.train_auc, on_step=False, on_epoch=True)
        self.log("train_ap", self.ap, on_step=False, on_epoch=True)
        smooth = y.float() * 0.9 + 0.05
        return F.binary_cross_entropy_with_logits(logits, smooth)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 2e-2, epochs=self.trainer.max_epochs, steps_per_epoch=10, three_phase=True
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Customers(Dataset):
    """Rows as dicts with an identifier."""

    def __init__(self, count: int = 160):
        self.categories = torch.stack([torch.randint(0, n, (count,)) for n in (5, 7, 3)], 1)
        self.numbers = torch.randn(count, 4)
        signal = self.numbers[:, 0] + (self.categories[:, 1] == 2).float()
        signal = signal - (self.categories[:, 0] == 1).float()
        self.target = (signal > 0).long()

    def __len__(self):
        return len(self.target)

    def __getitem__(self, i):
        return {
            "id": f"customer-{i:04}",
            "categories": self.categories[i],
            "numbers": self.numbers[i],
            "target": self.target[i],
        }


def categories_and_numbers(make_trainer) -> Any:
    """Embeddings of categories, BatchNorm of numbers, OneCycle in three phases, AUROC."""
    model, losses = TabularNet(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(Customers(), batch_size=16, shuffle=True))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class FeatureTokenizer(pl.LightningModule):
    """FT-Transformer: each number becomes a token, a class token is read out."""

    def __init__(self, features=30, width=8):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, width) * 0.3)
        self.bias = nn.Parameter(torch.zeros(features, width))
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        layer = nn.TransformerEncoderLayer(
            width, 2, 16, dropout=0.0, activation=F.relu, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 2))
        self.accuracy = torchmetrics.Accuracy(task="binary")

    def forward(self, x):
        tokens = x.unsqueeze(-1) * self.weight + self.bias
        h = self.encoder(torch.cat([self.cls.expand(len(x), -1, -1), tokens], 1))
        return self.head(h[:, 0])

    def training_step(self, batch, batch_idx):
        x, y = batch
        lam = torch.distributions.Beta(0.4, 0.4).sample()
        index = torch.randperm(len(x), device=self.device)
        logits = self(lam * x + (1 - lam) * x[index])
        loss = lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, y[index])
        self.log("lam", lam)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.accuracy(self(batch[0]).argmax(1), batch[1])
        self.log("val_acc", self.accuracy, prog_bar=True)

    def configure_optimizers(self):
        no_decay = [p for n, p in self.named_parameters() if n.endswith("bias") or "norm" in n]
        chosen = {id(p) for p in no_decay}
        decay = [p for p in self.parameters() if id(p) not in chosen]
        return torch.optim.AdamW(
            [{"params": decay}, {"params": no_decay, "weight_decay": 0.0}], 3e-3, weight_decay=0.1
        )


def feature_tokenizer_mixup(make_trainer) -> Any:
    """An FT-Transformer on breast cancer with mixup drawn from a Beta in the step."""
    train, val = rows("breast_cancer", 0, 320), rows("breast_cancer", 320, 448)
    model, losses = FeatureTokenizer(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(train, 32, shuffle=True), DataLoader(val, 32))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class IrisClassifier(pl.LightningModule):
    """The first program of many: cross entropy and accuracy with the default loader."""

    def __init__(self):
        super().__init__()
        self.net = mlp(4, 16, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        accuracy = (logits.argmax(dim=1) == y).float().mean()
        self.log("train_loss", loss)
        self.log("train_acc", accuracy, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


def iris_uneven_batches(make_trainer) -> Any:
    """150 rows in batches of 16: the last one is smaller."""
    model, losses = IrisClassifier(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(rows("iris", 0, 150), batch_size=16, shuffle=True))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


def iris_two_fits(make_trainer) -> Any:
    """The same model fitted twice, by two trainers, the second with another rate and clipping."""
    model, losses = IrisClassifier(), Losses()
    loader = DataLoader(rows("iris", 0, 150), batch_size=16, shuffle=True, drop_last=True)
    first = make_trainer(max_epochs=1, callbacks=[losses])
    first.fit(model, loader)
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.1)
    second = make_trainer(max_epochs=1, callbacks=[losses], gradient_clip_val=0.1)
    second.fit(model, loader)
    return {
        "losses": losses.values,
        "metrics": [first.callback_metrics, second.callback_metrics],
        "w": weights(model),
    }


def iris_indexed_batches(make_trainer) -> Any:
    """A BatchSampler as sampler, fit continued by raising max_epochs on the same trainer."""
    model, losses = IrisClassifier(), Losses()
    data = rows("iris", 0, 144)
    sampler = BatchSampler(RandomSampler(data), batch_size=16, drop_last=True)
    loader = DataLoader(data, sampler=sampler, batch_size=None)
    trainer = make_trainer(max_epochs=1, callbacks=[losses])
    trainer.fit(model, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader)
    return {"losses": losses.values, "step": trainer.global_step, "w": weights(model)}


class SupportVectors(pl.LightningModule):
    """Multiclass hinge with an L2 penalty; rates by 1/t in an overridden optimizer_step."""

    def __init__(self, c=1.0):
        super().__init__()
        self.save_hyperparameters()
        self.linear = nn.Linear(13, 3)
        self.hinge = nn.MultiMarginLoss(p=2)
        self.metric = torchmetrics.HingeLoss(task="multiclass", num_classes=3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self.linear(x)
        self.log("hinge", self.metric(scores, y))
        return self.hparams.c * self.hinge(scores, y) + 5e-3 * self.linear.weight.pow(2).sum()

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def on_train_batch_start(self, batch, batch_idx):
        for group in self.optimizers().param_groups:
            group["lr"] = 0.5 / (1 + self.global_step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def support_vector_machine(make_trainer) -> Any:
    """Squared multiclass hinge; the rate 1/t set in on_train_batch_start."""
    model, losses = SupportVectors(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(rows("wine", 0, 160), batch_size=16))
    return {
        "losses": losses.values,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "w": weights(model),
    }


class OrdinalRegression(pl.LightningModule):
    """CORAL: shared weights, ordered thresholds, cumulative targets."""

    def __init__(self, levels=5):
        super().__init__()
        self.levels = levels
        self.score = mlp(10, 8, 1, activation=nn.Hardtanh)
        self.thresholds = nn.Parameter(torch.linspace(1, -1, levels - 1))
        self.kappa = torchmetrics.CohenKappa("multiclass", num_classes=levels, weights="quadratic")

    def training_step(self, batch, batch_idx):
        x, y = batch
        level = torch.bucketize(y, torch.tensor([80.0, 120.0, 170.0, 220.0]))
        logits = self.score(x) + self.thresholds
        target = (level[:, None] > torch.arange(self.levels - 1)).float()
        self.kappa.update((logits > 0).sum(1), level)
        return F.binary_cross_entropy_with_logits(logits, target)

    def on_train_epoch_end(self):
        self.log("kappa", self.kappa.compute())
        self.kappa.reset()

    def configure_optimizers(self):
        return torch.optim.Adam(
            [
                {"params": [self.thresholds], "lr": 5e-2, "betas": (0.8, 0.99)},
                {"params": self.score.parameters()},
            ],
            lr=1e-2,
        )


def ordinal_regression(make_trainer) -> Any:
    """CORAL with bucketized targets, groups with their own betas, quadratic kappa."""
    model, losses = OrdinalRegression(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(rows("diabetes", 0, 320), batch_size=32))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class NoisyLabels(pl.LightningModule):
    """Co-teaching: each network picks the rows of small loss for the other."""

    def __init__(self, keep=0.75):
        super().__init__()
        self.automatic_optimization = False
        self.keep = keep
        self.nets = nn.ModuleList(mlp(64, 16, 10) for _ in range(2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = [net(x) for net in self.nets]
        each = [F.cross_entropy(out, y, reduction="none") for out in logits]
        count = int(self.keep * len(x))
        chosen = [e.detach().topk(count, largest=False).indices for e in each]
        for i, optimizer in enumerate(self.optimizers()):
            loss = each[i][chosen[1 - i]].mean()
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=i == 0)
            optimizer.step()
            self.log(f"loss_{i}", loss)
        return {"loss": torch.stack(each).mean().detach(), "agree": (chosen[0] == chosen[1]).sum()}

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.nets[0].parameters(), lr=5e-3),
            torch.optim.SGD(self.nets[1].parameters(), lr=0.1, momentum=0.9),
        ]


def co_teaching_noisy_labels(make_trainer) -> Any:
    """Two networks and two kinds of optimizers under manual optimization, noisy digits."""
    x, y = table("digits")
    y = torch.where(torch.rand(320) < 0.2, torch.randint(0, 10, (320,)), y[:320])
    model, losses = NoisyLabels(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(TensorDataset(x[:320], y), batch_size=32))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class SoftTrees(pl.LightningModule):
    """An oblivious soft decision forest (NODE) with entmax replaced by softmax."""

    def __init__(self, trees=4, depth=2):
        super().__init__()
        self.choice = nn.Parameter(torch.randn(trees * depth, 13))
        self.threshold = nn.Parameter(torch.zeros(trees * depth))
        self.log_temperature = nn.Parameter(torch.zeros(trees * depth))
        self.leaves = nn.Parameter(0.1 * torch.randn(trees, 2**depth, 3))
        self.shape = (trees, depth)
        bits = torch.arange(2**depth)[:, None] >> torch.arange(depth) & 1
        self.register_buffer("bits", bits.bool())

    def forward(self, x):
        selected = x @ self.choice.softmax(-1).T
        gate = torch.sigmoid((selected - self.threshold) * self.log_temperature.exp())
        gate = gate.view(-1, self.shape[0], 1, self.shape[1])
        leaf = torch.where(self.bits, gate, 1 - gate).prod(-1)
        return torch.einsum("btl,tlc->bc", leaf, self.leaves)

    def training_step(self, batch, batch_idx):
        x, y = batch
        one_hot = F.one_hot(y, 3).float()
        loss = (self(x).softmax(-1) - one_hot).square().sum(-1).mean()
        self.log("brier", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=3e-2)
        return [optimizer], [torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda e: 0.9)]


def soft_decision_trees(make_trainer) -> Any:
    """Oblivious soft trees with a Brier loss and a multiplicative schedule."""
    model, losses = SoftTrees(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(rows("wine", 0, 160), batch_size=16, shuffle=True))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


# Survival and treatment


class CoxNet(pl.LightningModule):
    """Cox' partial likelihood over the batch (Breslow), concordance by numpy after validation."""

    def __init__(self):
        super().__init__()
        self.risk = nn.Sequential(nn.Linear(10, 12), nn.SiLU(), nn.Dropout(0.1), nn.Linear(12, 1))
        self.collected = defaultdict(list)

    def training_step(self, batch, batch_idx):
        x, time, event = batch
        order = time.argsort(descending=True)
        risk, event = self.risk(x).squeeze(1)[order], event[order]
        log_sum = torch.logcumsumexp(risk, dim=0)
        loss = -((risk - log_sum) * event).sum() / event.sum().clamp(min=1)
        self.log("partial", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, time, event = batch
        return {"risk": self.risk(x).squeeze(1), "time": time, "event": event}

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        for name, value in outputs.items():
            self.collected[name].append(value.cpu().numpy())

    def on_validation_epoch_end(self):
        risk, time, event = (np.concatenate(self.collected[k]) for k in ("risk", "time", "event"))
        comparable = (time[:, None] < time[None]) & (event[:, None] == 1)
        right = (risk[:, None] > risk[None]) & comparable
        self.log("concordance", float(right.sum() / max(comparable.sum(), 1)))
        self.collected.clear()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2, weight_decay=1e-4)


def cox_survival(make_trainer) -> Any:
    """Cox regression with sorted risks; the concordance index from stored validation outputs."""
    x, y = table("diabetes")
    data = TensorDataset(x, (300 - y) / 100, (torch.rand(len(x)) < 0.7).float())
    model, losses = CoxNet(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(
        model,
        DataLoader(Subset(data, range(320)), batch_size=32, shuffle=True),
        DataLoader(Subset(data, range(320, 384)), batch_size=32),
    )
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class DiscreteHazards(pl.LightningModule):
    """Hazards of intervals (nnet-survival) and a ranking term (DeepHit)."""

    def __init__(self, bins: int = 6, alpha: float = 0.2):
        super().__init__()
        self.save_hyperparameters()
        self.net = mlp(10, 16, bins)

    def training_step(self, batch, batch_idx):
        x, bin_, event = batch["x"], batch["bin"], batch["event"]
        hazard = self.net(x).sigmoid().clamp(1e-6, 1 - 1e-6)
        survived = torch.arange(self.hparams.bins) < bin_[:, None]
        log_s = (torch.log1p(-hazard) * survived).sum(1)
        last = hazard.gather(1, bin_[:, None]).squeeze(1)
        nll = -(log_s + event * last.log() + (1 - event) * torch.log1p(-last)).mean()
        cdf = 1 - torch.cumprod(1 - hazard, 1)
        mine = cdf.gather(1, bin_[:, None])
        others = cdf[:, bin_].T
        pairs = (bin_[:, None] < bin_[None]).float() * event[:, None]
        rank = (pairs * torch.exp(-(mine - others) / 0.5)).sum() / (pairs.sum() + 1)
        self.log_dict({"nll": nll, "rank": rank}, on_step=False, on_epoch=True)
        return nll + self.hparams.alpha * rank

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), lr=5e-3)


def discrete_time_survival(make_trainer) -> Any:
    """Hazards per interval with censoring, a ranking loss over pairs of a batch."""
    x, y = table("diabetes")
    event = (torch.rand(320) < 0.6).float()
    items = [
        {"patient": i, "x": x[i], "bin": (y[i] / 60).long().clamp(max=5), "event": event[i]}
        for i in range(320)
    ]
    model, losses = DiscreteHazards(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(items, batch_size=32))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class DragonNet(pl.LightningModule):
    """Outcomes with and without treatment, and the propensity, on one body."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 16), nn.ELU(), nn.Linear(16, 16), nn.ELU())
        self.heads = nn.ModuleDict({name: nn.Linear(16, 1) for name in ("y0", "y1", "t")})
        self.epsilon = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        h = self.body(x)
        return tuple(self.heads[name](h).squeeze(1) for name in ("y0", "y1", "t"))

    def training_step(self, batch, batch_idx):
        x, t, y = batch
        y0, y1, logit = self(x)
        outcome = torch.where(t.bool(), y1, y0)
        propensity = logit.sigmoid().clamp(0.05, 0.95)
        h = t / propensity - (1 - t) / (1 - propensity)
        targeted = (y - outcome - self.epsilon * h).square().mean()
        factual = F.mse_loss(outcome, y)
        cross = F.binary_cross_entropy(propensity, t)
        self.log_dict({"factual": factual, "propensity": cross, "targeted": targeted})
        return factual + cross + 0.1 * targeted

    def predict_step(self, batch, batch_idx):
        y0, y1, _ = self(batch[0])
        return y1 - y0

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        steps = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.95**epoch)
        return [optimizer], [steps]


def treatment_effects(make_trainer) -> Any:
    """DragonNet with targeted regularization; the effects of all are predicted."""
    x, y = table("diabetes")
    t = (torch.rand(320) < torch.sigmoid(x[:320, 0])).float()
    data = TensorDataset(x[:320], t, (y[:320] - 150) / 77 + t)
    model, losses = DragonNet(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(data, batch_size=32))
    effects = trainer.predict(model, DataLoader(data, batch_size=64))
    return {"losses": losses.values, "effects": torch.cat(effects), "w": weights(model)}


# Recommenders


def ratings(count: int = 320, users: int = 30, items: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    u = torch.randint(0, users, (count,), generator=generator)
    i = torch.randint(0, items, (count,), generator=generator)
    taste = torch.randn(users, 3, generator=generator), torch.randn(items, 3, generator=generator)
    return TensorDataset(u, i, 3 + (taste[0][u] * taste[1][i]).sum(1).clamp(-2, 2))


class MatrixFactorization(pl.LightningModule):
    def __init__(self, users=30, items=40, rank=6, mean=3.0, sparse=False):
        super().__init__()
        self.save_hyperparameters()
        self.user, self.item = (nn.Embedding(n, rank, sparse=sparse) for n in (users, items))
        self.user_bias, self.item_bias = (nn.Embedding(n, 1, sparse=sparse) for n in (users, items))
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, 0.0, 0.1)

    def forward(self, u, i):
        biases = self.user_bias(u) + self.item_bias(i)
        return self.hparams.mean + biases.squeeze(-1) + (self.user(u) * self.item(i)).sum(-1)

    def training_step(self, batch, batch_idx):
        u, i, r = batch
        mse = F.mse_loss(self(u, i), r)
        penalty = 0.01 * (self.user(u).pow(2).sum(-1) + self.item(i).pow(2).sum(-1)).mean()
        self.log("train_rmse", mse.sqrt(), on_epoch=True)
        return mse + penalty

    def configure_optimizers(self):
        if self.hparams.sparse:
            return torch.optim.SparseAdam(list(self.parameters()), lr=2e-2)
        return torch.optim.Adam(self.parameters(), lr=2e-2)


def matrix_factorization(make_trainer) -> Any:
    """Biased matrix factorization of ratings."""
    model, losses = MatrixFactorization(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(ratings(), batch_size=32, shuffle=True))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


def sparse_matrix_factorization(make_trainer) -> Any:
    """The same with sparse gradients and SparseAdam."""
    model, losses = MatrixFactorization(sparse=True), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(ratings(), batch_size=32))
    return {"losses": losses.values, "w": weights(model)}


class BayesianRanking(pl.LightningModule):
    """BPR on implicit feedback; hit rate at 5 over all items in validation."""

    def __init__(self, users=30, items=40, rank=8):
        super().__init__()
        self.items = items
        self.user, self.item = nn.Embedding(users, rank), nn.Embedding(items, rank)
        self.hits = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        u, i, _ = batch
        j = torch.randint(0, self.items, i.shape, device=self.device)
        difference = (self.user(u) * (self.item(i) - self.item(j))).sum(-1)
        loss = -F.logsigmoid(difference).mean()
        self.log("bpr", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        u, i, _ = batch
        best = (self.user(u) @ self.item.weight.T).topk(5).indices
        self.hits.update((best == i[:, None]).any(1).float())
        self.log("hit@5", self.hits, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.1, lr_decay=1e-2, weight_decay=1e-4)


def bayesian_personalized_ranking(make_trainer) -> Any:
    """BPR with negatives drawn in the step, a MeanMetric of hits."""
    train, val = random_split(ratings(384), [320, 64], torch.Generator().manual_seed(0))
    model, losses = BayesianRanking(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(train, batch_size=32), DataLoader(val, batch_size=32))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class DeepFM(pl.LightningModule):
    """Factorization machine and a deep part over one table with offsets for the fields."""

    def __init__(self, fields=(30, 40, 5), width=4):
        super().__init__()
        offsets = np.concatenate([[0], np.cumsum(fields)[:-1]])
        self.register_buffer("offsets", torch.from_numpy(offsets), persistent=False)
        self.embedding = nn.Embedding(sum(fields), width)
        self.linear = nn.EmbeddingBag(sum(fields), 1, mode="sum")
        self.deep = nn.Sequential(
            nn.Linear(len(fields) * width, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2)
        )
        self.out = nn.Linear(16, 1)
        self.auroc = torchmetrics.AUROC(task="binary", thresholds=20)

    def forward(self, x):
        x = x + self.offsets
        e = self.embedding(x)
        pairs = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(1, keepdim=True)
        return (self.linear(x) + pairs + self.out(self.deep(e.flatten(1)))).squeeze(1)

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.auroc.update(logits, batch[1].int())
        return F.binary_cross_entropy_with_logits(logits, batch[1])

    def on_train_epoch_end(self):
        self.log("auroc", self.auroc.compute(), prog_bar=True)
        self.auroc.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=1e-4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


def deep_factorization_machine(make_trainer) -> Any:
    """Clicks by a factorization machine beside an MLP on shared embeddings, bf16-mixed."""
    u, i, r = ratings().tensors
    x = torch.stack([u, i, torch.randint(0, 5, u.shape)], 1)
    model, losses = DeepFM(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], precision="bf16-mixed")
    trainer.fit(model, DataLoader(TensorDataset(x, (r > 3).float()), batch_size=32, shuffle=True))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class MultinomialVAE(pl.LightningModule):
    """Collaborative filtering by a VAE; the KL's weight grows with global_step."""

    def __init__(self, items=40, cap=0.2, anneal=10):
        super().__init__()
        self.save_hyperparameters()
        self.encoder, self.decoder = mlp(items, 16, 12, activation=nn.Tanh), nn.Linear(6, items)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        h = F.dropout(F.normalize(x, dim=1), 0.5, training=self.training)
        mu, log_var = self.encoder(h).chunk(2, 1)
        z = mu + torch.randn_like(mu) * torch.exp(log_var / 2)
        nll = -(F.log_softmax(self.decoder(z), 1) * x).sum(1).mean()
        kl = -0.5 * (1 + log_var - mu.pow(2) - log_var.exp()).sum(1).mean()
        beta = min(self.hparams.cap, self.global_step / self.hparams.anneal)
        self.log_dict({"nll": nll, "kl": kl})
        return nll + beta * kl

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def collaborative_vae_step_annealing(make_trainer) -> Any:
    """Mult-VAE with dropout on the input, its beta computed from self.global_step."""
    clicks = (torch.rand(160, 40) < 0.15).float()
    model, losses = MultinomialVAE(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(TensorDataset(clicks), batch_size=16))
    return {"losses": losses.values, "w": weights(model)}


# Graphs


def ring(nodes: int = 24, classes: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Features, classes and edges (both ways) of a ring with chords."""
    generator = torch.Generator().manual_seed(3)
    y = torch.arange(nodes) * classes // nodes
    x = F.one_hot(y, classes).float() + torch.randn(nodes, classes, generator=generator)
    a = torch.arange(nodes)
    edges = torch.cat([torch.stack([a, (a + k) % nodes]) for k in (1, 2)], 1)
    return x, y, torch.cat([edges, edges.flip(0)], 1)


class DenseGCN(pl.LightningModule):
    """Graph convolutions with the normalized adjacency in a buffer; training nodes by index."""

    def __init__(self, edges: Tensor, nodes: int, train_nodes: Tensor):
        super().__init__()
        adjacency = torch.eye(nodes)
        adjacency[edges[0], edges[1]] = 1.0
        scale = adjacency.sum(1).rsqrt()
        self.register_buffer("adjacency", scale[:, None] * adjacency * scale)
        self.register_buffer("train_nodes", train_nodes)
        self.layers = nn.ModuleList([nn.Linear(3, 8, bias=False), nn.Linear(8, 3, bias=False)])

    def forward(self, x):
        h = F.dropout(x, p=0.3, training=self.training)
        h = F.relu(self.adjacency @ self.layers[0](h))
        h = F.dropout(h, p=0.3, training=self.training)
        return self.adjacency @ self.layers[1](h)

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)[self.train_nodes]
        loss = F.cross_entropy(out, y[self.train_nodes])
        self.log("acc", (out.argmax(1) == y[self.train_nodes]).float().mean(), batch_size=1)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        correct = self(x).argmax(1) == y
        correct[self.train_nodes] = False
        self.log("val_correct", correct.sum().float(), batch_size=1)

    def configure_optimizers(self):
        first, second = (layer.parameters() for layer in self.layers)
        return torch.optim.Adam([{"params": first, "weight_decay": 5e-3}, {"params": second}], 1e-2)


def dense_graph_convolutions(make_trainer) -> Any:
    """A GCN on one graph, full batch, dropout, an epoch for each step, early stopping."""
    x, y, edges = ring()
    model, losses = DenseGCN(edges, 24, torch.arange(0, 24, 2)), Losses()
    loader = DataLoader([(x, y)], batch_size=None)
    stop = EarlyStopping("val_correct", mode="max", patience=12)
    trainer = make_trainer(max_epochs=20, callbacks=[losses, stop])
    trainer.fit(model, loader, loader)
    return {"losses": losses.values, "epochs": trainer.current_epoch, "w": weights(model)}


class Graph(NamedTuple):
    x: Tensor
    edge_index: Tensor
    y: Tensor
    train_mask: Tensor


class GraphSAGE(pl.LightningModule):
    """Means over neighbours by index_add; the loss on the nodes of a boolean mask."""

    def __init__(self):
        super().__init__()
        self.self_1, self.near_1 = nn.Linear(3, 8), nn.Linear(3, 8)
        self.self_2, self.near_2 = nn.Linear(8, 3), nn.Linear(8, 3)

    def neighbours(self, h, edge_index):
        source, target = edge_index
        total = torch.zeros_like(h).index_add(0, target, h[source])
        degree = torch.zeros(len(h)).index_add(0, target, torch.ones(len(target)))
        return total / degree.clamp(min=1).unsqueeze(1)

    def forward(self, x, edge_index):
        h = F.relu(self.self_1(x) + self.near_1(self.neighbours(x, edge_index)))
        return self.self_2(h) + self.near_2(self.neighbours(h, edge_index))

    def training_step(self, batch, batch_idx):
        out = self(batch.x, batch.edge_index)
        loss = F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])
        self.log("loss", loss, batch_size=1)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def graph_sage_boolean_mask(make_trainer) -> Any:
    """GraphSAGE as in PyTorch Geometric's examples: out[mask], y[mask]."""
    x, y, edges = ring()
    graph = Graph(x, edges, y, torch.rand(24) < 0.5)
    model, losses = GraphSAGE(), Losses()
    trainer = make_trainer(max_epochs=20, callbacks=[losses])
    trainer.fit(model, DataLoader([graph], batch_size=None))
    return {"losses": losses.values, "w": weights(model)}


class GraphAttention(nn.Module):
    """GAT on edges: softmax over the edges of each target by scatter."""

    def __init__(self, inputs, outputs, heads):
        super().__init__()
        self.heads, self.size = heads, outputs
        self.project = nn.Linear(inputs, heads * outputs, bias=False)
        self.source, self.target = (
            nn.Parameter(torch.randn(heads, outputs) / outputs**0.5) for _ in range(2)
        )

    def forward(self, x, edge_index):
        n, (s, t) = len(x), edge_index
        h = self.project(x).view(n, self.heads, self.size)
        score = (h * self.source).sum(-1)[s] + (h * self.target).sum(-1)[t]
        score = F.leaky_relu(score, 0.2)
        index = t[:, None].expand(-1, self.heads)
        top = torch.full((n, self.heads), -1e9).scatter_reduce(0, index, score, "amax")
        e = torch.exp(score - top.detach()[t])
        total = torch.zeros(n, self.heads).scatter_add(0, index, e)
        weight = e / total[t].clamp_min(1e-9)
        out = torch.zeros_like(h).index_add(0, t, weight.unsqueeze(-1) * h[s])
        return out.flatten(1)


class GraphAttentionNet(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GraphAttention(3, 4, 2), GraphAttention(8, 3, 1)])
        self.norm = nn.BatchNorm1d(8)
        self.f1 = torchmetrics.F1Score("multiclass", num_classes=3, average="macro")

    def forward(self, x, edge_index):
        return self.convs[1](F.elu(self.norm(self.convs[0](x, edge_index))), edge_index)

    def training_step(self, batch, batch_idx):
        out = self(batch["x"], batch["edge_index"])
        each = F.cross_entropy(out, batch["y"], reduction="none")
        mask = batch["mask"].float()
        self.f1(out, batch["y"])
        self.log("f1", self.f1, on_step=True, on_epoch=True, batch_size=24)
        return (each * mask).sum() / mask.sum()

    def predict_step(self, batch, batch_idx):
        return {"graph": batch["name"], "classes": self(batch["x"], batch["edge_index"]).argmax(1)}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-2)


def graph_attention(make_trainer) -> Any:
    """GAT by scatter softmax on edge lists; batches are dicts with the graph's name."""
    x, y, edges = ring()
    graphs = [
        {
            "name": f"ring-{i}",
            "x": x + 0.3 * torch.randn(24, 3),
            "edge_index": edges,
            "y": y,
            "mask": torch.rand(24) < 0.6,
        }
        for i in range(10)
    ]
    model, losses = GraphAttentionNet(), Losses()
    loader = DataLoader(graphs, batch_size=None, shuffle=True)
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, loader)
    predictions = trainer.predict(model, DataLoader(graphs, batch_size=None))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "p": predictions}


class MoleculeNet(pl.LightningModule):
    """Energies as sums over atoms; forces are their negative gradients by positions."""

    def __init__(self, atoms=5, radial=6):
        super().__init__()
        self.embedding = nn.Embedding(4, 8)
        self.register_buffer("centers", torch.linspace(0.2, 3, radial))
        self.filter = mlp(radial, 8, 8, activation=nn.Softplus)
        self.readout = mlp(8, 8, 1, activation=nn.SiLU)
        self.register_buffer("not_self", ~torch.eye(atoms, dtype=torch.bool), persistent=False)

    def energy(self, kinds, r):
        difference = r[:, :, None] - r[:, None]
        distance = (difference.square().sum(-1) + 1e-8).sqrt()
        basis = torch.exp(-4 * (distance.unsqueeze(-1) - self.centers).square())
        w = self.filter(basis) * self.not_self[..., None]
        h = self.embedding(kinds)
        h = h + torch.einsum("bijc,bjc->bic", w, h)
        return self.readout(h).sum((1, 2))

    def training_step(self, batch, batch_idx):
        kinds, r, energy, forces = batch
        r.requires_grad_(True)
        e = self.energy(kinds, r)
        f = -torch.autograd.grad(e.sum(), r, create_graph=True)[0]
        loss_e, loss_f = F.mse_loss(e, energy), F.mse_loss(f, forces)
        self.log_dict({"mse_e": loss_e, "mse_f": loss_f}, on_epoch=True, on_step=False)
        return 0.1 * loss_e + loss_f

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def molecular_forces(make_trainer) -> Any:
    """A SchNet-like potential trained on energies and forces (double backward)."""
    n = 80
    r = torch.randn(n, 5, 3)
    data = TensorDataset(torch.randint(0, 4, (n, 5)), r, r.square().sum((1, 2)), -2 * r)
    model, losses = MoleculeNet(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], gradient_clip_val=5.0)
    trainer.fit(model, DataLoader(data, batch_size=8))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class LinkPredictor(pl.LightningModule):
    """A graph autoencoder: GIN layers, inner products, as many drawn negatives as edges."""

    def __init__(self, edges: Tensor, x: Tensor):
        super().__init__()
        self.edges, self.x = edges, x
        self.gin = nn.ModuleList([mlp(3, 8, 8), mlp(8, 8, 4)])
        self.epsilon = nn.ParameterList([torch.zeros(1) for _ in range(2)])

    def encode(self):
        h, (s, t) = self.x, self.edges
        for layer, epsilon in zip(self.gin, self.epsilon, strict=True):
            h = layer((1 + epsilon) * h + torch.zeros_like(h).index_add(0, t, h[s]))
        return h

    def training_step(self, batch, batch_idx):
        z = self.encode()
        negative = torch.randint(0, len(z), batch.shape, device=self.device)
        score = (z[torch.cat([batch, negative])]).prod(1).sum(-1)
        target = torch.cat([torch.ones(len(batch)), torch.zeros(len(negative))])
        loss = F.binary_cross_entropy_with_logits(score, target)
        self.log("ap", torchmetrics.functional.average_precision(score, target.int(), "binary", 8))
        return loss

    def configure_optimizers(self):
        return torch.optim.RAdam(self.parameters(), lr=2e-2)


def link_prediction(make_trainer) -> Any:
    """GIN encoder over tensors in plain attributes, edges in batches, drawn negatives."""
    x, _, edges = ring()
    model, losses = LinkPredictor(edges, x), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(edges.T[:80].tolist(), batch_size=8, collate_fn=torch.tensor))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


# Equations and dynamics


class HeatEquation(pl.LightningModule):
    """u_t = u_xx on a rod, residuals by autograd.grad with create_graph."""

    def __init__(self):
        super().__init__()
        self.net = mlp(2, 16, 16, 1, activation=nn.Tanh)
        self.log_k = nn.Parameter(torch.tensor(-1.0))
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_normal_(layer.weight)

    def forward(self, x, t):
        return self.net(torch.cat([x, t], dim=1))

    def training_step(self, batch, batch_idx):
        x, t = batch["interior"].split(1, dim=1)
        x.requires_grad_(), t.requires_grad_()
        u = self(x, t)
        ones = torch.ones_like(u)
        u_x, u_t = torch.autograd.grad(u, (x, t), ones, create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x, x, ones, create_graph=True)
        residual = (u_t - self.log_k.exp() * u_xx).square().mean()
        x0 = batch["initial"]
        start = F.mse_loss(self(x0, torch.zeros_like(x0)), torch.sin(math.pi * x0))
        t1 = batch["boundary"]
        edge = self(torch.zeros_like(t1), t1).square() + self(torch.ones_like(t1), t1).square()
        self.log_dict({"residual": residual, "start": start, "k": self.log_k.exp()})
        return residual + 10 * start + edge.mean()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}


class Collocation(torch.utils.data.IterableDataset):
    """Fresh points for each batch."""

    def __init__(self, batches: int, size: int):
        self.batches, self.size = batches, size

    def __len__(self):
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            yield {
                "interior": torch.rand(self.size, 2),
                "initial": torch.rand(self.size // 4, 1),
                "boundary": torch.rand(self.size // 4, 1),
            }


def heat_equation(make_trainer) -> Any:
    """A physics-informed network with an unknown conductivity, points from an IterableDataset."""
    model, losses = HeatEquation(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(Collocation(10, 32), batch_size=None))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class BurgersResidual(pl.LightningModule):
    """The same by torch.func: the hessian and the jacobian of one point, under vmap."""

    def __init__(self, viscosity=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.register_buffer("frequencies", torch.randn(2, 8))
        self.net = mlp(16, 16, 1, activation=nn.SiLU)

    def forward(self, point):
        angle = point @ self.frequencies
        return self.net(torch.cat([angle.sin(), angle.cos()], -1)).squeeze(-1)

    def training_step(self, batch, batch_idx):
        u = self(batch)
        first = vmap(jacrev(self.forward))(batch)
        second = vmap(hessian(self.forward))(batch)
        residual = first[:, 1] + u * first[:, 0] - self.hparams.viscosity * second[:, 0, 0]
        start = self(batch * torch.tensor([1.0, 0.0])) + torch.sin(math.pi * batch[:, 0])
        loss = residual.square().mean() + 5 * start.square().mean()
        self.log("residual", residual.abs().max(), reduce_fx="max", on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def burgers_by_torch_func(make_trainer) -> Any:
    """Burgers' equation with jacrev and hessian under vmap, Fourier features."""
    points = torch.rand(80, 2) * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0.0])
    model, losses = BurgersResidual(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(points, batch_size=8, shuffle=True))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class NeuralODE(pl.LightningModule):
    """Runge-Kutta of fixed steps through a learned field."""

    def __init__(self, steps=4, dt=0.25):
        super().__init__()
        self.save_hyperparameters()
        self.field = mlp(2, 12, 2, activation=nn.Tanh)
        nn.init.zeros_(self.field[-1].weight)

    def forward(self, z):
        path, h = [z], self.hparams.dt
        for _ in range(self.hparams.steps):
            k1 = self.field(z)
            k2 = self.field(z + h / 2 * k1)
            k3 = self.field(z + h / 2 * k2)
            k4 = self.field(z + h * k3)
            z = z + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            path.append(z)
        return torch.stack(path, dim=1)

    def training_step(self, batch, batch_idx):
        path = self(batch[:, 0])
        loss = F.mse_loss(path, batch)
        self.log("endpoint", (path[:, -1] - batch[:, -1]).norm(dim=1).mean())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adamax(self.parameters(), lr=2e-2)


def spirals(count: int) -> Tensor:
    t = torch.arange(5) * 0.25
    turn = torch.stack([torch.cos(t), -torch.sin(t), torch.sin(t), torch.cos(t)], 1).view(5, 2, 2)
    return torch.einsum(
        "tij,bj->bti", turn * torch.exp(-0.2 * t)[:, None, None], torch.randn(count, 2)
    )


def neural_ode(make_trainer) -> Any:
    """A neural ODE with four RK4 steps on damped spirals."""
    model, losses = NeuralODE(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], log_every_n_steps=2)
    trainer.fit(model, DataLoader(spirals(160), batch_size=16))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class Hamiltonian(pl.LightningModule):
    """dq/dt = dH/dp, dp/dt = -dH/dq, where H is a network; by torch.func.grad under vmap."""

    def __init__(self):
        super().__init__()
        self.energy = mlp(2, 24, 1, activation=nn.Softplus)
        self.register_buffer("symplectic", torch.tensor([[0.0, 1.0], [-1.0, 0.0]]))

    def field(self, z):
        return vmap(grad(lambda point: self.energy(point).squeeze()))(z) @ self.symplectic.T

    def training_step(self, batch, batch_idx):
        z, dz = batch
        return F.mse_loss(self.field(z), dz)

    def test_step(self, batch, batch_idx):
        z, start = batch[0], self.energy(batch[0]).mean()
        for _ in range(3):
            z = z + 0.1 * self.field(z)
        self.log("drift", (self.energy(z).mean() - start).abs())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-2)


def hamiltonian_network(make_trainer) -> Any:
    """A Hamiltonian network of a pendulum; drift of its energy in test, under gradients of func."""
    z = torch.randn(160, 2)
    data = TensorDataset(z, torch.stack([z[:, 1], -torch.sin(z[:, 0])], 1))
    model, losses = Hamiltonian(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(data, batch_size=16))
    drift = trainer.test(model, DataLoader(data, batch_size=32), verbose=False)
    return {"losses": losses.values, "drift": drift, "w": weights(model)}


class Koopman(pl.LightningModule):
    """An autoencoder whose code moves linearly, by an orthogonal matrix."""

    def __init__(self, size=4):
        super().__init__()
        self.encoder, self.decoder = mlp(2, 12, size, activation=nn.Tanh), nn.Linear(size, 2)
        linear = nn.Linear(size, size, bias=False)
        self.advance = nn.utils.parametrizations.orthogonal(linear, orthogonal_map="cayley")
        self.decay = nn.Parameter(torch.tensor(0.0))

    def training_step(self, batch, batch_idx):
        codes = self.encoder(batch)
        z, loss = codes[:, 0], F.mse_loss(self.decoder(codes), batch)
        for t in range(1, batch.shape[1]):
            z = torch.sigmoid(self.decay + 3) * self.advance(z)
            loss = loss + F.mse_loss(z, codes[:, t]) + F.mse_loss(self.decoder(z), batch[:, t])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def koopman_operator(make_trainer) -> Any:
    """Linear dynamics in a learned space by an orthogonal parametrization."""
    model, losses = Koopman(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], gradient_clip_val=1.0)
    trainer.fit(model, DataLoader(spirals(160), batch_size=16))
    return {"losses": losses.values, "w": weights(model)}


# Densities and generation


class Coupling(nn.Module):
    """RealNVP: half of the features scale and shift the others."""

    def __init__(self, mask: Tensor):
        super().__init__()
        self.register_buffer("mask", mask)
        self.net = mlp(len(mask), 16, 2 * len(mask))

    def forward(self, x):
        scale, shift = self.net(x * self.mask).chunk(2, dim=1)
        scale = torch.tanh(scale) * (1 - self.mask)
        return x * self.mask + (1 - self.mask) * (x * scale.exp() + shift), scale.sum(1)


class RealNVP(pl.LightningModule):
    def __init__(self, features=4):
        super().__init__()
        even = (torch.arange(features) % 2).float()
        self.layers = nn.ModuleList(Coupling(m) for m in (even, 1 - even, even))
        self.register_buffer("zero", torch.zeros(features), persistent=False)

    @property
    def base(self):
        return Independent(Normal(self.zero, torch.ones_like(self.zero)), 1)

    def log_prob(self, x):
        total = 0.0
        for layer in self.layers:
            x, log_det = layer(x)
            total = total + log_det
        return self.base.log_prob(x) + total

    def training_step(self, batch, batch_idx):
        x = batch[0] + 0.05 * torch.randn_like(batch[0])
        loss = -self.log_prob(x).mean()
        self.log("nats_per_feature", loss / x.shape[1], on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3, weight_decay=1e-5)


def real_nvp(make_trainer) -> Any:
    """A normalizing flow on iris with dequantization noise, base distribution by a property."""
    model, losses = RealNVP(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], gradient_clip_val=2.0)
    trainer.fit(model, DataLoader(rows("iris", 0, 144), batch_size=16, drop_last=True))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class AverageWeights(Callback):
    """Keeps an exponential average of the weights; validation and saving use it."""

    def __init__(self, decay: float):
        self.decay, self.average, self.kept = decay, None, None

    def on_fit_start(self, trainer, pl_module):
        if self.average is None:
            self.average = copy.deepcopy(pl_module.state_dict())

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, *args):
        for name, value in pl_module.state_dict().items():
            if value.is_floating_point():
                self.average[name].mul_(self.decay).add_(value, alpha=1 - self.decay)

    def on_validation_start(self, trainer, pl_module):
        self.kept = copy.deepcopy(pl_module.state_dict())
        pl_module.load_state_dict(self.average)

    def on_validation_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.kept)

    def state_dict(self):
        return {"average": self.average}

    def load_state_dict(self, state):
        self.average = state["average"]


class TabularDiffusion(pl.LightningModule):
    """Noise prediction on rows; cosine schedule in a buffer, time by sinusoids."""

    def __init__(self, steps=20):
        super().__init__()
        t = np.arange(steps + 1) / steps
        f = np.cos((t + 0.008) / 1.008 * np.pi / 2) ** 2
        self.register_buffer("alpha_bar", torch.tensor(f[1:] / f[0], dtype=torch.float32))
        self.time = nn.Embedding(steps, 8)
        self.net = mlp(2 + 8, 24, 2, activation=nn.SiLU)
        self.steps = steps

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], 1))

    def shared_step(self, x, t):
        noise = torch.randn_like(x)
        a = self.alpha_bar[t].unsqueeze(1)
        weight = (a / (1 - a)).clamp(max=5)
        error = (self(a.sqrt() * x + (1 - a).sqrt() * noise, t) - noise).square()
        return (weight * error).mean()

    def training_step(self, batch, batch_idx):
        t = torch.randint(0, self.steps, (len(batch),), device=self.device)
        loss = self.shared_step(batch, t)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        t = torch.full((len(batch),), self.steps // 2, device=self.device)
        self.log("val_loss", self.shared_step(batch, t))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def two_moons(count: int) -> Tensor:
    x, _ = datasets.make_moons(count, noise=0.05, random_state=0)
    return torch.tensor(x, dtype=torch.float32)


def diffusion_with_averaged_weights(make_trainer) -> Any:
    """Denoising diffusion in the plane; a callback averages weights and swaps them to validate."""
    model, losses, average = TabularDiffusion(), Losses(), AverageWeights(0.9)
    x = two_moons(192)
    trainer = make_trainer(max_epochs=2, callbacks=[losses, average], num_sanity_val_steps=0)
    trainer.fit(model, DataLoader(x[:160], 16, shuffle=True), DataLoader(x[160:], 16))
    return {
        "losses": losses.values,
        "metrics": trainer.callback_metrics,
        "average": average.average,
        "w": weights(model),
    }


class TabularWGAN(pl.LightningModule):
    """WGAN-GP; the generator learns on every batch after the critic."""

    def __init__(self, features=4, latent=3, penalty=10.0):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(latent, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, features)
        )
        self.critic = mlp(features, 16, 1, activation=functools.partial(nn.LeakyReLU, 0.2))

    def gradient_penalty(self, real, fake):
        mix = torch.rand(len(real), 1, device=self.device)
        x = (mix * real + (1 - mix) * fake).requires_grad_()
        (g,) = torch.autograd.grad(self.critic(x).sum(), x, create_graph=True)
        return (g.norm(2, dim=1) - 1).square().mean()

    def training_step(self, batch, batch_idx):
        real = batch[0]
        g_opt, c_opt = self.optimizers()
        for _ in range(2):
            fake = self.generator(torch.randn(len(real), self.hparams.latent)).detach()
            c_loss = self.critic(fake).mean() - self.critic(real).mean()
            c_loss = c_loss + self.hparams.penalty * self.gradient_penalty(real, fake)
            c_opt.zero_grad()
            self.manual_backward(c_loss)
            c_opt.step()
        g_loss = -self.critic(self.generator(torch.randn(len(real), self.hparams.latent))).mean()
        g_opt.zero_grad()
        self.manual_backward(g_loss)
        g_opt.step()
        self.log("c", c_loss, prog_bar=True)
        self.log("g", g_loss, prog_bar=True)
        return {"loss": c_loss.detach()}

    def configure_optimizers(self):
        g = torch.optim.Adam(self.generator.parameters(), 2e-3, betas=(0.0, 0.9))
        c = torch.optim.Adam(self.critic.parameters(), 2e-3, betas=(0.0, 0.9))
        return g, c


def wasserstein_gan(make_trainer) -> Any:
    """WGAN with gradient penalty on rows, two critic updates a step."""
    model, losses = TabularWGAN(), Losses()
    loader = DataLoader(rows("iris", 0, 144), batch_size=16, shuffle=True, drop_last=True)
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, loader)
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


# Anomalies and clusters


class DeepSVDD(pl.LightningModule):
    """Distances to a center, which is the mean of the first pass, found before training."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(30, 16, bias=False), nn.LeakyReLU(), nn.Linear(16, 4, bias=False)
        )
        self.register_buffer("center", torch.zeros(4))
        self.radius = torch.tensor(0.0)

    def on_train_start(self):
        with torch.no_grad():
            out = torch.cat([self.net(x) for x, _ in self.trainer.train_dataloader])
        self.center.copy_(torch.where(out.mean(0).abs() < 0.1, 0.1, out.mean(0)))

    def distance(self, x):
        return (self.net(x) - self.center).square().sum(1)

    def training_step(self, batch, batch_idx):
        d = self.distance(batch[0])
        self.log("q90", torch.quantile(d, 0.9))
        return d.mean()

    def test_step(self, batch, batch_idx):
        x, y = batch
        scores = self.distance(x)
        self.log("test_distance", scores.mean())
        return {"scores": scores, "labels": y}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, weight_decay=1e-3)


class KeepScores(Callback):
    """Collects test outputs and computes AUROC when the epoch ends."""

    def __init__(self):
        self.scores, self.labels, self.auroc = [], [], None

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.scores.append(outputs["scores"])
        self.labels.append(outputs["labels"])

    def on_test_epoch_end(self, trainer, pl_module):
        scores, labels = torch.cat(self.scores), torch.cat(self.labels)
        self.auroc = torchmetrics.functional.auroc(scores, 1 - labels, task="binary")
        pl_module.log("test_auroc", self.auroc)


def deep_svdd(make_trainer) -> Any:
    """One-class deep SVDD; center from a pass in on_train_start, a callback keeps test scores."""
    x, y = table("breast_cancer")
    healthy = x[y == 1]
    model, losses, scores = DeepSVDD(), Losses(), KeepScores()
    train = DataLoader(TensorDataset(healthy[:160], torch.ones(160)), batch_size=16)
    trainer = make_trainer(max_epochs=2, callbacks=[losses, scores])
    trainer.fit(model, train)
    result = trainer.test(model, DataLoader(rows("breast_cancer", 0, 64), 32), verbose=False)
    return {"losses": losses.values, "test": result, "scores": scores.scores, "w": weights(model)}


class EmbeddedClusters(pl.LightningModule):
    """DEC: Student's t to centers, sharpened targets of the whole set, renewed each epoch."""

    def __init__(self, data: Tensor, clusters=3):
        super().__init__()
        self.register_buffer("data", data, persistent=False)
        self.encoder = mlp(4, 12, 2)
        self.centers = nn.Parameter(torch.zeros(clusters, 2))
        self.register_buffer("target", torch.zeros(len(data), clusters))

    def assign(self, z):
        q = 1 / (1 + torch.cdist(z, self.centers).square())
        return q / q.sum(1, keepdim=True)

    @torch.no_grad()
    def on_train_epoch_start(self):
        z = self.encoder(self.data)
        if self.current_epoch == 0:
            self.centers.copy_(z[:: len(z) // len(self.centers)][: len(self.centers)])
        q = self.assign(z)
        p = q**2 / q.sum(0)
        self.target.copy_(p / p.sum(1, keepdim=True))

    def training_step(self, batch, batch_idx):
        x, index = batch
        q = self.assign(self.encoder(x))
        loss = F.kl_div(q.log(), self.target[index], reduction="batchmean")
        self.log("confidence", q.amax(1).mean(), on_epoch=True)
        return loss

    def predict_step(self, batch, batch_idx):
        return self.assign(self.encoder(batch[0])).argmax(1), batch[1]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.5)


def deep_embedded_clustering(make_trainer) -> Any:
    """Clusters in a learned space, targets refreshed over the whole set at each epoch's start."""
    x = table("iris")[0][:144]
    model, losses = EmbeddedClusters(x), Losses()
    data = TensorDataset(x, torch.arange(144))
    trainer = make_trainer(max_epochs=3, callbacks=[losses])
    trainer.fit(model, DataLoader(data, batch_size=16, shuffle=True))
    clusters = trainer.predict(model, DataLoader(data, batch_size=48))
    return {"losses": losses.values, "clusters": clusters, "w": weights(model)}


class OnlineKMeans(pl.LightningModule):
    """Centers and counts in buffers, moved in the step; a decoder learns beside them."""

    def __init__(self, k=4):
        super().__init__()
        self.register_buffer("centers", torch.randn(k, 2))
        self.register_buffer("counts", torch.ones(k))
        self.decoder = nn.Linear(2 + k, 2)

    def training_step(self, batch, batch_idx):
        nearest = torch.cdist(batch, self.centers).argmin(1)
        hot = F.one_hot(nearest, len(self.centers)).float()
        with torch.no_grad():
            self.counts += hot.sum(0)
            pull = hot.T @ batch - hot.sum(0)[:, None] * self.centers
            self.centers += pull / self.counts[:, None]
        out = self.decoder(torch.cat([self.centers[nearest], hot], 1))
        self.log("inertia", torch.cdist(batch, self.centers).amin(1).square().mean())
        return F.mse_loss(out, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.decoder.parameters(), lr=0.1)


def online_k_means(make_trainer) -> Any:
    """Mini-batch k-means in buffers, one_hot with the number of classes."""
    model, losses = OnlineKMeans(), Losses()
    trainer = make_trainer(max_steps=20, callbacks=[losses])
    trainer.fit(model, DataLoader(two_moons(160), batch_size=16, shuffle=True))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


# Metric learning, meta-learning, many models


class Prototypical(pl.LightningModule):
    """Episodes: prototypes of the support rows classify the query rows."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 24), nn.CELU(), nn.Linear(24, 8))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch, batch_idx):
        support, query = batch  # [ways, shots, 64]
        prototypes = self.encoder(support).mean(1)
        z = self.encoder(query).flatten(0, 1)
        logits = -self.scale * torch.cdist(z, prototypes).square()
        y = torch.arange(len(support)).repeat_interleave(query.shape[1])
        self.log("acc", (logits.argmax(1) == y).float().mean(), batch_size=1, on_epoch=True)
        return F.cross_entropy(logits, y)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=5e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Episodes(Dataset):
    def __init__(self, count: int, ways=3, shots=2, queries=3):
        x, y = table("digits")
        generator = torch.Generator().manual_seed(4)
        self.items = []
        for _ in range(count):
            classes = torch.randperm(10, generator=generator)[:ways]
            chosen = torch.stack([x[y == c][: shots + queries] for c in classes])
            self.items.append((chosen[:, :shots], chosen[:, shots:]))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def prototypical_episodes(make_trainer) -> Any:
    """Few-shot episodes without collation, labels by repeat_interleave of a number."""
    model, losses = Prototypical(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(Episodes(10), batch_size=None, shuffle=True))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class BatchHardTriplets(pl.LightningModule):
    """The hardest positive and negative of the batch for each row, and ArcFace beside it."""

    def __init__(self, margin=0.3, s=8.0):
        super().__init__()
        self.margin, self.s = margin, s
        self.encoder = nn.Sequential(nn.Linear(64, 16), nn.PReLU(), nn.Linear(16, 8))
        self.classes = nn.Parameter(F.normalize(torch.randn(10, 8), dim=1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        z = F.normalize(self.encoder(x), dim=1)
        distance = (2 - 2 * z @ z.T).clamp_min(1e-6).sqrt()
        same = y[:, None] == y[None]
        positive = distance.masked_fill(~same, 0).amax(1)
        negative = distance.masked_fill(same, 2.0).amin(1)
        triplet = F.softplus(positive - negative + self.margin).mean()
        cosine = (z @ F.normalize(self.classes, dim=1).T).clamp(-1 + 1e-6, 1 - 1e-6)
        angle = torch.acos(cosine) + 0.1 * F.one_hot(y, 10)
        arc = F.cross_entropy(self.s * torch.cos(angle), y)
        self.log_dict({"triplet": triplet, "arc": arc})
        return triplet + arc

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        z = F.normalize(self.encoder(x), dim=1)
        near = (z @ z.T - 2 * torch.eye(len(z))).argmax(1)
        self.log("p@1", (y[near] == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def metric_learning(make_trainer) -> Any:
    """Batch-hard triplets and an angular margin; two validation loaders, logged by their number."""
    model, losses = BatchHardTriplets(), Losses()
    val = [DataLoader(rows("digits", a, a + 64), 32) for a in (320, 400)]
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(rows("digits", 0, 320), 32, shuffle=True), val)
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


def sine_tasks(count: int) -> list[tuple[Tensor, ...]]:
    x = torch.rand(count, 2, 6, 1) * 10 - 5
    amplitude, phase = torch.rand(count, 1, 1, 1) * 4 + 1, torch.rand(count, 1, 1, 1) * 3
    y = amplitude * torch.sin(x + phase)
    return [(x[i, 0], y[i, 0], x[i, 1], y[i, 1]) for i in range(count)]


class ModelAgnostic(pl.LightningModule):
    """MAML: inner steps by torch.func under vmap over the tasks of a batch."""

    def __init__(self, inner_lr=0.02, inner_steps=2):
        super().__init__()
        self.save_hyperparameters()
        self.net = mlp(1, 16, 1, activation=nn.Tanh)

    def task_loss(self, xs, ys, xq, yq):
        def loss(params, x, y):
            return F.mse_loss(functional_call(self.net, params, (x,)), y)

        params = dict(self.net.named_parameters())
        for _ in range(self.hparams.inner_steps):
            grads = grad(loss)(params, xs, ys)
            params = {k: p - self.hparams.inner_lr * grads[k] for k, p in params.items()}
        return loss(params, xq, yq)

    def training_step(self, batch, batch_idx):
        loss = vmap(self.task_loss)(*batch).mean()
        self.log("meta", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def maml_by_torch_func(make_trainer) -> Any:
    """MAML on sines: functional_call, grad and vmap over tasks."""
    model, losses = ModelAgnostic(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], gradient_clip_val=10)
    trainer.fit(model, DataLoader(sine_tasks(40), batch_size=4))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class Reptile(pl.LightningModule):
    """Inner steps on copies of the weights, without an optimizer of the outer loop."""

    def __init__(self, inner_lr=0.05, outer_lr=0.3):
        super().__init__()
        self.automatic_optimization = False
        self.inner_lr, self.outer_lr = inner_lr, outer_lr
        self.net = mlp(1, 16, 1, activation=nn.Tanh)

    def training_step(self, batch, batch_idx):
        xs, ys, xq, yq = batch
        fast = {k: p.detach().clone() for k, p in self.net.named_parameters()}
        value_and_grad = grad_and_value(
            lambda p, x, y: F.mse_loss(functional_call(self.net, p, (x,)), y)
        )
        for x, y in ((xs, ys), (xq, yq), (xs, ys)):
            grads, loss = value_and_grad(fast, x, y)
            fast = {k: p - self.inner_lr * grads[k] for k, p in fast.items()}
        with torch.no_grad():
            for k, p in self.net.named_parameters():
                p.add_(fast[k] - p, alpha=self.outer_lr)
        self.log("inner", loss)
        return {"loss": loss.detach()}

    def configure_optimizers(self):
        return None


def reptile(make_trainer) -> Any:
    """Reptile without any optimizer: weights move towards those of the inner loop."""
    model, losses = Reptile(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(sine_tasks(10), batch_size=None))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class FederatedAverage(pl.LightningModule):
    """Each client has a copy and an optimizer; an epoch is a round, then copies are averaged."""

    def __init__(self, clients=3):
        super().__init__()
        self.automatic_optimization = False
        server = mlp(13, 8, 3)
        self.clients = nn.ModuleList(copy.deepcopy(server) for _ in range(clients))
        self.rounds = 0

    def training_step(self, batch, batch_idx):
        total = 0.0
        for name, optimizer in zip(sorted(batch), self.optimizers(), strict=True):
            x, y = batch[name]
            loss = F.cross_entropy(self.clients[int(name[-1])](x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            total = total + loss.detach()
            self.log(f"loss/{name}", loss, batch_size=len(x))
        return {"loss": total / len(self.clients)}

    @torch.no_grad()
    def on_train_epoch_end(self):
        for parameters in zip(*(c.parameters() for c in self.clients), strict=True):
            mean = torch.stack([p.data for p in parameters]).mean(0)
            for p in parameters:
                p.copy_(mean)
        self.rounds += 1

    def configure_optimizers(self):
        return [torch.optim.SGD(c.parameters(), lr=0.1) for c in self.clients]


def federated_averaging(make_trainer) -> Any:
    """Three clients with loaders of their own under CombinedLoader, averaged after each epoch."""
    loaders = {
        f"client-{i}": DataLoader(rows("wine", 48 * i, 48 * i + 40), batch_size=8, shuffle=True)
        for i in range(3)
    }
    model, losses = FederatedAverage(), Losses()
    trainer = make_trainer(max_epochs=4, callbacks=[losses])
    trainer.fit(model, CombinedLoader(loaders, mode="min_size"))
    return {"losses": losses.values, "rounds": model.rounds, "w": weights(model)}


class VmappedEnsemble(pl.LightningModule):
    """Five networks in stacked parameters; their disagreement is the uncertainty."""

    def __init__(self, members=5):
        super().__init__()
        nets = [mlp(10, 8, 1, activation=nn.Tanh) for _ in range(members)]
        stacked, _ = torch.func.stack_module_state(nets)
        self.stacked = nn.ParameterDict(
            {k.replace(".", "_"): nn.Parameter(v.detach()) for k, v in stacked.items()}
        )
        self.skeleton = (copy.deepcopy(nets[0]).to("meta"),)

    def forward(self, x):
        params = {k.replace("_", "."): p for k, p in self.stacked.items()}
        one = functools.partial(functional_call, self.skeleton[0])
        return vmap(one, in_dims=(0, None))(params, (x,)).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        p = self(x)
        self.log("disagreement", p.std(0).mean())
        return (p - y / 100).square().mean(1).sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def vmapped_ensemble(make_trainer) -> Any:
    """An ensemble by stack_module_state and vmap over a skeleton on the meta device."""
    model, losses = VmappedEnsemble(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(rows("diabetes", 0, 320), batch_size=32))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class PrivateSGD(pl.LightningModule):
    """DP-SGD: gradients of each row, clipped, summed, noised."""

    def __init__(self, clip=1.0, noise=0.5):
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters()
        self.net = mlp(30, 8, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        params = {k: p.detach() for k, p in self.net.named_parameters()}

        def loss(p, row, target):
            out = functional_call(self.net, p, (row.unsqueeze(0),)).squeeze()
            return F.binary_cross_entropy_with_logits(out, target.float())

        grads, losses = vmap(grad_and_value(loss), in_dims=(None, 0, 0))(params, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        scale = (self.hparams.clip / norms.clamp_min(1e-6)).clamp(max=1.0)
        optimizer = self.optimizers()
        for name, p in self.net.named_parameters():
            total = torch.einsum("n,n...->...", scale, grads[name])
            total = total + self.hparams.noise * self.hparams.clip * torch.randn_like(total)
            p.grad = total / len(x)
        optimizer.step()
        self.log("clipped", (scale < 1).float().mean())
        return {"loss": losses.mean()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def private_sgd(make_trainer) -> Any:
    """DP-SGD by per-sample gradients under vmap, noise drawn in the step."""
    model, losses = PrivateSGD(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(rows("breast_cancer", 0, 320), batch_size=32))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class SharpnessAware(pl.LightningModule):
    """SAM written out: climb, second pass, back, step."""

    def __init__(self, rho=0.05):
        super().__init__()
        self.automatic_optimization = False
        self.rho = rho
        self.net = mlp(13, 16, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = F.cross_entropy(self.net(x), y, label_smoothing=0.1)
        self.manual_backward(loss)
        params = [p for p in self.parameters() if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm() + 1e-12
        with torch.no_grad():
            climbs = [self.rho * p.grad / norm for p in params]
            for p, e in zip(params, climbs, strict=True):
                p.add_(e)
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(x), y, label_smoothing=0.1))
        with torch.no_grad():
            for p, e in zip(params, climbs, strict=True):
                p.sub_(e)
        optimizer.step()
        self.log("loss", loss)
        self.lr_schedulers().step()
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)]


def sharpness_aware(make_trainer) -> Any:
    """SAM by hand, the scheduler stepped in the training step."""
    model, losses = SharpnessAware(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(rows("wine", 0, 160), batch_size=16, shuffle=True))
    return {
        "losses": losses.values,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "w": weights(model),
    }


class ProjectedTasks(pl.LightningModule):
    """PCGrad: conflicting gradients of two tasks are projected on each other."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.body = mlp(10, 12, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 2)])

    def training_step(self, batch, batch_idx):
        x, y, sex = batch
        h = self.body(x)
        tasks = [
            F.l1_loss(self.heads[0](h).squeeze(1), y / 100),
            F.cross_entropy(self.heads[1](h), sex),
        ]
        shared = list(self.body.parameters())
        g = [
            nn.utils.parameters_to_vector(torch.autograd.grad(t, shared, retain_graph=True))
            for t in tasks
        ]
        dot = (g[0] * g[1]).sum()
        projected = [
            torch.where(dot < 0, a - dot / b.square().sum().clamp_min(1e-9) * b, a)
            for a, b in ((g[0], g[1]), (g[1], g[0]))
        ]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(sum(tasks))
        start = 0
        for p in shared:
            p.grad = sum(projected)[start : start + p.numel()].view_as(p)
            start += p.numel()
        optimizer.step()
        self.log_dict({"l1": tasks[0], "ce": tasks[1], "conflict": (dot < 0).float()})
        return {"loss": sum(tasks).detach()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def conflicting_tasks(make_trainer) -> Any:
    """Two tasks with PCGrad under manual optimization."""
    x, y = table("diabetes")
    data = TensorDataset(x[:320], y[:320], (x[:320, 1] > 0).long())
    model, losses = ProjectedTasks(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(data, batch_size=32))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class Reverse(torch.autograd.Function):
    """The identity, whose gradient is turned round."""

    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.strength * g, None


class DomainAdversarial(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(30, 12), nn.Softplus(), nn.LayerNorm(12))
        self.label, self.domain = nn.Linear(12, 2), nn.Linear(12, 1)

    def training_step(self, batch, batch_idx):
        (xs, ys), (xt, _) = batch["source"], batch["target"]
        h = self.features(torch.cat([xs, xt]))
        ce = F.cross_entropy(self.label(h[: len(xs)]), ys)
        domain = torch.cat([torch.zeros(len(xs)), torch.ones(len(xt))])
        guess = self.domain(Reverse.apply(h, 0.3)).squeeze(1)
        adversarial = F.binary_cross_entropy_with_logits(guess, domain)
        self.log_dict({"ce": ce, "adversarial": adversarial}, batch_size=len(h), prog_bar=True)
        return ce + adversarial

    def configure_optimizers(self):
        head = [*self.label.parameters(), *self.domain.parameters()]
        optimizer = torch.optim.SGD(
            [{"params": self.features.parameters(), "lr": 0.01}, {"params": head}],
            0.1,
            momentum=0.9,
        )
        decay = torch.optim.lr_scheduler.LambdaLR(
            optimizer, [lambda s: (1 + 0.1 * s) ** -0.75, lambda s: 1.0]
        )
        return [optimizer], [{"scheduler": decay, "interval": "step", "frequency": 2}]


def domain_adversarial(make_trainer) -> Any:
    """Gradient reversal between two domains in a dict of loaders, a lambda for each group."""
    target = rows("breast_cancer", 160, 320)
    target = TensorDataset(target.tensors[0] + 0.5, target.tensors[1])
    loaders = {
        "source": DataLoader(rows("breast_cancer", 0, 160), 16, shuffle=True),
        "target": DataLoader(target, 16),
    }
    model, losses = DomainAdversarial(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, loaders)
    rates = [g["lr"] for g in trainer.optimizers[0].param_groups]
    return {"losses": losses.values, "rates": rates, "w": weights(model)}


@dataclass
class Settings:
    """What the network reads in its step."""

    gamma: float = 0.9
    every: int = 5
    double: bool = True


class DeepQ(pl.LightningModule):
    """Q-learning from stored transitions; the target follows every few steps, on the host."""

    def __init__(self, settings: Settings):
        super().__init__()
        self.settings = settings
        self.online = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        state, action, reward, after, done = batch
        q = self.online(state).gather(1, action.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            if self.settings.double:
                best = self.online(after).argmax(1, keepdim=True)
                value = self.target(after).gather(1, best).squeeze(1)
            else:
                value = self.target(after).amax(1)
            goal = reward + self.settings.gamma * value * (~done)
        self.log("q", q.mean())
        return nn.HuberLoss()(q, goal)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.global_step % self.settings.every == 0:
            self.target.load_state_dict(self.online.state_dict())

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.online.parameters(), lr=5e-3, alpha=0.95)


def transitions(count: int = 320) -> TensorDataset:
    return TensorDataset(
        torch.randn(count, 4),
        torch.randint(0, 3, (count,)),
        torch.randn(count),
        torch.randn(count, 4),
        torch.rand(count) < 0.1,
    )


def double_deep_q(make_trainer) -> Any:
    """Double DQN on stored transitions; the target network is copied in on_train_batch_end."""
    model, losses = DeepQ(Settings()), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(transitions(), batch_size=32))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class SoftTargetQ(DeepQ):
    """Polyak averages in the step, and a prioritized loss that logs numbers by item()."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss.item())
        return loss


def logged_item(make_trainer) -> Any:
    """The same, with loss.item() in self.log."""
    model, losses = SoftTargetQ(Settings(double=False)), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(transitions(), batch_size=32))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class SkipsBadBatches(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = mlp(10, 16, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.net(x).squeeze(1), y / 100)
        if torch.isnan(loss):
            return None
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def skipped_nan_batches(make_trainer) -> Any:
    """A step that returns None where its loss is NaN."""
    model, losses = SkipsBadBatches(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(rows("diabetes", 0, 320), batch_size=32))
    return {"losses": losses.values, "w": weights(model)}


class ImputingAutoencoder(pl.LightningModule):
    """Missing numbers: running means in buffers fill them, the loss counts what was seen."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(26, 12), nn.RReLU(), nn.Linear(12, 4))
        self.decoder = mlp(4, 12, 13)
        self.register_buffer("mean", torch.zeros(13))
        self.example_count = 0

    def training_step(self, batch, batch_idx):
        seen = ~torch.isnan(batch)
        x = torch.nan_to_num(batch, nan=0.0)
        with torch.no_grad():
            batch_mean = x.sum(0) / seen.sum(0).clamp(min=1)
            self.mean.lerp_(batch_mean, 0.1)
        x = torch.where(seen, x, self.mean)
        hidden = seen & (torch.rand_like(x) < 0.2)
        out = self.decoder(self.encoder(torch.cat([x.masked_fill(hidden, 0), hidden], 1)))
        loss = ((out - x).square() * seen).sum() / seen.sum()
        self.log("seen", seen.float().mean(), on_epoch=True, reduce_fx="min")
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.example_count += batch.shape[0]

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def missing_values(make_trainer) -> Any:
    """An autoencoder that imputes NaNs by running means and hides more of the inputs."""
    x = table("wine")[0][:160].clone()
    x[torch.rand_like(x) < 0.15] = float("nan")
    model, losses = ImputingAutoencoder(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], accumulate_grad_batches=2)
    trainer.fit(model, DataLoader(x, batch_size=16))
    return {
        "losses": losses.values,
        "count": model.example_count,
        "metrics": trainer.callback_metrics,
        "w": weights(model),
    }


class DigitsData(pl.LightningDataModule):
    """Digits in bytes; scaled after the transfer."""

    def __init__(self, batch_size=32):
        super().__init__()
        self.batch_size = batch_size

    def prepare_data(self):
        datasets.load_digits()

    def setup(self, stage):
        digits = datasets.load_digits()
        x = torch.tensor(digits.images, dtype=torch.uint8)
        self.data = TensorDataset(x, torch.tensor(digits.target))

    def train_dataloader(self):
        both = ConcatDataset([Subset(self.data, range(160)), Subset(self.data, range(400, 560))])
        return DataLoader(both, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Subset(self.data, range(600, 664)), batch_size=self.batch_size)

    def predict_dataloader(self):
        return self.val_dataloader()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x.float().div(16), y


class DigitsNet(pl.LightningModule):
    def __init__(self, width: int = 8, lr: float = 0.05, classes: list[int] | None = None):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 8)),
            nn.Conv2d(1, width, 3),
            nn.GroupNorm(2, width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(width * 9, 10),
        )
        self.top2 = torchmetrics.Accuracy("multiclass", num_classes=10, top_k=2)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.top2(self(batch[0]), batch[1])
        self.log("val_top2", self.top2, on_step=False, on_epoch=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).topk(2).indices

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.hparams.lr, 0.9, nesterov=True)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3),
        }


def digits_checkpoint_and_resume(make_trainer) -> Any:
    """A DataModule; the best checkpoint is loaded with its hparams, and a run is resumed."""
    data = DigitsData()
    with tempfile.TemporaryDirectory() as folder:
        losses = Losses()
        keep = ModelCheckpoint(
            folder, monitor="val_top2", mode="max", save_last=True, filename="{epoch}-{step}"
        )
        logger = CSVLogger(folder, name="log")
        trainer = make_trainer(
            max_epochs=2, callbacks=[losses, keep], logger=logger, enable_checkpointing=True
        )
        model = DigitsNet(width=6)
        trainer.fit(model, datamodule=data)
        best = DigitsNet.load_from_checkpoint(keep.best_model_path)
        predictions = trainer.predict(best, datamodule=data)
        hparams = Path(logger.log_dir, "hparams.yaml").exists()
        resumed = make_trainer(max_epochs=3, callbacks=[losses])
        again = DigitsNet(width=6)
        resumed.fit(again, datamodule=data, ckpt_path=str(Path(folder, "last.ckpt")))
    return {
        "losses": losses.values,
        "width": best.hparams.width,
        "logged": hparams,
        "predictions": predictions,
        "metrics": resumed.callback_metrics,
        "w": weights(again),
    }


# Corners of the Trainer


class CurriculumRegressor(pl.LightningModule):
    """Its own loaders: each epoch brings harder rows; the optimizer is the user's own."""

    def __init__(self):
        super().__init__()
        self.net = mlp(10, 16, 1)

    def train_dataloader(self):
        x, y = table("diabetes")
        order = (y[:320] - 150).abs().argsort()
        chosen = order[: 160 * (self.current_epoch + 1)][-160:]
        return DataLoader(TensorDataset(x[chosen], y[chosen]), batch_size=16, shuffle=True)

    def training_step(self, batch, batch_idx):
        x, y = batch
        error = self.net(x).squeeze(1) - (y - 150) / 77
        loss = torch.log(torch.cosh(error)).mean()
        self.log("log_cosh", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return SignMomentum(self.parameters(), lr=5e-3)


class SignMomentum(torch.optim.Optimizer):
    """Steps by the sign of a running mean of gradients, smaller and smaller."""

    def __init__(self, params, lr=1e-3, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["mean"] = torch.zeros_like(p)
                self.state[p]["step"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] += 1
                state["mean"].mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                p.sub_(state["mean"].sign() * group["lr"] / state["step"].sqrt())
        return loss


def curriculum_reloaded_loaders(make_trainer) -> Any:
    """Loaders made anew each epoch by the module's own hook; an optimizer of one's own."""
    model, losses = CurriculumRegressor(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], reload_dataloaders_every_n_epochs=1)
    trainer.fit(model)
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class GeometricMeanScore(torchmetrics.Metric):
    """The geometric mean of the recalls of classes."""

    full_state_update = False

    def __init__(self, classes: int):
        super().__init__()
        self.add_state("right", torch.zeros(classes), dist_reduce_fx="sum")
        self.add_state("total", torch.zeros(classes), dist_reduce_fx="sum")

    def update(self, logits: Tensor, y: Tensor) -> None:
        hot = F.one_hot(y, len(self.total)).float()
        self.right += (hot * (logits.argmax(1) == y)[:, None]).sum(0)
        self.total += hot.sum(0)

    def compute(self) -> Tensor:
        return ((self.right + 1) / (self.total + 1)).log().mean().exp()


class WineWithOwnMetric(pl.LightningModule):
    """A metric of one's own, callbacks from the module, a BatchNorm that stays in eval."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(13, 16), nn.BatchNorm1d(16)).requires_grad_(False)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(16, 3))
        self.score = GeometricMeanScore(3)
        self.test_score = GeometricMeanScore(3)

    def train(self, mode: bool = True):
        super().train(mode)
        self.frozen.eval()
        return self

    def configure_callbacks(self):
        return [EarlyStopping("g_mean", mode="max", patience=2, stopping_threshold=0.999)]

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.nll_loss(self.head(self.frozen(x)).log_softmax(1), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.score(self.head(self.frozen(x)), y)
        self.log("g_mean", self.score, metric_attribute="score")

    def test_step(self, batch, batch_idx):
        self.test_score.update(self.head(self.frozen(batch[0])), batch[1])

    def on_test_epoch_end(self):
        self.log("test_g_mean", self.test_score.compute())

    def configure_optimizers(self):
        return torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=2e-2)


def own_metric_and_best_checkpoint(make_trainer) -> Any:
    """A Metric subclass, configure_callbacks, train() overridden, test with ckpt_path="best"."""
    model, losses = WineWithOwnMetric(), Losses()
    with tempfile.TemporaryDirectory() as folder:
        keep = ModelCheckpoint(folder, monitor="g_mean", mode="max", save_weights_only=True)
        trainer = make_trainer(max_epochs=4, callbacks=[losses, keep], enable_checkpointing=True)
        val = DataLoader(rows("wine", 80, 112), batch_size=16)
        trainer.fit(model, DataLoader(rows("wine", 0, 80), batch_size=16, shuffle=True), val)
        test = DataLoader(rows("wine", 112, 176), batch_size=16)
        result = trainer.test(ckpt_path="best", dataloaders=test, verbose=False)
    return {
        "losses": losses.values,
        "test": result,
        "best": keep.best_model_score,
        "epoch": trainer.current_epoch,
        "w": weights(model),
    }


class EvidentialNet(pl.LightningModule):
    """Dirichlet evidence; the weight of its KL is a tensor that a hook moves each epoch."""

    def __init__(self):
        super().__init__()
        self.net = mlp(13, 16, 3, activation=nn.Softplus)
        self.register_buffer("coefficient", torch.tensor(0.0))

    def on_train_epoch_start(self):
        self.coefficient.fill_(min(1.0, self.current_epoch / 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        alpha = F.softplus(self.net(x)) + 1
        strength = alpha.sum(1, keepdim=True)
        p, hot = alpha / strength, F.one_hot(y, num_classes=3)
        risk = ((hot - p) ** 2 + p * (1 - p) / (strength + 1)).sum(1)
        rest = torch.distributions.Dirichlet(hot + (1 - hot) * alpha)
        kl = torch.distributions.kl_divergence(rest, torch.distributions.Dirichlet(torch.ones(3)))
        self.log("uncertainty", (3 / strength).mean(), on_epoch=True, on_step=False)
        return (risk + self.coefficient * kl).mean()

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 5:
            return -1

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def evidential_short_epochs(make_trainer) -> Any:
    """A Dirichlet's KL annealed by a buffer; on_train_batch_start ends each epoch after 5."""
    model, losses = EvidentialNet(), Losses()
    trainer = make_trainer(max_epochs=4, callbacks=[losses])
    trainer.fit(model, DataLoader(rows("wine", 0, 160), batch_size=16, shuffle=True))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class SelfTraining(pl.LightningModule):
    """Pseudo-labels above a confidence, an average of losses read back from callback_metrics."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.LazyLinear(24), nn.Hardswish(), nn.Dropout(0.2), nn.LazyLinear(10)
        )
        self.shares: list[float] = []

    def configure_model(self):
        if isinstance(self.net[0], nn.LazyLinear):
            self.net(torch.zeros(1, 64))

    def training_step(self, batch, batch_idx):
        (x, y), (u, _) = batch
        supervised = F.cross_entropy(self.net(x), y)
        with torch.no_grad():
            confidence, label = self.net(u + 0.05 * torch.randn_like(u)).softmax(1).max(1)
        chosen = (confidence > 0.3).float()
        each = F.cross_entropy(self.net(u + 0.3 * torch.randn_like(u)), label, reduction="none")
        self.log("share", chosen.mean(), on_step=False, on_epoch=True, batch_size=len(u))
        return supervised + (each * chosen).mean()

    def on_train_epoch_end(self):
        self.shares.append(float(self.trainer.callback_metrics.get("share", -1.0)))

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log(
            f"val_{'clean' if dataloader_idx == 0 else 'noisy'}", loss, add_dataloader_idx=False
        )

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def self_training_lazy_layers(make_trainer) -> Any:
    """Lazy layers made real in configure_model, a list of loaders to train, two to validate."""
    model, losses = SelfTraining(), Losses()
    noisy = rows("digits", 700, 764)
    noisy = TensorDataset(noisy.tensors[0] + torch.randn(64, 64), noisy.tensors[1])
    loaders = [
        DataLoader(rows("digits", 0, 160), batch_size=16),
        DataLoader(rows("digits", 160, 480), batch_size=32, shuffle=True),
    ]
    val = [DataLoader(rows("digits", 700, 764), batch_size=32), DataLoader(noisy, batch_size=32)]
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, loaders, val)
    return {
        "losses": losses.values,
        "shares": model.shares,
        "metrics": trainer.callback_metrics,
        "w": weights(model),
    }


class Poisson(pl.LightningModule):
    """Counts with an exposure; `backward` is the module's own, the loss a module of its own."""

    def __init__(self, power: float = 1.0):
        super().__init__()
        self.net, self.power = mlp(10, 8, 1), power
        self.criterion = nn.PoissonNLLLoss(full=True, reduction="mean")
        self.deviance = torchmetrics.TweedieDevianceScore(power=1)

    def training_step(self, batch, batch_idx):
        x, exposure, count = batch
        log_rate = self.net(x).squeeze(1) + exposure.log()
        self.deviance.update(log_rate.exp().detach() + 1e-6, count + 1e-6)
        return self.criterion(log_rate, count)

    def on_train_epoch_end(self):
        self.log("deviance", self.deviance.compute())
        self.deviance.reset()

    def backward(self, loss):
        (loss + 1e-3 * sum(p.abs().sum() for p in self.net.parameters())).backward()

    def on_before_zero_grad(self, optimizer):
        self.log("largest", torch.stack([p.abs().max() for p in self.parameters()]).max())

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


def poisson_counts(make_trainer) -> Any:
    """Poisson regression with an exposure; backward and on_before_zero_grad overridden."""
    x, y = table("diabetes")
    exposure = torch.rand(320) + 0.5
    count = torch.poisson(exposure * y[:320] / 100)
    model, losses = Poisson(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(TensorDataset(x[:320], exposure, count), batch_size=32))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


def averaged_by_lightning(make_trainer) -> Any:
    """Lightning's EMAWeightAveraging from the fifth step on."""
    model, losses = IrisClassifier(), Losses()
    loader = DataLoader(rows("iris", 0, 150), batch_size=15, shuffle=True)
    average = EMAWeightAveraging(decay=0.9, update_starting_at_step=5)
    trainer = make_trainer(max_epochs=2, callbacks=[losses, average])
    trainer.fit(model, loader)
    return {"losses": losses.values, "w": weights(model)}


def overfitted_batches(make_trainer) -> Any:
    """overfit_batches and an identity sampler: the usual check that a network can learn."""
    model, losses = IrisClassifier(), Losses()
    loader = DataLoader(rows("iris", 0, 144), batch_size=16)
    trainer = make_trainer(max_epochs=10, overfit_batches=2, callbacks=[losses])
    trainer.fit(model, loader)
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}
