"""Checkpoints in parts: a folder that several processes write, each its own parts.

As Lightning's FSDPStrategy lays out a sharded one, in the format of torch.distributed.checkpoint:

    .metadata       the tensors, the chunks of each, and where they lie: a pickle of torch's
    __R_0.distcp    what process R wrote: records of torch.save, one after the other
    meta.pt         all of Lightning's dict but weights and the state of optimizers
    checksums.json  our own: bytes and CRC-32 of each of these files, for torch looks at none

The folder gets its name when every process has flushed its file to the disk.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from fulgurite.backends.checkpoints.damage import ANOTHER, CheckpointError, check_file

REST, METADATA, CHECKSUMS = "meta.pt", ".metadata", "checksums.json"
MODEL, OPTIMIZER = "model", "optimizer_"
"""Where Lightning's ``state_dict`` is in a folder, and each of its ``optimizer_states``."""

_PIECE_BYTES = 1 << 20

Sums = dict[str, dict[str, int]]
"""Of each file its bytes and its CRC-32."""


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a checkpoint in parts, whole or not."""
    return os.path.isdir(path) and os.path.isfile(os.path.join(path, REST))


def in_parts(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What of a checkpoint each process writes a part of."""
    weights = {MODEL: checkpoint["state_dict"]} if "state_dict" in checkpoint else {}
    states = checkpoint.get("optimizer_states") or []
    return {**weights, **{f"{OPTIMIZER}{i}": state for i, state in enumerate(states)}}


def without_parts(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The rest; of no optimizers an empty list, which is not the same as no state of them."""
    rest = {key: value for key, value in checkpoint.items() if key != "state_dict"}
    if rest.get("optimizer_states"):
        del rest["optimizer_states"]
    return rest


def check_checkpoint(path: str | os.PathLike[str]) -> None:
    """Compare all of a checkpoint, a file or a folder, with its checksums.

    Raises:
        CheckpointError: it is damaged, or of another kind.
        OSError: it cannot be read.
    """
    if os.path.isdir(path):
        check_folder(path)
    else:
        check_file(os.fspath(path))


def check_folder(path: str | os.PathLike[str], rank: int = 0, count: int = 1) -> None:
    """Compare the files of a folder with their checksums.

    Args:
        path: the folder.
        rank: this process looks at its share of the files,
        count: and so many processes at all of them.

    Raises:
        CheckpointError: one is damaged or missing, or the folder is no checkpoint.
    """
    folder = Path(path)
    if not is_folder(folder):
        what = f"is a folder, but no checkpoint in parts: it has no {REST}"
        raise CheckpointError(folder, what, ANOTHER)
    if not (folder / CHECKSUMS).exists():
        rank_zero_warn(
            f"{folder} was written without checksums ({CHECKSUMS}), as Lightning does: nobody can"
            " tell whether it is damaged."
        )
        return check_file(folder / REST)
    sums = _read_sums(folder / CHECKSUMS)
    for name in sorted(sums)[rank::count]:
        there = folder / name
        if not there.is_file():
            raise CheckpointError(there, "is missing, a file of a checkpoint in parts", ANOTHER)
        if sum_of(there) != sums[name]:
            what = f"is damaged or cut off, with {there.stat().st_size:,} bytes: its checksum is"
            raise CheckpointError(there, f"{what} another one in {CHECKSUMS}", ANOTHER)
    return None


def as_text(sums: Sums) -> str:
    return json.dumps(sums, indent=1, sort_keys=True)


def sum_of(path: Path) -> dict[str, int]:
    n_bytes = crc32 = 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            n_bytes, crc32 = n_bytes + len(piece), zlib.crc32(piece, crc32)
    return {"bytes": n_bytes, "crc32": crc32}


def _read_sums(path: Path) -> Sums:
    try:
        text = path.read_text(encoding="utf-8")
        sums: Sums = json.loads(text)
        # json takes blanks and numbers in other forms too, which nobody wrote
        if {REST, METADATA} <= sums.keys() and as_text(sums) == text:
            return sums
    except (ValueError, AttributeError, TypeError):
        pass
    raise CheckpointError(path, "is damaged: the checksums of a checkpoint in parts", ANOTHER)


def labelled(state: Mapping[str, Any], label: Callable[[int], Any]) -> dict[str, Any]:
    """The state of an optimizer whose parameters have other labels, each by its number."""
    groups, state_of = state["param_groups"], state["state"]
    before = [one for group in groups for one in group["params"]]
    after = {one: label(number) for number, one in enumerate(before)}
    return {
        **state,
        "state": {after.get(one, one): found for one, found in state_of.items()},
        "param_groups": [{**g, "params": [after[one] for one in g["params"]]} for g in groups],
    }
