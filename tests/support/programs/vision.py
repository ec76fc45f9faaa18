"""Small vision trainings, as users of Lightning write them.

Each function trains for about twenty steps with the Trainer that `make_trainer(**options)` makes,
and returns what two runs should agree on: losses, logged values, weights, predictions. The caller
seeds torch before each call; its `make_trainer` adds quiet options of its own beneath those given.
"""

import copy
import math
import tempfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from programs.common import Losses, results
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)


def digits(begin, end):
    """Pictures [n, 1, 8, 8] between 0 and 1, and their labels."""
    data = load_digits()
    pictures = torch.tensor(data.images[begin:end] / 16, dtype=torch.float32).unsqueeze(1)
    return TensorDataset(pictures, torch.tensor(data.target[begin:end], dtype=torch.long))


def pictures(n, channels=3, size=16, classes=4, seed=0):
    """Noise with a bright square, whose quarter is the label."""
    g = torch.Generator().manual_seed(seed)
    x = 0.5 * torch.randn(n, channels, size, size, generator=g)
    y = torch.randint(0, classes, (n,), generator=g)
    half = size // 2
    for i, label in enumerate(y.tolist()):
        row, column = divmod(label % 4, 2)
        x[i, :, row * half : (row + 1) * half, column * half : (column + 1) * half] += 1
    return TensorDataset(x, y)


# Classification


class DigitNet(L.LightningModule):
    def __init__(self, width=8, lr=5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(2 * width, 10)
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=10)
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def forward(self, x):
        return self.head(self.drop(self.features(x)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", self.val_acc, prog_bar=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=4 * self.hparams.lr,
            total_steps=int(self.trainer.estimated_stepping_batches),
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def digit_convnet_onecycle(make_trainer):
    """A ConvNet on digits with OneCycleLR, train and validation accuracy, then predictions."""
    model, losses = DigitNet(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    train = DataLoader(digits(0, 160), batch_size=16, shuffle=True)
    val = DataLoader(digits(160, 224), batch_size=32)
    trainer.fit(model, train, val)
    return results(trainer, model, losses, predicted=trainer.predict(model, val))


def digit_convnet_last_batch_smaller(make_trainer):
    """The same on 150 digits in batches of 16: the last batch of an epoch has 6."""
    model, losses = DigitNet(width=4), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(digits(0, 150), batch_size=16, shuffle=True))
    return results(trainer, model, losses)


class ResidualBlock(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        nn.init.zeros_(self.bn2.weight)
        self.shortcut = nn.Identity()
        if stride != 1 or cin != cout:
            self.shortcut = nn.Sequential(
                nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout)
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class ResNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            OrderedDict(
                stem=nn.Conv2d(3, 8, 3, padding=1),
                block1=ResidualBlock(8, 8),
                block2=ResidualBlock(8, 16, stride=2),
                pool=nn.AdaptiveAvgPool2d(1),
                flat=nn.Flatten(),
                head=nn.Linear(16, 4),
            )
        )
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        flip = torch.rand(len(x), 1, 1, 1, device=self.device) < 0.5
        x = torch.where(flip, x.flip(-1), x)
        loss = self.criterion(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.ndim > 1]
        no_decay = [p for p in self.parameters() if p.ndim <= 1]
        optimizer = torch.optim.SGD(
            [
                {"params": decay, "weight_decay": 5e-4},
                {"params": no_decay, "weight_decay": 0.0, "lr": 0.02},
            ],
            lr=0.05,
            momentum=0.9,
            nesterov=True,
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
        return [optimizer], [scheduler]


def resnet_sgd_cosine_clipped(make_trainer):
    """A ResNet with Nesterov SGD, two parameter groups, cosine per epoch, clipped gradients."""
    model, losses = ResNet(), Losses()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            max_epochs=3,
            gradient_clip_val=1.0,
            logger=CSVLogger(folder),
            log_every_n_steps=2,
            callbacks=[losses, LearningRateMonitor(logging_interval="step")],
        )
        trainer.fit(model, DataLoader(pictures(112), batch_size=16, shuffle=True))
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return results(trainer, model, losses, rates=rates)


class SqueezeExcite(nn.Module):
    def __init__(self, channels, reduction=4):
        super().__init__()
        self.fc1 = nn.Conv2d(channels, channels // reduction, 1)
        self.fc2 = nn.Conv2d(channels // reduction, channels, 1)

    def forward(self, x):
        s = x.mean((2, 3), keepdim=True)
        return x * F.hardsigmoid(self.fc2(F.relu(self.fc1(s))))


class InvertedResidual(nn.Module):
    def __init__(self, channels, expand=2, drop_path=0.1):
        super().__init__()
        hidden = channels * expand
        self.body = nn.Sequential(
            nn.Conv2d(channels, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden, momentum=0.01),
            nn.Hardswish(),
            nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden, momentum=0.01),
            nn.Hardswish(),
            SqueezeExcite(hidden),
            nn.Conv2d(hidden, channels, 1, bias=False),
        )
        self.drop_path = drop_path

    def forward(self, x):
        out = self.body(x)
        if self.training and self.drop_path > 0:
            keep = 1 - self.drop_path
            mask = x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(keep)
            out = out * mask / keep
        return x + out


class MobileNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 12, 3, stride=2, padding=1),
            InvertedResidual(12),
            InvertedResidual(12),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(12, 4),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        top1 = (logits.argmax(1) == y).float().mean()
        self.log_dict({"train/loss": loss, "train/top1": top1}, on_epoch=True, batch_size=len(x))
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.RMSprop(
            self.parameters(), lr=2e-3, alpha=0.9, momentum=0.9, eps=1e-3
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


class WeightAverage(L.Callback):
    """A moving average of the weights, kept beside the model and saved with checkpoints."""

    def __init__(self, decay=0.9):
        self.decay = decay
        self.shadow = {}

    def on_fit_start(self, trainer, pl_module):
        self.shadow = {k: v.detach().clone() for k, v in pl_module.state_dict().items()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for name, value in pl_module.state_dict().items():
            if value.is_floating_point():
                self.shadow[name].mul_(self.decay).add_(value, alpha=1 - self.decay)
            else:
                self.shadow[name].copy_(value)


def mobilenet_depthwise_se_ema_callback(make_trainer):
    """Depthwise convolutions, squeeze-excite, drop path; weights averaged by a callback."""
    model, losses, average = MobileNet(), Losses(), WeightAverage()
    trainer = make_trainer(max_steps=20, callbacks=[losses, average])
    trainer.fit(model, DataLoader(pictures(96), batch_size=16, shuffle=True))
    return results(trainer, model, losses, averaged=average.shadow)


class VisionTransformer(L.LightningModule):
    def __init__(self, dim=24, patch=4, size=16, classes=4, warmup=5):
        super().__init__()
        self.save_hyperparameters()
        self.patches = nn.Conv2d(3, dim, patch, stride=patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.empty(1, (size // patch) ** 2 + 1, dim))
        nn.init.trunc_normal_(self.pos, std=0.02)
        layer = nn.TransformerEncoderLayer(
            dim, 4, 2 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), tokens], dim=1) + self.pos
        return self.head(self.norm(self.encoder(tokens))[:, 0])

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, betas=(0.9, 0.95))
        warmup = self.hparams.warmup
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / warmup)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def vision_transformer_warmup(make_trainer):
    """A ViT with class token and learned positions, AdamW and a linear warm-up."""
    model, losses = VisionTransformer(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], gradient_clip_val=1.0)
    trainer.fit(model, DataLoader(pictures(160), batch_size=16))
    # keys' biases move by rounding alone: softmax does not see them
    weights = {k: v for k, v in model.state_dict().items() if "in_proj_bias" not in k}
    return results(trainer, model, losses, weights=weights)


class PatchMixer(L.LightningModule):
    def __init__(self, dim=16, depth=2, classes=4):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, dim, 4, stride=4), nn.GELU(), nn.BatchNorm2d(dim))
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            depthwise = nn.Sequential(
                nn.Conv2d(dim, dim, 3, groups=dim, padding="same"), nn.GELU(), nn.BatchNorm2d(dim)
            )
            pointwise = nn.Sequential(nn.Conv2d(dim, dim, 1), nn.GELU(), nn.BatchNorm2d(dim))
            self.blocks.append(nn.ModuleList([depthwise, pointwise]))
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(dim, classes)
        )

    def forward(self, x):
        x = self.stem(x)
        for depthwise, pointwise in self.blocks:
            x = pointwise(x + depthwise(x))
        return self.head(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        lam = torch.distributions.Beta(0.4, 0.4).sample()
        index = torch.randperm(x.size(0))
        mixed = lam * x + (1 - lam) * x[index]
        logits = self(mixed)
        loss = lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, y[index])
        self.log("lam", lam, on_step=True, on_epoch=True, reduce_fx="max")
        return {"loss": loss, "logits": logits.detach()}

    def configure_optimizers(self):
        return torch.optim.NAdam(self.parameters(), lr=5e-3, momentum_decay=4e-3)


