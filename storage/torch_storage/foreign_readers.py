"""Readers of a single foreign format, under torch's names.

`FileSystemReader` reads these formats too. These classes add torch's constructors and refuse other formats.
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
        """Folder or file of the current id; `PlanError` without an id."""
        if not self.path:
            raise OptionError(
                f"{type(self).__name__} needs a checkpoint_id: pass it to the reader or to dcp.load"
            )
        return super().place

    def read_index(self, rank: int | None = None, *, own_rank: int | None = None) -> CheckpointIndex:
        """Read like `FileSystemReader.read_index`.

        Raises:
            UnsupportedFormatError: For another format.
        """
        index = super().read_index(rank, own_rank=own_rank)
        if index.format not in self.formats:
            raise UnsupportedFormatError(
                f"{self.path} is not a {self.what}, but has the format {index.format!r}: use dcp.load "
                "without storage_reader=, which reads all formats",
                path=str(self.path),
            )
        return index


class BroadcastingTorchSaveReader(_OneFormatReader):
    """Reader of a torch.save file into a state dict of any sharding.

    torch's class of this name loads and unpickles the whole file on ``coordinator_rank`` and broadcasts
    tensors. This class reads each rank's bytes directly and runs no pickle code; ``coordinator_rank`` is
    accepted for compatibility. Objects load too.
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
    """Reader of a folder of safetensors files, or of a single file, with ``thread_count`` threads if above
    1.
    """

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
