"""Small training programs on text, sequences, time series and signals.

Each function whose one argument is `make_trainer` is a program: it sets up its data and its
LightningModule, trains for about twenty steps and returns a dict of what came out (losses, logged
values, weights, predictions). `make_trainer(**options)` makes the Trainer: options that a program
gives win over the caller's. Data and weights follow from torch's global seed, which the caller sets
before each call.
"""

import copy
import functools
import inspect
import math
import random
import tempfile
import textwrap
from collections import namedtuple
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader, grad_norm
from programs.common import LossNumbers as Losses
from programs.common import weights
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)


def source_bytes(module: Any = textwrap) -> Tensor:
    """The source of a module of the standard library, as bytes."""
    return torch.tensor(list(inspect.getsource(module).encode("ascii", "replace")))


def windows(length: int, count: int, module: Any = textwrap) -> Tensor:
    """`count` windows of bytes, one after the other."""
    return source_bytes(module)[: length * count].view(count, length)


def sentences(count: int, length: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Padded random word ids (0 is padding), their lengths, and labels that a word decides."""
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(3, length + 1, (count,), generator=generator)
    words = torch.randint(1, vocab, (count, length), generator=generator)
    words[torch.arange(length) >= lengths[:, None]] = 0
    labels = ((words == 3) | (words % 5 == 1)).sum(1) % 3
    return words, lengths, labels


def waves(count: int, length: int, generator: torch.Generator | None = None) -> Tensor:
    """Sums of two sines and noise, [count, length]."""
    generator = generator or torch.Generator().manual_seed(5)
    t = torch.arange(length) / length * 2 * math.pi
    freq = torch.randint(1, 6, (count, 2, 1), generator=generator)
    phase = torch.rand(count, 2, 1, generator=generator) * 6.28
    noise = torch.randn(count, length, generator=generator)
    return (freq * t + phase).sin().sum(1) + 0.1 * noise


# Language models


class ByteGRU(pl.LightningModule):
    def __init__(self, hidden: int = 24, lr: float = 2e-2):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(256, 16)
        self.gru = nn.GRU(16, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 256)

    def forward(self, x):
        out, _ = self.gru(self.embedding(x))
        return self.head(out)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        logits = self(x[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("bits_per_byte", loss / math.log(2))
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def byte_language_model_gru(make_trainer) -> Any:
    """A GRU on the bytes of a source file, AdamW under OneCycle."""
    loader = DataLoader(TensorDataset(windows(17, 80)), batch_size=8, shuffle=True)
    model, losses = ByteGRU(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], gradient_clip_val=1.0)
    trainer.fit(model, loader)
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class TinyGPT(pl.LightningModule):
    """Pre-norm decoder; head tied to the embedding; the causal mask is cached on first use."""

    def __init__(self, vocab=128, width=24, heads=3, depth=2, context=12):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self._mask = None
        self.apply(self._init)

    def _init(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def causal_mask(self, length):
        if self._mask is None or self._mask.shape[0] != length:
            self._mask = torch.triu(
                torch.full((length, length), float("-inf"), device=self.device), diagonal=1
            )
        return self._mask

    def forward(self, x):
        h = self.tokens(x) + self.positions[: x.shape[1]]
        for block in self.blocks:
            h = block(h, src_mask=self.causal_mask(x.shape[1]))
        return self.head(self.norm(h))

    def training_step(self, batch, batch_idx):
        logits = self(batch[:, :-1])
        loss = F.cross_entropy(logits.transpose(1, 2), batch[:, 1:])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"params": decay, "weight_decay": 0.1},
            {"params": rest, "weight_decay": 0.0, "lr": 6e-3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))

        def warm_up_then_cosine(step):
            if step < 4:
                return (step + 1) / 4
            return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - 4) / 16))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_cosine)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


class Rows(Dataset):
    """Rows of a tensor, without a tuple around them."""

    def __init__(self, rows: Tensor):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def decoder_only_transformer(make_trainer) -> Any:
    """A small GPT with tied weights, decay groups, warm-up and cosine, rates in a CSV file."""
    loader = DataLoader(Rows(windows(13, 80)), batch_size=8)
    model, losses = TinyGPT(), Losses()
    with tempfile.TemporaryDirectory() as folder:
        logger = CSVLogger(folder, flush_logs_every_n_steps=1)
        trainer = make_trainer(
            max_steps=20,
            callbacks=[losses, LearningRateMonitor("step")],
            logger=logger,
            log_every_n_steps=5,
            gradient_clip_val=0.5,
        )
        trainer.fit(model, loader)
        rows = Path(logger.log_dir, "metrics.csv").read_text().splitlines()
    return {"losses": losses.values, "header": rows[0], "rows": len(rows), "w": weights(model)}


class RotaryBlock(nn.Module):
    """RMSNorm, rotary positions, grouped queries and SwiGLU."""

    def __init__(self, width: int, heads: int, groups: int):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        angle = torch.arange(32)[:, None] * 10000 ** -(torch.arange(0, self.size, 2) / self.size)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def rotate(self, x):
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

    def forward(self, x):
        b, t, c = x.shape
        h = self.norm_1(x)
        q = self.q(h).view(b, t, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(h).view(b, t, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            self.rotate(q), self.rotate(k), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class RotaryLM(pl.LightningModule):
    def __init__(self, z_loss: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(128, 32)
        self.blocks = nn.Sequential(RotaryBlock(32, 4, 2), RotaryBlock(32, 4, 2))
        self.head = nn.Linear(32, 128, bias=False)

    def training_step(self, batch, batch_idx):
        x = batch["input_ids"]
        logits = self.head(self.blocks(self.embedding(x[:, :-1]))).float()
        loss = F.cross_entropy(logits.reshape(-1, 128), x[:, 1:].reshape(-1))
        z = logits.logsumexp(-1).square().mean()
        self.log_dict({"ce": loss, "z": z}, on_epoch=True, on_step=False)
        return loss + self.hparams.z_loss * z

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3, eps=1e-6)


class Tokens(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "doc": f"doc-{i // 10}"}


def rotary_grouped_query_model(make_trainer) -> Any:
    """RoPE, grouped-query attention, SwiGLU, z-loss, under bf16-mixed."""
    loader = DataLoader(Tokens(windows(11, 80, random)), batch_size=8)
    model, losses = RotaryLM(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], precision="bf16-mixed")
    trainer.fit(model, loader)
    return {"losses": losses.values, "metrics": trainer.callback_metrics}


class MaskedLM(pl.LightningModule):
    """BERT: 15 % of the words chosen, of which 80 % masked, 10 % random, 10 % kept."""

    def __init__(self, vocab=60, width=24, p=0.15):
        super().__init__()
        self.mask_id, self.vocab, self.p = vocab, vocab, p
        self.embedding = nn.Embedding(vocab + 1, width, padding_idx=0)
        self.register_buffer("positions", torch.arange(64), persistent=False)
        self.position_embedding = nn.Embedding(64, width)
        layer = nn.TransformerEncoderLayer(width, 2, 48, dropout=0.0, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(vocab + 1))

    def corrupt(self, x):
        chosen = torch.bernoulli(torch.full(x.shape, self.p, device=x.device)).bool() & (x != 0)
        kind = torch.rand(x.shape, device=x.device)
        other = torch.randint(1, self.vocab, x.shape, device=x.device)
        y = torch.where(chosen & (kind < 0.8), self.mask_id, x)
        y = torch.where(chosen & (kind >= 0.9), other, y)
        return y, x.masked_fill(~chosen, -100)

    def training_step(self, batch, batch_idx):
        x, _, _ = batch
        corrupted, target = self.corrupt(x)
        h = self.embedding(corrupted) + self.position_embedding(self.positions[: x.shape[1]])
        h = self.encoder(h.transpose(0, 1), src_key_padding_mask=corrupted == 0)
        logits = F.linear(self.transform(h.transpose(0, 1)), self.embedding.weight, self.bias)
        loss = F.cross_entropy(
            logits.flatten(0, 1), target.flatten(), ignore_index=-100, label_smoothing=0.1
        )
        self.log("mlm_loss", loss)
        self.log("masked", (target != -100).float().sum(), reduce_fx="max", on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.NAdam(self.parameters(), lr=2e-3, decoupled_weight_decay=True)


def masked_language_model(make_trainer) -> Any:
    """BERT's objective with random masks drawn in the step, tied output, ignore_index."""
    loader = DataLoader(TensorDataset(*sentences(160, 12, 60)), batch_size=16)
    model, losses = MaskedLM(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, loader)
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class StreamOfBytes(IterableDataset):
    def __init__(self, length: int):
        self.length, self.data = length, source_bytes(inspect)

    def __iter__(self):
        for start in range(0, len(self.data) - self.length, self.length):
            yield self.data[start : start + self.length]


class CausalConvLM(pl.LightningModule):
    """Dilated causal convolutions with weight norm and gated units; perplexity as the metric."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(128, 16)
        wn = nn.utils.parametrizations.weight_norm
        self.convs = nn.ModuleList(wn(nn.Conv1d(16, 32, 2, dilation=2**i)) for i in range(3))
        self.head = nn.Conv1d(16, 128, 1)
        self.perplexity = torchmetrics.text.Perplexity()

    def training_step(self, batch, batch_idx):
        x, y = batch[:, :-1], batch[:, 1:]
        h = self.embedding(x).permute(0, 2, 1)
        for conv in self.convs:
            pad = conv.dilation[0] * (conv.kernel_size[0] - 1)
            h = h + F.glu(conv(F.pad(h, (pad, 0))), dim=1)
        logits = self.head(h)
        self.perplexity(logits.transpose(1, 2).detach(), y)
        self.log("ppl", self.perplexity, on_step=True, on_epoch=True)
        return F.cross_entropy(logits, y)

    def configure_optimizers(self):
        optimizer = torch.optim.RMSprop(self.parameters(), lr=3e-3, momentum=0.5, centered=True)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def streamed_convolutional_model(make_trainer) -> Any:
    """An IterableDataset without length, max_steps over several epochs, perplexity."""
    loader = DataLoader(StreamOfBytes(16), batch_size=8)
    model, losses = CausalConvLM(), Losses()
    trainer = make_trainer(
        max_steps=20, max_epochs=-1, limit_train_batches=8, callbacks=[losses], log_every_n_steps=1
    )
    trainer.fit(model, loader)
    return {
        "losses": losses.values,
        "metrics": trainer.callback_metrics,
        "epochs": trainer.current_epoch,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
    }


class AdaptiveSoftmaxLM(pl.LightningModule):
    def __init__(self, vocab=200):
        super().__init__()
        self.embedding = nn.Embedding(vocab, 16, max_norm=2.0)
        self.rnn = nn.LSTM(16, 24, num_layers=2, dropout=0.2, batch_first=True)
        self.norm = nn.LayerNorm(24)
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(24, vocab, cutoffs=[40, 120], div_value=2.0)

    def step(self, batch):
        x = batch[0]
        h, _ = self.rnn(self.embedding(x[:, :-1]))
        return self.softmax(self.norm(h).reshape(-1, 24), x[:, 1:].reshape(-1))

    def training_step(self, batch, batch_idx):
        output, loss = self.step(batch)
        self.log("mean_log_prob", output.mean())
        return {"loss": loss, "log_prob": output.detach()}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch).loss, batch_size=len(batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9, nesterov=True)

    def on_after_backward(self):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.25)


def adaptive_softmax_model(make_trainer) -> Any:
    """A two-layer LSTM with dropout and an adaptive softmax, validated twice an epoch."""
    words = torch.randint(0, 200, (80, 9))
    train, val = TensorDataset(words[:64]), TensorDataset(words[64:])
    model, losses = AdaptiveSoftmaxLM(), Losses()
    trainer = make_trainer(max_epochs=2, val_check_interval=0.5, callbacks=[losses])
    trainer.fit(model, DataLoader(train, batch_size=8), DataLoader(val, batch_size=8))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


# Classifiers


class BagOfWords(pl.LightningModule):
    def __init__(self, vocab: int, classes: int, lr: float = 0.05):
        super().__init__()
        self.save_hyperparameters()
        self.bag = nn.EmbeddingBag(vocab, 16, mode="mean", padding_idx=0)
        self.net = nn.Sequential(nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, classes))
        metrics = torchmetrics.MetricCollection(
            {
                "acc": torchmetrics.classification.MulticlassAccuracy(classes, average="micro"),
                "f1": torchmetrics.classification.MulticlassF1Score(classes),
            }
        )
        self.train_metrics = metrics.clone(prefix="train/")
        self.val_metrics = metrics.clone(prefix="val/")

    def forward(self, words):
        return self.net(self.bag(words))

    def training_step(self, batch, batch_idx):
        words, _, y = batch
        logits = self(words)
        self.train_metrics.update(logits, y)
        return F.cross_entropy(logits, y)

    def on_train_epoch_end(self):
        self.log_dict(self.train_metrics.compute())
        self.train_metrics.reset()

    def validation_step(self, batch, batch_idx):
        words, _, y = batch
        logits = self(words)
        self.log_dict(self.val_metrics(logits, y), on_step=False, on_epoch=True)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)

    def predict_step(self, batch, batch_idx):
        words, lengths, _ = batch
        return self(words).softmax(-1), lengths

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=self.hparams.lr)


def bag_of_words_classifier(make_trainer) -> Any:
    """EmbeddingBag with a padding index, metric collections, early stopping, predictions."""
    data = TensorDataset(*sentences(128, 10, 50))
    train = DataLoader(Subset(data, range(96)), batch_size=16, shuffle=True)
    val = DataLoader(Subset(data, range(96, 128)), batch_size=16)
    model, losses = BagOfWords(50, 3), Losses()
    stop = EarlyStopping("val_loss", patience=1, min_delta=0.01)
    trainer = make_trainer(max_epochs=4, callbacks=[losses, stop])
    trainer.fit(model, train, val)
    return {
        "losses": losses.values,
        "metrics": trainer.callback_metrics,
        "stopped": stop.stopped_epoch,
        "best": stop.best_score,
        "predictions": trainer.predict(model, val),
    }


class PackedLSTM(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 12, padding_idx=0)
        self.lstm = nn.LSTM(12, 16, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, words, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(words), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, (hidden, _) = self.lstm(packed)
        return self.head(hidden[-1])

    def training_step(self, batch, batch_idx):
        words, lengths, y = batch
        loss = F.cross_entropy(self(words, lengths), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def packed_lstm_classifier(make_trainer) -> Any:
    """An LSTM over packed padded sequences."""
    loader = DataLoader(TensorDataset(*sentences(80, 10, 50)), batch_size=16)
    model, losses = PackedLSTM(), Losses()
    make_trainer(max_epochs=2, callbacks=[losses]).fit(model, loader)
    return {"losses": losses.values, "w": weights(model)}


class LastStateLSTM(pl.LightningModule):
    """A bidirectional LSTM; each direction's last state by the lengths."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 12, padding_idx=0)
        self.lstm = nn.LSTM(12, 10, bidirectional=True, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(20, 3))
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        for name, p in self.lstm.named_parameters():
            if "weight_hh" in name:
                nn.init.orthogonal_(p)
            elif "bias" in name:
                p.data[10:20] = 1.0

    def forward(self, words, lengths):
        out, _ = self.lstm(self.embedding(words))
        forward = out[torch.arange(len(out)), lengths - 1, :10]
        return self.head(torch.cat([forward, out[:, 0, 10:]], dim=1))

    def training_step(self, batch, batch_idx):
        words, lengths, y = batch
        logits = self(words, lengths)
        loss = F.cross_entropy(logits, y, weight=torch.tensor([0.5, 1.0, 2.0]))
        self.accuracy(logits, y)
        self.log("acc", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self.lstm, norm_type=2))

    def configure_optimizers(self):
        return torch.optim.RAdam(self.parameters(), lr=1e-2, weight_decay=1e-2)


