"""Checkpoints of processes that hold parts (weight streaming): each writes and reads its own.

A checkpoint is a folder then (``backends/checkpoints/folders.py``), whatever number of processes
wrote it and reads it. Lightning's dict has sharded tensors meanwhile, in the place of whole ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor
from torch.optim import Optimizer

from fulgurite.backends.checkpoints.damage import CheckpointError
from fulgurite.backends.checkpoints.folders import (
    OPTIMIZER,
    check_folder,
    is_folder,
    labelled,
)
from fulgurite.backends.checkpoints.plugin import CheckpointFiles, is_local
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.distributed.agreement import gathered as gathered_objects
from fulgurite.backends.csx.graph.collectives import Processes, length_of_part
from fulgurite.backends.csx.plugins.checkpoint_position import SHAPES
from fulgurite.backends.csx.state import ShardedTensor, gathered, is_cut, part_of, shard_state


class SavesParts(ParallelStrategy):
    """The part of a strategy that saves and loads; in parts, where processes hold parts."""

    backend: CSXBackend

    @property
    def processes(self) -> Processes:
        """Those that train together."""
        assert dist.group.WORLD is not None
        return Processes(group=dist.group.WORLD.group_name, count=self.world_size)

    @property
    def holds_parts(self) -> bool:
        """Whether each process holds a part of parameters and optimizer state."""
        return self.backend.execution == "weight_streaming"

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; of parts a folder, which is there when this returns.

        A plugin of the user's and paths of another machine get whole tensors, in one file.
        """
        if not self.holds_parts:
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        # 0.2 s, for torch.distributed.checkpoint
        from fulgurite.backends.checkpoints.folder_writer import write_folder

        path, files = self.broadcast(os.fspath(filepath)), self._checkpoint_io  # Lightning 2.6.6
        is_ours = isinstance(files, CheckpointFiles) and is_local(path)
        if storage_options is not None or not is_ours:
            return super().save_checkpoint(gathered(checkpoint), path, storage_options)
        parts = {key: checkpoint[key] for key in _IN_PARTS if key in checkpoint}
        rest = {key: value for key, value in checkpoint.items() if key not in parts}
        if "optimizer_states" in parts:
            # by name, as FSDP has them: numbers would come back as places in a list
            states = zip(self.optimizers, parts["optimizer_states"], strict=True)
            parts["optimizer_states"] = [
                labelled(state, self._names(one).__getitem__) for one, state in states
            ]
        write_folder(gathered(rest) | parts, Path(path), self.global_rank, gathered_objects)
        return None

    def _names(self, optimizer: Optimizer) -> list[str]:
        """The names of an optimizer's parameters, in its order."""
        assert self.lightning_module is not None
        names = {id(p): name for name, p in self.lightning_module.named_parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return [names.get(id(p), str(i)) for i, p in enumerate(parameters)]

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; of a folder each process reads its parts."""
        if not self.holds_parts:
            return super().load_checkpoint(checkpoint_path, weights_only)
        path, is_one = self.broadcast((os.fspath(checkpoint_path), is_folder(checkpoint_path)))
        if not is_one or not isinstance(self._checkpoint_io, CheckpointFiles):
            return super().load_checkpoint(path, weights_only)
        from fulgurite.backends.checkpoints.folder_reader import FolderReader

        self._check(path)
        reader = FolderReader(path, weights_only is not False)
        assert self.lightning_module is not None
        named = self.lightning_module.named_parameters(remove_duplicate=False)
        parameters, count = {name for name, _ in named}, self.processes.count

        def own(place: tuple[str | int, ...], shape: torch.Size, dtype: torch.dtype) -> Tensor:
            """What this process reads a tensor into."""
            is_buffer = place[-1] not in parameters and not str(place[0]).startswith(OPTIMIZER)
            if is_buffer or not is_cut(shape, dtype, count):
                return torch.empty(shape, dtype=dtype)
            part = torch.zeros(length_of_part(shape.numel(), count), dtype=dtype)
            return ShardedTensor(part, shape, self.processes)

        return reader.checkpoint(lambda place: reader.read(place, own))

    def _check(self, path: str) -> None:
        """Look at the checksums of a folder, each process at those of some files.

        Raises:
            CheckpointError: in all processes.
        """
        found = None
        try:
            check_folder(path, self.global_rank, self.world_size)
        except CheckpointError as error:
            found = error
        for one in gathered_objects(found):
            if one is not None:
                raise one

    def note_shapes(self, position: dict[str, Any]) -> None:
        """Note the whole shapes of gradients of which this process holds parts."""
        if self.holds_parts and "progress" in position:
            assert self.lightning_module is not None
            named = self.lightning_module.named_parameters()
            position["progress"][SHAPES] = {
                f"{name}.grad": list(p.shape) for name, p in named if isinstance(p, ShardedTensor)
            }

    def own_part(self, gradient: Tensor) -> Tensor:
        """What this process holds of a gradient, as of its parameter."""
        cut = is_cut(gradient.shape, gradient.dtype, self.processes.count)
        return part_of(gradient, self.processes) if cut else gradient

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load what a checkpoint has for optimizers; each process keeps its parts."""
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:
            shard_state(optimizer)


_IN_PARTS = ("state_dict", "optimizer_states")
