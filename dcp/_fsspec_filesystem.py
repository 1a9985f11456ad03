"""Names of ``torch.distributed.checkpoint._fsspec_filesystem``: storages for any URL that fsspec knows."""

from dcp.calls.torch_names import names_of
from dcp.storage.torch_storage.fsspec_storage import FsspecReader, FsspecWriter

__all__ = ["FsspecReader", "FsspecWriter"]

globals()["__getattr__"] = names_of("_fsspec_filesystem")