def bidirectional_last_state(make_trainer) -> Any:
    """A BiLSTM classifier with class weights as a tensor and logged gradient norms."""
    loader = DataLoader(TensorDataset(*sentences(160, 10, 50)), batch_size=16, shuffle=True)
    model, losses = LastStateLSTM(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, loader)
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class KimCNN(pl.LightningModule):
    """Convolutions of several widths over characters, the maximum over time."""

    def __init__(self, widths=(2, 3, 4), channels=8, classes=2):
        super().__init__()
        self.embedding = nn.Embedding(128, 8)
        self.convs = nn.ModuleList([nn.Conv1d(8, channels, w) for w in widths])
        self.dropout = nn.Dropout1d(0.2)
        self.fc = nn.Linear(channels * len(widths), classes)
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.05)
        self.confusion = torchmetrics.ConfusionMatrix(task="multiclass", num_classes=classes)

    def forward(self, chars):
        x = self.dropout(self.embedding(chars).transpose(1, 2))
        return self.fc(torch.cat([F.relu(conv(x)).amax(-1) for conv in self.convs], 1))

    def training_step(self, batch, batch_idx):
        return self.loss(self(batch["text"]), batch["label"])

    def test_step(self, batch, batch_idx):
        logits = self(batch["text"])
        self.confusion.update(logits, batch["label"])
        self.log("test_loss", self.loss(logits, batch["label"]))

    def on_test_epoch_end(self):
        matrix = self.confusion.compute()
        self.log("test_recall", (matrix.diag() / matrix.sum(1).clamp(min=1)).mean())
        self.confusion.reset()

    def configure_optimizers(self):
        return torch.optim.Adadelta(self.parameters(), lr=1.0)


class Snippets(Dataset):
    """Pieces of two source files; which file it is, is the label."""

    def __init__(self):
        texts = [windows(20, 80, textwrap), windows(20, 80, random)]
        self.items = [(row, label) for label, rows in enumerate(texts) for row in rows]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        row, label = self.items[i]
        return {"text": row, "label": label, "name": f"snippet{i}"}


def character_convolutions(make_trainer) -> Any:
    """Kim's CNN on characters, dict batches with names in them, test after fit."""
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(Snippets(), batch_size=16, shuffle=True, generator=generator)
    model, losses = KimCNN(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, loader)
    results = trainer.test(model, DataLoader(Snippets(), batch_size=16), verbose=False)
    return {"losses": losses.values, "test": results, "confusion": model.confusion.confmat}


class Attentive(nn.Module):
    """Additive attention over the second dimension."""

    def __init__(self, size):
        super().__init__()
        self.project, self.query = nn.Linear(size, size), nn.Parameter(torch.randn(size) * 0.1)

    def forward(self, x, mask=None):
        scores = torch.tanh(self.project(x)) @ self.query
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e9)
        weight = scores.softmax(1)
        return torch.einsum("bt,btc->bc", weight, x), weight


class HierarchicalAttention(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 8, padding_idx=0)
        self.words = nn.GRU(8, 6, bidirectional=True, batch_first=True)
        self.word_attention = Attentive(12)
        self.sentences = nn.GRU(12, 6, bidirectional=True, batch_first=True)
        self.sentence_attention = Attentive(12)
        self.head = nn.Linear(12, 1)
        self.auroc = torchmetrics.classification.BinaryAUROC(thresholds=16)

    def forward(self, documents):
        b, s, t = documents.shape
        flat = documents.view(b * s, t)
        h, _ = self.words(self.embedding(flat))
        vectors, _ = self.word_attention(h, flat != 0)
        h, _ = self.sentences(vectors.view(b, s, -1))
        document, weight = self.sentence_attention(h)
        return self.head(document).squeeze(-1), weight

    def training_step(self, batch, batch_idx):
        documents, y = batch
        logits, weight = self(documents)
        entropy = -(weight * weight.clamp_min(1e-9).log()).sum(1).mean()
        loss = F.binary_cross_entropy_with_logits(logits, y, pos_weight=torch.tensor(1.5))
        self.log("entropy", entropy, on_epoch=True, on_step=False)
        return loss - 0.01 * entropy

    def validation_step(self, batch, batch_idx):
        logits, _ = self(batch[0])
        self.auroc.update(logits, batch[1].long())
        self.log("val_auroc", self.auroc)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        logits, weight = self(batch[0])
        return {"p": logits.sigmoid(), "attention": weight, "loader": dataloader_idx}

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", 0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_auroc"},
        }


def hierarchical_attention(make_trainer) -> Any:
    """Words to sentences to documents, ReduceLROnPlateau on AUROC, two predict loaders."""
    documents = torch.randint(0, 40, (96, 3, 6))
    documents[..., 0] = documents[..., 0].clamp(min=1)
    labels = ((documents == 7).sum((1, 2)) > 0).float()
    train = DataLoader(TensorDataset(documents[:64], labels[:64]), batch_size=8)
    val = DataLoader(TensorDataset(documents[64:], labels[64:]), batch_size=8)
    model, losses = HierarchicalAttention(), Losses()
    trainer = make_trainer(max_epochs=3, callbacks=[losses])
    trainer.fit(model, train, val)
    return {
        "losses": losses.values,
        "metrics": trainer.callback_metrics,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "predictions": trainer.predict(model, [val, val]),
    }


def focal_loss(logits: Tensor, y: Tensor, gamma: float, alpha: Tensor) -> Tensor:
    log_p = F.log_softmax(logits, -1).gather(1, y[:, None]).squeeze(1)
    return -(alpha[y] * (1 - log_p.exp()) ** gamma * log_p).mean()


class SpamData(pl.LightningDataModule):
    """Rare spam, drawn more often by a weighted sampler."""

    def __init__(self, batch_size: int = 16):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        words, _, _ = sentences(192, 8, 40)
        labels = (words == 5).any(1).long()
        self.train = TensorDataset(words[:144], labels[:144])
        self.val = TensorDataset(words[144:], labels[144:])
        self.counts = torch.bincount(labels[:144], minlength=2)

    def train_dataloader(self):
        weight = (1 / self.counts.float())[self.train.tensors[1]]
        sampler = WeightedRandomSampler(weight, 160)
        return DataLoader(self.train, batch_size=self.hparams.batch_size, sampler=sampler)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.hparams.batch_size)


class SpamFilter(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 8, padding_idx=0)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Mish(), nn.Linear(16, 2))
        self.loss = functools.partial(focal_loss, gamma=2.0, alpha=torch.tensor([0.25, 0.75]))
        self.recall = torchmetrics.classification.MulticlassRecall(2, average=None)

    def training_step(self, batch, batch_idx):
        words, y = batch
        loss = self.loss(self.head(self.embedding(words)), y)
        self.log("focal", loss, on_step=False, on_epoch=True, reduce_fx=torch.sum)
        return loss

    def validation_step(self, batch, batch_idx):
        words, y = batch
        self.recall.update(self.head(self.embedding(words)), y)

    def on_validation_epoch_end(self):
        ham, spam = self.recall.compute()
        self.log_dict({"recall/ham": ham, "recall/spam": spam})
        self.recall.reset()

    def configure_optimizers(self):
        return torch.optim.Adamax(self.parameters(), lr=5e-3)


