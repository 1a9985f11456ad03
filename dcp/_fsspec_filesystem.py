"""What ``torch.distributed.checkpoint._fsspec_filesystem`` has: storages for any URL that fsspec knows."""

from typing import TYPE_CHECKING

from dcp.storage.fsspec_storage import FsspecReader, FsspecWriter
from dcp.torch_names import names_of

__all__ = ["FsspecReader", "FsspecWriter"]

if not TYPE_CHECKING:
    __getattr__ = names_of("_fsspec_filesystem")