def convmixer_mixup(make_trainer):
    """A ConvMixer trained on mixed pictures: Beta weights and permutations drawn in the step."""
    model, losses = PatchMixer(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(pictures(160, seed=1), batch_size=16))
    return results(trainer, model, losses)


def random_box(height, width, lam):
    """A box of a share 1 - lam of the picture, as a mask."""
    cut = torch.sqrt(1 - lam)
    cy, cx = torch.rand(()) * height, torch.rand(()) * width
    rows = torch.arange(height).unsqueeze(1)
    columns = torch.arange(width).unsqueeze(0)
    inside_rows = (rows - cy).abs() < cut * height / 2
    inside_columns = (columns - cx).abs() < cut * width / 2
    return inside_rows & inside_columns


class CutMixNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1),
            nn.GroupNorm(3, 12),
            nn.SiLU(),
            nn.AvgPool2d(2),
            nn.Dropout2d(0.1),
            nn.Conv2d(12, 16, 3, padding=1),
            nn.SiLU(),
        )
        self.head = nn.Linear(16, 4)
        self.soft = nn.KLDivLoss(reduction="batchmean")

    def forward(self, x):
        return self.head(self.body(x).amax(dim=(-2, -1)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        mask = random_box(x.shape[-2], x.shape[-1], torch.rand(()))
        x = torch.where(mask, x.roll(1, 0), x)
        share = mask.float().mean()
        one_hot = F.one_hot(y, num_classes=4).float()
        targets = (1 - share) * one_hot + share * one_hot.roll(1, 0)
        loss = self.soft(F.log_softmax(self(x), dim=-1), targets)
        self.log("share", share, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        accuracy = (self(x).argmax(-1) == y).float().mean()
        self.log("val_acc", accuracy)

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


def cutmix_two_validation_loaders(make_trainer):
    """CutMix by masks drawn in the step, Adagrad, two validation loaders."""
    model, losses = CutMixNet(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], num_sanity_val_steps=0)
    loaders = [DataLoader(pictures(32, seed=s), batch_size=16) for s in (5, 6)]
    trainer.fit(model, DataLoader(pictures(160), batch_size=16), loaders)
    return results(trainer, model, losses)


class BalancedData(L.LightningDataModule):
    def __init__(self, batch_size=16):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        load_digits()

    def setup(self, stage):
        if stage == "fit":
            whole = digits(0, 400)
            rare = [i for i, (_, y) in enumerate(whole) if y < 5 or i % 4 == 0]
            self.train = Subset(whole, rare)
            self.val = digits(400, 464)
        if stage == "test":
            self.held_out = digits(464, 528)

    def train_dataloader(self):
        labels = torch.stack([y for _, y in self.train])
        weights = 1.0 / torch.bincount(labels, minlength=10)[labels]
        sampler = WeightedRandomSampler(weights, 160, generator=torch.Generator().manual_seed(3))
        return DataLoader(self.train, self.hparams.batch_size, sampler=sampler)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=32)

    def test_dataloader(self):
        return DataLoader(self.held_out, batch_size=32)


class ImbalancedNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3),
            nn.PReLU(),
            nn.LazyConv2d(8, 3),
            nn.ELU(),
            nn.Flatten(),
            nn.AlphaDropout(0.1),
            nn.Linear(128, 10),
        )
        self.net(torch.zeros(1, 1, 8, 8))
        metrics = torchmetrics.MetricCollection(
            {
                "acc": torchmetrics.classification.MulticlassAccuracy(10, average="micro"),
                "f1": torchmetrics.classification.MulticlassF1Score(10),
            }
        )
        self.val_metrics = metrics.clone(prefix="val_")
        self.test_metrics = metrics.clone(prefix="test_")
        self.confusion = torchmetrics.classification.MulticlassConfusionMatrix(10)

    def focal(self, logits, y, gamma=2.0):
        log_p = F.log_softmax(logits, dim=-1).gather(1, y[:, None]).squeeze(1)
        return -((1 - log_p.exp()) ** gamma * log_p).mean()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.focal(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        self.val_metrics.update(self.net(batch[0]), batch[1])
        self.log_dict(self.val_metrics)

    def test_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.test_metrics.update(logits, batch[1])
        self.confusion.update(logits, batch[1])

    def on_test_epoch_end(self):
        self.log_dict(self.test_metrics.compute())
        self.matrix = self.confusion.compute()
        self.test_metrics.reset()
        self.confusion.reset()

    def configure_optimizers(self):
        return torch.optim.Adamax(self.parameters(), lr=5e-3)


def imbalanced_digits_datamodule_focal(make_trainer):
    """Focal loss, a weighted sampler in a DataModule, metric collections, a confusion matrix."""
    model, losses, data = ImbalancedNet(), Losses(), BalancedData()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, datamodule=data)
    fitted = dict(trainer.callback_metrics)
    tested = trainer.test(model, datamodule=data)
    return results(trainer, model, losses, fitted=fitted, tested=tested, matrix=model.matrix)


# Without labels


def two_views(x):
    """Two random crops of each picture, by padding and gathering rows and columns."""
    n, c, h, w = x.shape
    padded = F.pad(x, (2, 2, 2, 2), mode="reflect")
    views = []
    for _ in range(2):
        dy = torch.randint(0, 5, (n, 1, 1, 1), device=x.device)
        dx = torch.randint(0, 5, (n, 1, 1, 1), device=x.device)
        rows = (torch.arange(h, device=x.device).view(1, 1, h, 1) + dy).expand(n, c, h, w + 4)
        columns = (torch.arange(w, device=x.device).view(1, 1, 1, w) + dx).expand(n, c, h, w)
        view = padded.gather(2, rows).gather(3, columns)
        views.append(view * (0.8 + 0.4 * torch.rand(n, 1, 1, 1, device=x.device)))
    return views


