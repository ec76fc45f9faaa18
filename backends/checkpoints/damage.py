"""What is wrong with a file that should be a checkpoint.

``torch.save`` writes a zip archive with a CRC-32 of every record, and ``torch.load`` does not look
at them (checked with torch 2.13): a flipped bit becomes another number. ``check_file`` looks, at
files of stock Lightning as at our own.
"""

from __future__ import annotations

import errno
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

_ZIP = b"PK\x03\x04"
_OLD_FORMAT = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")  # the magic number, pickled
_CHUNK_BYTES = 1 << 20
_UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, EOFError, struct.error, UnicodeDecodeError),
    *(NotImplementedError, RuntimeError, ValueError, OverflowError),
)
"""What Python's zipfile raises where an archive is damaged."""
_IS_DIRECTORY = 0x10  # in a record's attributes: torch.load gives whatever memory held for those


class CheckpointError(RuntimeError):
    """A file is no whole Lightning checkpoint: damaged, cut off, or a file of another kind.

    Args:
        path: the file.
        what: what is wrong, as the rest of a sentence that begins with the file's name.
        remedy: what to do, as whole sentences.
    """

    def __init__(self, path: str | Path, what: str, remedy: str) -> None:
        super().__init__(f"{path} {what}. {remedy}")
        self.path, self.what = str(path), what


def refuse_pipes(path: str | os.PathLike[str]) -> None:
    """Raise CheckpointError where opening a path would wait for somebody to write into it."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        what = "is a pipe or a device, no file"
        raise CheckpointError(os.fspath(path), what, "Copy what comes out of it into a file first.")


ANOTHER = "Load another checkpoint, or copy this one again from where it is whole."


def check_lightning(path: object, loaded: Any) -> None:
    """Raise a CheckpointError where a file holds something else than a Lightning checkpoint."""
    if isinstance(loaded, dict) and "pytorch-lightning_version" in loaded:
        return
    holds = f"a {type(loaded).__name__}"
    if isinstance(loaded, dict):
        holds = f"a dict with the keys {', '.join(map(repr, list(loaded)[:5]))}, ..."
    remedy = "Weights alone go into a module: module.load_state_dict(torch.load(path))."
    what = f"is a file of torch's, but no Lightning checkpoint: it holds {holds}"
    raise CheckpointError(str(path), what, remedy)


def check_file(path: str | Path, file: IO[bytes] | None = None) -> None:
    """Read a file that ``torch.save`` wrote, and compare all of it with its checksums.

    Args:
        path: the file.
        file: the same, open; its position is anywhere afterwards.

    Raises:
        CheckpointError: it is damaged, or of another kind.
        OSError: it cannot be read.
    """
    if file is None:
        refuse_pipes(path)
        with open(path, "rb") as opened:
            return check_file(path, opened)
    n_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    begin = file.read(16)
    if not begin:
        raise CheckpointError(path, "is empty", ANOTHER)
    if begin.startswith(_OLD_FORMAT):
        raise CheckpointError(
            path,
            "has the format of torch before 1.6, which has no checksums",
            "Where you trust it, write it anew:"
            f" torch.save(torch.load({str(path)!r}), {str(path)!r}).",
        )
    if not begin.startswith(_ZIP):
        raise CheckpointError(path, f"is no checkpoint: it begins with {begin!r}", ANOTHER)
    try:
        with zipfile.ZipFile(file) as archive:
            _check_records(path, archive)
        file.seek(0)
        torch._C.PyTorchFileReader(file)  # torch 2.13; it looks at the directory, and at no more
    except CheckpointError:
        raise
    except (*_UNREADABLE, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a place before the begin
            raise
        told = str(error).partition("\n")[0] or "it ends too early"
        what = f"is damaged or cut off, with {n_bytes:,} bytes ({told})"
        raise CheckpointError(path, what, ANOTHER) from None
    return None


def _check_records(path: str | Path, archive: zipfile.ZipFile) -> None:
    records = archive.infolist()
    if not any(record.filename.endswith("/data.pkl") for record in records):
        what = "is a zip archive, but none that torch.save wrote: it has no data.pkl"
        raise CheckpointError(path, what, ANOTHER)
    # of a file without checksums all are 0
    if not any(record.CRC for record in records):
        return rank_zero_warn(
            f"{path} was written without checksums (torch.serialization.set_crc32_options(False)):"
            " nobody can tell whether it is damaged."
        )
    for record in records:
        # torch.save compresses nothing, and writes no directory
        if record.external_attr & _IS_DIRECTORY or record.compress_size != record.file_size:
            raise zipfile.BadZipFile(f"directory entry of {record.filename}")
        with archive.open(record) as content:
            while content.read(_CHUNK_BYTES):
                pass
