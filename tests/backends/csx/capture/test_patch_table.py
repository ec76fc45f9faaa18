"""What a trace replaces in other people's code: every row says why, and all of it is put back."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from math import sqrt
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from harness import assert_same_run, both, fit
from installed import installed
from models import Classifier, Measured, loader, mlp
from optimizers import Moving

from fulgurite.backends import patches
from fulgurite.backends.csx.capture import patch_table
from fulgurite.backends.csx.compile.inductor import changes
from fulgurite.backends.csx.diagnostics.trace_errors import HostRead
from fulgurite.backends.patches import MISSING, Patch
from fulgurite.backends.torch_versions import DROPS_COPIES, LOSES_ORDER

CSX = Path(patches.__file__).parent / "csx"
OURS = {
    "math",
    "time",
    "random",
    "numpy",
    "logging",
    "secrets",
    "scipy",
    "torch",
    "torchmetrics",
    "lightning",
}
"""Packages and modules of Python's whose names a trace may replace, besides the user's own."""


def run(make: Callable[[], Any] = lambda: Classifier(mlp())) -> None:
    """Trace a step, and run it once."""
    fit(make, lambda: (loader(16),), static=True)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> list[Patch]:
    """The rows of the traces that follow."""
    rows: list[Patch] = []
    made = patch_table.patches

    def recorded(*args: Any) -> Iterator[Patch]:
        for patch in made(*args):
            rows.append(patch)
            yield patch

    monkeypatch.setattr(patch_table, "patches", recorded)
    return rows


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """Owner and name of all that the traces which follow replace."""
    found: list[tuple[Any, str]] = []
    applied = patches.patched

    def recorded(changes: Any) -> Any:
        changes = list(changes)
        found.extend((owner, name) for owner, name, _ in changes)
        return applied(changes)

    monkeypatch.setattr(patches, "patched", recorded)
    return found


def package_of(owner: Any) -> str:
    """The first part of the name of the module where an owner is from."""
    if isinstance(owner, patches._Namespace):
        return str(vars(owner)["__name__"]).partition(".")[0]
    module = owner if isinstance(owner, ModuleType) else sys.modules[type(owner).__module__]
    if isinstance(owner, type):
        module = sys.modules[owner.__module__]
    return module.__name__.partition(".")[0]


@pytest.mark.fits
def test_every_row_has_a_target_a_reason_and_a_version(table: list[Patch]) -> None:
    run(Measured)
    fit(lambda: Classifier(mlp()), lambda: (loader(16),), static=True, precision="cb16-mixed")
    assert len(table) > 300
    for patch in table:
        own = hasattr(patch.owner, patch.name)  # else a function of Python's that its code calls
        assert own or f" {patch.name}(" in inspect.getsource(patch.owner), patch
        assert len(patch.why.split()) > 4
        assert re.fullmatch(r"\w+ \d+\.\d+( to \d+\.\d+)?", patch.checked), patch


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # torch's own
def test_the_rows_of_the_compilers_bugs_name_the_issues() -> None:
    rows = [
        *changes.order_after_writes(),
        *changes.copies_first(),
        *changes.local_only_where_read(),
    ]
    assert len(rows) == LOSES_ORDER + DROPS_COPIES + 1
    for patch in rows:
        assert hasattr(patch.owner, patch.name)
        assert patch.upstream.startswith("https://github.com/pytorch/pytorch/issues/")


@pytest.mark.fits
def test_no_row_replaces_what_another_row_replaces(table: list[Patch]) -> None:
    run(Measured)
    targets = [(id(patch.owner), patch.name) for patch in table]
    assert len(set(targets)) == len(targets)


@pytest.mark.fits
@pytest.mark.parametrize("package", ["torch", "lightning", "torchmetrics"])
def test_rows_were_checked_with_the_version_that_is_installed(
    package: str, table: list[Patch]
) -> None:
    run(Measured)
    installed = [int(part) for part in version(package).split(".")[:2]]
    checked = {patch.checked for patch in table if patch.checked.startswith(f"{package} ")}
    [stated] = checked
    versions = [[int(part) for part in one.split(".")] for one in stated.split()[1::2]]
    assert versions[0] <= installed <= versions[-1]


def test_the_table_names_every_file_that_makes_patches() -> None:
    text = inspect.getsource(patch_table)
    makers = {
        path.stem
        for path in CSX.rglob("*.py")
        if re.search(r"\b(Patch|patches_of)\(", path.read_text(encoding="utf-8"))
    }
    assert len(makers) > 10
    assert {name for name in makers if not re.search(rf"\b{name}\b", text)} == set()


def now(targets: list[tuple[Any, str]]) -> list[Any]:
    """What stands in places that were replaced."""
    return [vars(owner).get(name, MISSING) for owner, name in targets]


STOCK = [sqrt]  # in a list, which no patch reaches


def reads(module: Any, loss: Any) -> None:
    assert sqrt is not STOCK[0]
    loss.item()


def interrupts(module: Any, loss: Any) -> None:
    assert sqrt is not STOCK[0]
    raise KeyboardInterrupt


class Fails(Classifier):
    """Fails in the middle of its step."""

    def __init__(self, fail: Callable[[Any, Any], None]) -> None:
        super().__init__(mlp())
        self.fail = fail

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.fail(self, loss)
        return loss


@pytest.mark.fits
@pytest.mark.parametrize(
    ("fail", "error"),
    [(lambda *_: None, None), (reads, HostRead), (interrupts, BaseException)],
    ids=["goes well", "an error", "interrupted"],
)
def test_whatever_ends_a_trace_every_target_is_what_it_was(
    fail: Any, error: Any, replaced: list[tuple[Any, str]]
) -> None:
    run(Measured)
    before = now(replaced)
    targets = list(replaced)
    if error is None:
        run(lambda: Fails(fail))
    else:
        with pytest.raises(error):
            run(lambda: Fails(fail))
    assert all(a is b for a, b in zip(now(targets), before, strict=True))
    assert len(replaced) > len(targets)
    assert sqrt is math.sqrt is STOCK[0]


@pytest.mark.fits
def test_only_modules_of_the_users_own_are_touched(
    replaced: list[tuple[Any, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "model", raising=False)  # a program of tests/support/misuses
    for name in ("networkx", "scipy.stats", "sklearn.linear_model", "sympy"):
        pytest.importorskip(name)
    run()
    packages = {package_of(owner) for owner, _ in replaced}
    users = {__name__.partition(".")[0], "optimizers", "models"}
    assert packages >= {__name__.partition(".")[0], "math"}
    assert packages - OURS - users == set()
    # 295 names once, 72 of them in sympy, scipy and networkx; 69 are torchmetrics' checks of labels
    assert len(replaced) < 360


OPTIMIZER = """
from math import sqrt

import torch


class Theirs(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=sqrt(group["lr"]))
        return loss
"""


@pytest.mark.numbers
@pytest.mark.parametrize("listed", [True, False], ids=["installed", "run by its path"])
def test_an_optimizers_own_file_takes_traced_numbers(
    listed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = installed(tmp_path, "theirs", OPTIMIZER, monkeypatch, listed)
    ours, stock = both(
        lambda: Classifier(mlp(), module.Theirs, lr=0.01),
        lambda: (loader(64),),
        callbacks=(Moving(),),
    )
    assert_same_run(ours, stock)
