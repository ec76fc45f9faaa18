"""Checkpoints in parts: a folder that several processes write, each its own parts.

As Lightning's FSDPStrategy lays out a sharded one, in the format of torch.distributed.checkpoint:

    .metadata       the tensors, the chunks of each, and where they lie: a pickle of torch's
    __R_0.distcp    what process R wrote: records of torch.save, one after the other
    meta.pt         all of Lightning's dict but weights and the state of optimizers
    checksums.json  our own: bytes and CRC-32 of each of these files, for torch looks at none

The folder gets its name when every process has flushed its file to the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from fulgurite.backends.checkpoints.damage import ANOTHER, CheckpointError, check_file
from fulgurite.backends.checkpoints.files import (
    Sink,
    appear,
    flush_folder,
    flush_name,
    named,
    part_folder,
)

REST, METADATA, CHECKSUMS = "meta.pt", ".metadata", "checksums.json"
MODEL, OPTIMIZER = "model", "optimizer_"
"""Where Lightning's ``state_dict`` is in a folder, and each of its ``optimizer_states``."""

_PIECE_BYTES = 1 << 20

Sums = dict[str, dict[str, int]]
"""Of each file its bytes and its CRC-32."""

Gathered = Callable[[Any], list[Any]]
"""Gives the value of each process, in the order of their ranks; all of them call it."""


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a checkpoint in parts, whole or not."""
    return os.path.isdir(path) and os.path.isfile(os.path.join(path, REST))


# -- writing -----------------------------------------------------------------------------------


def write_folder(checkpoint: Mapping[str, Any], path: Path, rank: int, gathered: Gathered) -> None:
    """Write a checkpoint of tensors in parts; all processes call this.

    Args:
        checkpoint: Lightning's; the labels of parameters in ``optimizer_states`` are strings. What
            is whole, rank 0 writes.
        path: where the folder appears, or takes the place of another checkpoint, when all is
            written; the same in all processes.
        rank: of this process.
        gathered: exchanges values of all processes.

    Raises:
        OSError: in all processes, where one of them could not write.
    """
    planner = Planner(in_parts(checkpoint))
    with contextlib.ExitStack() as stack:

        def begin() -> Path | None:
            if rank:
                return None
            _refuse_other_folder(path)
            return stack.enter_context(part_folder(path.parent))

        def complete() -> None:
            if not rank:
                finish(folder, metadata, written, without_parts(checkpoint))
                appear(folder, path)
                flush_name(path)

        def together(call: Callable[[], Any]) -> list[Any]:
            try:
                with named(path):
                    own = call()
            except OSError as error:
                own = error
            found = gathered(own)
            for one in found:
                if isinstance(one, OSError):
                    raise one
            return found

        [folder, *_] = together(begin)
        plans, metadata = planner.create_global_plan(gathered(planner.create_local_plan()))
        written = together(lambda: planner.write(folder, rank, plans[rank]))
        together(complete)


def _refuse_other_folder(path: Path) -> None:
    if path.is_dir() and not is_folder(path) and any(path.iterdir()):
        what = f"{path} is a folder which is no checkpoint, and is left as it is"
        raise OSError(f"{what}. Give the checkpoint another name.")


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


class Planner(DefaultSavePlanner):
    """Says what each process writes.

    Torch's own takes lists and empty dicts apart, and an optimizer without state had none when it
    is put together again.

    Args:
        tree: of ``in_parts``, with this process's parts.
    """

    def __init__(self, tree: Mapping[str, Any]) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)
        # as set_up_planner does, with other leaves
        self.mappings = {".".join(path): path for path, _ in _leaves(tree, ())}
        self.state_dict = {".".join(path): leaf for path, leaf in _leaves(tree, ())}
        self.is_coordinator = False

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What is written: the chunk of a part, or what the state dict has."""
        found = self.state_dict[index.fqn]
        is_part = hasattr(found, "__get_tensor_shard__")
        return found.__get_tensor_shard__(index) if is_part else found

    def write(self, folder: Path, rank: int, plan: SavePlan) -> tuple[list[WriteResult], Sums]:
        """Write what a plan has for a process; what was written, and the checksum."""
        name, results = f"__{rank}_0.distcp", []
        with open(folder / name, "xb", buffering=0) as file:
            sink = _Summed(file)
            for item in plan.items:
                begin = sink.n_bytes
                data = self.resolve_data(item)
                with sink.raising() as stream:
                    if isinstance(data, torch.Tensor):
                        torch.save(_alone(data), stream)
                    else:
                        stream.write(data.getbuffer())
                at = _StorageInfo(name, begin, sink.n_bytes - begin)
                results.append(WriteResult(item.index, at.length, at))
            os.fsync(file.fileno())
        return results, {name: {"bytes": sink.n_bytes, "crc32": sink.crc32}}


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        for key, one in value.items():
            yield from _leaves(one, (*path, key))
    else:
        yield path, value


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the host in memory of its own, for torch.save writes all of the memory."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class _Summed(Sink):
    """A file that adds up what is written."""

    n_bytes = crc32 = 0

    def write(self, data: Any) -> int:
        """As ``Sink``."""
        self.crc32 = zlib.crc32(data, self.crc32)
        self.n_bytes += len(data)
        return super().write(data)


def finish(
    folder: Path,
    metadata: Metadata,
    written: Sequence[tuple[list[WriteResult], Sums]],
    rest: Mapping[str, Any],
) -> None:
    """Write what says what the parts are, and flush all of it to the disk.

    Raises:
        OSError: it cannot be written, or the file of a process is not there.
    """
    sums = {name: one for _, found in written for name, one in found.items()}
    for name, one in sums.items():
        there = folder / name
        if not there.exists() or there.stat().st_size != one["bytes"]:
            what = f"{folder.parent} lacks what another process has written ({name})"
            raise OSError(f"{what}. Checkpoints in parts need a folder that all processes share.")
    FileSystemWriter(folder).finish(metadata, [results for results, _ in written])
    with open(folder / REST, "xb", buffering=0) as file:
        with Sink(file).raising() as stream:
            torch.save(dict(rest), stream)
        os.fsync(file.fileno())
    sums |= {name: _sum_of(folder / name) for name in (METADATA, REST)}
    with open(folder / CHECKSUMS, "x") as text:
        text.write(_as_text(sums))
        text.flush()
        os.fsync(text.fileno())
    flush_folder(folder)


def _as_text(sums: Sums) -> str:
    return json.dumps(sums, indent=1, sort_keys=True)


def _sum_of(path: Path) -> dict[str, int]:
    n_bytes = crc32 = 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            n_bytes, crc32 = n_bytes + len(piece), zlib.crc32(piece, crc32)
    return {"bytes": n_bytes, "crc32": crc32}


# -- what is wrong with one --------------------------------------------------------------------


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
        if _sum_of(there) != sums[name]:
            what = f"is damaged or cut off, with {there.stat().st_size:,} bytes: its checksum is"
            raise CheckpointError(there, f"{what} another one in {CHECKSUMS}", ANOTHER)
    return None


def _read_sums(path: Path) -> Sums:
    try:
        text = path.read_text(encoding="utf-8")
        sums: Sums = json.loads(text)
        # json takes blanks and numbers in other forms too, which nobody wrote
        if {REST, METADATA} <= sums.keys() and _as_text(sums) == text:
            return sums
    except (ValueError, AttributeError, TypeError):
        pass
    raise CheckpointError(path, "is damaged: the checksums of a checkpoint in parts", ANOTHER)


# -- labels of parameters ----------------------------------------------------------------------


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
