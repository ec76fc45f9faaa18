"""Errors name the line of the user's that did it, also where no frame of theirs runs any more."""

from __future__ import annotations

from pathlib import Path

import pytest
from misuses.program import Code, Outcome, run

from fulgurite.backends.csx.diagnostics.trace_errors import (
    InputChanged,
    StateChanged,
    TraceError,
    UnsupportedState,
)

BUFFER = 'self.register_buffer("seen", torch.zeros(0, dtype=torch.int64))'
TENSOR = "self.seen = torch.zeros(2)"
READ = "self.seen.sum()"  # what nobody reads is a result, of whatever shape
HOOK = "def on_train_batch_start(self, batch, i):\n    if i == 2:\n        {}  # <-"
IN_THE_STEP = {
    "grows": Code(init=BUFFER, step="self.seen = torch.cat([self.seen, y])  # <-"),
    "grows in a method": Code(
        init=TENSOR,
        step="self.keep(loss.detach())",
        hooks="def keep(self, x):\n    self.seen = torch.cat([self.seen, x[None]])  # <-",
    ),
    "set by setattr": Code(init=TENSOR, step=f"{READ}; setattr(self, 'seen', out.detach())  # <-"),
    "registered again": Code(
        init=BUFFER, step=f"{READ}; self.register_buffer('seen', y[:3])  # <-"
    ),
    "of a layer": Code(
        init="self.net.seen = torch.ones(2)",
        step="self.net.seen.sum(); self.net.seen = out  # <-",
    ),
    "another dtype": Code(init=TENSOR, step=f"{READ}; self.seen = out[0, :2].half()  # <-"),
    "weight norm": Code(step="torch.nn.utils.weight_norm(self.net)  # <-"),
    "parametrized": Code(step="torch.nn.utils.parametrizations.weight_norm(self.net)  # <-"),
    "a module": Code(step="self.net = nn.Linear(8, 4)  # <-"),
    "a module more": Code(step="self.net.more = nn.Linear(8, 4)  # <-"),
}
ON_THE_HOST = {
    "weight norm": "torch.nn.utils.weight_norm(self.net)",
    "parametrized": "torch.nn.utils.parametrizations.weight_norm(self.net)",
    "spectral norm": "torch.nn.utils.parametrizations.spectral_norm(self.net)",
    "pruned": "torch.nn.utils.prune.random_unstructured(self.net, 'weight', amount=0.5)",
    "a module": "self.net = nn.Linear(8, 4)",
}


def check(outcome: Outcome, kind: type[TraceError]) -> TraceError:
    """The error of a program, on its marked line."""
    error = outcome.error
    if type(error) is not kind:
        raise AssertionError(f"no {kind.__name__}") from error
    assert isinstance(error, TraceError)
    assert error.line is not None
    assert (Path(error.line.file), error.line.line) == (outcome.file, outcome.marked)
    return error


@pytest.mark.fits
@pytest.mark.parametrize("name", IN_THE_STEP)
def test_state_that_the_step_replaces(name: str, tmp_path: Path) -> None:
    check(run(IN_THE_STEP[name], tmp_path), UnsupportedState)


@pytest.mark.fits
@pytest.mark.parametrize("name", ON_THE_HOST)
def test_a_layer_that_a_hook_replaces_in_the_middle_of_an_epoch(name: str, tmp_path: Path) -> None:
    error = check(run(Code(hooks=HOOK.format(ON_THE_HOST[name])), tmp_path), StateChanged)
    assert "Linear" in error.what or "self.net.weight" in error.what


@pytest.mark.numbers
def test_a_module_that_a_hook_adds_is_no_change_of_the_step(tmp_path: Path) -> None:
    code = Code(hooks=HOOK.format("self.copy = nn.Linear(8, 4)"))
    ours, stock = run(code, tmp_path), run(code, tmp_path, static=False)
    assert ours.error is None
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)


LOGGED = Code(
    hooks="""
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch["x"]), batch["y"])
        self.log("loss", loss, on_epoch=True, batch_size=batch["k"])
        return loss
    """,
    batches='[{"x": x, "y": y, "k": 16} for x, y in batches]',
    after='assert abs(float(trainer.callback_metrics["loss_epoch"]) - 1.53) < 0.05',
)


@pytest.mark.numbers
def test_a_number_of_the_batch_is_a_batch_size(tmp_path: Path) -> None:
    ours, stock = run(LOGGED, tmp_path), run(LOGGED, tmp_path, static=False)
    assert ours.error is None
    assert stock.error is None
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)


@pytest.mark.fits
def test_a_batch_size_that_changes_is_an_error(tmp_path: Path) -> None:
    batches = '[{"x": x, "y": y, "k": 16 + i} for i, (x, y) in enumerate(batches)]'
    outcome = run(Code(hooks=LOGGED.hooks, batches=batches), tmp_path)
    assert type(outcome.error) is InputChanged
    assert "batch['k'] was 16" in str(outcome.error)