def weighted_sampler_focal_loss(make_trainer) -> Any:
    """A DataModule with a WeightedRandomSampler, a focal loss by functools.partial."""
    model, losses = SpamFilter(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, datamodule=SpamData())
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class RDropClassifier(pl.LightningModule):
    """Two passes under different dropout, their divergence in the loss."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=0)
        self.embedding_dropout = nn.Dropout1d(0.1)  # drops whole words
        self.net = nn.Sequential(
            nn.Linear(16, 32), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(32, 3)
        )

    def forward(self, words):
        mask = (words != 0).unsqueeze(-1).float()
        x = self.embedding_dropout(self.embedding(words))
        return self.net((x * mask).sum(1) / mask.sum(1))

    def training_step(self, batch, batch_idx):
        words, _, y = batch
        p, q = (F.log_softmax(self(words), -1) for _ in range(2))
        nll = F.nll_loss(p, y) + F.nll_loss(q, y)
        kl = F.kl_div(p, q, log_target=True, reduction="batchmean")
        kl = kl + F.kl_div(q, p, log_target=True, reduction="batchmean")
        self.log_dict({"nll": nll, "kl": kl}, on_step=True, on_epoch=True)
        return 0.5 * nll + 0.5 * kl

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2, amsgrad=True)


def r_drop_classifier(make_trainer) -> Any:
    """R-Drop: KL between two forward passes with Dropout1d and AlphaDropout."""
    loader = DataLoader(TensorDataset(*sentences(160, 8, 50)), batch_size=16)
    model, losses = RDropClassifier(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, loader)
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class AdversarialEmbeddings(pl.LightningModule):
    """Miyato's adversarial training: the embedding moves along the gradient of the loss."""

    def __init__(self, epsilon=0.5):
        super().__init__()
        self.epsilon = epsilon
        self.embedding = nn.Embedding(50, 12)
        self.rnn = nn.RNN(12, 16, nonlinearity="tanh", batch_first=True)
        self.head = nn.Linear(16, 3)

    def loss_of(self, embedded, y):
        _, h = self.rnn(embedded)
        return F.cross_entropy(self.head(h.squeeze(0)), y)

    def training_step(self, batch, batch_idx):
        words, _, y = batch
        embedded = self.embedding(words)
        clean = self.loss_of(embedded, y)
        (g,) = torch.autograd.grad(clean, embedded, retain_graph=True)
        delta = self.epsilon * g / (g.norm(dim=(1, 2), keepdim=True) + 1e-8)
        adversarial = self.loss_of(embedded + delta.detach(), y)
        self.log("clean", clean)
        self.log("adversarial", adversarial)
        return (clean + adversarial) / 2

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def adversarial_embeddings(make_trainer) -> Any:
    """Adversarial perturbations of embeddings by autograd.grad in the step."""
    loader = DataLoader(TensorDataset(*sentences(160, 8, 50)), batch_size=16)
    model, losses = AdversarialEmbeddings(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, loader)
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class MixtureOfExperts(pl.LightningModule):
    """Top-2 gates over experts on words, with the switch transformer's balancing loss."""

    def __init__(self, experts=4, width=16):
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))
            for _ in range(experts)
        )
        self.head = nn.Linear(width, 3)
        self.register_buffer("load", torch.zeros(experts))

    def training_step(self, batch, batch_idx):
        words, _, y = batch
        x = self.embedding(words)
        probabilities = self.gate(x).softmax(-1)
        top, index = probabilities.topk(2, dim=-1)
        gates = torch.zeros_like(probabilities).scatter(-1, index, top / top.sum(-1, True))
        out = torch.stack([expert(x) for expert in self.experts], dim=-2)
        h = x + (gates.unsqueeze(-1) * out).sum(-2)
        share = (gates > 0).float().mean((0, 1))
        balance = len(self.experts) * (share * probabilities.mean((0, 1))).sum()
        self.load += share
        loss = F.cross_entropy(self.head(h.mean(1)), y)
        self.log_dict({"ce": loss, "balance": balance})
        return loss + 0.01 * balance

    def configure_optimizers(self):
        return torch.optim.AdamW(
            [
                {"params": self.gate.parameters(), "lr": 1e-3},
                {"params": self.experts.parameters(), "weight_decay": 0.0},
                {"params": [*self.embedding.parameters(), *self.head.parameters()]},
            ],
            lr=5e-3,
        )


def mixture_of_experts(make_trainer) -> Any:
    """Top-2 gated experts with a balancing loss; the load is counted in a buffer."""
    loader = DataLoader(TensorDataset(*sentences(160, 8, 50)), batch_size=16)
    model, losses = MixtureOfExperts(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, loader)
    return {"losses": losses.values, "load": model.load, "w": weights(model)}


class Student(pl.LightningModule):
    """Distillation: a frozen teacher, soft targets at a temperature."""

    def __init__(self, teacher: nn.Module, temperature: float = 2.0, alpha: float = 0.7):
        super().__init__()
        self.save_hyperparameters(ignore=["teacher"])
        self.teacher = teacher.eval().requires_grad_(False)
        self.student = nn.Sequential(nn.EmbeddingBag(50, 6, mode="sum"), nn.Linear(6, 3))

    def training_step(self, batch, batch_idx):
        words, _, y = batch
        t = self.hparams.temperature
        with torch.no_grad():
            soft = F.softmax(self.teacher(words) / t, dim=-1)
        logits = self.student(words)
        kd = F.kl_div(F.log_softmax(logits / t, -1), soft, reduction="batchmean") * t**2
        ce = F.cross_entropy(logits, y)
        self.log("kd", kd, prog_bar=True)
        self.log("agreement", (logits.argmax(1) == soft.argmax(1)).float().mean(), on_epoch=True)
        return self.hparams.alpha * kd + (1 - self.hparams.alpha) * ce

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.student.parameters(), lr=2e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=5, T_mult=2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def distillation(make_trainer) -> Any:
    """First a teacher is trained, then a student learns its soft targets: two fits, two models."""
    loader = DataLoader(TensorDataset(*sentences(96, 8, 50)), batch_size=16)
    teacher, first = BagOfWords(50, 3), Losses()
    make_trainer(max_epochs=2, callbacks=[first]).fit(teacher, loader)
    student, second = Student(teacher), Losses()
    trainer = make_trainer(max_epochs=3, callbacks=[second])
    trainer.fit(student, loader)
    return {"teacher": first.values, "student": second.values, "metrics": trainer.callback_metrics}


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 12)
        self.gru = nn.GRU(12, 12, batch_first=True)
        self.norm = nn.BatchNorm1d(12)

    def forward(self, words):
        return self.norm(self.gru(self.embedding(words))[1][-1])


class Unfreeze(BaseFinetuning):
    def __init__(self, at_epoch: int):
        super().__init__()
        self.at_epoch = at_epoch

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.at_epoch:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=1e-3)


class FineTuned(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Linear(12, 3)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.head(self.backbone(batch[0])), batch[2])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        trainable = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.Adam(trainable, lr=1e-2)


def fine_tuning_with_unfreezing(make_trainer) -> Any:
    """BaseFinetuning: the head alone for one epoch, then the backbone in a group of its own."""
    loader = DataLoader(TensorDataset(*sentences(80, 8, 50)), batch_size=8)
    model, losses = FineTuned(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses, Unfreeze(at_epoch=1)])
    trainer.fit(model, loader)
    groups = [g["lr"] for g in trainer.optimizers[0].param_groups]
    return {"losses": losses.values, "groups": groups, "w": weights(model)}


def frozen_backbone(make_trainer) -> Any:
    """BaseFinetuning that never unfreezes: a frozen GRU and BatchNorm, a trained head."""
    loader = DataLoader(TensorDataset(*sentences(80, 8, 50)), batch_size=8)
    model, losses = FineTuned(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses, Unfreeze(at_epoch=99)])
    trainer.fit(model, loader)
    return {"losses": losses.values, "w": weights(model)}


# Tagging


def tagged(count: int = 96, length: int = 8) -> TensorDataset:
    """Word ids, tags that follow from a word and the one before it (-100 on padding)."""
    words, _, _ = sentences(count, length, 30)
    before = F.pad(words[:, :-1], (1, 0))
    tags = ((words % 3) + (before % 2)) % 4
    return TensorDataset(words, tags.masked_fill(words == 0, -100))


