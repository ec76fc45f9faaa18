"""``fulgurite checkpoint convert``: a checkpoint in parts made one file, and back."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from fulgurite.backends.checkpoints.conversion import to_file, to_folder
from fulgurite.backends.safe_load import naming_classes


class NoParts(ValueError):
    """``--parts`` is missing, or is given where there is nothing to part."""


def convert_checkpoint(source: str, target: str, parts: int | None) -> int:
    """Write a folder as a file, or a file as a folder; returns the exit status.

    Args:
        source: the checkpoint that is read.
        target: the new one.
        parts: into how many a file is cut; None for a folder.

    Raises:
        NoParts: it is the other way round.
        CheckpointError: the source is damaged, or is no checkpoint.
        UnsafeCheckpoint: it holds what could run code.
        OSError: it cannot be read, something has the target's name, or it cannot be written.
    """
    if not os.path.exists(source):
        raise FileNotFoundError(errno.ENOENT, "There is no checkpoint of that name", source)
    is_folder = os.path.isdir(source)
    if is_folder and parts is not None:
        raise NoParts(f"{source} is in parts, and becomes one file. Leave out --parts.")
    with naming_classes(source):
        if parts is None and not is_folder:
            raise NoParts(f"{source} is one file: --parts 4 makes 4 parts of it, in a folder.")
        if parts is None:
            to_file(Path(source), Path(target))
        else:
            to_folder(Path(source), Path(target), parts)
    print(f"{target}: {'one file' if parts is None else f'a folder with {parts} parts'}")
    return 0