class SimCLR(L.LightningModule):
    def __init__(self, temperature=0.2):
        super().__init__()
        self.temperature = temperature
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.projector = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))

    def info_nce(self, views):
        z = F.normalize(self.projector(self.encoder(torch.cat(views))), dim=1)
        similarity = z @ z.T / self.temperature
        n = len(z)
        itself = torch.eye(n, dtype=torch.bool, device=z.device)
        similarity.masked_fill_(itself, -9e15)
        positives = itself.roll(shifts=n // 2, dims=0)
        nll = -similarity[positives] + torch.logsumexp(similarity, dim=-1)
        ranks = similarity.argsort(dim=-1, descending=True)[:, 0]
        top1 = (ranks == (torch.arange(n, device=z.device) + n // 2) % n).float().mean()
        return nll.mean(), top1

    def training_step(self, batch, batch_idx):
        loss, top1 = self.info_nce(two_views(batch[0]))
        self.log("train_loss", loss)
        self.log("train_top1", top1, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, _ = self.info_nce([batch[0], batch[0].flip(-1)])
        self.log("val_loss", loss)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=4, T_mult=2)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def simclr_random_crops(make_trainer):
    """SimCLR: two random crops in the step, InfoNCE with a mask, cosine with warm restarts."""
    model, losses = SimCLR(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    train = DataLoader(pictures(160), batch_size=16, shuffle=True, drop_last=True)
    trainer.fit(model, train, DataLoader(pictures(32, seed=2), batch_size=16))
    return results(trainer, model, losses)


class MoCo(L.LightningModule):
    def __init__(self, dim=8, length=64, momentum=0.9, temperature=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.query = self.make_encoder(dim)
        self.key = copy.deepcopy(self.query)
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(dim, length), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @staticmethod
    def make_encoder(dim):
        return nn.Sequential(
            nn.Conv2d(3, 8, 4, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(128, dim)
        )

    @torch.no_grad()
    def enqueue(self, keys):
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + len(keys)] = keys.T
        self.queue_ptr[0] = (ptr + len(keys)) % self.hparams.length

    def training_step(self, batch, batch_idx):
        first, second = two_views(batch[0])
        with torch.no_grad():
            m = self.hparams.momentum
            for p, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                k.data = k.data * m + p.data * (1 - m)
            keys = F.normalize(self.key(second), dim=1)
        queries = F.normalize(self.query(first), dim=1)
        positive = torch.einsum("nc,nc->n", queries, keys).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", queries, self.queue.clone().detach())
        logits = torch.cat([positive, negative], dim=1) / self.hparams.temperature
        loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
        self.enqueue(keys)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.query.parameters(), lr=0.03, momentum=0.9)


def moco_queue_with_int_pointer(make_trainer):
    """MoCo as its authors wrote it: a queue in a buffer, its pointer read by int()."""
    model, losses = MoCo(), Losses()
    trainer = make_trainer(max_steps=16, callbacks=[losses])
    trainer.fit(model, DataLoader(pictures(128), batch_size=16, drop_last=True))
    return results(trainer, model, losses)


class BYOL(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(
            nn.Unfold(4, stride=4),
            nn.Flatten(),
            nn.Linear(48 * 16, 16, bias=False),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Linear(16, 8),
        )
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.tau = 0.9

    def loss_of(self, a, b):
        with torch.no_grad():
            target = self.target(b)
        return 2 - 2 * F.cosine_similarity(self.predictor(self.online(a)), target, dim=-1).mean()

    def training_step(self, batch, batch_idx):
        a, b = two_views(batch[0])
        loss = (self.loss_of(a, b) + self.loss_of(b, a)) / 2
        self.log("loss", loss, on_epoch=True, reduce_fx=torch.mean)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        # tau goes to 1 along a cosine
        progress = self.trainer.global_step / self.trainer.estimated_stepping_batches
        tau = 1 - (1 - self.tau) * (math.cos(math.pi * progress) + 1) / 2
        with torch.no_grad():
            for p, t in zip(self.online.parameters(), self.target.parameters(), strict=True):
                t.lerp_(p, 1 - tau)

    def configure_optimizers(self):
        parameters = [*self.online.parameters(), *self.predictor.parameters()]
        return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=1e-3)


def byol_target_follows_on_host(make_trainer):
    """BYOL: the target network follows in on_train_batch_end, ever more slowly."""
    model, losses = BYOL(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(pictures(128), batch_size=16, drop_last=True))
    return results(trainer, model, losses)


class BarlowTwins(L.LightningModule):
    def __init__(self, lambd=5e-3):
        super().__init__()
        self.lambd = lambd
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1),
            nn.LeakyReLU(0.1),
            nn.Conv2d(8, 8, 3, 2, 1, bias=False),
            nn.Flatten(),
        )
        self.head = nn.Linear(128, 12, bias=False)
        self.norm = nn.BatchNorm1d(12, affine=False)

    def training_step(self, batch, batch_idx):
        a, b = (self.norm(self.head(self.backbone(view))) for view in two_views(batch[0]))
        c = (a.T @ b) / len(a)
        on_diagonal = (torch.diagonal(c) - 1).pow(2).sum()
        off_diagonal = c.flatten()[:-1].view(11, 13)[:, 1:].flatten().pow(2).sum()
        loss = on_diagonal + self.lambd * off_diagonal
        self.log_dict({"on": on_diagonal, "off": off_diagonal}, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.log("norm", sum(p.norm() for p in self.parameters()))

    def configure_optimizers(self):
        optimizer = torch.optim.RAdam(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2], gamma=0.3)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def barlow_twins_accumulated(make_trainer):
    """Barlow Twins with RAdam, MultiStepLR by epoch and two batches accumulated."""
    model, losses = BarlowTwins(), Losses()
    trainer = make_trainer(max_epochs=3, callbacks=[losses], accumulate_grad_batches=2)
    trainer.fit(model, DataLoader(pictures(112), batch_size=16, drop_last=True))
    return results(trainer, model, losses)


class MaskedAutoencoder(L.LightningModule):
    def __init__(self, dim=16, patch=4, keep=4):
        super().__init__()
        self.keep, self.patch = keep, patch
        self.embed = nn.Linear(3 * patch * patch, dim)
        self.pos = nn.Embedding(16, dim)
        self.attend = nn.MultiheadAttention(dim, 2, bias=False, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.decoder = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, 48))
        self.mask_token = nn.Parameter(0.02 * torch.randn(dim))

    def forward(self, tokens, order):
        kept = order[:, : self.keep].unsqueeze(-1).expand(-1, -1, tokens.shape[-1])
        x = self.embed(tokens.gather(1, kept)) + self.pos(order[:, : self.keep])
        q = self.norm1(x)
        x = self.norm2(x + self.attend(q, q, q, need_weights=False)[0])
        filler = self.mask_token + self.pos(order[:, self.keep :]) + x.mean(1, keepdim=True)
        return self.decoder(torch.cat([x, filler], dim=1))

    def training_step(self, batch, batch_idx):
        tokens = F.unfold(batch[0], self.patch, stride=self.patch).transpose(1, 2)
        order = torch.rand(tokens.shape[:2], device=self.device).argsort(dim=1)
        out = self(tokens, order)
        wanted = torch.take_along_dim(tokens, order.unsqueeze(-1), dim=1)
        error = (out - wanted).square().mean(-1)
        loss = error[:, self.keep :].mean()
        self.log("masked", loss, prog_bar=True)
        return loss

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        tokens = F.unfold(batch[0], self.patch, stride=self.patch).transpose(1, 2)
        order = torch.arange(16).expand(len(tokens), -1)
        out = self(tokens, order).transpose(1, 2)
        return F.fold(out, batch[0].shape[-2:], self.patch, stride=self.patch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=4e-3, amsgrad=True)


def masked_autoencoder(make_trainer):
    """A masked autoencoder: a random order of patches, most of them to be guessed."""
    model, losses = MaskedAutoencoder(), Losses()
    trainer = make_trainer(max_steps=20, callbacks=[losses])
    trainer.fit(model, DataLoader(pictures(160), batch_size=16))
    drawn = trainer.predict(model, DataLoader(pictures(16, seed=9), batch_size=8))
    return results(trainer, model, losses, drawn=drawn)


# Metric learning


class Triplet(NamedTuple):
    anchor: torch.Tensor
    positive: torch.Tensor
    negative: torch.Tensor


class Triplets(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        x, y = digits(0, 300).tensors
        self.rows = []
        for i in range(n):
            same = (y == y[i]).nonzero().flatten()
            other = (y != y[i]).nonzero().flatten()
            p = same[torch.randint(len(same), (1,), generator=g)].item()
            q = other[torch.randint(len(other), (1,), generator=g)].item()
            self.rows.append(Triplet(x[i], x[p], x[q]))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Embedder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 8, 3)),
            nn.CELU(),
            nn.Flatten(),
            nn.utils.parametrizations.weight_norm(nn.Linear(288, 8)),
        )
        self.loss = nn.TripletMarginWithDistanceLoss(
            distance_function=lambda a, b: 1 - F.cosine_similarity(a, b), margin=0.3, swap=True
        )
        self.violations = torchmetrics.MeanMetric()

    def training_step(self, batch: Triplet, batch_idx):
        a, p, n = self.net(batch.anchor), self.net(batch.positive), self.net(batch.negative)
        loss = self.loss(a, p, n)
        self.violations.update((F.pairwise_distance(a, p) > F.pairwise_distance(a, n)).float())
        self.log("violations", self.violations, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adadelta(self.parameters(), lr=1.0)


def triplet_embedding_namedtuple_batch(make_trainer):
    """Triplets as named tuples, weight norm, cosine triplet loss with swap, Adadelta."""
    model, losses = Embedder(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(Triplets(160, seed=0), batch_size=16, shuffle=True))
    return results(trainer, model, losses)


class ArcFace(L.LightningModule):
    def __init__(self, scale=16.0, margin=0.2):
        super().__init__()
        self.scale, self.margin = scale, margin
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16))
        self.centers = nn.Parameter(torch.empty(10, 16))
        nn.init.xavier_uniform_(self.centers)

    def cosine(self, x):
        return F.linear(F.normalize(self.net(x)), F.normalize(self.centers))

    def training_step(self, batch, batch_idx):
        x, y = batch
        cosine = self.cosine(x)
        theta = torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6))
        with_margin = torch.cos(theta + self.margin)
        one_hot = torch.zeros_like(cosine).scatter_(1, y.view(-1, 1), 1.0)
        logits = self.scale * torch.where(one_hot.bool(), with_margin, cosine)
        loss = F.cross_entropy(logits, y)
        self.log("angle", theta.gather(1, y[:, None]).mean().rad2deg())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return {"correct": (self.cosine(x).argmax(1) == y).sum(), "of": len(y)}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, dampening=0.1)