class Tagger(pl.LightningModule):
    def __init__(self, tags: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(30, 10, padding_idx=0)
        self.lstm = nn.LSTM(10, 8, num_layers=2, bidirectional=True, dropout=0.25, batch_first=True)
        self.head = nn.Linear(16, tags)
        self.loss = nn.CrossEntropyLoss(ignore_index=-100)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(
            tags, ignore_index=-100, average="macro"
        )

    def forward(self, words):
        return self.head(self.lstm(self.embedding(words))[0])

    def training_step(self, batch, batch_idx):
        words, tags = batch
        loss = self.loss(self(words).transpose(1, 2), tags)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        words, tags = batch
        logits = self(words).transpose(1, 2)
        self.accuracy(logits, tags)
        self.log("val_acc", self.accuracy)
        self.log("val_loss", self.loss(logits, tags))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        config = {"scheduler": scheduler, "monitor": "val_loss", "interval": "epoch"}
        return {"optimizer": optimizer, "lr_scheduler": config}


def bilstm_tagger(make_trainer) -> Any:
    """A stacked BiLSTM with ignore_index, best checkpoint by validation loaded again."""
    data = tagged(112)
    train = DataLoader(Subset(data, range(80)), batch_size=16, shuffle=True)
    val = DataLoader(Subset(data, range(80, 112)), batch_size=16)
    model, losses = Tagger(), Losses()
    with tempfile.TemporaryDirectory() as folder:
        best = ModelCheckpoint(folder, "{epoch}", monitor="val_acc", mode="max", save_top_k=1)
        trainer = make_trainer(max_epochs=4, callbacks=[losses, best], enable_checkpointing=True)
        trainer.fit(model, train, val)
        again = Tagger.load_from_checkpoint(best.best_model_path)
        name = Path(best.best_model_path).name
    return {
        "losses": losses.values,
        "metrics": trainer.callback_metrics,
        "best": (name, best.best_model_score),
        "w": weights(again),
    }


class ConditionalRandomField(nn.Module):
    """A linear chain: forward algorithm for the loss, Viterbi to decode."""

    def __init__(self, tags: int):
        super().__init__()
        self.start, self.end = nn.Parameter(torch.zeros(tags)), nn.Parameter(torch.zeros(tags))
        self.transitions = nn.Parameter(torch.empty(tags, tags).uniform_(-0.1, 0.1))

    def log_partition(self, emissions):
        alpha = self.start + emissions[:, 0]
        for t in range(1, emissions.shape[1]):
            alpha = torch.logsumexp(alpha.unsqueeze(2) + self.transitions, 1) + emissions[:, t]
        return torch.logsumexp(alpha + self.end, dim=1)

    def score(self, emissions, tags):
        local = emissions.gather(2, tags.unsqueeze(2)).squeeze(2).sum(1)
        moves = self.transitions[tags[:, :-1], tags[:, 1:]].sum(1)
        return local + moves + self.start[tags[:, 0]] + self.end[tags[:, -1]]

    def decode(self, emissions):
        score, back = self.start + emissions[:, 0], []
        for t in range(1, emissions.shape[1]):
            score, index = (score.unsqueeze(2) + self.transitions).max(1)
            score = score + emissions[:, t]
            back.append(index)
        path = [(score + self.end).argmax(1, keepdim=True)]
        for index in reversed(back):
            path.append(index.gather(1, path[-1]))
        return torch.cat(path[::-1], dim=1)


class CRFTagger(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.conv = nn.Conv1d(8, 4, 3, padding="same", padding_mode="zeros")
        self.crf = ConditionalRandomField(4)

    def forward(self, words):
        return self.conv(self.embedding(words).transpose(1, 2)).transpose(1, 2)

    def training_step(self, batch, batch_idx):
        words, tags = batch
        emissions = self(words)
        loss = (self.crf.log_partition(emissions) - self.crf.score(emissions, tags)).mean()
        self.log("nll", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        words, tags = batch
        self.log("exact", (self.crf.decode(self(words)) == tags).all(1).float().mean())

    def predict_step(self, batch, batch_idx):
        return self.crf.decode(self(batch[0]))

    def configure_optimizers(self):
        crf = {"params": self.crf.parameters(), "lr": 0.1, "weight_decay": 0.0}
        rest = [*self.embedding.parameters(), *self.conv.parameters()]
        return torch.optim.AdamW([crf, {"params": rest}], lr=1e-2)


def crf_tagger(make_trainer) -> Any:
    """A linear-chain CRF over convolutions: forward algorithm, Viterbi outside of training."""
    words = torch.randint(0, 30, (96, 6))
    data = TensorDataset(words, (words + F.pad(words[:, :-1], (1, 0))) % 4)
    train = DataLoader(Subset(data, range(80)), batch_size=8)
    val = DataLoader(Subset(data, range(80, 96)), batch_size=8)
    model, losses = CRFTagger(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, train, val)
    return {
        "losses": losses.values,
        "metrics": trainer.callback_metrics,
        "paths": trainer.predict(model, val),
        "w": weights(model),
    }


class JointTagger(pl.LightningModule):
    """Intent and slots, weighted by learned uncertainties (Kendall)."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 16, padding_idx=0)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True, dropout=0.1)
        self.norm = nn.LayerNorm(16)
        self.heads = nn.ModuleDict({"slots": nn.Linear(16, 4), "intent": nn.Linear(16, 3)})
        self.log_sigma = nn.ParameterDict(
            {"slots": nn.Parameter(torch.zeros(())), "intent": nn.Parameter(torch.zeros(()))}
        )

    def forward(self, words):
        x, padding = self.embedding(words), words == 0
        a, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)
        h = self.norm(x + a)
        pooled = h.masked_fill(padding.unsqueeze(-1), 0).sum(1) / (~padding).sum(1, keepdim=True)
        return {"slots": self.heads["slots"](h), "intent": self.heads["intent"](pooled)}

    def training_step(self, batch, batch_idx):
        words, tags = batch
        out = self(words)
        parts = {
            "slots": F.cross_entropy(out["slots"].transpose(1, 2), tags),
            "intent": F.cross_entropy(out["intent"], words[:, 0] % 3),
        }
        total = 0.0
        for name, value in parts.items():
            s = self.log_sigma[name]
            total = total + torch.exp(-2 * s) * value + s
            self.log(f"loss/{name}", value, on_step=False, on_epoch=True)
            self.log(f"sigma/{name}", s.exp())
        return total

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def joint_intent_and_slots(make_trainer) -> Any:
    """Two tasks with learned uncertainties; attention with dropout and a padding mask."""
    loader = DataLoader(tagged(160), batch_size=16)
    model, losses = JointTagger(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], gradient_clip_val=1.0)
    trainer.fit(model, loader)
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


# Sequence to sequence


class Seq2SeqTransformer(pl.LightningModule):
    """nn.Transformer that reverses its input; greedy decoding in predict_step."""

    def __init__(self, vocab: int = 20, width: int = 16):
        super().__init__()
        self.bos, self.scale = 1, math.sqrt(width)
        self.embedding = nn.Embedding(vocab, width, padding_idx=0)
        self.register_buffer("pe", self.sinusoids(32, width))
        self.transformer = nn.Transformer(
            width, 2, 1, 1, 32, dropout=0.0, batch_first=True, norm_first=False
        )
        self.head = nn.Linear(width, vocab)

    @staticmethod
    def sinusoids(length, width):
        table = np.zeros((length, width), dtype=np.float32)
        rate = np.exp(np.arange(0, width, 2) * -(np.log(10000.0) / width))
        table[:, 0::2] = np.sin(np.arange(length)[:, None] * rate)
        table[:, 1::2] = np.cos(np.arange(length)[:, None] * rate)
        return torch.from_numpy(table)

    def embed(self, x):
        return self.embedding(x) * self.scale + self.pe[: x.size(1)]

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        padding = torch.zeros_like(source, dtype=torch.float).masked_fill(source == 0, -torch.inf)
        h = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=mask,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.head(h)

    def training_step(self, batch, batch_idx):
        source, target = batch
        logits = self(source, target[:, :-1])
        loss = F.cross_entropy(
            logits.transpose(1, 2), target[:, 1:], ignore_index=0, label_smoothing=0.1
        )
        self.log("loss", loss)
        return loss

    def predict_step(self, batch, batch_idx):
        source, _ = batch
        out = torch.full((len(source), 1), self.bos, dtype=torch.long, device=self.device)
        for _ in range(3):
            word = self(source, out)[:, -1].argmax(-1, keepdim=True)
            out = torch.cat([out, word], dim=1)
        return out

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
        noam = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda s: 16**-0.5 * min((s + 1) ** -0.5, (s + 1) * 8**-1.5) * 0.1
        )
        return [optimizer], [{"scheduler": noam, "interval": "step"}]


def reversal(count: int = 80, length: int = 6, vocab: int = 20) -> TensorDataset:
    source = torch.randint(2, vocab, (count, length))
    source[: count // 2, -1] = 0
    target = torch.cat([torch.ones(count, 1, dtype=torch.long), source.flip(1)], dim=1)
    return TensorDataset(source, target)


def transformer_reverses(make_trainer) -> Any:
    """nn.Transformer with masks and padding, Noam's schedule, greedy decoding."""
    data = reversal()
    model, losses = Seq2SeqTransformer(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True))
    decoded = trainer.predict(model, DataLoader(Subset(data, range(32)), batch_size=16))
    return {"losses": losses.values, "decoded": decoded, "w": weights(model)}


class TransformerDropout(Seq2SeqTransformer):
    """The same with dropout of its own on the embeddings, and an encoder alone."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(16))
        del self.transformer
        self.dropout = nn.Dropout(0.1)

    def training_step(self, batch, batch_idx):
        source, target = batch
        h = self.encoder(self.dropout(self.embed(source)), src_key_padding_mask=source == 0)
        return F.cross_entropy(self.head(h).transpose(1, 2), target[:, 1:], ignore_index=0)

    def predict_step(self, batch, batch_idx):
        return self.head(self.encoder(self.embed(batch[0]))).argmax(-1)


def encoder_layer_dropout(make_trainer) -> Any:
    """nn.TransformerEncoder with its dropout, non-autoregressive."""
    data = reversal()
    model, losses = TransformerDropout(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(data, batch_size=8))
    return {"losses": losses.values, "predictions": trainer.predict(model, DataLoader(data, 16))}


class BahdanauSeq2Seq(pl.LightningModule):
    """GRU encoder, GRUCell decoder with additive attention; each word forced with probability p."""

    def __init__(self, vocab=20, width=12, forcing=0.6):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(vocab, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.attention_keys = nn.Linear(width, width)
        self.attention_query = nn.Linear(width, width, bias=False)
        self.attention_v = nn.Linear(width, 1, bias=False)
        self.cell = nn.GRUCell(2 * width, width)
        self.head = nn.Linear(2 * width, vocab)

    def forward(self, source, target):
        memory, h = self.encoder(self.embedding(source))
        h, keys = h[0], self.attention_keys(memory)
        word, logits = target[:, 0], []
        for t in range(4):
            energy = self.attention_v(torch.tanh(keys + self.attention_query(h).unsqueeze(1)))
            context = (energy.softmax(1) * memory).sum(1)
            h = self.cell(torch.cat([self.embedding(word), context], -1), h)
            logits.append(self.head(torch.cat([h, context], -1)))
            forced = torch.rand(len(word), device=self.device) < self.hparams.forcing
            word = torch.where(forced, target[:, t + 1], logits[-1].argmax(-1))
        return torch.stack(logits, 1)

    def training_step(self, batch, batch_idx):
        source, target = batch
        loss = F.cross_entropy(self(source, target).flatten(0, 1), target[:, 1:5].flatten())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def attention_with_teacher_forcing(make_trainer) -> Any:
    """Bahdanau attention; teacher forcing drawn for each word and sample in the step."""
    loader = DataLoader(reversal(), batch_size=8)
    model, losses = BahdanauSeq2Seq(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], gradient_clip_val=1.0)
    trainer.fit(model, loader)
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class PointerNetwork(pl.LightningModule):
    """Points to the order of numbers, one pointer for each rank."""

    def __init__(self, size=5, hidden=12):
        super().__init__()
        self.encoder = nn.LSTM(1, hidden, batch_first=True, bidirectional=True)
        self.ranks = nn.Parameter(torch.randn(size, hidden) * 0.1)
        self.w1, self.w2 = nn.Linear(2 * hidden, hidden), nn.Linear(hidden, hidden)
        self.v = nn.Linear(hidden, 1)

    def forward(self, numbers):
        keys = self.w1(self.encoder(numbers.unsqueeze(-1))[0])
        query = self.w2(self.ranks)
        return self.v(torch.tanh(keys[:, None] + query[None, :, None])).squeeze(-1)

    def training_step(self, batch, batch_idx):
        (numbers,) = batch
        order = numbers.argsort(dim=1)
        pointers = self(numbers)
        self.log("hits", (pointers.argmax(-1) == order).float().mean(), prog_bar=True)
        return F.cross_entropy(pointers.flatten(0, 1), order.flatten())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
        cool = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=15)
        both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cool], milestones=[5])
        return [optimizer], [{"scheduler": both, "interval": "step", "name": "rate"}]


def pointer_network(make_trainer) -> Any:
    """Sorting by pointers, SequentialLR of warm-up and cosine, batches without a validation."""
    loader = DataLoader(TensorDataset(torch.rand(160, 5)), batch_size=16)
    model, losses = PointerNetwork(), Losses()
    monitor = LearningRateMonitor(logging_interval="step")
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            max_steps=20, callbacks=[losses, monitor], logger=CSVLogger(folder), log_every_n_steps=4
        )
        trainer.fit(model, loader)
    return {"losses": losses.values, "rates": monitor.lrs, "metrics": trainer.callback_metrics}


class CoinFlipDecoder(pl.LightningModule):
    """Teacher forcing by one coin for the whole batch, from Python's random."""

    def __init__(self):
        super().__init__()
        self.embedding, self.cell = nn.Embedding(20, 12), nn.GRUCell(12, 12)
        self.head = nn.Linear(12, 20)

    def training_step(self, batch, batch_idx):
        source, target = batch
        h = self.embedding(source).mean(1)
        word, loss = target[:, 0], 0.0
        for t in range(1, 4):
            h = self.cell(self.embedding(word), h)
            logits = self.head(h)
            loss = loss + F.cross_entropy(logits, target[:, t])
            word = target[:, t] if random.random() < 0.5 else logits.argmax(-1)
        return loss / 3

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def coin_flip_teacher_forcing(make_trainer) -> Any:
    """Teacher forcing by random.random() in the step, as in the PyTorch tutorial."""
    random.seed(3)
    model, losses = CoinFlipDecoder(), Losses()
    make_trainer(max_epochs=2, callbacks=[losses]).fit(model, DataLoader(reversal(), batch_size=8))
    return {"losses": losses.values, "w": weights(model)}


class SpeechCTC(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(6, 16, 3, 2, 1), nn.ReLU(), nn.Conv1d(16, 8, 3, 1, 1))

    def training_step(self, batch, batch_idx):
        features, lengths, targets, target_lengths = batch
        log_p = self.net(features).permute(2, 0, 1).log_softmax(-1)
        loss = F.ctc_loss(log_p, targets, lengths, target_lengths, zero_infinity=True)
        self.log("ctc", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def ctc_speech(make_trainer) -> Any:
    """Connectionist temporal classification of short feature sequences."""
    n = 80
    data = TensorDataset(
        torch.randn(n, 6, 24),
        torch.randint(10, 13, (n,)),
        torch.randint(1, 8, (n, 4)),
        torch.randint(2, 5, (n,)),
    )
    model, losses = SpeechCTC(), Losses()
    make_trainer(max_epochs=2, callbacks=[losses]).fit(model, DataLoader(data, batch_size=8))
    return {"losses": losses.values, "w": weights(model)}


# State carried over batches


class TruncatedLSTM(pl.LightningModule):
    """Long sequences in pieces; the state goes on to the next batch, and to zero each epoch."""

    def __init__(self, batch=4, hidden=16):
        super().__init__()
        self.embedding, self.head = nn.Embedding(128, 8), nn.Linear(hidden, 128)
        self.lstm = nn.LSTM(8, hidden, batch_first=True)
        self.hidden = (torch.zeros(1, batch, hidden), torch.zeros(1, batch, hidden))

    def on_train_epoch_start(self):
        for state in self.hidden:
            state.zero_()

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = tuple(h.detach() for h in self.hidden)
        out, self.hidden = self.lstm(self.embedding(x), hidden)
        loss = F.cross_entropy(self.head(out).transpose(1, 2), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0)


def truncated_back_propagation(make_trainer) -> Any:
    """LSTM states kept in a tuple over batches of one long text, detached, reset each epoch."""
    text = source_bytes()[: 4 * 81].view(4, 81)
    pieces = [(text[:, i : i + 8], text[:, i + 1 : i + 9]) for i in range(0, 80, 8)]
    model, losses = TruncatedLSTM(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], gradient_clip_val=0.5)
    trainer.fit(model, DataLoader(pieces, batch_size=None))
    return {"losses": losses.values, "hidden": model.hidden, "w": weights(model)}


class HiddenFromNone(pl.LightningModule):
    """The state begins as None, as nn.GRU takes it."""

    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(3, 12, batch_first=True), nn.Linear(12, 3)
        self.hidden = None

    def training_step(self, batch, batch_idx):
        out, hidden = self.gru(batch[:, :-1], self.hidden)
        self.hidden = hidden.detach()
        return F.mse_loss(self.head(out), batch[:, 1:])

    def on_train_epoch_end(self):
        self.hidden = None

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def hidden_state_from_none(make_trainer) -> Any:
    """A GRU's state that starts as None and is kept for the next batch."""
    series = torch.randn(8, 80, 3).cumsum(1) * 0.1
    loader = DataLoader(list(series.split(8, dim=1)), batch_size=None)
    model, losses = HiddenFromNone(), Losses()
    make_trainer(max_epochs=2, callbacks=[losses]).fit(model, loader)
    return {"losses": losses.values, "w": weights(model)}


# Embeddings and retrieval


class SkipGram(pl.LightningModule):
    """word2vec with negative samples drawn by frequency to the power 3/4."""

    def __init__(self, counts: Tensor, width=12, negatives=4):
        super().__init__()
        self.negatives = negatives
        self.center = nn.Embedding(len(counts), width)
        self.context = nn.Embedding(len(counts), width)
        nn.init.zeros_(self.context.weight)
        self.register_buffer("noise", (counts.float() ** 0.75) / (counts.float() ** 0.75).sum())

    def training_step(self, batch, batch_idx):
        center, context = batch.T
        drawn = torch.multinomial(self.noise, len(center) * self.negatives, replacement=True)
        v, u = self.center(center), self.context(context)
        n = self.context(drawn.view(len(center), self.negatives))
        positive = F.logsigmoid((v * u).sum(-1))
        negative = F.logsigmoid(-torch.einsum("bd,bnd->bn", v, n)).sum(-1)
        loss = -(positive + negative).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def nearest(self, word, k=3):
        table = F.normalize(self.center.weight.detach(), dim=1)
        return (table @ table[word]).topk(k + 1).indices[1:]


def skip_gram_negative_sampling(make_trainer) -> Any:
    """word2vec on the words of a docstring; negatives by torch.multinomial in the step."""
    words = inspect.getsource(textwrap).split()[:330]
    index = {word: i for i, word in enumerate(dict.fromkeys(words))}
    ids = torch.tensor([index[word] for word in words])
    pairs = torch.cat([torch.stack([ids[:-1], ids[1:]], 1), torch.stack([ids[1:], ids[:-1]], 1)])
    model, losses = SkipGram(torch.bincount(ids, minlength=len(index))), Losses()
    loader = DataLoader(Rows(pairs[:640]), batch_size=32, shuffle=True)
    make_trainer(max_epochs=1, callbacks=[losses]).fit(model, loader)
    return {"losses": losses.values, "near": model.nearest(1), "w": weights(model)}


class GloVe(pl.LightningModule):
    def __init__(self, vocab, width=8, x_max=10.0, alpha=0.75):
        super().__init__()
        self.save_hyperparameters()
        self.tables = nn.ModuleList(nn.Embedding(vocab, width) for _ in range(2))
        self.biases = nn.ModuleList(nn.Embedding(vocab, 1) for _ in range(2))
        for table in [*self.tables, *self.biases]:
            nn.init.uniform_(table.weight, -0.5 / width, 0.5 / width)

    def training_step(self, batch, batch_idx):
        i, j, count = batch["i"], batch["j"], batch["count"]
        product = (self.tables[0](i) * self.tables[1](j)).sum(-1)
        bias = self.biases[0](i).squeeze(-1) + self.biases[1](j).squeeze(-1)
        weight = (count / self.hparams.x_max).pow(self.hparams.alpha).clamp(max=1)
        loss = (weight * (product + bias - count.log()).square()).mean()
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.1, initial_accumulator_value=0.1)


def glove(make_trainer) -> Any:
    """Weighted regression on the counts of neighbouring letters."""
    text = source_bytes() % 32
    counts = torch.zeros(32, 32)
    counts.index_put_((text[:-1], text[1:]), torch.ones(len(text) - 1), accumulate=True)
    i, j = counts.nonzero(as_tuple=True)
    items = [{"i": a, "j": b, "count": counts[a, b]} for a, b in zip(i[:320], j[:320], strict=True)]
    model, losses = GloVe(32), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], deterministic=True)
    try:
        trainer.fit(model, DataLoader(items, batch_size=32))
    finally:
        torch.use_deterministic_algorithms(False)
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class HashedSubwords(pl.LightningModule):
    """fastText: n-grams hashed to buckets, weighted sums, a shared projection."""

    def __init__(self, buckets=64):
        super().__init__()
        self.table = nn.EmbeddingBag(buckets, 8, mode="sum")
        self.head = nn.Linear(8, 2)
        self.buckets = buckets

    def ngrams(self, text):
        grams = text.unfold(1, 3, 1)
        return (grams * torch.tensor([1, 31, 961])).sum(-1) % self.buckets

    def training_step(self, batch, batch_idx):
        grams = self.ngrams(batch["text"])
        idf = torch.linspace(0.5, 1.5, self.buckets)[grams]
        logits = self.head(self.table(grams, per_sample_weights=idf) / grams.shape[1])
        return F.multi_margin_loss(logits, batch["label"], margin=0.5)

    def predict_step(self, batch, batch_idx):
        label = self.head(self.table(self.ngrams(batch["text"]))).argmax(-1)
        return {"name": batch["name"], "label": label}

    def configure_optimizers(self):
        return torch.optim.ASGD(self.parameters(), lr=0.5)


