"""Hand-written loops that count their steps, that only build, and that trace every time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import csx
from torch import Tensor, nn

import fulgurite
from fulgurite.backends.csx.diagnostics.trace_errors import GraphChanged, LeakedTensor
from fulgurite.backends.csx.program import announcements
from fulgurite.utils.data import DataExecutor

BATCHES = [torch.full((2, 4), float(i)) for i in range(1, 5)]


@pytest.mark.parametrize("device", ["CSX", "CPU"])
def test_global_step_counts_the_steps_of_the_loop(device: str) -> None:
    csx() if device == "CSX" else fulgurite.backend("CPU")

    @fulgurite.trace
    def step(x: Tensor) -> Tensor:
        return x[0, 0] * 10 + fulgurite.global_step()

    alone = [step(x).item() for x in BATCHES[:2]]
    looped = [step(x).item() for x in DataExecutor(BATCHES)]
    assert alone == [10.0, 21.0]
    assert looped == [10.0, 21.0, 32.0, 43.0]


@pytest.mark.parametrize(
    "option", ["validate_only", pytest.param("compile_only", marks=pytest.mark.compiler)]
)
def test_a_loop_that_only_builds_has_one_step_without_values(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(announcements, "rank_zero_info", said.append)
    csx("default", **{option: True})
    torch.manual_seed(0)
    model = fulgurite.compile(nn.Sequential(nn.Linear(4, 4), nn.Dropout()))
    optimizer = torch.optim.AdamW(model.parameters())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    random, seen = torch.get_rng_state(), []

    @fulgurite.step_closure
    def show(loss: Tensor) -> None:
        seen.append(loss.item())

    @fulgurite.trace
    def step(x: Tensor) -> dict[str, Tensor]:
        loss = model(x).square().mean()
        show(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss}

    count = 0
    for x in DataExecutor(BATCHES, num_steps=100, checkpoint_steps=1):
        result = step(x)
        show(result["loss"])
        count += 1
    assert (count, seen) == (1, [])
    with pytest.raises(LeakedTensor, match="builds programs, and runs none"):
        result["loss"].item()
    assert step(BATCHES[0]) is result
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert optimizer.state_dict()["state"] == {}
    assert torch.equal(random, torch.get_rng_state())
    done = {"validate_only": ", checked", "compile_only": ", compiled in"}[option]
    assert any("step program" in line and done in line for line in said)


def test_a_function_that_is_traced_every_time_has_its_side_effects_and_may_not_change() -> None:
    csx(retrace_every_iteration=True)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[Any] = []
    factor = 1.0

    @fulgurite.trace
    def step(x: Tensor) -> Tensor:
        seen.append(len(seen))
        loss = (model(x) * factor).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = [step(x).item() for x in BATCHES]
    assert seen == [0, 1, 2, 3]
    torch.manual_seed(0)
    twin = nn.Linear(4, 1)
    eager = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for x, loss in zip(BATCHES, losses, strict=True):
        wanted = twin(x).square().mean()
        wanted.backward()
        eager.step()
        eager.zero_grad()
        assert loss == pytest.approx(wanted.item(), rel=1e-5)
    factor = 2.0
    weight = model.weight.detach().clone()
    with pytest.raises(GraphChanged, match=r"test_offline_loops\.py"):
        step(BATCHES[0])
    assert torch.equal(model.weight, weight)
