"""Writes checkpoints in parts, in the format of torch.distributed.checkpoint (see ``folders``)."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from fulgurite.backends.checkpoints.files import (
    Sink,
    appear,
    flush_folder,
    flush_name,
    named,
    part_folder,
)
from fulgurite.backends.checkpoints.folders import (
    CHECKSUMS,
    METADATA,
    REST,
    Sums,
    as_text,
    in_parts,
    is_folder,
    sum_of,
    without_parts,
)
from fulgurite.backends.supported import UnsupportedVersion

try:
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # torch 2.13
except ImportError:
    lacks = "has no torch.distributed.checkpoint.filesystem._StorageInfo"
    raise UnsupportedVersion("torch", f"{lacks}, which checkpoints in parts need") from None

Gathered = Callable[[Any], list[Any]]
"""Gives the value of each process, in the order of their ranks; all of them call it."""


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
    is_tree = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    if is_tree and (value or not path):
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
    sums |= {name: sum_of(folder / name) for name in (METADATA, REST)}
    with open(folder / CHECKSUMS, "x") as text:
        text.write(as_text(sums))
        text.flush()
        os.fsync(text.fileno())
    flush_folder(folder)