def hashed_subwords(make_trainer) -> Any:
    """fastText with hashed trigrams, EmbeddingBag with weights, names passed on by predict."""
    loader = DataLoader(Snippets(), batch_size=16, shuffle=True)
    model, losses = HashedSubwords(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, loader)
    predictions = trainer.predict(model, DataLoader(Snippets(), batch_size=16))
    return {"losses": losses.values, "predictions": predictions, "w": weights(model)}


class DualEncoder(pl.LightningModule):
    """Questions and answers in one space: InfoNCE over the batch, a learned temperature."""

    def __init__(self):
        super().__init__()
        self.question = nn.Sequential(nn.EmbeddingBag(60, 16), nn.Linear(16, 8))
        self.answer = nn.Sequential(nn.EmbeddingBag(60, 16), nn.Linear(16, 8))
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.validation_outputs = []

    def encode(self, batch):
        q = F.normalize(self.question(batch["question"]), dim=-1)
        return q, F.normalize(self.answer(batch["answer"]), dim=-1)

    def training_step(self, batch, batch_idx):
        q, a = self.encode(batch)
        logits = self.log_scale.clamp(max=math.log(100)).exp() * q @ a.T
        labels = torch.arange(len(q), device=self.device)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        self.log("scale", self.log_scale.exp())
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        pair = self.encode(batch)
        self.validation_outputs.append(pair)
        return pair

    def on_validation_epoch_end(self):
        q, a = (torch.cat(part) for part in zip(*self.validation_outputs, strict=True))
        rank = ((q @ a.T) > (q * a).sum(-1, keepdim=True)).sum(-1)
        self.log("mrr", (1 / (rank + 1)).mean())
        self.log("recall@3", (rank < 3).float().mean())
        self.validation_outputs.clear()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.01)


def dual_encoder_retrieval(make_trainer) -> Any:
    """CLIP's loss for questions and answers; ranks over all embeddings of a validation."""
    questions = torch.randint(0, 60, (112, 6))
    answers = (questions + 1) % 60
    items = [
        {"id": f"q{i:03}", "question": q, "answer": a}
        for i, (q, a) in enumerate(zip(questions, answers, strict=True))
    ]
    train = DataLoader(items[:80], batch_size=16, shuffle=True, drop_last=True)
    model, losses = DualEncoder(), Losses()
    trainer = make_trainer(max_epochs=4, callbacks=[losses], num_sanity_val_steps=0)
    trainer.fit(model, train, DataLoader(items[80:], batch_size=16))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


Triplet = namedtuple("Triplet", ["anchor", "positive", "negative", "key"])


class TripletText(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 12, padding_idx=0)
        self.project = nn.Bilinear(12, 12, 8)
        self.criterion = nn.TripletMarginWithDistanceLoss(
            distance_function=lambda x, y: 1.0 - F.cosine_similarity(x, y), margin=0.3, swap=True
        )

    def forward(self, words):
        x = self.embedding(words)
        return self.project(x.mean(1), x.amax(1))

    def training_step(self, batch, batch_idx):
        loss = self.criterion(self(batch.anchor), self(batch.positive), self(batch.negative))
        self.log("loss", loss, batch_size=batch.anchor.size(0), on_epoch=True, sync_dist=True)
        return loss

    def predict_step(self, batch, batch_idx):
        return Triplet(self(batch.anchor), self(batch.positive), self(batch.negative), batch.key)

    def configure_optimizers(self):
        return torch.optim.Rprop(self.parameters(), lr=1e-2)


def triplet_sentences(make_trainer) -> Any:
    """Triplets as named tuples with a text key, cosine distance by a lambda, Rprop."""
    words, _, _ = sentences(96, 8, 50)
    changed = torch.cat([words.roll(1, 0)[:, :3], words[:, 3:]], dim=1)
    items = [Triplet(words[i], changed[i], words[(i + 7) % 96], f"row {i}") for i in range(96)]
    loader = DataLoader(items, batch_size=8)
    model, losses = TripletText(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, loader)
    predictions = trainer.predict(model, DataLoader(items[:16], batch_size=8))
    return {"losses": losses.values, "predictions": predictions, "w": weights(model)}


