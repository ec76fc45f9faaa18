"""``fulgurite.global_step()``: the number of optimizer steps, in programs and eagerly."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import QUIET, Recorder, Run, assert_same_run, csx, numbers
from models import Classifier, loader, mlp
from torch import Tensor, nn

import fulgurite
from fulgurite.backends import reset_backend

pytestmark = pytest.mark.fits


class Warm(Classifier):
    """The loss warms up over four optimizer steps; validation uses the count too."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        step = fulgurite.global_step()
        assert step.dtype == torch.int64
        assert step.shape == ()
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("step", step.float())
        return loss * torch.where(step < 4, step / 4, 1.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_step", fulgurite.global_step().float())


class Manual(Warm):
    """Two optimizers, two steps a batch."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__(mlp())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss / (1 + fulgurite.global_step()))
            optimizer.step()
        self.log("step", fulgurite.global_step().float())

    def configure_optimizers(self) -> Any:
        halves = self.net[0].parameters(), self.net[3].parameters()
        return [torch.optim.SGD(half, lr=0.1) for half in halves]


def run(device: str, make: Any, **options: Any) -> Run:
    """One module on one device."""
    reset_backend()
    torch.manual_seed(0)
    module, recorder = make(), Recorder()
    backend = csx() if device == "CSX" else fulgurite.backend(device)
    options = {"max_epochs": 2, "callbacks": [recorder], **QUIET, **options}
    ckpt_path = options.pop("ckpt_path", None)
    trainer = fulgurite.Trainer(backend=backend, **options)
    trainer.fit(module, loader(96), loader(32), ckpt_path=ckpt_path)
    final = numbers(trainer.callback_metrics)
    return Run(module, trainer, recorder.losses, recorder.outputs, recorder.metrics, final)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: Warm(mlp()), {}),
        (lambda: Warm(mlp()), {"accumulate_grad_batches": 2}),
        (Manual, {}),
    ],
    ids=["automatic", "accumulated", "manual"],
)
def test_it_counts_the_same_on_csx_and_eagerly(make: Any, options: dict[str, Any]) -> None:
    ours, eager = run("CSX", make, **options), run("CPU", make, **options)
    assert_same_run(ours, eager)
    assert ours.final["val_step"] == ours.trainer.global_step


def test_it_goes_on_right_after_a_resume(tmp_path: Any) -> None:
    make = lambda: Warm(mlp())  # noqa: E731
    first = run("CSX", make, max_epochs=1)
    first.trainer.save_checkpoint(tmp_path / "one.ckpt")
    again = run("CSX", make, ckpt_path=tmp_path / "one.ckpt")
    assert [metrics["step"] for metrics in again.metrics] == [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]


def test_it_is_an_input_only_of_programs_that_read_it() -> None:
    class Half(Warm):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    programs = run("CSX", lambda: Half(mlp())).trainer.strategy.programs
    kinds = {p.stage: {item.kind.value for item in p.entries[0].graph.inputs} for p in programs}
    assert "counter" in kinds["training"]
    assert "counter" not in kinds["validation"]


def test_changing_the_tensor_changes_nothing_else() -> None:
    class Changes(Warm):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            fulgurite.global_step().add_(100)
            return super().training_step(batch, batch_idx)

    assert_same_run(run("CSX", lambda: Changes(mlp())), run("CPU", lambda: Warm(mlp())))


def test_a_step_may_return_it() -> None:
    class Returns(Warm):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "step": fulgurite.global_step()}

    outputs = run("CSX", lambda: Returns(mlp()), max_epochs=1).outputs
    assert [int(output["step"]) for output in outputs] == [0, 1, 2, 3, 4, 5]


def test_an_average_that_begins_with_data_is_chosen_by_the_count() -> None:
    class Averages(Warm):
        def __init__(self) -> None:
            super().__init__(mlp())
            self.register_buffer("ema", torch.zeros([]))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("step", loss)
            before = torch.where(fulgurite.global_step() == 0, loss.detach(), self.ema)
            self.ema.copy_(0.9 * before + 0.1 * loss.detach())
            return loss / self.ema

    class Born(Averages):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("step", loss)
            if not self.ema:
                self.ema = loss.detach()
            self.ema = 0.9 * self.ema + 0.1 * loss.detach()
            return loss / self.ema

    assert_same_run(run("CSX", Averages), run("CPU", Born))


def test_hooks_of_a_run_see_the_trainers_counter() -> None:
    class Looks(pl.Callback):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_train_batch_end(self, *args: Any) -> None:
            self.seen.append(int(fulgurite.global_step()))

    looks = Looks()
    run("CSX", lambda: Warm(mlp()), callbacks=[Recorder(), looks], max_epochs=1)
    assert looks.seen == [1, 2, 3, 4, 5, 6]


def test_outside_of_a_run_it_says_where_it_can_be_called() -> None:
    with pytest.raises(RuntimeError, match=r"outside of a run\. Call it in a step or a hook while"):
        fulgurite.global_step()
