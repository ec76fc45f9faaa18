"""A fabric of one's own: the backend runs through the protocol alone."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same_run, both, csx
from models import Measured, loader
from torch import Tensor, fx

import fulgurite
from fulgurite.backends.csx.compile.fabric import Loaded, Timer
from fulgurite.backends.csx.compile.fabrics import FABRICS, fabric_devices
from fulgurite.backends.csx.compile.host.host_fabric import HostFabric
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.plugins.accelerator import CSXAccelerator
from fulgurite.backends.csx.plugins.precision_plugins import CSXMixedPrecision
from fulgurite.backends.csx.plugins.strategy import CSXStrategy


class StubFabric:
    """Interprets graphs operation by operation, and remembers each run."""

    waits = False
    made: list[StubFabric] = []

    def __init__(self, backend: CSXBackend) -> None:
        self.timer: Timer | None = None
        self.loads: list[Graph] = []
        self.runs: list[Loaded] = []
        StubFabric.made.append(self)

    @staticmethod
    def devices() -> tuple[torch.device, ...]:
        return (torch.device("cpu"),)

    def describe(self, graphs: Sequence[Graph]) -> str:
        return "stub fabric"

    def load(self, graph: Graph, shown: Any, *how: Any) -> Loaded:
        self.loads.append(graph)

        def call(inputs: list[Tensor]) -> Any:
            return fx.Interpreter(graph.module).run(*inputs)

        return Loaded(call=call, compiled=False, built=False, seconds=0.0, how="interpreted")

    def run(self, loaded: Loaded, inputs: list[Tensor]) -> Sequence[Tensor]:
        self.runs.append(loaded)
        if self.timer is not None:
            self.timer.begin()
        with torch.no_grad():
            outputs: Sequence[Tensor] = loaded.call(inputs)
        if self.timer is not None:
            self.timer.end()
        return outputs


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> type[StubFabric]:
    """The only fabric there is."""
    monkeypatch.setattr(StubFabric, "made", [])
    monkeypatch.setitem(FABRICS, "auto", StubFabric)
    for name in ("load", "run"):
        monkeypatch.setattr(HostFabric, name, lambda *args: pytest.fail("the host ran it"))
    return StubFabric


@pytest.mark.long
@pytest.mark.numbers
def test_a_fit_through_a_stub_fabric_is_the_eager_one_and_nothing_else_ran_it(
    stub: type[StubFabric],
) -> None:
    ours, stock = both(Measured, lambda: (loader(80), loader(32)), max_epochs=2)
    assert_same_run(ours, stock)
    [fabric] = stub.made
    assert ours.trainer.strategy.fabric is fabric  # type: ignore[attr-defined]
    training, validation = 2 * 5, 2 * 2 + 2  # batches; two of the sanity check
    assert len(fabric.runs) == training + validation
    assert len(fabric.loads) == 2


def test_a_function_runs_on_the_fabric_of_its_backend(stub: type[StubFabric]) -> None:
    csx()
    net = torch.nn.Linear(3, 1)
    doubled = fulgurite.trace(lambda x: 2 * net(x))
    x = torch.randn(4, 3)
    with torch.no_grad():
        torch.testing.assert_close(doubled(x), 2 * net(x))
    assert [len(fabric.runs) for fabric in stub.made] == [1]


def test_lightning_and_autocast_ask_the_fabric_for_its_device(
    stub: type[StubFabric], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stub, "devices", staticmethod(lambda: (torch.device("meta"),)))
    assert fabric_devices() == (torch.device("meta"),)
    assert CSXAccelerator.get_parallel_devices(1) == [torch.device("meta")]
    assert CSXStrategy().root_device == torch.device("meta")
    assert CSXMixedPrecision().device == "meta"


HOST = {
    "compile/host/host_fabric.py": "the host fabric itself",
    "contract/function_mode.py": "what a step asks for by name: x.cpu(), device='cpu'",
    "costs/machine.py": "how fast the machine is that the host fabric runs on",
    "plugins/precision_plugins.py": (
        "what Lightning calls an accelerator of its own, and a scaler's device"
    ),
    "state/in_files.py": "files are mapped into the host's memory",
}
"""Who may name the CPU, and what for."""


def test_nothing_but_the_host_fabric_takes_the_cpu_for_granted() -> None:
    home = Path(fulgurite.backends.__file__).parent / "csx"
    naming = {
        str(path.relative_to(home))
        for path in home.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value == "cpu"
    }
    assert naming == set(HOST)
