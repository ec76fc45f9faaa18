"""What a run prints: nothing that nobody can act on, and what the user filters stays filtered."""

from __future__ import annotations

import io
import logging
import re
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import rich
from lightning.pytorch.callbacks import RichModelSummary, RichProgressBar, Timer
from models import Classifier, loader, mlp
from rich.console import Console

import fulgurite
from fulgurite.screen import Bar, Summary, without_noise

LOGGER = "lightning.pytorch.utilities.rank_zero"
NOISE = ("LeafSpec", "Tip:", "GPU available", "TPU available", "FLOPs", "v_num", "many workers")


class Described(Classifier):
    """A module whose FLOPs Lightning counts."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.example_input_array = next(iter(loader(8)))[0]

    def forward(self, x: Any) -> Any:
        """The logits."""
        return self.net(x)


class Measured(Classifier):
    """A module that shows five metrics, which take more than a line of 80 columns."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Log the loss by step and epoch, and three more."""
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        for name in ("accuracy", "val_loss", "val_accuracy"):
            self.log(name, loss, prog_bar=True)
        return loss


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal of 80 columns, as rich sees one, and what it shows."""
    shown = io.StringIO()
    console = Console(file=shown, width=80, force_terminal=True, legacy_windows=False)
    monkeypatch.setattr(rich, "_console", console)
    return shown


def printed(screen: io.StringIO, module: pl.LightningModule, device: str = "CSX") -> str:
    """What a short fit writes to a terminal, its log's lines and warnings among it."""
    handler = logging.StreamHandler(screen)
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    logging.getLogger("lightning.pytorch").addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            options: dict[str, Any] = {"max_epochs": 1, "logger": False}
            if device == "CSX":
                options["backend"] = fulgurite.backend("CSX", autogen_policy="disabled")
            else:
                options["device"] = device
            fulgurite.Trainer(**options, enable_checkpointing=False).fit(module, loader(64))
    finally:
        logging.getLogger("lightning.pytorch").removeHandler(handler)
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return screen.getvalue() + "\n".join(str(one.message) for one in warned)


@pytest.mark.fits
def test_a_first_run_prints_nothing_that_nobody_can_act_on(
    screen: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    told = printed(screen, Classifier(mlp())) + capsys.readouterr().out
    assert [word for word in NOISE if word in told] == []
    for kept in ("Trainable params", "Modules in train mode", "CSX on host fabric", "stopped:"):
        assert kept in told


@pytest.mark.fits
def test_on_cpu_lightning_says_which_machines_there_are(screen: io.StringIO) -> None:
    told = printed(screen, Classifier(mlp()), "CPU")
    assert "GPU available" in told
    assert "Tip:" not in told


@pytest.mark.fits
def test_flops_that_lightning_counted_are_shown(screen: io.StringIO) -> None:
    assert "Total FLOPs" in printed(screen, Described())


def test_the_users_filters_and_loggers_are_as_they_were_after_it() -> None:
    log, seen = logging.getLogger(LOGGER), list(warnings.filters)
    kept = list(log.filters)
    with without_noise(on_csx=True):
        warnings.filterwarnings("ignore", message="the user's own, from a hook")
        assert len(log.filters) == len(kept) + 1
    assert log.filters == kept
    added = [one for one in warnings.filters if one not in seen]
    assert [one[1].pattern for one in added] == ["the user's own, from a hook"]  # type: ignore[union-attr]


def test_a_filter_that_the_user_has_too_stays() -> None:
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    before = list(warnings.filters)
    with without_noise(on_csx=False):
        pass
    assert sorted(map(str, warnings.filters)) == sorted(map(str, before))


@pytest.mark.parametrize("given", [None, Timer(), [], [Timer()]])
def test_ours_take_their_places_whatever_else_was_given(given: Any) -> None:
    trainer = fulgurite.Trainer(device="CSX", callbacks=given, logger=False)
    kinds = {type(one) for one in trainer.callbacks}
    assert kinds >= {Bar, Summary}
    assert not kinds & {RichProgressBar, RichModelSummary}


def test_lightnings_own_bar_and_summary_are_kept_where_they_were_given() -> None:
    given = [RichProgressBar(), RichModelSummary()]
    trainer = fulgurite.Trainer(device="CSX", callbacks=[*given], logger=False)
    assert all(any(one is kept for kept in trainer.callbacks) for one in given)
    kinds = {type(one) for one in fulgurite.Trainer(device="CSX", logger=False).callbacks}
    assert {Bar, Summary} <= kinds


@pytest.mark.parametrize("width", [80, 120])
def test_the_bar_is_short_in_a_narrow_terminal_alone(
    width: int, screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=screen, width=width, force_terminal=True, legacy_windows=False)
    monkeypatch.setattr(rich, "_console", console)
    columns = Bar().configure_columns(fulgurite.Trainer(device="CSX", logger=False))
    assert len(columns) == 5
    assert (columns[1].bar_width == 10) == (width == 80)  # type: ignore[attr-defined]


@pytest.mark.fits
@pytest.mark.parametrize(("width", "below"), [(80, 2), (200, 0)])
def test_neither_metrics_nor_announcements_are_broken(
    width: int,
    below: int,
    screen: io.StringIO,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"COLUMNS": str(width), "FORCE_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)  # Lightning's bar makes a console of its own
    printed(screen, Measured(mlp()))
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out).splitlines()
    [told] = [line for line in lines if line.startswith("CSX on host fabric")]
    assert told.endswith("(autogen_policy='disabled')")
    assert len(told) > 80
    bars = [i for i, line in enumerate(lines) if line.startswith("Epoch")]
    names = ("loss_step", "accuracy", "val_loss", "val_accuracy", "loss_epoch")
    last = "\n".join(lines[bars[-1] : bars[-1] + below + 1])
    assert all(re.search(rf"\b{name}: \d+\.\d{{3}}(\s|$)", last) for name in names)
    assert max(map(len, last.splitlines())) <= width
    assert ("accuracy" in lines[bars[-1]]) == (below == 0)
