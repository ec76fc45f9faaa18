"""The backend: what kind of machine a process computes on, and with which options.

A process holds one backend *type*. The first backend that is made claims it; another of the same
type may follow with other options, one of another type is refused. The last one made is the live
one. "CPU" and "GPU" are ordinary eager Lightning; "CSX" is a folder of its own.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

DEVICES = ("CSX", "CPU", "GPU")

_live: Backend | None = None
_only_compiling = False
_has_built = False


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Base of the three backends. Making one claims its type for the process.

    Raises:
        RuntimeError: a backend of another type already lives in this process.
    """

    backend_type: ClassVar[str]

    def __post_init__(self) -> None:
        check_backend_type(self.backend_type)
        if _only_compiling:
            self._compile_only()
        self._validate()
        global _live
        _live = self

    def _validate(self) -> None:
        """Check the options and what the machine must have; nothing is claimed if this raises."""

    def _compile_only(self) -> None:
        """Build the programs of runs, and train nothing.

        Raises:
            RuntimeError: there are no programs, and runs would train.
        """
        raise RuntimeError(
            f"Nothing is compiled on {self.backend_type}: the run would train. What compiles is"
            ' Trainer(device="CSX").'
        )


@contextlib.contextmanager
def only_compiling() -> Iterator[None]:
    """Let backends that are made in the block build the programs of runs, and train nothing."""
    global _only_compiling, _has_built
    before, _only_compiling, _has_built = _only_compiling, True, False
    try:
        yield
    finally:
        _only_compiling = before


def note_built() -> None:
    """A run has built its programs, and trained nothing."""
    global _has_built
    _has_built = True


def has_built() -> bool:
    """Whether a run did so since the last ``only_compiling`` began."""
    return _has_built


def check_backend_type(backend_type: str) -> None:
    """Raise if a backend of another type than ``backend_type`` lives in this process."""
    if _live is None or _live.backend_type == backend_type:
        return
    error = RuntimeError(
        "Cannot instantiate multiple backends. A backend with type "
        f"{_live.backend_type} has already been instantiated."
    )
    # the text is a contract, and what to do is no part of it
    error.add_note(
        f"  Remedy: use {_live.backend_type} here too, or run what needs {backend_type} in a"
        " process of its own (in a notebook: restart the kernel). Stock Lightning may run beside"
        " any backend: lightning.Trainer(accelerator='cpu')."
    )
    raise error


def current_backend() -> Backend | None:
    """The live backend: the last one made in this process, or None."""
    return _live


def set_backend(backend: Backend | None) -> None:
    """Make another backend the live one, or none."""
    global _live
    _live = backend


def device_type(device: object) -> str:
    """``device`` in capitals.

    Raises:
        ValueError: it is not one of the three devices.
    """
    if isinstance(device, str) and device.upper() in DEVICES:
        return device.upper()
    raise ValueError(f"device must be one of 'CSX', 'CPU' or 'GPU' (any case); got {device!r}.")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question after the nearest of the known names, to follow a sentence; or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def check_keys(options: Mapping[str, Any], known: type, owner: str) -> None:
    """Raise a ValueError that names the nearest key where ``options`` has one ``known`` lacks."""
    names = [field.name for field in fields(known)]
    for key in options:
        if key not in names:
            takes = f"It takes {', '.join(names)}." if names else "It takes no options."
            raise ValueError(
                f"{owner} has no option {key!r}.{did_you_mean(str(key), names)} {takes}"
            )


@dataclass(frozen=True, kw_only=True)
class CPUBackend(Backend):
    """Eager Lightning on the CPU. It takes no options."""

    backend_type: ClassVar[str] = "CPU"


def gpu_device() -> torch.device:
    """Where eager code on backend GPU has its tensors."""
    return torch.device("cuda" if torch.cuda.is_available() else "mps")


@dataclass(frozen=True, kw_only=True)
class GPUBackend(Backend):
    """Eager Lightning on the GPU. It takes no options.

    Raises:
        MisconfigurationException: no usable GPU.
    """

    backend_type: ClassVar[str] = "GPU"

    def _validate(self) -> None:
        if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
            raise MisconfigurationException(
                "device 'GPU' was asked for, but PyTorch finds no usable GPU here (neither CUDA nor"
                " MPS). Use device='CSX' or device='CPU', or install a PyTorch build with GPU"
                " support."
            )
