"""Names of ``torch.distributed.checkpoint.fsspec_filesystem``, from torch 2.15 on; here in any version."""

from dcp.storage.torch_storage.fsspec_storage import FsspecReader, FsspecWriter

__all__ = ["FsspecReader", "FsspecWriter"]
