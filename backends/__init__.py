"""Where a step runs.

supported          the versions that this package works with, and the private names it needs of them
torch_versions     in which way torch's versions differ
torch_compiler     the parts of torch's compiler that more than one room needs
patches            what replaces a part of somebody else's code
backend            the base, the rule of one type per process, and the eager backends
csx                the static-graph backend
report             what it built, for who reads it
mixed              mixed precision on every device
step_context       what runs now; the numbers of a step that user code may ask for
closures           functions that run on the host after a step, on every device
program_scheduler  schedulers that a program computes
runtime            Python's collector, the C library's heap and Ctrl-C around a step
checkpoints        files that are whole, on every device
safe_load          what is read runs nothing

Importing this package registers strategy and accelerator "csx" with Lightning, so that
``lightning.Trainer(strategy="csx")`` works too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fulgurite.backends.supported import UnsupportedVersion as UnsupportedVersion

# isort: split
# the import above sees that all names are there which those below need
from fulgurite.backends.backend import Backend as Backend
from fulgurite.backends.backend import CPUBackend as CPUBackend
from fulgurite.backends.backend import GPUBackend as GPUBackend
from fulgurite.backends.backend import (
    check_backend_type,
    check_keys,
    current_backend,
    device_type,
    set_backend,
)
from fulgurite.backends.csx.config import CSConfig as CSConfig
from fulgurite.backends.csx.config import CSXBackend as CSXBackend
from fulgurite.backends.csx.config import forget_config
from fulgurite.backends.csx.contract import forget_warned_lines
from fulgurite.backends.csx.distributed.parallel import CSXParallelStrategy
from fulgurite.backends.csx.plugins.accelerator import CSXAccelerator
from fulgurite.backends.csx.plugins.strategy import CSXStrategy

BACKENDS: dict[str, type[Backend]] = {
    kind.backend_type: kind for kind in (CSXBackend, CPUBackend, GPUBackend)
}
"""The class of each ``backend_type``."""


def backend(backend_type: str | None = None, **options: Any) -> Backend:
    """Make the backend of a type; without arguments, return the live one.

    Args:
        backend_type: "CSX", "CPU" or "GPU", in any case.
        options: that backend's own arguments (``CSXBackend`` lists those of CSX).

    Raises:
        RuntimeError: a backend of another type lives in this process; or none does, and none was
            asked for.
        ValueError: no such type or option.
    """
    if backend_type is None:
        if options:
            raise ValueError(f"backend() got options {sorted(options)}, but no backend_type.")
        live = current_backend()
        if live is None:
            raise RuntimeError(
                "There is no backend in this process yet. Make one with"
                " fulgurite.backend('CSX'), or with Trainer(device='CSX')."
            )
        return live
    kind = BACKENDS[device_type(backend_type)]
    check_backend_type(kind.backend_type)
    check_keys(options, kind, f"backend {kind.backend_type}")
    return kind(**options)


def backend_from(value: Backend | Mapping[str, Any]) -> Backend:
    """The backend that ``Trainer(backend=value)`` means: a ready one, or a dict of its arguments.

    A ready one becomes the live backend again, as if it had just been made.
    """
    if isinstance(value, Backend):
        value.__post_init__()
        return value
    if isinstance(value, Mapping):
        if "backend_type" not in value:
            raise ValueError(
                "backend was given as a dict without the key 'backend_type' ('CSX', 'CPU' or"
                f" 'GPU'); got the keys {list(value)}."
            )
        return backend(**value)
    raise TypeError(
        "backend must be a backend object (fulgurite.backend('CSX')) or a dict"
        f" {{'backend_type': 'CSX', ...}}; got {type(value).__name__} {value!r}."
    )


def reset_backend() -> None:
    """Forget the live backend and the process's CSConfig. For tests, which start afresh with it."""
    set_backend(None)
    forget_config()
    forget_warned_lines()


CSXAccelerator.register()
CSXStrategy.register()
CSXParallelStrategy.register()
