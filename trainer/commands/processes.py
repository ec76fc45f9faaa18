"""What ``fulgurite doctor`` finds of processes that train together: where they meet, if at all."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import time

import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from fulgurite.backends.csx.plugins.network import (
    choose,
    interfaces,
    is_here,
    listens,
    unanswered,
)
from fulgurite.commands.checkups import Finding

LIMIT_S = 60.0
_MEETS = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
rank, place, limit_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
options = {"rank": rank, "world_size": 2, "timeout": timedelta(seconds=limit_s)}
dist.init_process_group("gloo", init_method=place, **options)
number = torch.tensor(rank + 1.0)
dist.all_reduce(number)
dist.destroy_process_group()  # or threads of gloo's may abort the process at its end
print(number.item())
"""


def network() -> Finding:
    """The network's interfaces, and the one at which gloo listens for other processes."""
    found, own = interfaces(), listens()
    shown = ", ".join(f"{name} {address}" for name, address in found.items()) or "no interface"
    if own.address is None:
        return Finding("network", f"{shown}; gloo cannot listen: {own.why}", choose(found))
    text = f"{shown}; gloo listens at {own.address}, {own.why}"
    others = any(not address.startswith("127.") for address in found.values())
    if not own.alone or not others:
        return Finding("network", f"{text}; {_nccl()}")
    remedy = f"{choose(found)}, or this machine's own address for its name in /etc/hosts"
    host = os.environ.get("MASTER_ADDR", "")
    if host and not (is_here(host) and _is_loopback(host)):
        return Finding("network", f"{text}, where other machines do not reach it", remedy)
    return Finding("network", f"{text} (between machines: {remedy}); {_nccl()}")


def _nccl() -> str:
    return "NCCL is there, for GPUs" if dist.is_nccl_available() else "no NCCL, and CPUs need none"


def place() -> Finding | None:
    """Where the environment says that processes meet; None where it does not say."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if host is None:
        return None
    if not port.isdigit():
        said = f"MASTER_ADDR={host}, and MASTER_PORT={port!r} is no port"
        return Finding("place", said, "export MASTER_PORT=29500, the same for all processes")
    count = os.environ.get("WORLD_SIZE", "an unknown number of")
    name, why = f"{host}:{port}, for {count} processes", unanswered(host, int(port))
    refused = why is not None and os.strerror(errno.ECONNREFUSED) in why
    if not is_here(host):
        if why is None:
            return Finding("place", f"{name}: it answers")
        if refused:
            return Finding("place", f"{name}: that machine answers, and rank 0 is not there yet")
        remedy = "MASTER_ADDR is the machine of rank 0; a firewall has to let MASTER_PORT through"
        return Finding("place", f"{name}: {why}", remedy)
    if refused:
        return Finding("place", f"{name}: on this machine, and free")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return Finding("place", f"{name}: torchrun's store answers")
    remedy = f"end what holds it (`ss -ltnp` says who), or export MASTER_PORT=N, not {port}"
    return Finding("place", f"{name}: on this machine, and held already, by another run?", remedy)


def meets() -> Finding:
    """Have two processes of this machine meet over gloo, and add up a number."""
    if listens().address is None:
        return Finding("meeting", "not tried, for gloo cannot listen")
    try:
        port = find_free_network_port()
    except OSError as error:
        remedy = "Let this user open ports: a sandbox or container forbids it."
        return Finding("meeting", f"no port can be opened: {error}", remedy)
    began = time.monotonic()
    command = [sys.executable, "-c", _MEETS]
    place = f"tcp://127.0.0.1:{port}"
    own = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(rank), place, str(LIMIT_S)],
                    env=own,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in (0, 1)
        ]
        try:
            said = [one.communicate(timeout=_left(began)) for one in started]
        except subprocess.TimeoutExpired:
            said = [("", f"not done after {LIMIT_S:.0f} s")]
        finally:
            for one in started:
                one.kill()
    if [out.strip() for out, _ in said] == ["3.0", "3.0"]:
        took = f"after {time.monotonic() - began:.1f} s"
        return Finding("meeting", f"two processes met over gloo, and added up a number, {took}")
    lines = [line for _, error in said for line in error.strip().splitlines()[-1:]]
    why = lines[0] if lines else "they ended, and said nothing"
    remedy = (
        f"{choose(interfaces())}; or this machine's address for its name in /etc/hosts. A machine"
        " that is busy may take longer: try again. One process needs none of it."
    )
    return Finding("meeting", f"two processes did not meet over gloo: {why}", remedy)


def _left(began: float) -> float:
    return max(0.0, LIMIT_S - (time.monotonic() - began))


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or listens().address == host
