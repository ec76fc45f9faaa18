"""What this machine's network is for processes that meet: its interfaces, and gloo's choice.

Gloo listens at one address of each process, and says it to the others: that of the interface in
GLOO_SOCKET_IFNAME, else the one to which this host's name resolves, else 127.0.0.1 (torch 2.13,
``ProcessGroupGloo::createDefaultDevice``).
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from dataclasses import dataclass

INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"
ANSWERS_S = 3.0
"""How long a connection may take to be answered (assumed: what a lost packet takes, twice)."""
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def interfaces() -> dict[str, str]:
    """The network interfaces that have an IPv4 address, with it; none where it cannot be asked."""
    if sys.platform != "linux":
        return {}
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                # the name of an interface is 15 bytes and a zero (IFNAMSIZ); the answer has its
                # address at 20
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ListeningAddress:
    """The address at which gloo of this process listens for the others.

    Attributes:
        address: None if it cannot.
        why: why it is there, in words; or why it cannot.
    """

    address: str | None
    why: str

    @property
    def is_loopback(self) -> bool:
        """Whether no process on another machine reaches it."""
        return self.address is not None and self.address.startswith("127.")


def listening_address() -> ListeningAddress:
    """Where gloo of this process would listen."""
    named, found = os.environ.get(INTERFACE), interfaces()
    if named:
        name, said = named.split(",")[0], f"{INTERFACE}={named}"
        if name in found or not found:
            return ListeningAddress(address=found.get(name, name), why=f"of {said}")
        return ListeningAddress(
            address=None, why=f"{said} is no interface of this machine with an address"
        )
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
            tried.bind((address, 0))
    except OSError as error:
        why = f"for this host's name, {name}, is no address of this machine ({reason(error)})"
        return ListeningAddress(address=LOOPBACK, why=why)
    return ListeningAddress(address=address, why=f"to which this host's name, {name}, resolves")


def choose(found: dict[str, str]) -> str:
    """What to type so that gloo takes an interface that others reach."""
    others = [name for name, address in found.items() if not address.startswith("127.")]
    of = f" (it has {', '.join(others)})" if len(others) > 1 else ""
    return f"export {INTERFACE}={others[0] if others else 'NAME'}{of}"


def is_here(host: str) -> bool:
    """Whether a name or address is this machine's."""
    try:
        address = socket.gethostbyname(host)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
            tried.bind((address, 0))
    except OSError:
        return False
    return True


def unanswered(host: str, port: int) -> str | None:
    """Why nobody answers at a port; None where somebody does."""
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        return f"{host} is no name that DNS or /etc/hosts has ({reason(error)})"
    try:
        socket.create_connection((host, port), timeout=ANSWERS_S).close()
    except OSError as error:
        return f"nobody answers at {host}:{port} ({reason(error)})"
    return None


def reason(error: OSError) -> str:
    """An error of the system in its own words."""
    return error.strerror or str(error)