class CountCorrect(L.Callback):
    def __init__(self):
        self.correct, self.total, self.history = 0, 0, []

    def on_validation_epoch_start(self, trainer, pl_module):
        self.correct = self.total = 0

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, *_):
        self.correct += int(outputs["correct"])
        self.total += outputs["of"]

    def on_validation_epoch_end(self, trainer, pl_module):
        self.history.append((trainer.current_epoch, self.correct, self.total))


def arcface_counting_callback(make_trainer):
    """ArcFace margins by acos and cos; a callback counts what validation steps return."""
    model, losses, count = ArcFace(), Losses(), CountCorrect()
    trainer = make_trainer(max_epochs=3, callbacks=[losses, count])
    trainer.fit(
        model,
        DataLoader(digits(0, 224), batch_size=32),
        DataLoader(digits(300, 364), batch_size=32),
    )
    return results(trainer, model, losses, history=count.history)


# Teachers, transfer, domains


class Distilled(L.LightningModule):
    def __init__(self, temperature=3.0, alpha=0.7):
        super().__init__()
        self.save_hyperparameters()
        self.teacher = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10)
        )
        self.teacher.requires_grad_(False)
        self.student = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 10)
        )

    def on_train_epoch_start(self):
        self.teacher.eval()

    def training_step(self, batch, batch_idx):
        x, y = batch
        t = self.hparams.temperature
        with torch.no_grad():
            soft = F.softmax(self.teacher(x) / t, dim=-1)
        logits = self.student(x)
        kd = F.kl_div(F.log_softmax(logits / t, dim=-1), soft, reduction="batchmean") * t**2
        ce = F.cross_entropy(logits, y)
        self.log_dict({"kd": kd, "ce": ce})
        return self.hparams.alpha * kd + (1 - self.hparams.alpha) * ce

    def configure_optimizers(self):
        return torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=5e-3)


def distillation_frozen_teacher(make_trainer):
    """A student learns from a frozen teacher in eval mode, with temperature."""
    model, losses = Distilled(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(digits(0, 160), batch_size=16, shuffle=True))
    return results(trainer, model, losses)


class FineTuned(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, 10)
        for p in self.backbone.parameters():
            p.requires_grad = False

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            for p in self.backbone.parameters():
                p.requires_grad = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.head(self.backbone(x)), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(
            [
                {"params": self.head.parameters()},
                {"params": self.backbone.parameters(), "lr": 1e-3},
            ],
            lr=1e-2,
        )


def fine_tuning_unfreezes_after_an_epoch(make_trainer):
    """The backbone is frozen for an epoch, then trained at a lower rate."""
    model, losses = FineTuned(), Losses()
    trainer = make_trainer(max_epochs=3, callbacks=[losses])
    trainer.fit(model, DataLoader(digits(0, 112), batch_size=16))
    return results(trainer, model, losses)


class ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.save_for_backward(alpha)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        (alpha,) = ctx.saved_tensors
        return -alpha * grad, None


