"""What ``torch.distributed.checkpoint._fsspec_filesystem`` has: storages for any URL that fsspec knows."""

from dcp.storage.fsspec_storage import FsspecReader, FsspecWriter

__all__ = ["FsspecReader", "FsspecWriter"]
