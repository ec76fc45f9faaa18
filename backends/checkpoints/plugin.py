"""Lightning's ``CheckpointIO``: who saves, loads or removes a checkpoint comes through here."""

from __future__ import annotations

import contextlib
import functools
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.strategies.strategy import Strategy

from fulgurite.backends.checkpoints.damage import check_file, check_lightning, refuse_pipes
from fulgurite.backends.checkpoints.files import link, remove_folder, write
from fulgurite.backends.checkpoints.folders import check_folder, is_folder
from fulgurite.backends.checkpoints.writer import Copy, Writer
from fulgurite.backends.patches import Change

AnyPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory for a run's state.

    Args:
        limit_bytes: how much there is.
        when_written: called whenever a part of a checkpoint was written.
    """

    limit_bytes: int
    when_written: Callable[[], None]

    def is_less_than(self, file: IO[bytes]) -> bool:
        """Whether a checkpoint has more than that; its tensors then go into files (Linux)."""
        # what fits stays mapped as long as it is used, and may be overwritten meanwhile
        return os.fstat(file.fileno()).st_size > self.limit_bytes and zipfile.is_zipfile(file)


class CheckpointFiles(TorchCheckpointIO):
    """Whole files or none, and no damaged ones; the files are those of Lightning's own plugin.

    ``save_checkpoint`` returns when the file is there. In a block of ``beside`` it returns when the
    checkpoint is copied, and a thread writes the file while training goes on;
    ``remove_checkpoint`` and ``link`` happen after what was asked for before. What the thread
    cannot write is an error of the next call, or of ``wait``. Paths with a protocol
    (``s3://...``) are left to Lightning.
    """

    def __init__(self) -> None:
        self._writer = Writer()
        self._is_beside = False
        self.is_training = False  # steps run, beside which files can be written
        self.budget: Budget | None = None  # of memory: no copies, and large files are mapped

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: AnyPath, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; or copy it, and write it beside the training.

        Raises:
            OSError: it cannot be written, or one before it could not.
        """
        if storage_options is not None or not is_local(path):
            self.wait()
            super().save_checkpoint(checkpoint, os.fspath(path), storage_options)
        elif self._is_beside and self.budget is None:
            copy = Copy(checkpoint)
            self._writer.submit(lambda: write(copy.restored(), Path(path)), path, leaves=True)
        else:
            self.wait()
            budget = self.budget
            when_written = None if budget is None else budget.when_written
            write(checkpoint, Path(path), when_written=when_written)

    def load_checkpoint(
        self,
        path: AnyPath,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> Any:
        """Read a checkpoint, and all of its checksums.

        Raises:
            FileNotFoundError: there is none.
            CheckpointError: it is damaged, or of another kind.
        """
        self.wait()
        if is_local(path):
            refuse_pipes(path)
        if is_local(path) and os.path.isdir(path):
            # 0.2 s, for torch.distributed.checkpoint
            from fulgurite.backends.checkpoints.folder_reader import FolderReader

            check_folder(path)
            return FolderReader(path, weights_only is not False).checkpoint()
        if not is_local(path) or not os.path.isfile(path):
            return super().load_checkpoint(os.fspath(path), map_location, weights_only)
        with open(path, "rb") as file:
            # of one open file: what is loaded is what was checked, whoever replaces the name
            # meanwhile
            check_file(os.fspath(path), file)
            file.seek(0)
            if self.budget is not None and self.budget.is_less_than(file):
                here = f"/proc/self/fd/{file.fileno()}"  # torch maps what has a name
                return torch.load(here, map_location="cpu", weights_only=weights_only, mmap=True)
            return torch.load(file, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: AnyPath) -> None:
        """Remove a checkpoint; not before what was to be written before is."""
        whole, remove = Path(path), super().remove_checkpoint

        def run() -> None:
            remove_folder(whole) if is_folder(whole) else remove(os.fspath(path))

        self._writer.run(run, path, leaves=False)

    def link(self, target: AnyPath, name: AnyPath) -> None:
        """Let a symbolic link lead to a checkpoint that was saved; a file of that name stays."""
        if os.path.abspath(target) != os.path.abspath(name):
            self._writer.run(lambda: link(Path(target), Path(name)), name, leaves=True)

    def when_there(self, path: AnyPath, call: Callable[[], None]) -> None:
        """Call a function when a file that was saved is there; maybe in the thread that writes."""
        self._writer.run(call, path, leaves=True)

    def exists(self, path: AnyPath) -> bool:
        """Whether a file is there when all that was asked for is done."""
        return self._writer.exists(path)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Save what is saved in the block beside the training, after what was saved before."""
        before, self._is_beside = self._is_beside, True
        try:
            if not before:
                self.wait()  # so at most the copies of one block are in memory
            yield
        finally:
            self._is_beside = before

    def wait(self) -> None:
        """Wait until all is written.

        Raises:
            OSError: a file could not be written.
        """
        self._writer.wait()

    def teardown(self) -> None:
        """As ``wait``; then end the thread."""
        self._writer.close()


def is_local(path: AnyPath) -> bool:
    """Whether a path is one of this machine's file systems."""
    return "://" not in os.fspath(path)


def install(strategy: Strategy) -> None:
    """Let a strategy use ``CheckpointFiles``, where nobody chose another plugin."""
    chosen = strategy._checkpoint_io  # Lightning 2.6.6
    if chosen is None and type(strategy).checkpoint_io is Strategy.checkpoint_io:
        strategy.checkpoint_io = CheckpointFiles()


def loads_lightnings(strategy: Strategy) -> Change:
    """The change by which a strategy refuses to load what is no Lightning checkpoint."""
    return strategy, "load_checkpoint", functools.partial(_load, strategy.load_checkpoint)


def _load(load: Callable[..., Any], path: AnyPath, *args: Any, **kwargs: Any) -> Any:
    loaded = load(path, *args, **kwargs)
    check_lightning(path, loaded)
    return loaded


def files_of(trainer: pl.Trainer) -> CheckpointFiles | None:
    """The plugin of a trainer, where it is ours."""
    chosen = trainer.strategy._checkpoint_io  # Lightning 2.6.6: asking for it may raise
    return chosen if isinstance(chosen, CheckpointFiles) else None
