"""Names of ``torch.distributed.checkpoint.hf_storage``: dcp's reader, and torch's writer.

`dcp.convert` also writes safetensors, from any format and in constant memory.
"""

from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from dcp.calls.torch_names import names_of
from dcp.storage.torch_storage.foreign_readers import HuggingFaceStorageReader

__all__ = ["HuggingFaceStorageReader", "HuggingFaceStorageWriter"]

globals()["__getattr__"] = names_of("hf_storage")