class DANN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU())
        self.classes = nn.Linear(24, 10)
        self.domain = nn.Sequential(nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 1))
        self.register_buffer("alpha", torch.tensor(0.0))

    def on_train_batch_start(self, batch, batch_idx):
        p = self.global_step / self.trainer.estimated_stepping_batches
        self.alpha.fill_(2 / (1 + math.exp(-10 * p)) - 1)

    def training_step(self, batch, batch_idx):
        x, y = batch["source"]
        (other,) = batch["target"]
        f = self.features(torch.cat([x, other]))
        reversed_ = ReverseGradient.apply(f, self.alpha)
        domain = torch.cat([torch.zeros(len(x)), torch.ones(len(other))])
        task = F.cross_entropy(self.classes(f[: len(x)]), y)
        confusion = F.binary_cross_entropy_with_logits(self.domain(reversed_).squeeze(-1), domain)
        self.log("task", task, batch_size=len(x))
        self.log("confusion", confusion, batch_size=len(x) + len(other))
        self.log("alpha", self.alpha)
        return task + confusion

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: (1 + t) ** -0.75)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def domain_adversarial_two_loaders(make_trainer):
    """DANN: source and target loaders side by side, gradients reversed by a growing factor."""
    model, losses = DANN(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    shifted = TensorDataset(1 - digits(200, 360).tensors[0])
    loaders = {
        "source": DataLoader(digits(0, 160), batch_size=16, shuffle=True),
        "target": DataLoader(shifted, batch_size=16),
    }
    trainer.fit(model, loaders)
    return results(trainer, model, losses)


class FixMatch(L.LightningModule):
    def __init__(self, threshold=0.3):
        super().__init__()
        self.threshold = threshold
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.InstanceNorm2d(8, affine=True),
            nn.ReLU(),
            nn.MaxPool2d(4),
            nn.Flatten(),
            nn.Linear(32, 10),
        )

    def training_step(self, batch, batch_idx):
        (x, y), (u,) = batch
        weak = u + 0.05 * torch.randn_like(u)
        strong = u * (torch.rand_like(u) > 0.3)
        logits_x, logits_w, logits_s = self.net(torch.cat([x, weak, strong])).split(
            [len(x), len(u), len(u)]
        )
        with torch.no_grad():
            confidence, guess = logits_w.softmax(-1).max(dim=-1)
            mask = confidence.ge(self.threshold).float()
        supervised = F.cross_entropy(logits_x, y)
        unsupervised = (F.cross_entropy(logits_s, guess, reduction="none") * mask).mean()
        self.log("mask", mask.mean(), on_epoch=True, batch_size=len(u))
        return supervised + unsupervised

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def fixmatch_combined_loader(make_trainer):
    """FixMatch: labelled and unlabelled loaders, confident guesses chosen by a mask."""
    from lightning.pytorch.utilities import CombinedLoader

    model, losses = FixMatch(), Losses()
    labelled = DataLoader(digits(0, 64), batch_size=8, shuffle=True)
    unlabelled = DataLoader(TensorDataset(digits(100, 420).tensors[0]), batch_size=32)
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, CombinedLoader([labelled, unlabelled], mode="max_size_cycle"))
    return results(trainer, model, losses)


# Dense predictions


class UNet(L.LightningModule):
    def __init__(self, base=6):
        super().__init__()
        self.down1 = self.double(1, base)
        self.down2 = self.double(base, 2 * base)
        self.bottom = self.double(2 * base, 4 * base)
        self.up2 = nn.ConvTranspose2d(4 * base, 2 * base, 2, stride=2)
        self.dec2 = self.double(4 * base, 2 * base)
        self.up1 = nn.ConvTranspose2d(2 * base, base, 2, stride=2)
        self.dec1 = self.double(2 * base, base)
        self.out = nn.Conv2d(base, 1, 1)
        self.iou = torchmetrics.classification.BinaryJaccardIndex()

    @staticmethod
    def double(cin, cout):
        return nn.Sequential(
            nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.GroupNorm(2, cout), nn.ReLU(True)
        )

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        b = self.dec2(torch.cat([self.up2(c), b], dim=1))
        a = self.dec1(torch.cat([self.up1(b), a], dim=1))
        return self.out(a)

    def loss(self, logits, mask):
        p = logits.sigmoid()
        dims = (1, 2, 3)
        dice = 1 - (2 * (p * mask).sum(dims) + 1) / (p.sum(dims) + mask.sum(dims) + 1)
        return dice.mean() + F.binary_cross_entropy_with_logits(logits, mask)

    def training_step(self, batch, batch_idx):
        loss = self.loss(self(batch["image"]), batch["mask"])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self(batch["image"])
        self.iou(logits.sigmoid(), batch["mask"].long())
        self.log("val_loss", self.loss(logits, batch["mask"]), on_epoch=True)
        self.log("val_iou", self.iou)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=5e-3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=0.5
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
        }


def discs(n, seed):
    """Noisy discs on 16 by 16 pixels, and where they are."""
    g = torch.Generator().manual_seed(seed)
    centers = 4 + 8 * torch.rand(n, 2, 1, 1, generator=g)
    radius = 2 + 3 * torch.rand(n, 1, 1, generator=g)
    grid = torch.stack(torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")).float()
    mask = ((grid - centers).square().sum(1) < radius**2).float().unsqueeze(1)
    image = mask + 0.4 * torch.randn(n, 1, 16, 16, generator=g)
    return [{"image": i, "mask": m} for i, m in zip(image, mask, strict=True)]


def unet_dice_plateau_early_stopping(make_trainer):
    """A U-Net with Dice and BCE, ReduceLROnPlateau, EarlyStopping, the best checkpoint loaded."""
    model, losses = UNet(), Losses()
    with tempfile.TemporaryDirectory() as folder:
        best = ModelCheckpoint(folder, monitor="val_loss", mode="min", save_top_k=1)
        stop = EarlyStopping("val_loss", patience=2, min_delta=0.05)
        trainer = make_trainer(
            max_epochs=5, callbacks=[losses, best, stop], enable_checkpointing=True
        )
        trainer.fit(
            model,
            DataLoader(discs(64, 0), batch_size=16, shuffle=True),
            DataLoader(discs(32, 1), batch_size=16),
        )
        loaded = UNet.load_from_checkpoint(best.best_model_path, map_location="cpu")
    return results(
        trainer,
        model,
        losses,
        best=loaded.state_dict(),
        score=best.best_model_score,
        epochs=trainer.current_epoch,
        rate=trainer.optimizers[0].param_groups[0]["lr"],
    )


class DepthNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1))
        self.decoder = nn.Sequential(
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
            nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
            nn.ReLU(),
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.Conv2d(8, 1, 3, padding=1),
            nn.Softplus(),
        )

    def forward(self, x):
        return self.decoder(self.encoder(x)).squeeze(1) + 1e-3


class ValidPixelDepth(DepthNet):
    def training_step(self, batch, batch_idx):
        image, depth = batch
        valid = depth > 0.2
        error = torch.log(self(image)[valid]) - torch.log(depth[valid])
        loss = torch.sqrt((error**2).mean() - 0.85 * error.mean() ** 2)
        self.log("silog", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class MaskedDepth(DepthNet):
    def training_step(self, batch, batch_idx):
        image, depth = batch
        valid = (depth > 0.2).float()
        error = (torch.log(self(image)) - torch.log(depth.clamp_min(1e-3))) * valid
        count = valid.sum().clamp(min=1)
        mean = error.sum() / count
        loss = torch.sqrt(error.pow(2).sum() / count - 0.85 * mean**2)
        self.log("silog", loss, on_step=True)
        self.log("abs_rel", error.detach().abs().sum() / count, on_epoch=True, reduce_fx="mean")
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=5)
        rest = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=15, power=0.9)
        both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, rest], milestones=[5])
        return [optimizer], [{"scheduler": both, "interval": "step"}]


def depth_data():
    g = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(160, 3, 16, 16, generator=g), torch.rand(160, 16, 16, generator=g)
    )


def depth_boolean_indexing(make_trainer):
    """Scale-invariant depth loss over the valid pixels, chosen by a boolean index."""
    model, losses = ValidPixelDepth(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(depth_data(), batch_size=16))
    return results(trainer, model, losses)


