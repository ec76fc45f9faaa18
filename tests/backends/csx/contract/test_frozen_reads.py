"""Python values that a step reads are frozen, with one warning that names the line."""

from __future__ import annotations

import random
import secrets
import time
import warnings
from random import random as draw
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from harness import assert_same_run, both, fit
from lightning.pytorch.loggers import CSVLogger
from models import GAN, Classifier, loader, mlp
from numpy.random import rand
from scipy import stats
from torch import Tensor, nn

from fulgurite.backends.csx.contract import frozen_reads as frozen
from fulgurite.backends.csx.contract.frozen_reads import FrozenValueWarning

pytestmark = pytest.mark.fits

OWN = random.Random(3)
SYSTEM = random.SystemRandom()


class Reads(Classifier):
    """``read`` looks at Python values in the step; a learning rate that falls on every step."""

    def __init__(self, read: Any) -> None:
        super().__init__(mlp())
        self.read = read

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss * self.read(self, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def warnings_of(read: Any, **options: Any) -> list[warnings.WarningMessage]:
    """The warnings of a fit with ``read`` in its step; it has two entry points."""
    frozen._SHOWN.clear()
    options = {"accumulate_grad_batches": 2, "limit_train_batches": 4, **options}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", FrozenValueWarning)
        fit(lambda: Reads(read), lambda: (loader(),), static=True, **options)
    return [warning for warning in seen if warning.category is FrozenValueWarning]


def looped(module: Any, batch_idx: int) -> float:
    return 1.0 + len(range(batch_idx))


def step_count(module: Any, batch_idx: int) -> float:
    return 1.0 + float(module.global_step)


def epoch(module: Any, batch_idx: int) -> float:
    return 1.0 + int(module.current_epoch / 2)


def trainer_s_epoch(module: Any, batch_idx: int) -> float:
    return 1.0 + len(f"{module.trainer.current_epoch}")


def metrics(module: Any, batch_idx: int) -> float:
    return 1.0 + len(module.trainer.callback_metrics)


def logged(module: Any, batch_idx: int) -> float:
    return 1.0 + len(module.trainer.logged_metrics)


def shown(module: Any, batch_idx: int) -> float:
    return 1.0 + len(module.trainer.progress_bar_metrics)


def rate(module: Any, batch_idx: int) -> float:
    return float(module.lr_schedulers().get_last_lr()[0])


def clock(module: Any, batch_idx: int) -> float:
    return 1.0 + 0 * time.time()


def clock_by_name(module: Any, batch_idx: int) -> float:
    return 1.0 + 0 * perf_counter()


def nanoseconds(module: Any, batch_idx: int) -> float:
    return 1.0 + 0 * time.monotonic_ns()


def chance(module: Any, batch_idx: int) -> float:
    return 1.0 + random.randint(3, 3)


def chance_by_name(module: Any, batch_idx: int) -> float:
    return 1.0 + draw()


def own_generator(module: Any, batch_idx: int) -> float:
    return OWN.uniform(2.0, 2.0)


def numpys(module: Any, batch_idx: int) -> float:
    return 1.0 + np.random.randint(5, 6)


def numpys_beta(module: Any, batch_idx: int) -> float:
    return np.random.beta(0.4, 0.4)


def numpys_by_name(module: Any, batch_idx: int) -> float:
    return 1.0 + rand(2).sum()


def numpys_new_generator(module: Any, batch_idx: int) -> float:
    return 1.0 + float(np.random.default_rng(0).random())


def systems_generator(module: Any, batch_idx: int) -> float:
    return 1.0 + 0 * SYSTEM.random()


def secret(module: Any, batch_idx: int) -> float:
    return 1.0 + secrets.randbelow(1)


def scipys(module: Any, batch_idx: int) -> float:
    return 1.0 + 0 * stats.norm.rvs()


COUNT, DRAW = (
    "Use it in arithmetic and comparisons alone",
    "Use torch.rand, torch.randint or torch.randperm",
)
READS = [
    (looped, "batch_idx was read", "0", COUNT),
    (step_count, "global_step was read", "0", COUNT),
    (epoch, "current_epoch was read", "0", "or a buffer that on_train_epoch_start sets"),
    (trainer_s_epoch, "current_epoch was read", "0", COUNT),
    (metrics, "callback_metrics was read", "a dict", "Use a host hook such as on_train_batch_end"),
    (logged, "logged_metrics was read", "a dict", "Use a host hook"),
    (shown, "progress_bar_metrics was read", "a dict", "Use a host hook"),
    (rate, "get_last_lr() was called", "0.01", 'Use optimizer.param_groups[0]["lr"]'),
    (clock, "time.time() was called", "1", "Use on_train_batch_start and on_train_batch_end"),
    (clock_by_name, "time.perf_counter() was called", "", "Use on_train_batch_start"),
    (nanoseconds, "time.monotonic_ns() was called", "", "Use on_train_batch_start"),
    (chance, "random.randint() was called", "3", DRAW),
    (chance_by_name, "random.random() was called", "0.", DRAW),
    (own_generator, "random.Random.uniform() was called", "2.0", "Use torch.empty(size).uniform_("),
    (
        numpys_beta,
        "numpy.random.beta() was called",
        "",  # one in 66 is below 1e-4, and not written as 0.
        "Use torch.distributions.Beta(a, b).sample()",
    ),
    (numpys, "numpy.random.randint() was called", "5", DRAW),
    (numpys_by_name, "numpy.random.rand() was called", "a ndarray", DRAW),
    (numpys_new_generator, "numpy.random.default_rng() was called", "a Generator", DRAW),
    (systems_generator, "random.SystemRandom.random() was called", "0.", DRAW),
    (secret, "secrets.randbelow() was called", "0", DRAW),
    (scipys, "scipy.stats.rv_continuous.rvs() was called", "", DRAW),
]


@pytest.mark.parametrize(
    ("read", "done", "value", "remedy"), READS, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_read_warns_with_line_value_and_remedy(
    read: Any, done: str, value: str, remedy: str
) -> None:
    [warning] = warnings_of(read)
    text = str(warning.message)
    assert text.startswith(f"{done} while the step was traced; the program keeps its value")
    assert f"its value, {value}" in text
    assert f"{remedy}" in text
    assert warning.filename == __file__
    assert warning.lineno == read.__code__.co_firstlineno + 1


def test_using_a_logger_warns_on_that_line_alone(tmp_path: Any) -> None:
    def logs(module: Any, batch_idx: int) -> float:
        module.logger.log_metrics({"a": 1.0})
        module.trainer.loggers[0].log_metrics({"a": 2.0})
        return 1.0

    first, second = warnings_of(logs, logger=CSVLogger(tmp_path))
    assert str(first.message).startswith("logger was read while the step was traced")
    assert 'Use self.log("name", value); or fulgurite.step_closure' in str(first.message)
    assert str(second.message).startswith("loggers was read")
    start = logs.__code__.co_firstlineno
    assert [first.lineno, second.lineno] == [start + 1, start + 2]


def test_nothing_warns_where_nothing_is_read() -> None:
    fit(lambda: Classifier(mlp()), lambda: (loader(),), static=True)  # warnings are errors here
    fit(GAN, lambda: (loader(),), static=True)


def test_only_the_users_own_code_warns() -> None:
    library = compile(
        "import time\ndef now(): return time.time()", "site-packages/clock.py", "exec"
    )
    names: dict[str, Any] = {"__name__": "clock"}
    exec(library, names)
    names["now"].__code__ = names["now"].__code__.replace(co_filename="/x/site-packages/clock.py")
    assert warnings_of(lambda module, _: 1.0 + 0 * names["now"]()) == []


def test_functions_are_the_librarys_own_again_after_the_trace() -> None:
    before = time.time, perf_counter, random.random, draw, np.random.rand, rand
    warnings_of(clock)
    assert (time.time, perf_counter, random.random, draw, np.random.rand, rand) == before
    assert "random" not in vars(random.Random)


# -- what the warnings advise: the same numbers as eager Lightning ---------------------------------


class EpochInABuffer(Reads):
    """Remedy of ``current_epoch`` and of the metric dicts."""

    def __init__(self) -> None:
        super().__init__(lambda module, _: module.beta)
        self.register_buffer("beta", torch.tensor(1.0))

    def on_train_epoch_start(self) -> None:
        self.beta.fill_(1.0 / (1 + self.current_epoch))


TWINS = {
    "a buffer that a hook sets": EpochInABuffer,
    "the group's learning rate": lambda: Reads(
        lambda module, _: 100 * module.optimizers().param_groups[0]["lr"]
    ),
    "torch's random numbers": lambda: Reads(lambda module, _: torch.rand(()) + 1),
}


@pytest.mark.numbers
@pytest.mark.parametrize("make", TWINS.values(), ids=TWINS)
def test_the_corrected_twin_equals_stock(make: Any) -> None:
    assert_same_run(*both(make, lambda: (loader(64),), max_epochs=3))
