"""Ctrl-C while a step is traced or compiled: a plain KeyboardInterrupt, and all is as before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import csx
from torch import nn

import fulgurite
from fulgurite.backends.csx.compile.store.entries import is_whole
from fulgurite.backends.csx.state.python_objects import Snapshot
from fulgurite.backends.runtime import interrupted_once, shielded


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_the_first_ctrl_c_ends_the_block_and_a_second_one_waits_for_its_end() -> None:
    done = []

    @interrupted_once()
    def work() -> None:
        try:
            ctrl_c()
        finally:
            ctrl_c()
            done.append("put back")

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert done == ["put back"]
    assert caught.value.__context__ is None
    with pytest.raises(KeyboardInterrupt):  # as before
        ctrl_c()


def test_a_ctrl_c_while_something_is_put_back_waits_for_its_end() -> None:
    done = []

    @shielded()
    def put_back() -> None:
        ctrl_c()
        done.append("put back")

    with pytest.raises(KeyboardInterrupt):
        put_back()
    assert done == ["put back"]


def test_a_handler_that_raises_nothing_receives_every_ctrl_c() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        with interrupted_once():
            ctrl_c()
            ctrl_c()
    finally:
        signal.signal(signal.SIGINT, before)
    assert received == [signal.SIGINT] * 2


def test_ctrl_c_twice_in_a_trace_leaves_everything_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, restore = csx(), Snapshot.restore
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    patient = [False]

    def restored_slowly(self: Snapshot) -> None:
        ctrl_c()
        restore(self)

    @fulgurite.trace
    def step(x: Any) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not patient[0]:
            ctrl_c()
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "restore", restored_slowly)
        with pytest.raises(KeyboardInterrupt) as caught:
            step(torch.ones(3, 4))
    assert caught.value.__context__ is None
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert not optimizer.state
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    patient[0] = True
    assert step(torch.ones(3, 4)) > step(torch.ones(3, 4))
    assert backend is fulgurite.backend()


SCRIPT = """
import sys
sys.path.insert(0, {support!r})
from harness import csx
import fulgurite, torch

backend = csx("default", compile_dir={folder!r})

@fulgurite.trace
def step(x):
    return (x.exp().sum(0) / x.cos()).mean()

step(torch.ones(16, 16))
"""


def compilers(mark: str) -> list[str]:
    """The processes of a compiler that work for the process with ``mark`` in its environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name = (process / "comm").read_text().strip()
            if mark.encode() in (process / "environ").read_bytes() and "python" not in name:
                found.append(name)
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.long
@pytest.mark.compiler
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_ctrl_c_while_compiling_ends_the_compiler_and_leaves_no_half_program(
    tmp_path: Path,
) -> None:
    folder, mark = tmp_path / "programs", f"MARK={tmp_path}"
    support = str(Path(__file__).parents[1] / "support")
    (tmp_path / "script.py").write_text(SCRIPT.format(support=support, folder=str(folder)))
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", tmp_path / "script.py"],
        env={**os.environ, "MARK": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not (list(folder.glob("*.part")) and compilers(mark)):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in said  # last; or Python says that the second cut the text short
    assert "During handling" not in said
    assert compilers(mark) == []
    assert [path.name for path in folder.iterdir() if path.name != "parts"] == []
    kept = [path for path in folder.glob("parts/*") if path.suffix != ".lock"]
    assert all(map(is_whole, kept))  # generated code is kept as it comes