def depth_masked_sums_sequential_schedule(make_trainer):
    """The same loss by masked sums; linear warm-up, then a polynomial, in a SequentialLR."""
    model, losses = MaskedDepth(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(depth_data(), batch_size=16))
    return results(trainer, model, losses)


class SuperResolution(L.LightningModule):
    def __init__(self, factor=2):
        super().__init__()
        self.factor = factor
        self.head = nn.Conv2d(1, 16, 5, padding=2, padding_mode="replicate")
        self.body = nn.ModuleList([nn.Conv2d(16, 16, 3, padding=1) for _ in range(2)])
        self.tail = nn.Sequential(nn.Conv2d(16, factor**2, 3, padding=1), nn.PixelShuffle(factor))
        self.psnr = torchmetrics.image.PeakSignalNoiseRatio(data_range=1.0)

    def forward(self, low):
        x = torch.tanh(self.head(low))
        for conv in self.body:
            x = x + 0.1 * F.relu(conv(x))
        return self.tail(x) + F.interpolate(low, scale_factor=self.factor, mode="bicubic")

    def training_step(self, batch, batch_idx):
        high, _ = batch
        low = F.avg_pool2d(high, self.factor)
        loss = torch.sqrt((self(low) - high) ** 2 + 1e-6).mean()
        self.log("charbonnier", loss, logger=True)
        return loss

    def test_step(self, batch, batch_idx):
        high, _ = batch
        self.psnr(self(F.avg_pool2d(high, self.factor)).clamp(0, 1), high)
        self.log("psnr", self.psnr, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3, eps=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)]


def super_resolution_pixel_shuffle(make_trainer):
    """Super-resolution by pixel shuffle over a bicubic base, Charbonnier loss, tested by PSNR."""
    model, losses = SuperResolution(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(digits(0, 160), batch_size=16, shuffle=True))
    tested = trainer.test(model, DataLoader(digits(200, 264), batch_size=32), verbose=False)
    return results(trainer, model, losses, tested=tested)


class NoisyStream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        g = torch.Generator().manual_seed(11)
        base = torch.linspace(0, 1, 16).expand(16, 16)
        for _ in range(self.length):
            yield base.rot90(int(torch.randint(4, (1,), generator=g))).unsqueeze(0).clone()


class Denoiser(L.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(1, 12, 3, padding=1), nn.ReLU()]
        for dilation in (1, 2):
            layers += [
                nn.Conv2d(12, 12, 3, padding=dilation, dilation=dilation, bias=False),
                nn.BatchNorm2d(12),
                nn.ReLU(),
            ]
        self.net = nn.Sequential(*layers, nn.Conv2d(12, 1, 3, padding=1))

    def training_step(self, batch, batch_idx):
        sigma = 0.05 + 0.45 * torch.rand(len(batch), 1, 1, 1, device=batch.device)
        noise = torch.randn_like(batch) * sigma
        loss = F.smooth_l1_loss(self.net(batch + noise), noise, beta=0.5)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.02)


def denoiser_stream_bf16(make_trainer):
    """DnCNN with dilations on an IterableDataset, in bf16-mixed, with limited batches."""
    model, losses = Denoiser(), Losses()
    trainer = make_trainer(
        max_epochs=2, limit_train_batches=9, precision="bf16-mixed", callbacks=[losses]
    )
    trainer.fit(model, DataLoader(NoisyStream(320), batch_size=16))
    return results(trainer, model, losses)


# Boxes, points, motion


@dataclass
class Anchors:
    cells: int
    size: float

    def centers(self):
        step = 1 / self.cells
        line = torch.arange(self.cells) * step + step / 2
        return torch.cartesian_prod(line, line)


class BoxData(Dataset):
    def __init__(self, n=96):
        g = torch.Generator().manual_seed(4)
        self.images = torch.randn(n, 3, 16, 16, generator=g)
        self.boxes = 0.2 + 0.6 * torch.rand(n, 4, generator=g)
        self.labels = torch.randint(0, 3, (n,), generator=g)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        target = {"box": self.boxes[i], "label": self.labels[i]}
        return {"image": self.images[i], "target": target, "file": f"img_{i:03d}.png"}


class Detector(L.LightningModule):
    def __init__(self, anchors):
        super().__init__()
        self.anchors = anchors
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.Mish(), nn.Conv2d(16, 16, 3, 2, 1), nn.Mish()
        )
        self.boxes = nn.Conv2d(16, 4, 1)
        self.scores = nn.Conv2d(16, 3, 1)
        self.register_buffer("centers", anchors.centers(), persistent=False)
        nn.init.constant_(self.scores.bias, -2.0)

    def forward(self, x):
        f = self.backbone(x)
        offsets = self.boxes(f).flatten(2).transpose(1, 2)
        centers = self.centers + 0.1 * torch.tanh(offsets[..., :2])
        sizes = self.anchors.size * offsets[..., 2:].exp()
        return torch.cat([centers, sizes], -1), self.scores(f).flatten(2).transpose(1, 2)

    def training_step(self, batch, batch_idx):
        boxes, scores = self(batch["image"])
        target = batch["target"]
        distance = torch.cdist(target["box"][:, None, :2], self.centers[None])
        nearest = distance.squeeze(1).argmin(-1)
        rows = torch.arange(len(nearest), device=self.device)
        wanted = torch.zeros_like(scores)
        wanted[rows, nearest, target["label"]] = 1.0
        p = scores.sigmoid()
        ce = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
        focal = (ce * (1 - (p * wanted + (1 - p) * (1 - wanted))) ** 2).sum() / len(boxes)
        box = F.smooth_l1_loss(boxes[rows, nearest], target["box"])
        self.log_dict({"focal": focal, "box": box}, batch_size=len(boxes))
        return focal + 5 * box

    def predict_step(self, batch, batch_idx):
        boxes, scores = self(batch["image"])
        best = scores.amax(-1).topk(2, dim=1).indices
        chosen = boxes.gather(1, best.unsqueeze(-1).expand(-1, -1, 4))
        return {"file": batch["file"], "boxes": chosen, "count": len(boxes)}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3, foreach=True)


def detector_dict_batches_with_file_names(make_trainer):
    """An anchor detector on nested dicts, focal loss; file names go through to predictions."""
    model, losses = Detector(Anchors(cells=4, size=0.3)), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(BoxData(), batch_size=12, shuffle=True))
    predicted = trainer.predict(model, DataLoader(BoxData(16), batch_size=8))
    return results(trainer, model, losses, predicted=predicted)


class Keypoints(L.LightningModule):
    def __init__(self, points=3):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 12, 5, padding=2),
            nn.SELU(),
            nn.Conv2d(12, points, 3, padding=1, bias=False),
        )
        line = torch.linspace(-1, 1, 16)
        grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).flatten(0, 1)
        self.register_buffer("grid", grid)

    def forward(self, x):
        heat = self.net(x).flatten(2).softmax(-1)
        return heat @ self.grid, heat

    def training_step(self, batch, batch_idx):
        image, points, visible = batch
        found, heat = self(image)
        error = (found - points).abs()
        wing = torch.where(error < 0.2, 2 * torch.log1p(error / 0.1), error + 0.8).sum(-1)
        loss = (wing * visible).sum() / visible.sum()
        entropy = -(heat * heat.clamp_min(1e-8).log()).sum(-1).mean()
        self.log("entropy", entropy)
        return loss + 0.01 * entropy

    def on_before_optimizer_step(self, optimizer):
        self.log("grad_max", max_abs_gradient(self.parameters()))

    def configure_optimizers(self):
        optimizer = torch.optim.Rprop(self.parameters(), lr=1e-3)
        return optimizer


