"""Beside a trace other threads read the real weights and the real functions, and may trace too."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fulgurite
from fulgurite.backends.csx.capture.scope import BeforeTrace
from fulgurite.backends.csx.plugins.host_optimizers import ZeroGradObserver
from fulgurite.backends.csx.state import fake_swap

pytestmark = pytest.mark.fits


class Slow(pl.LightningModule):
    """A step that runs for a while where it is traced."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 2))
        self.seconds, self.traced = seconds, threading.Event()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        self.traced.set()
        time.sleep(self.seconds)
        return nn.functional.cross_entropy(out, y) * math.sqrt(4.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 4, generator=generator)
    return DataLoader(TensorDataset(x, torch.arange(32) % 2), 8)


def fit(module: Slow, audit: bool = False) -> list[Tensor]:
    make_trainer(True, backend={"audit": audit}, max_epochs=2).fit(module, data())
    return [parameter.detach().clone() for parameter in module.parameters()]


def saved(module: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    return file.getvalue()


READS: dict[str, Callable[[Slow], Any]] = {
    "state_dict": lambda module: module.state_dict()["net.0.weight"].tolist(),
    "item": lambda module: module.net[0].weight.sum().item(),
    "a composite": lambda module: module.net[0].weight.norm().item(),
    "clone": lambda module: module.net[0].weight.detach().clone().tolist(),
    "forward": lambda module: module.net[3](torch.ones(1, 8)).tolist(),
    "saved": lambda module: torch.load(io.BytesIO(saved(module)))["net.1.running_mean"].tolist(),
    "a function": lambda module: torch.cat([p.flatten() for p in module.parameters()]).tolist(),
    "deepcopy": lambda module: copy.deepcopy(module.net)[0].weight.tolist(),
    "numpy": lambda module: module.net[0].weight.detach().numpy().tolist(),
    "a buffer's value": lambda module: float(module.net[1].running_mean[0]),
    "locked": lambda module: _locked(lambda: copy.deepcopy(module.net)[0].weight.tolist()),
}


def _locked(read: Callable[[], Any]) -> Any:
    with fulgurite.trace_lock:
        return read()


class Other:
    """Calls a function in another thread, once a module's step is traced."""

    def __init__(self, module: Slow, call: Callable[[], Any]) -> None:
        self._module, self._call = module, call
        self.result: Any = None
        self.raised: Exception | None = None

    def _run(self) -> None:
        assert self._module.traced.wait(60)
        try:
            self.result = self._call()
        except Exception as error:
            self.raised = error

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        yield
        thread.join()


@pytest.mark.parametrize("name", READS)
def test_a_thread_that_reads_weights_beside_a_trace_sees_real_ones(name: str) -> None:
    module, read = Slow(0.3), READS[name]
    before, other = read(module), Other(module, lambda: read(module))
    trainer = make_trainer(True, backend={"validate_only": True}, max_steps=1)
    with other.running():
        trainer.fit(module, data())
    assert other.raised is None
    assert other.result == before


def test_patched_functions_are_the_originals_in_other_threads() -> None:
    module = Slow(0.3)
    seen: dict[str, Any] = {}

    def look() -> None:
        seen["inside"] = math.sqrt is not ORIGINALS["sqrt"]
        weight = nn.Parameter(torch.ones(4))
        (weight * weight).sum().backward()
        seen["grad"] = weight.grad
        seen["linear"] = nn.Linear(4, 1)(torch.ones(2, 4)).shape
        seen["sqrt"] = math.sqrt(16.0)
        seen["seed"] = torch.Generator().manual_seed(3).initial_seed()
        seen["draw"] = 0 <= random.random() < 1 and time.time() > 0

    other = Other(module, look)
    with other.running():
        fit(module)
    assert other.raised is None
    assert seen.pop("inside"), "the step was not traced while the thread looked"
    assert seen.pop("grad").tolist() == [2.0] * 4
    assert seen == {"linear": (2, 1), "sqrt": 4.0, "seed": 3, "draw": True}
    assert math.sqrt is ORIGINALS["sqrt"]


ORIGINALS = {"sqrt": math.sqrt}  # a global name would be rebound


@pytest.mark.parametrize("audit", [False, True])
def test_fits_in_two_threads_give_what_each_gives_alone(audit: bool) -> None:
    alone, found = fit(Slow(), audit), []
    modules = [Slow(0.05) for _ in range(2)]  # here: threads would draw weights from one stream
    threads = [
        threading.Thread(target=lambda module=module: found.append(fit(module, audit)))
        for module in modules
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, alone, strict=True))
    assert math.sqrt is ORIGINALS["sqrt"]
    assert nn.Module.__getattribute__ is object.__getattribute__


def test_a_fit_that_begins_beside_a_trace_takes_nothing_of_it_for_torchs() -> None:
    module, before = Slow(0.3), (torch.optim.Optimizer.zero_grad, nn.Module.zero_grad)
    other = Other(module, lambda: ZeroGradObserver(lambda: None))
    with other.running():
        fit(module)
    other.result.remove()
    assert (torch.optim.Optimizer.zero_grad, nn.Module.zero_grad) == before


def test_a_step_that_waits_for_a_thread_which_reads_its_weights_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fake_swap, "PATIENCE_S", 0.2)

    class Helped(Slow):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            other = Other(self, lambda: self.net[0].weight.sum().item())
            self.traced.set()
            with other.running():
                pass
            assert other.raised is not None
            raise other.raised

    with pytest.raises(RuntimeError, match=r"compute in the step's own thread. Else take\s+fulgur"):
        fit(Helped())


def test_what_other_threads_draw_beside_a_trace_does_not_come_again() -> None:
    scope = Scope()
    before = BeforeTrace(scope)  # type: ignore[arg-type]
    drawn: list[float] = []
    stop = threading.Event()
    thread = threading.Thread(target=lambda: (drawn.append(random.random()), stop.wait(60)))
    thread.start()
    while not drawn:
        time.sleep(0.01)
    before.restore()
    stop.set()
    thread.join()
    assert random.random() != drawn[0]


class Scope:
    """Nothing to put back but random states."""

    def objects(self) -> Iterator[object]:
        return iter(())

    def trees(self) -> Any:
        return self

    def restore(self) -> None:
        """Nothing."""


def test_a_second_trace_prints_nothing_and_other_threads_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Prints(Slow):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            print("step", file=sys.stdout)
            return super().training_step(batch, batch_idx)

    module = Prints(0.2)
    other = Other(module, lambda: [print("other") or time.sleep(0.02) for _ in range(40)])
    with other.running():
        fit(module, audit=True)
    printed = capsys.readouterr().out.split()
    assert printed.count("step") == 1
    assert printed.count("other") == 40
