"""Processes come together: who has not come is named, and so is what can be done about it.

How they meet is Lightning's and torch's: rank 0 opens a store at MASTER_ADDR:MASTER_PORT, then gloo
connects each to each. Here each process first leaves a key in that store, so that those who wait
can say for whom, and give up sooner than torch does, which waits for 30 minutes and names nobody.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from fulgurite.backends.csx.diagnostics.trace_errors import NoMeeting
from fulgurite.backends.csx.distributed import network

MEETS_S = 600.0
"""How long a process waits for the others."""
SAYS_AFTER_S = 10.0
"""When it first says for whom; then after twice that time, and so on."""
_LOOKS_EVERY_S = 0.2
_ANSWERS_S = 10.0  # of a store that is one
_HEARD_S = 1.0  # time for others to read why: with rank 0 the store goes
_GRACE_S = 2.0  # to end by itself
_SHOWN = 8  # ranks in a line

_ABSENT = (
    "look whether it was started, and what it printed. All need the same MASTER_ADDR and"
    " MASTER_PORT, and a firewall has to let that port through. What takes long on one rank alone"
    " belongs into prepare_data(), for which the others wait. `fulgurite doctor` on each machine"
    " says what it finds"
)
_APART = (
    "a firewall has to let the machines reach each other on all ports, and gloo has to listen"
    f" where others reach it: export {network.INTERFACE}=eth0, or what the interface between the"
    " machines is called, on each; or give /etc/hosts the machine's own address for its name, and"
    " not 127.*. `fulgurite doctor` on each machine says what it finds"
)
_OTHER_PORT = (
    "export MASTER_PORT=N with another number, the same for all processes (`ss -ltnp` says who"
    " holds which)"
)
_BY_HAND = (
    "processes that are started by hand are told apart by LOCAL_RANK on one machine, and by"
    " NODE_RANK on several (Lightning reads RANK under torchrun alone)"
)


@contextlib.contextmanager
def rendezvous(
    environment: ClusterEnvironment, rank: int, count: int, end: Callable[[], None]
) -> Iterator[Any]:
    """Wait for the others; in the block torch connects them, by the store that is given, if one is.

    Args:
        environment: knows where they meet.
        rank: this process's.
        count: of all of them.
        end: ends what this process has started, where they do not meet.

    Raises:
        NoMeeting: some have not come; another program holds the port; gloo cannot connect them.
    """
    if dist.is_initialized():  # by an earlier run of this process, or by who started it
        yield None
        return
    try:
        own = Rendezvous(environment.main_address, environment.main_port, rank, count, end)
        own.wait()
        with own.connecting():
            yield own.of_attempt()
    except BaseException:
        end()
        raise


class Rendezvous:
    """One process's part, which begins with the store: that of rank 0 is open, others reach it."""

    def __init__(
        self, host: str, port: int, rank: int, count: int, end: Callable[[], None]
    ) -> None:
        self._host, self._port, self._rank, self._count = host, port, rank, count
        self._end, self._over = end, threading.Event()
        self._began, self._says_after_s = time.monotonic(), SAYS_AFTER_S
        self._by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # of torchrun
        self._server = self._open() if rank == 0 and not self._by_agent else None
        # torchrun keeps its store when it starts all again: keys of the attempt before are in it
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store: Any = None  # until it is reached there is nobody to tell that this one leaves
        self._store = PrefixStore(f"fulgurite/meeting/{attempt}", self._join())

    def _open(self) -> TCPStore:
        try:
            return TCPStore(
                "localhost",
                self._port,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,  # torch's own of this process will be the same
                use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
            )
        except RuntimeError as error:
            held = "EADDRINUSE" in str(error)
            why = "another program holds it" if held else _first_line(error)
        raise NoMeeting(
            f"Rank 0 cannot open port {self._port}, where the processes are to meet: {why}.",
            remedy=f"{_OTHER_PORT}; or, where Lightning starts all of them, unset"
            " MASTER_PORT, and it takes a free one. If it is held by another process of this"
            f" run: {_BY_HAND}",
        ) from None

    def _join(self) -> TCPStore:
        while (why := network.unanswered(self._host, self._port)) is not None:
            self._wait(lambda why=why: f"rank 0: {why}")  # type: ignore[misc]
        store: Future[TCPStore] = Future()

        def join() -> None:
            limit = timedelta(seconds=_ANSWERS_S)
            try:
                store.set_result(TCPStore(self._host, self._port, is_master=False, timeout=limit))
            except RuntimeError as error:
                store.set_exception(error)

        # torch waits without a limit for a program that takes what it says and answers nothing, in
        # a call that does not end: so in a thread that nobody waits for
        threading.Thread(target=join, name="meeting", daemon=True).start()
        try:
            return store.result(2 * _ANSWERS_S)
        except TimeoutError:
            said = ""
        except RuntimeError as error:
            said = f" ({_first_line(error)})"
        raise NoMeeting(
            f"What answers rank {self._rank} at {self._host}:{self._port} is not the store of a"
            f" training: another program holds that port{said}.",
            remedy=f"{_OTHER_PORT}; MASTER_ADDR is the machine of rank 0",
        )

    def wait(self) -> None:
        """Wait until all have come."""
        own = network.listening_address()
        with self._hearing():
            if own.address is None:
                self._leave(f"Rank {self._rank}: {own.why}.", network.choose(network.interfaces()))
            # torchrun gives out the ranks, and starts processes again under the same ones
            if self._store.add(f"claims/{self._rank}", 1) > 1 and not self._by_agent:
                self._leave(f"Two processes have come as rank {self._rank}.", _BY_HAND)
            self._store.set(f"here/{self._rank}", f"{socket.gethostname()} {own.address}")
            self._store.add("here", 1)  # a count, for one question instead of one for each rank
            while self._store.add("here", 0) < self._count:
                self._look()
                self._wait(self._missing)

    def of_attempt(self) -> Any:
        """A store without what an earlier attempt left in it: torchrun's own lives on when it
        starts all again, and torch would read where others listened then. None: torch's is new.
        """
        return PrefixStore("default_pg", self._store.clone()) if self._by_agent else None

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """All have come: in the block gloo connects each to each."""
        self._began, self._says_after_s = time.monotonic(), SAYS_AFTER_S
        with self._hearing():
            places = self._store.multi_get([f"here/{rank}" for rank in range(self._count)])
        shown = [f"rank {rank} at {place.decode()}" for rank, place in enumerate(places[:_SHOWN])]
        where = f"gloo listens for {', '.join(shown)}{', ...' * (self._count > _SHOWN)}"
        threading.Thread(target=self._watch, args=(where,), name="meeting", daemon=True).start()
        try:
            yield
        except (RuntimeError, ValueError) as error:
            said = f"Gloo cannot connect rank {self._rank} with the others: {_first_line(error)}"
            self._leave(f"{said}\n  {where}", _APART)
        finally:
            self._over.set()

    def _watch(self, where: str) -> None:
        """End this process where gloo waits for others that it cannot reach, or that are gone."""
        try:
            while not self._over.is_set():
                with self._hearing():
                    self._look()
                self._wait(lambda: f"gloo, which has not connected all of them; {where}", _APART)
        except NoMeeting as error:
            if self._over.wait(_GRACE_S):  # it ends by itself
                return
            print(f"CSX: rank {self._rank} ends. {error}", file=sys.stderr, flush=True)
            self._end()
            sys.stdout.flush()
            os._exit(1)

    def _wait(self, whom: Callable[[], str], remedy: str = _ABSENT) -> None:
        """Wait a little; say for whom every now and then.

        Raises:
            NoMeeting: it has been too long.
        """
        time.sleep(_LOOKS_EVERY_S)
        waited_s = time.monotonic() - self._began
        if waited_s > MEETS_S:
            self._leave(f"Rank {self._rank} has waited {waited_s:.0f} s for {whom()}.", remedy)
        if waited_s > self._says_after_s:
            self._says_after_s *= 2
            print(
                f"CSX: rank {self._rank} has waited {waited_s:.0f} s for {whom()}; it gives up"
                f" after {MEETS_S:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    def _missing(self) -> str:
        """Who has not come."""
        found = [r for r in range(self._count) if not self._store.check([f"here/{r}"])]
        shown = ", ".join(map(str, found[:_SHOWN])) + ", ..." * (len(found) > _SHOWN)
        ranks = f"rank{'s' * (len(found) != 1)} {shown}"
        there = f"{self._count - len(found)} of {self._count} are there"
        return f"{ranks} to come to {self._host}:{self._port}; {there}"

    def _leave(self, what: str, remedy: str) -> NoReturn:
        """Tell the others why this process does not wait any more."""
        error = NoMeeting(what, remedy=remedy)
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # who keeps the store is gone
                self._store.set("over", str(error))
                time.sleep(_HEARD_S)
        raise error from None

    def _look(self) -> None:
        """End with the others, if one has left."""
        if self._store.check(["over"]):
            why = self._store.get("over").decode()
            if self._server is not None:  # the others have still to read it
                time.sleep(_HEARD_S)
            raise NoMeeting(why)

    @contextlib.contextmanager
    def _hearing(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, NoMeeting):
                raise
            raise NoMeeting(
                f"Rank 0 is gone, which keeps the store where the processes meet, at"
                f" {self._host}:{self._port}: {_first_line(error)}",
                remedy="what rank 0 printed says why",
            ) from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
