"""Checkpoints are read without running anything that is in them.

A checkpoint is a pickle, which may name any function of any package and have it called. torch reads
one with ``weights_only=True``: it makes tensors, plain values and the classes that somebody allowed
(``torch.serialization.add_safe_globals``), and refuses the rest before it is imported. Lightning
leaves that to torch's default, which an environment variable turns off, and turns it off itself for
a URL; here it is on, unless the caller says ``weights_only=False``.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
)

from fulgurite.backends.patches import patched


class UnsafeCheckpoint(pickle.UnpicklingError):
    """A checkpoint holds what could run code when it is read; nothing of it was run.

    Args:
        path: the file.
        names: the classes and functions that are not allowed, or what else it is.
    """

    def __init__(self, path: str | Path, names: list[str]) -> None:
        self.path, self.names = str(path), names
        super().__init__(
            f"{path} holds {', '.join(names)}: not one of the tensors, plain values and allowed"
            " classes that a checkpoint is read for, and what could run code. Nothing of it was"
            " run. If it is a class of yours (most often a hyperparameter, which"
            " save_hyperparameters(ignore=[...]) leaves out), allow it before:"
            " torch.serialization.add_safe_globals([TheClass]). If you trust the file as you trust"
            " a program, give weights_only=False to fit, validate, test or predict in Python."
        )


def read_checkpoint(path: str | Path) -> Any:
    """What a checkpoint holds, on the CPU; tensors of a zip file are read when they are used.

    Raises:
        UnsafeCheckpoint: it holds a class that is not allowed.
    """
    if os.path.isdir(path):
        with naming_classes(path):
            return _folder(path).checkpoint()
    with naming_classes(path):
        # torch refuses to map a file of the format before 1.6
        mmap = zipfile.is_zipfile(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def read_rest(path: str | Path) -> Any:
    """What a checkpoint says of its run: of one in parts no weights, of a file they are not read.

    Raises:
        UnsafeCheckpoint: it holds a class that is not allowed.
    """
    if not os.path.isdir(path):
        return read_checkpoint(path)
    with naming_classes(path):
        return _folder(path).rest()


def _folder(path: str | Path) -> Any:
    # 0.2 s, for torch.distributed.checkpoint
    from fulgurite.backends.checkpoints.folder_reader import FolderReader

    return FolderReader(path)


@contextlib.contextmanager
def naming_classes(path: str | Path) -> Iterator[None]:
    """Raise UnsafeCheckpoint where torch refuses what a file holds, whoever has it read."""
    try:
        yield
    except UnsafeCheckpoint:
        raise
    except Exception as error:  # whoever reads may have wrapped torch's error in one of their own
        names = _refused(error, path)
        if not names:
            raise
        raise UnsafeCheckpoint(path, names) from None


_REFUSALS = (
    r"GLOBAL (?P<name>\S+) was not an allowed global",
    r"unsupported GLOBAL (?P<name>\S+) whose module",
    r"call reduce for unrecognized function (?P<name>.+)",
    r"Can only (?:create new object|build).* but got (?P<name>.+)",
    r"``(?P<name>[\w. ]+)`` must be imported to load",
    r"(?P<name>Unsupported operand \d+)",
    r"with (?P<name>TorchScript archives) passed to",
    r"with files saved in the (?P<name>legacy \.tar format)",
)
"""How ``torch.load(weights_only=True)`` says no (checked against torch 2.13)."""


def _refused(error: BaseException | None, path: str | Path) -> list[str]:
    """What torch refused to make: all of a file's names where it says so of one."""
    while error is not None:
        if isinstance(error, (pickle.UnpicklingError, RuntimeError)):
            said = (re.search(pattern, str(error)) for pattern in _REFUSALS)
            name = next((found["name"] for found in said if found), None)
            if name is not None and name.startswith("Unsupported"):
                number = name.rpartition(" ")[2]
                return [f"a pickle of another protocol than torch.save's (instruction {number})"]
            if name is not None:
                return _names_in(path) or [name]
        error = error.__cause__ or error.__context__
    return []


def _names_in(path: str | Path) -> list[str]:
    """The classes and functions that a zip file's pickle names and nobody allowed."""
    if not os.path.isfile(path) or not zipfile.is_zipfile(path):
        return []
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except (ValueError, pickle.UnpicklingError):  # TorchScript's, or a pickle that is cut off
        return []


_SHARDED = (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)
"""They do not hand ``weights_only`` on wherever they read (checked against Lightning 2.6.6)."""


def loading_safely(strategy: Strategy, load: Callable[..., Any]) -> Callable[..., Any]:
    """A strategy's ``load_checkpoint`` that runs nothing unless it is told ``weights_only=False``.

    Args:
        strategy: whose it is.
        load: the one that it has.

    Raises:
        UnsafeCheckpoint: the checkpoint holds a class that is not allowed, or is a folder that
            only code which runs what it holds can read.
    """

    def load_checkpoint(path: str | Path, weights_only: bool | None = None) -> Any:
        weights_only = weights_only is None or weights_only
        if weights_only and isinstance(strategy, _SHARDED):
            if os.path.isdir(path):  # its .metadata is a pickle that nobody restricts
                raise UnsafeCheckpoint(path, [f"the shards of {type(strategy).__name__}"])
            read_checkpoint(path)  # Lightning itself reads it by an unrestricted pickle
        with naming_classes(path):
            return load(path, weights_only=weights_only)

    return load_checkpoint


@contextlib.contextmanager
def reading_safely(strategy: Strategy) -> Iterator[None]:
    """Let a strategy load as ``loading_safely`` says while the block runs."""
    load = loading_safely(strategy, strategy.load_checkpoint)
    with patched([(strategy, "load_checkpoint", load)]):
        yield
