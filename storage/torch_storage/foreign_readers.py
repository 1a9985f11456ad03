"""Readers of one foreign format each, by torch's names.

`FileSystemReader` reads these formats as well. These two add torch's constructors, and refuse all formats but
their own.
"""

from __future__ import annotations

import os

from dcp.storage.engine.requests import Verify
from dcp.storage.errors import OptionError, UnsupportedFormatError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.opening import SourcePlace
from dcp.storage.formats.registry import SAFETENSORS, TORCH_SAVE
from dcp.storage.stores import OpenStore, open_store
from dcp.storage.torch_storage.reader import FileSystemReader


class _OneFormatReader(FileSystemReader):
    formats: tuple[str, ...] = ()
    what: str = ""

    @property
    def place(self) -> SourcePlace:
        """Return the folder or file of the current id; `PlanError` without one."""
        if not self.path:
            raise OptionError(
                f"{type(self).__name__} was given no checkpoint_id, neither here nor by dcp.load"
            )
        return super().place

    def read_index(self, rank: int | None = None, *, own_rank: int | None = None) -> CheckpointIndex:
        """Read as `FileSystemReader.read_index`; `UnsupportedFormatError` for another format."""
        index = super().read_index(rank, own_rank=own_rank)
        if index.format not in self.formats:
            raise UnsupportedFormatError(
                f"{self.path} is no {self.what}, its format is {index.format!r}; dcp.load without a "
                "storage_reader reads all formats",
                path=str(self.path),
            )
        return index


class BroadcastingTorchSaveReader(_OneFormatReader):
    """Reads a file of torch.save into a state dict of any sharding.

    torch's class of this name loads all of the file on ``coordinator_rank``, running its pickle, and sends
    each tensor to all ranks. This one lets each rank read its own bytes, and runs nothing; so there is
    nothing to broadcast, and ``coordinator_rank`` is accepted for compatibility. Values other than tensors
    load, too.
    """

    formats = (TORCH_SAVE.name,)
    what = "file of torch.save"

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        coordinator_rank: int = 0,
        *,
        verify: Verify = "blocks",
        threads: int | None = None,
        open_store: OpenStore = open_store,
    ) -> None:
        super().__init__(checkpoint_id or "", verify=verify, threads=threads, open_store=open_store)
        self.coordinator_rank = coordinator_rank


class HuggingFaceStorageReader(_OneFormatReader):
    """Reads a folder of safetensors files, or one such file, by ``thread_count`` threads if it is above 1."""

    formats = (SAFETENSORS.name,)
    what = "safetensors file, nor a folder of them"

    def __init__(
        self,
        path: str | os.PathLike[str],
        thread_count: int = 1,
        *,
        verify: Verify = "blocks",
        open_store: OpenStore = open_store,
    ) -> None:
        threads = thread_count if thread_count > 1 else None
        super().__init__(path, verify=verify, threads=threads, open_store=open_store)
        self.thread_count = thread_count
