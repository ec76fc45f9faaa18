"""What ``fulgurite doctor`` says of processes that shall meet."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from fulgurite.backends.csx.distributed import network
from fulgurite.commands import doctor

TWO = {"lo": "127.0.0.1", "eth0": "10.1.2.3"}


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment says nothing, and there are two interfaces."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for module in (network, doctor):
        monkeypatch.setattr(module, "interfaces", lambda: TWO)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")


@pytest.fixture
def held() -> Iterator[int]:
    """A port that another program holds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_interfaces_are_told_and_the_one_that_gloo_takes() -> None:
    found = doctor.network()
    assert not found.remedy
    assert found.text.startswith("lo 127.0.0.1, eth0 10.1.2.3; gloo listens at 127.0.0.1, to which")
    assert "between machines: export GLOO_SOCKET_IFNAME=eth0" in found.text


def test_an_interface_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    found = doctor.network()
    assert "GLOO_SOCKET_IFNAME=eth7 is no interface of this machine" in found.text
    assert found.remedy == "export GLOO_SOCKET_IFNAME=eth0"
    assert "not tried" in doctor.meets().text


def test_a_loopback_between_machines_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.77")  # nobody's: RFC 5737
    found = doctor.network()
    assert "where other machines do not reach it" in found.text
    assert found.remedy.startswith("export GLOO_SOCKET_IFNAME=eth0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert not doctor.network().remedy


def test_without_a_place_there_is_nothing_to_tell_of_it() -> None:
    assert doctor.place() is None


def test_a_port_that_is_held_is_told(monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(held))
    found = doctor.place()
    assert found is not None
    assert "and held already" in found.text
    assert "export MASTER_PORT=N" in found.remedy
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    found = doctor.place()
    assert found is not None
    assert not found.remedy


def test_a_port_that_is_free_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(doctor.find_free_network_port()))
    found = doctor.place()
    assert found is not None
    assert found.text.endswith("on this machine, and free")


@pytest.mark.parametrize(
    ("host", "port", "says"),
    [
        ("nowhere.invalid", "29500", "is no name that DNS or /etc/hosts has"),
        ("127.0.0.1", "", "MASTER_PORT='' is no port"),
    ],
)
def test_a_place_that_is_none_is_told(
    host: str, port: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", port)
    found = doctor.place()
    assert found is not None
    assert says in found.text
    assert found.remedy


@pytest.mark.several
def test_two_processes_meet_and_add_up_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MEETING_LIMIT_S", 200.0)  # tests share the machine
    found = doctor.meets()
    assert found.text.startswith("two processes met over gloo")
    assert not found.remedy


@pytest.mark.several
def test_processes_that_do_not_meet_in_time_are_ended_and_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "MEETING_LIMIT_S", 0.1)
    found = doctor.meets()
    assert "two processes did not meet over gloo: not done after 0 s" in found.text
    assert "export GLOO_SOCKET_IFNAME=eth0" in found.remedy