def max_abs_gradient(parameters):
    return torch.stack([p.grad.abs().max() for p in parameters if p.grad is not None]).max()


def keypoints_soft_argmax_rprop(make_trainer):
    """Points by soft-argmax, a wing loss over visible ones, Rprop, the largest gradient logged."""
    g = torch.Generator().manual_seed(2)
    points = 1.6 * torch.rand(80, 3, 2, generator=g) - 0.8
    line = torch.linspace(-1, 1, 16)
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1)
    images = torch.exp(-20 * (grid - points[:, :, None, None]).square().sum(-1)).sum(1, True)
    visible = (torch.rand(80, 3, generator=g) > 0.2).float()
    model, losses = Keypoints(), Losses()
    trainer = make_trainer(max_epochs=4, callbacks=[losses])
    trainer.fit(model, DataLoader(TensorDataset(images, points, visible), batch_size=16))
    return results(trainer, model, losses)


class FlowNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(2, 12, 5, padding=2), nn.LeakyReLU(0.1), nn.Conv2d(12, 2, 5, padding=2)
        )
        nn.init.normal_(self.net[-1].weight, std=1e-3)

    def warp(self, image, flow):
        theta = torch.eye(2, 3, device=image.device).expand(len(image), -1, -1)
        grid = F.affine_grid(theta, image.shape, align_corners=False)
        return F.grid_sample(
            image, grid + flow.permute(0, 2, 3, 1), padding_mode="border", align_corners=False
        )

    def training_step(self, batch, batch_idx):
        first, second = batch
        flow = self.net(torch.cat([first, second], 1))
        photometric = F.huber_loss(self.warp(second, flow), first, delta=0.1)
        smooth = flow.diff(dim=-1).abs().mean() + flow.diff(dim=-2).abs().mean()
        self.log("photometric", photometric, on_step=False, on_epoch=True)
        self.log("smooth", smooth, on_step=False, on_epoch=True)
        return photometric + 0.01 * smooth

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def optical_flow_by_warping(make_trainer):
    """Flow learned by warping the second picture to the first; own gradient clipping."""
    image = torch.stack([d["image"] for d in discs(96, 3)])
    data = TensorDataset(image, image.roll((1, 1), dims=(2, 3)))
    model, losses = FlowNet(), Losses()
    trainer = make_trainer(max_epochs=3, callbacks=[losses])
    trainer.fit(model, DataLoader(data, batch_size=16, shuffle=True))
    return results(trainer, model, losses)


class SpatialTransformer(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.localization = nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.ReLU(True))
        self.fc_loc = nn.Sequential(nn.Linear(4 * 3 * 3, 16), nn.ReLU(True), nn.Linear(16, 6))
        self.fc_loc[2].weight.data.zero_()
        self.fc_loc[2].bias.data.copy_(torch.tensor([0.9, 0, 0, 0, 0.9, 0]))
        self.conv = nn.Conv2d(1, 10, 3)
        self.drop = nn.Dropout1d(0.0)  # a resumed run repeats the masks on CSX, not in stock
        self.fc = nn.Linear(10 * 36, 10)

    def stn(self, x):
        theta = self.fc_loc(self.localization(x).view(-1, 4 * 3 * 3)).view(-1, 2, 3)
        grid = F.affine_grid(theta, x.size(), align_corners=True)
        return F.grid_sample(x, grid, align_corners=True)

    def forward(self, x):
        x = F.relu(self.conv(self.stn(x)))
        x = self.drop(x.flatten(2))
        return F.log_softmax(self.fc(x.flatten(1)), dim=1)

    def training_step(self, batch, batch_idx):
        data, target = batch
        loss = F.nll_loss(self(data), target)
        self.log("train_nll", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.ASGD(self.parameters(), lr=0.05)


def spatial_transformer_resumed(make_trainer):
    """A spatial transformer; one epoch, a checkpoint, and another Trainer that goes on from it."""
    first, second = Losses(), Losses()
    data = DataLoader(digits(0, 160), batch_size=16)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one.ckpt"
        model = SpatialTransformer()
        trainer = make_trainer(max_epochs=1, callbacks=[first])
        trainer.fit(model, data)
        trainer.save_checkpoint(path)
        resumed = SpatialTransformer()
        trainer = make_trainer(max_epochs=2, callbacks=[second])
        trainer.fit(resumed, data, ckpt_path=path)
    return results(trainer, resumed, second, before=first.values, steps=trainer.global_step)


# Robustness, video, words


class AdversarialTraining(L.LightningModule):
    def __init__(self, epsilon=0.1, steps=2):
        super().__init__()
        self.epsilon, self.steps = epsilon, steps
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.Softplus(), nn.Flatten(), nn.Linear(512, 10)
        )

    def attack(self, x, y):
        delta = torch.zeros_like(x).uniform_(-self.epsilon, self.epsilon).requires_grad_(True)
        for _ in range(self.steps):
            loss = F.cross_entropy(self.net(x + delta), y)
            (grad,) = torch.autograd.grad(loss, delta)
            delta = (delta + 0.5 * self.epsilon * grad.sign()).clamp(-self.epsilon, self.epsilon)
            delta = delta.detach().requires_grad_(True)
        return (x + delta).clamp(0, 1).detach()

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(self.attack(x, y))
        loss = F.multi_margin_loss(logits, y) + F.cross_entropy(logits, y)
        self.log("robust", (logits.argmax(1) == y).float().mean(), on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def adversarial_training_pgd(make_trainer):
    """PGD attacks inside the step, and training on what they find."""
    model, losses = AdversarialTraining(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(digits(0, 160), batch_size=16))
    return results(trainer, model, losses)


class SharpnessAware(L.LightningModule):
    def __init__(self, rho=0.05):
        super().__init__()
        self.automatic_optimization = False
        self.rho = rho
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        loss = F.cross_entropy(self.net(x), y)
        self.manual_backward(loss)
        with torch.no_grad():
            grads = [p.grad for p in self.net.parameters()]
            norm = torch.norm(torch.stack([g.norm(2) for g in grads]), 2)
            steps = [g * self.rho / (norm + 1e-12) for g in grads]
            for p, e in zip(self.net.parameters(), steps, strict=True):
                p.add_(e)
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(x), y))
        with torch.no_grad():
            for p, e in zip(self.net.parameters(), steps, strict=True):
                p.sub_(e)
        optimizer.step()
        optimizer.zero_grad()
        self.log("norm", norm)
        return loss

    def on_train_epoch_end(self):
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def sharpness_aware_minimization_by_hand(make_trainer):
    """SAM under manual optimization: climb, second gradient, back, step; scheduler by epoch."""
    model, losses = SharpnessAware(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(digits(0, 160), batch_size=16, shuffle=True))
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return results(trainer, model, losses, rate=rate)


