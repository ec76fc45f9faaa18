"""What ``fulgurite doctor`` looks at: each function says what there is and what is wrong."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from fulgurite.backends.csx.compile.inductor import toolchain
from fulgurite.backends.csx.compile.inductor.headers import Headers
from fulgurite.backends.csx.compile.store.cache import CompileCache
from fulgurite.backends.csx.compile.store.cache_folder import users_folder
from fulgurite.backends.patches import applied
from fulgurite.backends.supported import TESTED
from fulgurite.backends.torch_compiler import CppCompileError
from fulgurite.callbacks.count_params import human
from fulgurite.commands.cache import contents
from fulgurite.commands.self_test import LIMIT_S, MODEL, TOLERANCE, Outcome
from fulgurite.commands.versions import installed_versions

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


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, in words, and what to do about it where that has to be mended."""

    name: str
    text: str
    remedy: str = ""


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
        return Finding("processor", text, f"pip install 'torch{TESTED['torch']}'")
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
        return Finding("self-test", text, "Report it, with the lines above.")
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
    said = f"{times_as_fast:.1f} times as fast; measured {busy()}"
    return [*lines, f"{'':>16}  {said}"]
