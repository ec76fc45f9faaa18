"""Python values that a step reads are frozen, with one warning that names the line."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from harness import fit
from models import GAN, Classifier, loader, mlp
from torch import Tensor, nn

from fulgurite.backends.csx import frozen
from fulgurite.backends.csx.frozen import FrozenValueWarning


class Reads(Classifier):
    """``read`` looks at Python values in the step."""

    def __init__(self, read: Any) -> None:
        super().__init__(mlp())
        self.read = read

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        return loss * self.read(self, batch_idx)


def branch(module: Any, batch_idx: int) -> float:
    return 2.0 if batch_idx % 2 == 0 else 1.0


def arithmetic(module: Any, batch_idx: int) -> Any:
    return torch.ones(()) * batch_idx + 1


def looped(module: Any, batch_idx: int) -> float:
    return 1.0 + len(range(batch_idx))


def step_count(module: Any, batch_idx: int) -> float:
    return 1.0 + module.global_step


def epoch(module: Any, batch_idx: int) -> float:
    return 1.0 + module.current_epoch


def trainer_s_epoch(module: Any, batch_idx: int) -> float:
    return 1.0 + module.trainer.current_epoch


def last(module: Any, batch_idx: int) -> float:
    return 1.0 + module.trainer.is_last_batch


READS = [
    (branch, "batch_idx", "0"),
    (arithmetic, "batch_idx", "0"),
    (looped, "batch_idx", "0"),
    (step_count, "global_step", "0"),
    (epoch, "current_epoch", "0"),
    (trainer_s_epoch, "current_epoch", "0"),
    (last, "is_last_batch", "False"),
]


@pytest.mark.parametrize(("read", "name", "value"), READS, ids=lambda v: getattr(v, "__name__", ""))
def test_a_read_warns_with_line_value_and_remedy(read: Any, name: str, value: str) -> None:
    frozen._SHOWN.clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", FrozenValueWarning)
        fit(lambda: Reads(read), lambda: (loader(),), static=True, accumulate_grad_batches=2)
    [warning] = [w for w in seen if w.category is FrozenValueWarning]
    text = str(warning.message)
    assert text.startswith(f"{name} was read while the step was traced")
    assert f"its value, {value}, in" in text
    assert "Use " in text
    assert warning.filename == __file__
    assert warning.lineno == read.__code__.co_firstlineno + 1


def test_nothing_warns_where_nothing_is_read() -> None:
    fit(lambda: Classifier(mlp()), lambda: (loader(),), static=True)  # warnings are errors here
    fit(GAN, lambda: (loader(),), static=True)


def test_a_logged_index_is_its_first_value() -> None:
    class Logs(Reads):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("index", batch_idx)
            return super().training_step(batch, batch_idx)

    frozen._SHOWN.clear()
    with pytest.warns(FrozenValueWarning, match="batch_idx was read"):
        run = fit(
            lambda: Logs(lambda *_: 1.0), lambda: (loader(),), static=True, limit_train_batches=3
        )
    assert [metrics["index"] for metrics in run.metrics] == [0.0] * 3