class MomentumContrast(pl.LightningModule):
    """SimCSE with dropout as augmentation, keys of a momentum encoder in a queue."""

    def __init__(self, size=32, momentum=0.95, temperature=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.EmbeddingBag(50, 16, mode="max"), nn.Dropout(0.2), nn.Linear(16, 8)
        )
        self.momentum_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(size, 8), dim=1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def follow(self):
        m = self.hparams.momentum
        for slow, fast in zip(
            self.momentum_encoder.parameters(), self.encoder.parameters(), strict=True
        ):
            slow.mul_(m).add_(fast, alpha=1 - m)

    def training_step(self, batch, batch_idx):
        words = batch[0]
        q = F.normalize(self.encoder(words), dim=1)
        with torch.no_grad():
            self.follow()
            k = F.normalize(self.momentum_encoder(words), dim=1)
        positive, negative = (q * k).sum(1, keepdim=True), q @ self.queue.clone().T
        logits = torch.cat([positive, negative], 1) / self.hparams.temperature
        with torch.no_grad():
            place = (self.pointer + torch.arange(len(k))) % len(self.queue)
            self.queue[place] = k
            self.pointer.copy_((self.pointer + len(k)) % len(self.queue))
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=self.device))

    def configure_optimizers(self):
        return torch.optim.SGD(self.encoder.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def momentum_contrast_sentences(make_trainer) -> Any:
    """Dropout as augmentation, a momentum encoder, a queue of keys in a buffer."""
    loader = DataLoader(TensorDataset(sentences(160, 8, 50)[0]), batch_size=8)
    model, losses = MomentumContrast(), Losses()
    make_trainer(max_steps=20, callbacks=[losses]).fit(model, loader)
    return {"losses": losses.values, "w": weights(model)}


# Time series


class NBeatsBlock(nn.Module):
    """Trend by a polynomial basis, or seasons by a Fourier basis, made with numpy."""

    def __init__(self, kind: str, back: int, ahead: int, width=24, terms=3):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Linear(back, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        t = np.linspace(0, 1, back + ahead)
        if kind == "trend":
            basis = np.stack([t**i for i in range(terms)])
        else:
            angle = 2 * np.pi * np.outer(np.arange(1, terms + 1), t)
            basis = np.concatenate([np.cos(angle), np.sin(angle)])
        self.theta = nn.Linear(width, len(basis), bias=False)
        self.register_buffer("basis", torch.tensor(basis, dtype=torch.float32))
        self.back = back

    def forward(self, x):
        out = self.theta(self.stem(x)) @ self.basis
        return out[:, : self.back], out[:, self.back :]


class NBeats(pl.LightningModule):
    def __init__(self, back=16, ahead=4):
        super().__init__()
        self.save_hyperparameters()
        kinds = ["trend", "season", "season"]
        self.blocks = nn.ModuleList(NBeatsBlock(kind, back, ahead) for kind in kinds)
        self.mae = torchmetrics.MeanAbsoluteError()
        self.r2 = torchmetrics.R2Score()

    def forward(self, x):
        forecast = x.new_zeros(len(x), self.hparams.ahead)
        for block in self.blocks:
            backcast, step = block(x)
            x, forecast = x - backcast, forecast + step
        return forecast

    def training_step(self, batch, batch_idx):
        x, y = batch
        p = self(x)
        loss = 2 * ((p - y).abs() / (p.abs() + y.abs()).clamp_min(1e-3)).mean()
        self.log("smape", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        p = self(x)
        self.mae(p, y)
        self.r2(p.flatten(), y.flatten())
        self.log("mae", self.mae)
        self.log("r2", self.r2)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.3)]


def n_beats_forecast(make_trainer) -> Any:
    """Residual blocks on numpy bases, sMAPE, MultiStepLR, MAE and R2 in validation."""
    series = waves(112, 20)
    data = TensorDataset(series[:, :16], series[:, 16:])
    train = DataLoader(Subset(data, range(80)), batch_size=16)
    val = DataLoader(Subset(data, range(80, 112)), batch_size=16)
    model, losses = NBeats(), Losses()
    trainer = make_trainer(max_epochs=4, callbacks=[losses], check_val_every_n_epoch=2)
    trainer.fit(model, train, val)
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class DeepAR(pl.LightningModule):
    """A GRU that predicts the next value as a Student t; samples of the future in predict."""

    def __init__(self, hidden=12):
        super().__init__()
        self.gru = nn.GRU(2, hidden, num_layers=2, dropout=0.1, batch_first=True)
        self.to_params = nn.Linear(hidden, 3)
        self.categories = nn.Embedding(4, 1)

    def distribution(self, h):
        df, loc, scale = self.to_params(h).unbind(-1)
        return torch.distributions.StudentT(2 + F.softplus(df), loc, F.softplus(scale) + 1e-3)

    def training_step(self, batch, batch_idx):
        series, category = batch
        scale = series[:, :-1].abs().mean(1, keepdim=True) + 1e-3
        x = series / scale
        c = self.categories(category).expand(-1, x.shape[1] - 1).unsqueeze(-1)
        h, _ = self.gru(torch.cat([x[:, :-1, None], c], -1))
        loss = -self.distribution(h).log_prob(x[:, 1:]).mean()
        self.log("nll", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def predict_step(self, batch, batch_idx):
        series, category = batch
        c = self.categories(category).expand(-1, series.shape[1]).unsqueeze(-1)
        h, _ = self.gru(torch.cat([series[..., None], c], -1))
        d = self.distribution(h[:, -1])
        return {"mean": d.mean, "scale": d.scale, "df": d.df, "category": category}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=True)


def deep_ar_student_t(make_trainer) -> Any:
    """Autoregressive Student t's with scaled inputs and category embeddings."""
    data = TensorDataset(waves(160, 12), torch.arange(160) % 4)
    loader = DataLoader(data, batch_size=16)
    model, losses = DeepAR(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], gradient_clip_val=10.0)
    trainer.fit(model, loader)
    predictions = trainer.predict(model, loader)
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "p": predictions}


@dataclass
class PatchConfig:
    length: int = 24
    patch: int = 6
    ahead: int = 6
    width: int = 16
    norm: dict[str, float] = field(default_factory=lambda: {"eps": 1e-5})


class PatchTransformer(pl.LightningModule):
    """Patches of a series as words, normalized by each series' own mean and deviation (RevIN)."""

    def __init__(self, config: PatchConfig):
        super().__init__()
        self.config = config
        patches = config.length // config.patch
        self.embed = nn.Linear(config.patch, config.width)
        self.positions = nn.Parameter(0.02 * torch.randn(patches, config.width))
        self.attention = nn.MultiheadAttention(config.width, 4, batch_first=True)
        self.norms = nn.ModuleList(nn.BatchNorm1d(config.width) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.Hardswish(), nn.Linear(32, 16))
        self.head = nn.Sequential(
            nn.Flatten(), nn.Dropout(0.1), nn.Linear(16 * patches, config.ahead)
        )
        self.gain, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        c = self.config
        mean = x.mean(1, keepdim=True)
        std = (x.var(1, keepdim=True, unbiased=False) + c.norm["eps"]).sqrt()
        x = (x - mean) / std * self.gain + self.shift
        h = self.embed(x.unfold(1, c.patch, c.patch)) + self.positions
        a, weight = self.attention(h, h, h)
        h = self.norms[0]((h + a).transpose(1, 2)).transpose(1, 2)
        h = self.norms[1]((h + self.mlp(h)).transpose(1, 2)).transpose(1, 2)
        return (self.head(h) - self.shift) / self.gain * std + mean, weight

    def training_step(self, batch, batch_idx):
        p, weight = self(batch[:, : self.config.length])
        self.log("sharpness", weight.amax(-1).mean(), on_epoch=True)
        return F.huber_loss(p, batch[:, self.config.length :], delta=0.5)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def patch_transformer_forecast(make_trainer) -> Any:
    """PatchTST with RevIN, a dataclass as config, Huber loss, accumulated gradients."""
    model, losses = PatchTransformer(PatchConfig()), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses], accumulate_grad_batches=2)
    trainer.fit(model, DataLoader(Rows(waves(160, 30)), batch_size=16))
    return {"losses": losses.values, "steps": trainer.global_step, "w": weights(model)}


class QuantileForecast(pl.LightningModule):
    def __init__(self, quantiles=(0.1, 0.5, 0.9)):
        super().__init__()
        self.save_hyperparameters()
        self.rnn = nn.LSTM(1, 10, batch_first=True, proj_size=6)
        self.head = nn.Linear(6, len(quantiles))
        self.seen = 0

    def forward(self, x):
        return self.head(self.rnn(x.unsqueeze(-1))[0][:, -1])

    def training_step(self, batch, batch_idx):
        x, y = batch[:, :-1], batch[:, -1:]
        q = torch.tensor(self.hparams.quantiles, device=self.device)
        error = y - self(x)
        loss = torch.maximum(q * error, (q - 1) * error).mean()
        self.log("pinball", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += len(batch)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint["seen"]

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)]


def quantile_forecast_resumed(make_trainer) -> Any:
    """Pinball loss; one run of two epochs, a second that resumes from its last checkpoint."""
    loader = DataLoader(Rows(waves(80, 10)), batch_size=16)
    with tempfile.TemporaryDirectory() as folder:
        keep = ModelCheckpoint(folder, save_last=True)
        first, losses = QuantileForecast(), Losses()
        trainer = make_trainer(max_epochs=2, callbacks=[losses, keep], enable_checkpointing=True)
        trainer.fit(first, loader)
        second, more = QuantileForecast(), Losses()
        trainer = make_trainer(max_epochs=4, callbacks=[more])
        trainer.fit(second, loader, ckpt_path=str(Path(folder, "last.ckpt")))
    return {
        "losses": losses.values + more.values,
        "seen": second.seen,
        "epoch": trainer.current_epoch,
        "step": trainer.global_step,
        "w": weights(second),
    }


