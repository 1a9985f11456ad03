"""Names of ``torch.distributed.checkpoint.filesystem``.

The reader and the writer are dcp's. `FileSystem`, `FileSystemBase` and `SerializationFormat` are torch's.
"""

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase, SerializationFormat

from dcp.calls.torch_names import names_of
from dcp.storage.torch_storage.reader import FileSystemReader
from dcp.storage.torch_storage.writer import FileSystemWriter

__all__ = ["FileSystem", "FileSystemBase", "FileSystemReader", "FileSystemWriter", "SerializationFormat"]

globals()["__getattr__"] = names_of("filesystem")
