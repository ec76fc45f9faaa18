"""After a CSX fit a module is as after a stock fit: exported, copied and loaded alike."""

from __future__ import annotations

import copy
import functools
import io
import operator
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_close, make_trainer
from models import CLASSES, loader
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from fulgurite.errors import GradientNotKept

pytestmark = pytest.mark.numbers


class Net(pl.LightningModule):
    """BatchNorm and dropout, a metric, and hyperparameters that a checkpoint brings back."""

    def __init__(self, width: int = 12, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(8, width, bias=False),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(width, CLASSES),
        )
        self.accuracy = MulticlassAccuracy(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        self.log("accuracy", self.accuracy(logits, batch[1]))
        return nn.functional.cross_entropy(logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


X = torch.randn(5, 8, generator=torch.Generator().manual_seed(4))


@functools.cache
def fitted(static: bool, validates: bool = True) -> tuple[Net, bytes]:
    """A module after a fit, and the checkpoint of its end.

    A validation clears the gradients; without one those of the last step stay.
    """
    torch.manual_seed(0)
    module = Net(width=20)
    trainer = make_trainer(static, max_epochs=2)
    torch.manual_seed(7)
    trainer.fit(module, loader(160), loader(32) if validates else None)
    file = io.BytesIO()
    torch.save(trainer._checkpoint_connector.dump_checkpoint(), file)
    return module.eval(), file.getvalue()


def exported(module: Net, folder: Path) -> Any:
    program = torch.export.export(module, (X,))
    return program.module()(X), program.graph_module.code


def scripted(module: Net, folder: Path) -> Any:
    found = module.to_torchscript(folder / "script.pt")
    return torch.jit.load(folder / "script.pt")(X), found.net.code


def traced(module: Net, folder: Path) -> Any:
    found = module.to_torchscript(method="trace", example_inputs=X)
    return found(X), found.code


def onnx(module: Net, folder: Path) -> Any:
    pytest.importorskip("onnxscript", reason="needs onnx and onnxscript")
    reference = pytest.importorskip("onnx.reference", reason="needs onnx and onnxscript")
    module.to_onnx(folder / "net.onnx", X, dynamo=True, verbose=False)
    model = reference.ReferenceEvaluator(str(folder / "net.onnx"))
    [result] = model.run(None, {model.input_names[0]: X.numpy()})
    return torch.from_numpy(result), [node.op_type for node in model.proto_.graph.node]


def copied(module: Net, folder: Path) -> Any:
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.net[0].weight.zero_()
    assert not torch.equal(other(X), module(X))
    other.load_state_dict(module.state_dict())
    return other(X), sorted(vars(other))


def pickled(module: Net, folder: Path) -> Any:
    torch.save(module, folder / "module.pt")
    other = torch.load(folder / "module.pt", weights_only=False)
    return other(X), sorted(vars(other))


def trained_on(module: Net, folder: Path) -> Any:
    """By hand, in eager PyTorch."""
    other = copy.deepcopy(module).train()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    torch.manual_seed(3)
    optimizer.zero_grad()
    nn.functional.cross_entropy(other(X), torch.arange(5) % CLASSES).backward()
    optimizer.step()
    return other.eval()(X), [name for name, p in other.named_parameters() if p.grad is not None]


def described(module: Net, folder: Path) -> Any:
    hooks = [name for name in vars(module.net[0]) if name.endswith("_hooks")]
    told = [
        [(name, p.requires_grad, p.is_leaf) for name, p in module.named_parameters()],
        [(name, one.training) for name, one in module.named_modules()],
        [name for name, _ in module.named_buffers()],
        sorted(module.state_dict()),
        [(name, len(getattr(module.net[0], name))) for name in hooks],
    ]
    return module(X), told


def by_compiler(module: Net, folder: Path) -> Any:
    return torch.compile(module, backend="aot_eager")(X), None


WAYS: list[Callable[[Net, Path], Any]] = [
    *(exported, scripted, traced, onnx, copied, pickled, trained_on, described, by_compiler)
]


@pytest.mark.parametrize("validates", [True, False], ids=["cleared", "gradients"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_fitted_module_gives_what_it_gives_after_stock(
    way: Callable[[Net, Path], Any], validates: bool, tmp_path: Path
) -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript, onnx
    warnings.filterwarnings("ignore", message="`LightningModule.to_torchscript` has been")
    warnings.filterwarnings("ignore", message="`torch.jit.*is deprecated")  # since torch 2.15
    for folder in ("ours", "stock"):
        (tmp_path / folder).mkdir()
    (ours, _), (stock, _) = fitted(True, validates), fitted(False, validates)
    (mine, what), (theirs, wanted) = way(ours, tmp_path / "ours"), way(stock, tmp_path / "stock")
    assert_close(mine.detach(), theirs.detach(), 1e-4)
    assert what == wanted
    if way is not trained_on:
        assert_close(mine.detach(), ours(X).detach(), 1e-6)


def test_gradients_after_a_fit() -> None:
    """After a validation there are none; else those of the last step, which CSX keeps if asked."""
    gradient = operator.attrgetter("grad")  # code that calls fit and names it keeps them
    for static in (True, False):
        assert all(gradient(p) is None for p in fitted(static, True)[0].parameters())
    ours, stock = fitted(True, False)[0], fitted(False, False)[0]
    assert all(gradient(p) is not None for p in stock.parameters())
    with pytest.raises(GradientNotKept, match="grad"):
        float(gradient(next(ours.parameters())).sum())


def test_load_from_checkpoint_gives_module_and_hyperparameters_of_stock(tmp_path: Path) -> None:
    found = []
    for static in (True, False):
        module, checkpoint = fitted(static)
        (tmp_path / "one.ckpt").write_bytes(checkpoint)
        loaded = Net.load_from_checkpoint(tmp_path / "one.ckpt", weights_only=True)
        assert torch.equal(loaded.eval()(X), module(X))
        again = Net.load_from_checkpoint(tmp_path / "one.ckpt", weights_only=True, lr=1.0)
        found.append((loaded, dict(loaded.hparams), dict(again.hparams)))
    (ours, *mine), (stock, *theirs) = found
    assert mine == theirs == [{"width": 20, "lr": 0.05}, {"width": 20, "lr": 1.0}]
    assert_close(ours.state_dict(), stock.state_dict(), 2e-5)