class Clips(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(1, 6, (3, 5, 5), stride=(1, 2, 2), padding=(1, 2, 2), bias=False)
        self.norm = nn.BatchNorm3d(6)
        self.gru = nn.GRU(6 * 16, 12, batch_first=True, bidirectional=True)
        self.direction = nn.Linear(24, 4)
        self.speed = nn.Linear(24, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, clip):
        f = F.relu(self.norm(self.conv(clip)))
        frames = f.transpose(1, 2).flatten(2)
        _, last = self.gru(frames)
        h = torch.cat([last[0], last[1]], dim=-1)
        return self.direction(h), self.speed(h).squeeze(-1)

    def training_step(self, batch, batch_idx):
        direction, speed = self(batch["clip"])
        losses = torch.stack(
            [
                F.cross_entropy(direction, batch["direction"]),
                F.mse_loss(speed, batch["speed"]),
            ]
        )
        loss = (losses * torch.exp(-self.log_vars) + self.log_vars).sum()
        self.log("tasks/direction", losses[0])
        self.log("tasks/speed", losses[1])
        self.log("sigma", self.log_vars.exp().mean(), on_step=False, on_epoch=True)
        return {"loss": loss, "parts": losses.detach()}

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)
        with torch.no_grad():
            self.log_vars.clamp_(-2, 2)

    def configure_optimizers(self):
        slow = {"params": [self.log_vars], "lr": 1e-2}
        rest = {"params": [p for n, p in self.named_parameters() if n != "log_vars"]}
        return torch.optim.Adam([rest, slow], lr=3e-3)


def moving_squares(n=80, seed=0):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n):
        direction = int(torch.randint(4, (1,), generator=g))
        speed = int(torch.randint(1, 3, (1,), generator=g))
        dy, dx = [(0, 1), (0, -1), (1, 0), (-1, 0)][direction]
        frame = torch.zeros(8, 8)
        frame[3:5, 3:5] = 1
        frames = [frame.roll((t * speed * dy, t * speed * dx), (0, 1)) for t in range(4)]
        rows.append(
            {
                "clip": torch.stack(frames).unsqueeze(0),
                "direction": direction,
                "speed": torch.tensor(float(speed)),
            }
        )
    return rows


def video_conv3d_gru_two_tasks(make_trainer):
    """Conv3d and a GRU over clips, two tasks weighed by learned uncertainty."""
    model, losses = Clips(), Losses()
    trainer = make_trainer(max_epochs=4, callbacks=[losses])
    trainer.fit(model, DataLoader(moving_squares(), batch_size=16, shuffle=True))
    return results(trainer, model, losses)


class Captioner(L.LightningModule):
    def __init__(self, words=12):
        super().__init__()
        self.words = words
        self.see = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 16))
        self.embed = nn.Embedding(words, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.out = nn.Linear(16, words)

    def forward(self, image, tokens):
        h = self.see(image).unsqueeze(0)
        out, _ = self.lstm(self.embed(tokens), (h, torch.zeros_like(h)))
        return self.out(out)

    def training_step(self, batch, batch_idx):
        image, caption = batch
        logits = self(image, caption[:, :-1])
        loss = F.cross_entropy(
            logits.reshape(-1, self.words), caption[:, 1:].reshape(-1), ignore_index=0
        )
        self.log("ppl", loss.exp())
        return loss

    def predict_step(self, batch, batch_idx):
        image, _ = batch
        tokens = torch.full((len(image), 1), 1, dtype=torch.long, device=image.device)
        for _ in range(3):
            logits = self(image, tokens)[:, -1]
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
        return tokens

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def captions_lstm_padded(make_trainer):
    """Digits described by an LSTM: padded captions, ignore_index, greedy decoding to predict."""
    image, label = digits(0, 160).tensors
    begin = torch.ones_like(label)
    odd = torch.where(label % 2 == 1, label + 2, 0)
    captions = torch.stack([begin, label + 2, odd, torch.zeros_like(label)], 1)
    model, losses = Captioner(), Losses()
    data = DataLoader(TensorDataset(image, captions), batch_size=16)
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, data)
    return results(trainer, model, losses, said=trainer.predict(model, data)[:2])


class Sine(nn.Module):
    def __init__(self, cin, cout, omega=10.0):
        super().__init__()
        self.omega = omega
        self.linear = nn.Linear(cin, cout)
        bound = (6 / cin) ** 0.5 / omega
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x):
        return torch.sin(self.omega * self.linear(x))


class Siren(L.LightningModule):
    """A picture as a function of its coordinates."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Sine(2, 16, omega=30.0), Sine(16, 16), nn.Linear(16, 1))
        self.history = []

    def forward(self, xy):
        return self.net(xy).squeeze(-1)

    def training_step(self, batch, batch_idx):
        xy, value, slope = batch
        xy = xy.clone().requires_grad_(True)
        out = self(xy)
        (grad,) = torch.autograd.grad(out.sum(), xy, create_graph=True)
        fit = F.mse_loss(out, value)
        slopes = F.mse_loss(grad, slope)
        self.log("fit", fit)
        return fit + 0.01 * slopes

    def on_train_epoch_end(self):
        self.history.append(self.trainer.callback_metrics["fit"].item())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def siren_value_and_slope_two_fits(make_trainer):
    """A SIREN fits values and slopes (double backward); fitted twice in a row."""
    line = torch.linspace(-1, 1, 16)
    xy = torch.cartesian_prod(line, line)
    value = torch.sin(3 * xy[:, 0]) * xy[:, 1]
    slope = torch.stack([3 * torch.cos(3 * xy[:, 0]) * xy[:, 1], torch.sin(3 * xy[:, 0])], 1)
    data = DataLoader(TensorDataset(xy, value, slope), batch_size=32, shuffle=True)
    model, losses = Siren(), Losses()
    trainer = make_trainer(max_epochs=1, callbacks=[losses])
    trainer.fit(model, data)
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, data)
    return results(trainer, model, losses, history=model.history)


class LowRankAdapter(nn.Module):
    """A frozen layer with a trained correction of low rank around it."""

    def __init__(self, base, rank=2, scale=1.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = scale

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.a), self.b)


class Adapted(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 32),
            nn.ReLU(),
            nn.utils.spectral_norm(nn.Linear(32, 32)),
            nn.ReLU(),
            nn.Linear(32, 10),
        )
        for i in (1, 5):
            self.net[i] = LowRankAdapter(self.net[i])
        self.loss_fn = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, 10))
        self.outs = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss_fn(self.net(x), y)
        self.outs.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("epoch_mean", torch.stack(self.outs).mean())
        self.outs.clear()

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CyclicLR(
            optimizer, 1e-3, 1e-2, step_size_up=5, cycle_momentum=False
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_save_checkpoint(self, checkpoint):
        kept = {k: v for k, v in checkpoint["state_dict"].items() if ".base." not in k}
        checkpoint["adapters"] = list(kept)


def low_rank_adapters_saved(make_trainer):
    """LoRA around frozen layers, spectral norm, CyclicLR, losses in a list until the epoch ends."""
    model, losses = Adapted(), Losses()
    with tempfile.TemporaryDirectory() as folder:
        last = ModelCheckpoint(folder, save_last=True, save_top_k=0)
        trainer = make_trainer(max_epochs=2, callbacks=[losses, last], enable_checkpointing=True)
        trainer.fit(model, DataLoader(digits(0, 160), batch_size=16, shuffle=True))
        saved = torch.load(Path(folder) / "last.ckpt", weights_only=False)
    return results(trainer, model, losses, adapters=saved["adapters"], step=saved["global_step"])
