"""What ``torch.distributed.checkpoint.hf_storage`` has: our reader, and torch's writer.

`dcp.convert` writes safetensors as well, from any format and in constant memory.
"""

from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from dcp.storage.foreign_readers import HuggingFaceStorageReader

__all__ = ["HuggingFaceStorageReader", "HuggingFaceStorageWriter"]