class DiagonalStateSpace(pl.LightningModule):
    """S4D: complex poles, the kernel by their powers, a convolution by FFT."""

    def __init__(self, channels=4, states=4):
        super().__init__()
        self.encoder = nn.Linear(1, channels)
        self.log_decay = nn.Parameter(torch.log(0.5 * torch.ones(channels, states)))
        self.frequency = nn.Parameter(math.pi * torch.arange(states).repeat(channels, 1))
        self.c = nn.Parameter(torch.randn(channels, states, 2) * 0.5)
        self.skip = nn.Parameter(torch.ones(channels))
        self.head = nn.Sequential(nn.GELU(), nn.Linear(channels, 2))

    def kernel(self, length):
        pole = torch.complex(-self.log_decay.exp(), self.frequency) * 0.1
        powers = torch.exp(pole.unsqueeze(-1) * torch.arange(length))
        return 2 * torch.einsum("cs,csl->cl", torch.view_as_complex(self.c), powers).real

    def forward(self, x):
        u = self.encoder(x.unsqueeze(-1)).transpose(1, 2)
        n = u.shape[-1]
        spectrum = torch.fft.rfft(self.kernel(n), n=2 * n) * torch.fft.rfft(u, n=2 * n)
        y = torch.fft.irfft(spectrum, n=2 * n)[..., :n] + u * self.skip[:, None]
        return self.head(y.transpose(1, 2).mean(1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("acc", torchmetrics.functional.accuracy(logits, y, "multiclass", num_classes=2))
        return F.cross_entropy(logits, y)

    def configure_optimizers(self):
        slow = [self.log_decay, self.frequency]
        rest = [p for p in self.parameters() if all(p is not q for q in slow)]
        return torch.optim.AdamW(
            [{"params": slow, "lr": 1e-3, "weight_decay": 0.0}, {"params": rest}], lr=1e-2
        )


def diagonal_state_space(make_trainer) -> Any:
    """S4D with complex poles and an FFT convolution, groups with their own rates."""
    x = waves(160, 32)
    y = (x[:, :16].var(1) > x[:, 16:].var(1)).long()
    model, losses = DiagonalStateSpace(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=16))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class SeriesAnomaly(pl.LightningModule):
    """An autoencoder of GRUs; the threshold is a quantile of validation errors."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.GRU(1, 8, batch_first=True)
        self.decoder = nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, 1)
        self.register_buffer("threshold", torch.tensor(0.0))
        self.errors: list[Tensor] = []

    def forward(self, x):
        _, h = self.encoder(x.unsqueeze(-1))
        z = h[-1].unsqueeze(1).expand(-1, x.shape[1], -1)
        return self.out(self.decoder(z)[0]).squeeze(-1)

    def error(self, x):
        return (self(x) - x).square().mean(1)

    def training_step(self, batch, batch_idx):
        return self.error(batch).mean()

    def on_validation_epoch_start(self):
        self.errors = []

    def validation_step(self, batch, batch_idx):
        self.errors.append(self.error(batch))

    def on_validation_epoch_end(self):
        self.threshold = torch.quantile(torch.cat(self.errors), 0.95)
        self.log("threshold", self.threshold)

    def predict_step(self, batch, batch_idx):
        return self.error(batch) > self.threshold

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def recurrent_anomaly_detector(make_trainer) -> Any:
    """A sequence autoencoder; a threshold from a list of validation errors, used in predict."""
    x = waves(112, 10)
    odd = torch.cat([x[80:96], 4 * torch.randn(16, 10)])
    model, losses = SeriesAnomaly(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(Rows(x[:80]), 8), DataLoader(Rows(x[80:]), 8))
    return {
        "losses": losses.values,
        "threshold": model.threshold,
        "flags": trainer.predict(model, DataLoader(Rows(odd), 8)),
    }


# Signals


def mel_filters(bands: int, bins: int, rate: int = 8000) -> Tensor:
    """Triangles on the mel scale, as numpy makes them."""
    top = 2595 * np.log10(1 + rate / 2 / 700)
    hertz = 700 * (10 ** (np.linspace(0, top, bands + 2) / 2595) - 1)
    places = hertz / (rate / 2) * (bins - 1)
    grid = np.arange(bins)[None]
    left, center, right = places[:-2, None], places[1:-1, None], places[2:, None]
    up, down = (grid - left) / (center - left), (right - grid) / (right - center)
    return torch.tensor(np.maximum(0, np.minimum(up, down)), dtype=torch.float32)


class KeywordSpotter(pl.LightningModule):
    """Log-mel features by stft, SpecAugment masks in training, a depthwise-separable ConvNet."""

    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(32), persistent=False)
        self.register_buffer("mel", mel_filters(8, 17), persistent=False)
        self.net = nn.Sequential(
            nn.BatchNorm2d(1),
            nn.Conv2d(1, 8, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.Conv2d(8, 12, 1),
            nn.BatchNorm2d(12),
            nn.ReLU6(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(12, 3),
        )

    def features(self, wave):
        spectrum = torch.stft(wave, 32, 16, window=self.window, return_complex=True).abs() ** 2
        return torch.log(self.mel @ spectrum + 1e-6)

    def augment(self, x):
        b, f, t = x.shape
        for axis, size, width in ((1, f, 2), (2, t, 3)):
            start = torch.randint(0, size - width, (b, 1), device=x.device)
            places = torch.arange(size, device=x.device)
            mask = (places >= start) & (places < start + width)
            x = x.masked_fill(mask.unsqueeze(3 - axis), 0.0)
        return x

    def forward(self, wave):
        x = self.features(wave)
        if self.training:
            x = self.augment(x)
        return self.net(x.unsqueeze(1))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        return self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def keyword_spotting(make_trainer) -> Any:
    """stft, mel filters in a buffer, SpecAugment, CyclicLR with momentum."""
    wave = waves(112, 160)
    label = wave.diff(dim=1).abs().mean(1).argsort().argsort() * 3 // 112
    data = TensorDataset(wave, label)
    model, losses = KeywordSpotter(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(
        model, DataLoader(Subset(data, range(80)), 8), DataLoader(Subset(data, range(80, 112)), 8)
    )
    group = trainer.optimizers[0].param_groups[0]
    return {
        "losses": losses.values,
        "metrics": trainer.callback_metrics,
        "rate": (group["lr"], group["momentum"]),
        "w": weights(model),
    }


class WaveNet(pl.LightningModule):
    """mu-law levels, gated dilated convolutions with skips."""

    def __init__(self, levels=32):
        super().__init__()
        self.levels = levels
        self.embedding = nn.Embedding(levels, 8)
        self.gated = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=d) for d in (1, 2, 4))
        self.skips = nn.ModuleList(nn.Conv1d(8, 12, 1) for _ in range(3))
        self.out = nn.Sequential(nn.ReLU(), nn.Conv1d(12, levels, 1))

    def mu_law(self, x):
        mu = self.levels - 1
        y = x.clamp(-1, 1).sign() * torch.log1p(mu * x.clamp(-1, 1).abs()) / math.log1p(mu)
        return ((y + 1) / 2 * mu + 0.5).long()

    def training_step(self, batch, batch_idx):
        codes = self.mu_law(batch)
        h, total = self.embedding(codes[:, :-1]).transpose(1, 2), 0
        for conv, skip in zip(self.gated, self.skips, strict=True):
            a, b = conv(F.pad(h, (conv.dilation[0], 0))).chunk(2, 1)
            z = a.tanh() * b.sigmoid()
            total, h = total + skip(z), h + z
        loss = F.cross_entropy(self.out(total), codes[:, 1:])
        self.log("nats", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.log("after_clipping", max_gradient(self))


def max_gradient(module: nn.Module) -> Tensor:
    return torch.stack([p.grad.abs().max() for p in module.parameters()]).max()


def mu_law_wavenet(make_trainer) -> Any:
    """WaveNet on mu-law levels, gradients clipped by value in an overridden hook."""
    model, losses = WaveNet(), Losses()
    trainer = make_trainer(
        max_epochs=2, callbacks=[losses], gradient_clip_val=0.02, gradient_clip_algorithm="value"
    )
    trainer.fit(model, DataLoader(Rows(waves(80, 24) / 3), batch_size=8))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class SignalDenoiser(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv1d(1, 8, 4, 2, 1, padding_mode="reflect"), nn.InstanceNorm1d(8, affine=True)
        )
        self.up = nn.ConvTranspose1d(8, 1, 4, 2, 1)
        self.act = nn.PReLU(8)
        self.snr = torchmetrics.audio.SignalNoiseRatio()

    def forward(self, x):
        return self.up(self.act(self.down(x.unsqueeze(1)))).squeeze(1)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch + 0.3 * torch.randn_like(batch), batch

    def training_step(self, batch, batch_idx):
        noisy, clean = batch
        out = self(noisy)
        spectral = (torch.fft.rfft(out).abs() - torch.fft.rfft(clean).abs()).abs().mean()
        self.log("snr", self.snr(out.detach(), clean), on_step=True, on_epoch=False)
        return F.l1_loss(out, clean) + 0.1 * spectral

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=20, power=2.0)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def lr_scheduler_step(self, scheduler, metric):
        if self.global_step > 4:
            scheduler.step()


def signal_denoiser(make_trainer) -> Any:
    """Noise added after transfer, a spectral loss, lr_scheduler_step that waits."""
    model, losses = SignalDenoiser(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(Rows(waves(80, 32)), batch_size=8, shuffle=True))
    return {
        "losses": losses.values,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "metrics": trainer.callback_metrics,
        "w": weights(model),
    }


class ConformerBlock(nn.Module):
    def __init__(self, width=12, kernel=5):
        super().__init__()
        self.ff = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 24), nn.SiLU(), nn.Linear(24, width)
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, add_zero_attn=True)
        self.pointwise = nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Conv1d(width, width, kernel, padding="same", groups=width)
        self.bn, self.project = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)

    def forward(self, x):
        x = x + 0.5 * self.ff[0](x)
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        c = F.glu(self.pointwise(x.transpose(1, 2)), dim=1)
        x = x + self.project(F.silu(self.bn(self.depthwise(c)))).transpose(1, 2)
        return x + 0.5 * self.ff[1](x)


class Conformer(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(1, 12, 4, stride=4)
        self.block = ConformerBlock()
        self.head = nn.Linear(12, 5)
        self.loss = nn.BCEWithLogitsLoss(reduction="none")
        self.f1 = torchmetrics.classification.MultilabelF1Score(5)

    def training_step(self, batch, batch_idx):
        wave, y = batch
        logits = self.head(self.block(self.stem(wave.unsqueeze(1)).transpose(1, 2)).mean(1))
        self.f1(logits, y.int())
        self.log("f1", self.f1, on_step=False, on_epoch=True)
        return self.loss(logits, y).sum(1).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-3, maximize=False, fused=True)


def conformer_multilabel(make_trainer) -> Any:
    """A conformer block on signals; several labels at once; fused AdamW."""
    model, losses = Conformer(), Losses()
    data = TensorDataset(waves(80, 40), (torch.rand(80, 5) < 0.3).float())
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(data, batch_size=8))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


# Generation, adapters, preferences


class SentenceVAE(pl.LightningModule):
    """Bowman's VAE: word dropout, the weight of the KL grows with the epoch."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(41, 10)
        self.encoder, self.decoder = nn.GRU(10, 12, batch_first=True), nn.GRU(14, 12)
        self.to_stats, self.head = nn.Linear(12, 8), nn.Linear(12, 40)

    def training_step(self, batch, batch_idx):
        (words,) = batch
        mu, log_var = self.to_stats(self.encoder(self.embedding(words))[1][-1]).chunk(2, -1)
        z = mu + torch.randn_like(mu) * (0.5 * log_var).exp()
        dropped = torch.where(torch.rand(words.shape) < 0.3, 40, words)[:, :-1]
        x = torch.cat([self.embedding(dropped), z[:, None].expand(-1, dropped.shape[1], -1)], -1)
        logits = self.head(self.decoder(x.transpose(0, 1))[0])
        reconstruction = F.cross_entropy(logits.permute(1, 2, 0), words[:, 1:])
        kl = -0.5 * (1 + log_var - mu**2 - log_var.exp()).sum(1).mean()
        beta = min(1.0, self.current_epoch / 2)
        self.log_dict({"kl": kl, "reconstruction": reconstruction, "beta": beta})
        return reconstruction + beta * kl

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def sentence_vae_epoch_annealing(make_trainer) -> Any:
    """A VAE of sentences whose KL weight is min(1, current_epoch / 2)."""
    loader = DataLoader(TensorDataset(torch.randint(0, 40, (64, 8))), batch_size=8)
    model, losses = SentenceVAE(), Losses()
    trainer = make_trainer(max_epochs=3, callbacks=[losses])
    trainer.fit(model, loader)
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class AnnealedSentenceVAE(SentenceVAE):
    """The same, the weight in a buffer that a hook fills."""

    def __init__(self):
        super().__init__()
        self.register_buffer("beta", torch.tensor(0.0))

    def on_train_batch_start(self, batch, batch_idx):
        self.beta.fill_(min(1.0, self.trainer.global_step / 16))

    def training_step(self, batch, batch_idx):
        words = batch[0]
        stats = self.to_stats(self.encoder(self.embedding(words))[1][-1])
        mu, sigma = stats[:, :4], F.softplus(stats[:, 4:]) + 1e-3
        posterior = torch.distributions.Normal(mu, sigma)
        prior = torch.distributions.Normal(torch.zeros_like(mu), torch.ones_like(sigma))
        z = posterior.rsample()
        x = torch.cat([self.embedding(words[:, :-1]), z[:, None].expand(-1, 7, -1)], -1)
        logits = self.head(self.decoder(x.transpose(0, 1))[0]).permute(1, 2, 0)
        kl = torch.distributions.kl_divergence(posterior, prior).sum(1).mean()
        loss = F.cross_entropy(logits, words[:, 1:]) + self.beta * kl
        self.log("beta", self.beta, on_step=True)
        return {"loss": loss, "kl": kl.detach()}


def sentence_vae_step_annealing(make_trainer) -> Any:
    """A VAE with torch.distributions whose KL weight grows by the step, in a buffer."""
    loader = DataLoader(TensorDataset(torch.randint(0, 40, (80, 8))), batch_size=8)
    model, kls = AnnealedSentenceVAE(), []
    keep = LambdaCallback(on_train_batch_end=lambda t, m, out, b, i: kls.append(float(out["kl"])))
    losses = Losses()
    make_trainer(max_epochs=2, callbacks=[losses, keep]).fit(model, loader)
    return {"losses": losses.values, "kl": kls, "w": weights(model)}


class GumbelTextGAN(pl.LightningModule):
    """Words by straight-through Gumbel softmax; two optimizers by hand."""

    def __init__(self, vocab=16, length=5):
        super().__init__()
        self.automatic_optimization = False
        self.vocab, self.length = vocab, length
        self.generator = nn.Sequential(
            nn.Linear(8, 24), nn.LeakyReLU(0.2), nn.Linear(24, vocab * length)
        )
        self.critic = nn.Sequential(
            nn.Flatten(), nn.Linear(vocab * length, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1)
        )
        self.history: list[dict[str, float]] = []

    def sample(self, n):
        logits = self.generator(torch.randn(n, 8, device=self.device))
        return F.gumbel_softmax(logits.view(n, self.length, self.vocab), tau=0.8, hard=True)

    def training_step(self, batch, batch_idx):
        g_opt, d_opt = self.optimizers()
        real = F.one_hot(batch[0], self.vocab).float()
        fake = self.sample(len(real))
        self.toggle_optimizer(d_opt)
        d_loss = (
            F.relu(1 - self.critic(real)).mean() + F.relu(1 + self.critic(fake.detach())).mean()
        )
        d_opt.zero_grad()
        self.manual_backward(d_loss)
        self.clip_gradients(d_opt, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        d_opt.step()
        self.untoggle_optimizer(d_opt)
        self.toggle_optimizer(g_opt)
        g_loss = -self.critic(fake).mean()
        g_opt.zero_grad()
        self.manual_backward(g_loss)
        g_opt.step()
        self.untoggle_optimizer(g_opt)
        self.log_dict({"g": g_loss, "d": d_loss}, prog_bar=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        metrics = self.trainer.callback_metrics
        self.history.append({name: float(metrics[name]) for name in ("g", "d")})

    def on_train_epoch_end(self):
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        g = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
        d = torch.optim.Adam(self.critic.parameters(), lr=4e-3, betas=(0.5, 0.9))
        rates = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in (g, d)]
        return [g, d], rates


def gumbel_text_gan(make_trainer) -> Any:
    """A GAN of words by Gumbel softmax under manual optimization, schedulers stepped per epoch."""
    loader = DataLoader(TensorDataset(torch.randint(0, 8, (80, 5))), batch_size=8)
    model = GumbelTextGAN()
    trainer = make_trainer(max_epochs=2)
    trainer.fit(model, loader)
    return {
        "history": model.history,
        "lr": [o.param_groups[0]["lr"] for o in trainer.optimizers],
        "w": weights(model),
    }


class LowRank(nn.Module):
    """A frozen linear layer and a trained product of two thin matrices beside it."""

    def __init__(self, base: nn.Linear, rank=2, alpha=4.0, p=0.1):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.dropout, self.scale = nn.Dropout(p), alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * (self.dropout(x) @ self.a.T @ self.b.T)


class LoRAModel(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Embedding(50, 12), nn.Flatten(), nn.Linear(96, 24), nn.Tanh(), nn.Linear(24, 3)
        )
        for p in self.model.parameters():
            p.requires_grad = False
        for name, layer in list(self.model.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(self.model, name, LowRank(layer))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.model(batch[0]), batch[2])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        trained = filter(lambda p: p.requires_grad, self.parameters())
        return torch.optim.AdamW(trained, lr=2e-2)

    def on_save_checkpoint(self, checkpoint):
        wanted = {name for name, p in self.named_parameters() if p.requires_grad}
        checkpoint["state_dict"] = {
            k: v for k, v in checkpoint["state_dict"].items() if k in wanted
        }


def low_rank_adapters(make_trainer) -> Any:
    """LoRA around frozen layers; a checkpoint of the adapters alone, loaded with strict=False."""
    loader = DataLoader(TensorDataset(*sentences(160, 8, 50)), batch_size=16)
    model, losses = LoRAModel(), Losses()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(max_epochs=2, callbacks=[losses])
        trainer.fit(model, loader)
        path = Path(folder, "adapters.ckpt")
        trainer.save_checkpoint(path)
        saved = torch.load(path, weights_only=False)["state_dict"]
        fresh = LoRAModel()
        missing = fresh.load_state_dict(saved, strict=False).missing_keys
    return {"losses": losses.values, "saved": saved, "missing": missing, "w": weights(model)}


class MeanTeacherText(pl.LightningModule):
    """Labelled and unlabelled text together; the teacher is an average of the student."""

    def __init__(self, decay=0.9):
        super().__init__()
        self.save_hyperparameters()
        self.student = nn.Sequential(
            nn.EmbeddingBag(50, 12), nn.Dropout(0.2), nn.Linear(12, 3, bias=True)
        )
        self.teacher = copy.deepcopy(self.student)
        self.teacher.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        (words, _, y), unlabelled = batch["labelled"], batch["unlabelled"]
        supervised = F.cross_entropy(self.student(words), y)
        with torch.no_grad():
            target = self.teacher(unlabelled).softmax(-1)
        consistency = F.mse_loss(self.student(unlabelled).softmax(-1), target)
        self.log_dict({"ce": supervised, "consistency": consistency}, batch_size=len(words))
        return supervised + 2.0 * consistency

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for slow, fast in zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            ):
                slow.lerp_(fast, 1 - self.hparams.decay)

    def configure_optimizers(self):
        return torch.optim.Adam(self.student.parameters(), lr=1e-2)


def mean_teacher_two_loaders(make_trainer) -> Any:
    """CombinedLoader of labelled and unlabelled batches, the teacher updated on the host."""
    labelled = DataLoader(TensorDataset(*sentences(48, 8, 50)), batch_size=8, shuffle=True)
    unlabelled = DataLoader(Rows(torch.randint(1, 50, (160, 8))), batch_size=16)
    loaders = CombinedLoader({"labelled": labelled, "unlabelled": unlabelled}, "max_size_cycle")
    model, losses = MeanTeacherText(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, loaders)
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class DirectPreference(pl.LightningModule):
    """DPO: log-ratios to a frozen copy of the policy."""

    def __init__(self, beta=0.5):
        super().__init__()
        self.beta = beta
        self.policy = nn.ModuleDict(
            {
                "embed": nn.Embedding(30, 12),
                "rnn": nn.GRU(12, 12, batch_first=True),
                "head": nn.Linear(12, 30),
            }
        )
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    @staticmethod
    def log_prob(net, words):
        h, _ = net["rnn"](net["embed"](words[:, :-1]))
        picked = net["head"](h).log_softmax(-1).gather(2, words[:, 1:, None]).squeeze(2)
        return (picked * (words[:, 1:] != 0)).sum(1)

    def training_step(self, batch, batch_idx):
        both = torch.cat([batch["chosen"], batch["rejected"]])
        policy = self.log_prob(self.policy, both)
        with torch.no_grad():
            reference = self.log_prob(self.reference, both)
        chosen, rejected = (self.beta * (policy - reference)).chunk(2)
        self.log("margin", (chosen - rejected).mean())
        self.log("right", (chosen > rejected).float().mean(), on_step=False, on_epoch=True)
        return -F.logsigmoid(chosen - rejected).mean()

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.policy.parameters(), lr=3e-3)


