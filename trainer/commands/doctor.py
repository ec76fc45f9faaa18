"""``fulgurite doctor``: what there is, whether it works, and what to do where it does not.

``doctor`` asks one function after another; each says what there is and what is wrong with it. Then
come those about processes that train together: where they meet, if they can at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from fulgurite.backends.csx.compile.inductor import toolchain
from fulgurite.backends.csx.compile.inductor.headers import Headers
from fulgurite.backends.csx.compile.store.cache import CompileCache
from fulgurite.backends.csx.compile.store.cache_folder import users_folder
from fulgurite.backends.csx.distributed.network import (
    choose,
    interfaces,
    is_here,
    listening_address,
    unanswered,
)
from fulgurite.backends.patches import applied
from fulgurite.backends.supported import TESTED
from fulgurite.backends.torch_compiler import CppCompileError
from fulgurite.backends.torch_versions import IS_OLDER, OLDEST_CHECKED
from fulgurite.callbacks.count_params import human
from fulgurite.commands.cached import contents
from fulgurite.commands.options import installed_versions
from fulgurite.commands.self_test import LIMIT_S, MODEL, TOLERANCE, Outcome, OutOfTime, self_test

_NAME = 11  # the longest name of a finding, and two spaces
_BAR = 40  # characters
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_FREE_BYTES = 64 << 20  # some hundred small programs, and what their compiler writes (assumed)
_INSTALL = {
    "linux": (
        "Install one: apt install g++ python3-dev (Debian, Ubuntu), dnf install gcc-c++"
        " python3-devel (Fedora), or conda install -c conda-forge cxx-compiler; or name another in"
        " the environment variable CXX. Without it programs run operation by operation, slower."
    ),
    "darwin": (
        "Install one: xcode-select --install, and Python from python.org or Homebrew. Without it"
        " programs run operation by operation, slower."
    ),
}
_TORCH = f"pip install 'torch>={OLDEST_CHECKED},{TESTED['torch'].partition(',')[2]}'"
MEETING_LIMIT_S = 60.0
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


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, in words, and what to do about it where that has to be mended."""

    name: str
    text: str
    remedy: str = ""


def doctor(compile_dir: str | None = None) -> int:
    """Look at everything and print it; returns 0 if all is well, 1 if something must be mended.

    Args:
        compile_dir: the folder of the compile cache; None is the user's.
    """
    wrong = [_tell(versions())]
    wrong += [_tell(processor()), _tell(threads())]
    wrong += [_tell(finding) for finding in (network(), place()) if finding]
    wrong.append(_tell(meets()))
    found, kept = cache(compile_dir)
    wrong.append(_tell(found))
    # where runs would compile: another disk may be mounted otherwise
    with scratch(kept) as folder:
        cannot_compile = _tell(compiler(folder))
    if cannot_compile:
        _tell(Finding("self-test", "not run, for nothing can be compiled"))
    else:
        _tell(header(kept))
        print("  ...  a small training is compiled, some 10 s", flush=True)
        outcome = _tested(kept)
        wrong.append(_tell(tested(outcome)))
        if outcome is not None:
            print("\n".join(_printable(picture(outcome, "█"))))
    several = sum([*wrong, cannot_compile])
    print("\nAll is well." if not several else f"\nTo be mended: {several}, see above.")
    return int(bool(several))


def _tested(cache: CompileCache | None) -> Outcome | None:
    try:
        with scratch(cache) as folder:
            return self_test(folder)
    except OutOfTime:
        return None


def _tell(finding: Finding) -> bool:
    """Print what was found; returns whether it must be mended."""
    state = "MEND" if finding.remedy else "ok"
    _print(f"{state:>5}  {finding.name:<{_NAME}}", finding.text)
    if finding.remedy:
        _print(" " * (_NAME + 7), f"-> {finding.remedy}")
    return bool(finding.remedy)


