"""Processes that do not meet say who is missing, and why; one whose other has ended says that."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from fulgurite.backends.csx.distributed import rendezvous
from fulgurite.backends.csx.distributed.rendezvous import Rendezvous
from fulgurite.errors import NoMeeting

SUPPORT = Path(__file__).parents[3] / "support"

pytestmark = pytest.mark.several


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is waited for long."""
    monkeypatch.setattr(rendezvous, "MEETS_S", 8.0)
    monkeypatch.setattr(rendezvous, "SAYS_AFTER_S", 1.0)
    monkeypatch.setattr(rendezvous, "_ANSWERS_S", 0.5)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


@pytest.fixture
def held() -> Iterator[int]:
    """A port that another program holds, which answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def come(rank: int, count: int, port: int, host: str = "127.0.0.1") -> Rendezvous:
    """One process comes, and waits."""
    own = Rendezvous(host, port, rank, count, lambda: None)
    own.wait()
    return own


def errors_of(ranks: list[int], count: int) -> list[str]:
    """What each says that comes."""
    port, said, kept = find_free_network_port(), [], []

    def one(rank: int) -> None:
        try:
            kept.append(come(rank, count, port))  # or the store would be gone for others
        except NoMeeting as error:
            said.append(str(error))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def test_who_has_not_come_is_named_by_all_who_have(capfd: pytest.CaptureFixture[str]) -> None:
    said = errors_of([0, 2], 4)
    assert len(said) == 2
    for text in said:
        assert "s for ranks 1, 3 to come to 127.0.0.1:" in text
        assert "; 2 of 4 are there.\n  Remedy: look whether it was started" in text
    lines = capfd.readouterr().err
    assert re.search(r"CSX: rank 0 has waited \d s for ranks 1, 3 to come to 127.0.0.1:", lines)
    assert "it gives up after 8 s" in lines


def test_all_that_come_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MEETS_S", 60.0)
    assert errors_of([0, 1, 2], 3) == []


def test_two_that_come_as_the_same_rank_are_told_how_to_be_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "MEETS_S", 60.0)
    said = errors_of([0, 1, 1], 3)
    assert len(said) == 3
    assert all("Two processes have come as rank 1." in text for text in said)
    assert all("NODE_RANK" in text for text in said)


def test_a_port_at_which_nobody_answers_is_named() -> None:
    port = find_free_network_port()
    with pytest.raises(
        NoMeeting, match=rf"for rank 0: nobody answers at 127\.0\.0\.1:{port} \(Conn"
    ):
        come(1, 2, port)


def test_a_name_that_does_not_resolve_is_named() -> None:
    with pytest.raises(NoMeeting, match=r"rank 0: nowhere\.invalid is no name that DNS"):
        come(1, 2, 29500, "nowhere.invalid")


def test_a_port_of_another_program_is_an_error_at_once(held: int) -> None:
    with pytest.raises(NoMeeting, match=f"Rank 0 cannot open port {held}.*another program holds"):
        come(0, 2, held)
    with pytest.raises(NoMeeting, match=f"rank 1 at 127.0.0.1:{held} is not the store of a train"):
        come(1, 2, held)


def test_what_gloo_says_comes_with_the_addresses_at_which_it_listens() -> None:
    own = come(0, 1, find_free_network_port())
    with pytest.raises(NoMeeting) as caught, own.connecting():
        raise RuntimeError("Gloo connectFullMesh failed\nand more")
    assert str(caught.value).startswith(
        "Gloo cannot connect rank 0 with the others: Gloo connectFullMesh failed\n"
        f"  gloo listens for rank 0 at {socket.gethostname()} "
    )
    assert "export GLOO_SOCKET_IFNAME=eth0" in str(caught.value)


# -- processes -------------------------------------------------------------------------------------


def run(script: str, *arguments: object, **environment: str) -> tuple[int, str]:
    """Run a script that starts a second process: its status, and what both said."""
    done = subprocess.run(
        [sys.executable, str(SUPPORT / script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(SUPPORT), **environment},
        stdout=subprocess.PIPE,  # until the second process has ended too
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.long
def test_a_port_that_is_held_ends_the_processes_that_were_started(
    held: int, tmp_path: Path
) -> None:
    status, printed = run("meets.py", "held", tmp_path, MASTER_PORT=str(held))
    assert status != 0
    assert f"fulgurite.errors.NoMeeting: Rank 0 cannot open port {held}" in printed
    assert "site-packages" not in printed


def test_a_signal_that_one_process_notes_at_an_epochs_end_ends_all_at_the_same_step(
    tmp_path: Path,
) -> None:
    status, printed = run("meets.py", "signal", tmp_path)
    assert status == 0, printed
    steps: Any = [int((tmp_path / str(rank)).read_text()) for rank in (0, 1)]
    assert steps == [6, 6]  # the epoch's five, and the one with which the other got to know


@pytest.mark.long
def test_a_process_whose_other_is_gone_says_that_alone(tmp_path: Path) -> None:
    status, printed = run("several_ends.py", "killed", 1, tmp_path)
    assert status != 0
    error = "[rank0]: fulgurite.errors.OtherRankEnded: rank 1 gave no sign of life since its conn"
    assert error in printed
    assert "site-packages" not in printed