def direct_preference_optimization(make_trainer) -> Any:
    """DPO with a frozen reference policy, dict batches with prompts as strings."""
    words = torch.randint(1, 30, (160, 7))
    items = [
        {"prompt": f"say {i}", "chosen": row.sort().values, "rejected": row}
        for i, row in enumerate(words)
    ]
    model, losses = DirectPreference(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, DataLoader(items, batch_size=16))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class ReinforcedCopy(pl.LightningModule):
    """REINFORCE with a moving baseline: sampled words are rewarded where they equal the input."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(12, 16), nn.ReLU(), nn.Linear(16, 12))
        self.register_buffer("baseline", torch.tensor(1 / 12))

    def training_step(self, batch, batch_idx):
        policy = torch.distributions.Categorical(logits=self.net(batch))
        words = policy.sample()
        reward = (words == batch).float()
        advantage = reward - self.baseline
        self.baseline.lerp_(reward.mean(), 0.1)
        self.log("reward", reward.mean(), on_step=True, on_epoch=True)
        entropy = policy.entropy().mean()
        return -(advantage * policy.log_prob(words)).mean() - 0.01 * entropy

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-2)


def reinforced_copying(make_trainer) -> Any:
    """A policy gradient with sampled words and a baseline in a buffer."""
    model, losses = ReinforcedCopy(), Losses()
    trainer = make_trainer(max_steps=20, callbacks=[losses], log_every_n_steps=1)
    trainer.fit(model, DataLoader(Rows(torch.randint(0, 12, (160, 6))), batch_size=8))
    return {"losses": losses.values, "metrics": trainer.callback_metrics, "w": weights(model)}


class RewardModel(pl.LightningModule):
    def __init__(self, margin: float = 0.2):
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.zeros(2, 8, dtype=torch.long)
        self.net = nn.Sequential(
            nn.Embedding(50, 8), nn.Flatten(), nn.GroupNorm(4, 64), nn.Linear(64, 1)
        )

    def forward(self, words):
        return self.net(words).squeeze(-1)

    def training_step(self, batch, batch_idx):
        better, worse = batch
        sign = torch.ones(len(better), device=self.device)
        loss = F.margin_ranking_loss(self(better), self(worse), sign, margin=self.hparams["margin"])
        self.log("loss", loss)
        return loss

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)
        with torch.no_grad():
            self.net[3].weight.clamp_(-0.2, 0.2)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def pairwise_reward_model(make_trainer) -> Any:
    """A ranking loss; optimizer_step overridden to clamp weights; accumulation by a scheduler."""
    words, _, _ = sentences(160, 8, 50)
    model, losses = RewardModel(), Losses()
    loader = DataLoader(TensorDataset(words, words.flip(0)), batch_size=16)
    phases = GradientAccumulationScheduler(scheduling={0: 1, 1: 2})
    trainer = make_trainer(max_epochs=2, callbacks=[losses, phases, Timer("00:01:00:00")])
    trainer.fit(model, loader)
    return {"losses": losses.values, "steps": trainer.global_step, "w": weights(model)}


class AlibiEncoder(pl.LightningModule):
    """Attention with linear biases; padded batches made by a collate function."""

    def __init__(self, heads=4, width=16):
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(128, width, padding_idx=0)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.head = nn.Linear(width, 2)
        self.bias_cache: dict[int, Tensor] = {}

    def bias(self, length):
        if length not in self.bias_cache:
            slopes = 2.0 ** -torch.arange(1, self.heads + 1)
            distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
            self.bias_cache[length] = -slopes[:, None, None] * distance
        return self.bias_cache[length]

    def forward(self, text):
        b, t = text.shape
        x = self.norm(self.embedding(text))
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mask = self.bias(t).masked_fill((text == 0)[:, None, None], -1e9)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
        return self.head(x[:, 0])

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch["text"]), batch["label"])
        self.log("loss", loss)
        return loss

    def predict_step(self, batch, batch_idx):
        return list(zip(batch["name"], self(batch["text"]).argmax(-1), strict=True))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-3, amsgrad=True)


def pad_to_24(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Cut each text at a length of its own, then pad all to 24."""
    cut = [{**item, "text": item["text"][: 12 + item["label"] * 4]} for item in items]
    padded = [{**c, "text": F.pad(c["text"], (0, 24 - len(c["text"])))} for c in cut]
    return default_collate(padded)


def alibi_with_collate(make_trainer) -> Any:
    """ALiBi biases cached in a dict on first use, a collate_fn that pads, pairs from predict."""
    loader = DataLoader(Snippets(), batch_size=16, shuffle=True, collate_fn=pad_to_24)
    model, losses = AlibiEncoder(), Losses()
    trainer = make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, loader)
    rest = DataLoader(Snippets(), batch_size=16, collate_fn=pad_to_24)
    return {"losses": losses.values, "predictions": trainer.predict(model, rest)}
