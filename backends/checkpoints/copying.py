"""A copy of a checkpoint, which holds what the training's memory holds now.

A step writes its parameters in place, so what is written beside the training must be copied first.
The copy is made as ``torch.save`` looks at a checkpoint: everything is pickled but the memory of
tensors (their *storages*), which is copied. So tensors that share memory still do, and whatever
``torch.save`` can write can be copied.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

_STORAGES = (torch.UntypedStorage, torch.TypedStorage)


class Copy:
    """A checkpoint as it is at this moment; memory on other devices is copied to the host's.

    Args:
        checkpoint: whatever ``torch.save`` takes.
    """

    def __init__(self, checkpoint: Any) -> None:
        pickled = io.BytesIO()
        pickler = _Pickler(pickled)
        pickler.dump(checkpoint)
        self._pickled, self._storages = pickled.getvalue(), pickler.copies

    def restored(self) -> Any:
        """The checkpoint; its tensors are those of the copy."""
        try:
            return _Unpickler(io.BytesIO(self._pickled), self._storages).load()
        finally:
            # as torch.load ends: else torch holds sparse tensors until its next load, which warns
            torch._utils._validate_loaded_sparse_tensors()  # type: ignore[no-untyped-call]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.copies: list[torch.UntypedStorage] = []
        self._seen: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def persistent_id(self, obj: Any) -> tuple[int, torch.dtype | None] | None:
        """A storage is copied once, and named by its number."""
        if not isinstance(obj, _STORAGES):
            return None
        dtype = None if isinstance(obj, torch.UntypedStorage) else obj.dtype
        storage = obj if isinstance(obj, torch.UntypedStorage) else obj._untyped_storage
        if storage._cdata not in self._seen:
            # the storage is kept with its number: an address that is free again is another's
            self._seen[storage._cdata] = len(self.copies), storage
            is_elsewhere = storage.device.type not in ("cpu", "meta")
            self.copies.append(storage.cpu() if is_elsewhere else storage.clone())  # type: ignore[no-untyped-call]
        return self._seen[storage._cdata][0], dtype


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storages: list[torch.UntypedStorage]) -> None:
        super().__init__(file)
        self._storages = storages

    def persistent_load(self, pid: tuple[int, torch.dtype | None]) -> Any:
        """The copy of a storage."""
        number, dtype = pid
        storage = self._storages[number]
        if dtype is None:
            return storage
        typed: Any = torch.TypedStorage
        return typed(wrap_storage=storage, dtype=dtype, _internal=True)  # torch 2.13