def _print(head: str, text: str) -> None:
    """Print a text after its head, on a terminal in lines of its width that begin below it."""
    if sys.stdout.isatty():  # elsewhere a finding is one line, for who searches in them
        width = max(40, shutil.get_terminal_size().columns - len(head))
        lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
        text = f"\n{' ' * len(head)}".join(lines)
    print(f"{head}{text}", flush=True)


def _printable(lines: list[str]) -> list[str]:
    """Lines as the screen can show them: block characters and µ are not in every encoding."""
    encoding = sys.stdout.encoding or "ascii"
    try:
        "".join(lines).encode(encoding)
    except UnicodeEncodeError:
        return [line.replace("█", "#").replace("µs", "us") for line in lines]
    return lines


def compiler(folder: Path) -> Finding:
    """The C++ compiler, and whether what it makes in a folder can be loaded."""
    install = _INSTALL.get(sys.platform, _INSTALL["linux"])
    missing = toolchain.toolchain_missing()
    if missing is not None:
        return Finding("compiler", missing, install)
    version, fails = toolchain.compiler_version(), toolchain.loading_fails(folder)
    if fails is None:
        return Finding("compiler", f"{version}; what it makes can be loaded")
    remedy = (
        f"Try it by hand: a shared library made and loaded in {folder.parent}. A disk that is"
        " mounted with 'noexec' loads none: give a --compile-dir on another, and to runs the same"
        f" as compile_dir. If the compiler itself fails: {install}"
    )
    return Finding("compiler", f"{version}, but what it makes cannot be loaded: {fails}", remedy)


def header(found: CompileCache | None) -> Finding:
    """Torch's header, read once and kept where programs are."""
    if found is None:
        return Finding("header", "not kept, for there is no cache")
    try:
        kept = Headers(found.folder).keep()
    except (CppCompileError, OSError) as error:
        return Finding("header", f"not kept: {error}")
    if kept is None:
        return Finding("header", "not kept, which takes g++")
    size = human(kept.stat().st_size)
    return Finding("header", f"torch's is kept as the compiler read it: {size}, for every program")


def processor() -> Finding:
    """The processor's name and its vector units."""
    try:
        with applied(toolchain.believed()):
            unit = toolchain.chosen()
    except (ImportError, AttributeError) as error:  # a version that has them elsewhere
        text = f"{toolchain.cpu_name()}; torch does not say its vector units: {error}"
        return Finding("processor", text, _TORCH)
    units = f"vector units: {unit}" if unit else "no vector units that compiled code uses"
    return Finding("processor", f"{toolchain.cpu_name()}; {units}")


def threads() -> Finding:
    """How many threads compute, on how many cores."""
    number, usable = torch.get_num_threads(), cores()
    said = os.environ.get("OMP_NUM_THREADS")
    why = f" (OMP_NUM_THREADS={said})" if said else ""
    text = f"at most {number} of torch's{why}, on {usable} core{'s' * (usable != 1)}"
    if number <= usable:
        return Finding("threads", text)
    return Finding(
        "threads",
        text,
        f"Set OMP_NUM_THREADS={usable} before Python starts: threads that share a core wait for"
        " each other, and a step may take a hundred times as long.",
    )


def cores() -> int:
    """How many cores this process may use: a container's share of them counts."""
    affinity = getattr(os, "sched_getaffinity", None)
    usable = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text().split()
    except (OSError, ValueError):  # no container, or another system's
        return usable
    return usable if quota == "max" else min(usable, max(1, round(int(quota) / int(period))))


def cache(given: str | None) -> tuple[Finding, CompileCache | None]:
    """The compile cache: where, how full, whether it is usable; None where it is not.

    Args:
        given: its folder; None is the user's.
    """
    try:
        folder = users_folder() if given is None else Path(given)
        found = CompileCache(folder)
        held = contents(found.folder)
    except (OSError, RuntimeError, ValueError) as error:  # not a folder, not ours; no home; limit
        remedy = (
            "Do what it says, or give runs compile_dir=..., a folder of your own with free space."
            " Until then every run compiles anew, or ends with this error."
        )
        return Finding("cache", f"cannot be used: {error}", remedy), None
    text = f"{found.folder}: {held}; writable, nobody else can write it"
    if stat.S_IMODE(found.folder.stat().st_mode) & (stat.S_IRGRP | stat.S_IROTH):
        text += ", others can read it"
    free = shutil.disk_usage(found.folder).free
    if free < _FREE_BYTES:
        remedy = "Make room on that disk, or give runs compile_dir=..., a folder on another."
        return Finding("cache", f"{text}; only {human(free)} left on its disk", remedy), found
    return Finding("cache", f"{text}; {human(free)} left on its disk"), found


@contextmanager
def scratch(found: CompileCache | None) -> Iterator[Path]:
    """An empty folder where a run would compile: in the cache, else where temporary files go."""
    if found is not None:
        with found.scratch() as folder:
            yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="fulgurite-") as temporary:
            yield Path(temporary)


def versions() -> Finding:
    """Of Python and of the packages that decide what runs."""
    return Finding("versions", installed_versions())


def tested(outcome: Outcome | None) -> Finding:
    """What the self-test came to; None where it was stopped."""
    if outcome is None:
        remedy = "It takes some 10 s on two free cores: try again when less runs here."
        return Finding("self-test", f"not done after {LIMIT_S:.0f} s, {busy()}", remedy)
    text = f"{MODEL}: {outcome.how}, ready after {outcome.prepared_s:.1f} s"
    if not outcome.compiled:
        remedy = f"{_TORCH}: the compiler of this one lacks what compiling here takes."
        return Finding(
            "self-test", text, remedy if IS_OLDER else "Report it, with the lines above."
        )
    if not outcome.apart <= TOLERANCE:  # NaN too
        remedy = "Train with device='CPU' until it is mended, and report it with the lines above."
        text += f", but losses are apart by {outcome.apart:.1e} of their value"
        return Finding("self-test", text, remedy)
    return Finding("self-test", f"{text}; losses equal Lightning's within {outcome.apart:.0e}")


def busy() -> str:
    """How busy the machine is."""
    return f"with {os.getloadavg()[0]:.1f} processes at work on {cores()} cores in the last minute"


def picture(outcome: Outcome, bar: str) -> list[str]:
    """Step times as bars of a character, a line each."""
    times = {"Lightning": outcome.lightning_us, "this program": outcome.program_us}
    longest = max(times.values())
    lines = []
    for name, step_us in times.items():
        drawn = bar * max(1, round(_BAR * step_us / longest))
        lines.append(f"{name:>16}  {drawn:<{_BAR}}  {step_us:,.0f} µs a step")
    times_as_fast = outcome.lightning_us / outcome.program_us
    said = f"{times_as_fast:.1f} times as fast, measured", busy()
    return [*lines, *(f"{'':>16}  {line}" for line in said)]


def network() -> Finding:
    """The network's interfaces, and the one at which gloo listens for other processes."""
    found, own = interfaces(), listening_address()
    shown = ", ".join(f"{name} {address}" for name, address in found.items()) or "no interface"
    if own.address is None:
        return Finding("network", f"{shown}; gloo cannot listen: {own.why}", choose(found))
    text = f"{shown}; gloo listens at {own.address}, {own.why}"
    others = any(not address.startswith("127.") for address in found.values())
    if not own.is_loopback or not others:
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
    if listening_address().address is None:
        return Finding("meeting", "not tried, for gloo cannot listen")
    try:
        port = find_free_network_port()
    except OSError as error:
        remedy = "Let this user open ports: a sandbox or container forbids it."
        return Finding("meeting", f"no port can be opened: {error}", remedy)
    began = time.monotonic()
    command = [sys.executable, "-c", _MEETS]
    place = f"tcp://127.0.0.1:{port}"
    # under torchrun torch looks for the agent's store, and starts none
    own = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(rank), place, str(MEETING_LIMIT_S)],
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
            said = [("", f"not done after {MEETING_LIMIT_S:.0f} s")]
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
    return max(0.0, MEETING_LIMIT_S - (time.monotonic() - began))


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or listening_address().address == host
