"""Names of ``torch.distributed.checkpoint.quantized_hf_storage``: torch's reader, with metadata of the
dequantized tensors.
"""

from torch import Size
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.quantized_hf_storage import (
    QuantizedHuggingFaceStorageReader as TorchQuantizedReader,
)

from dcp.calls.torch_names import names_of

__all__ = ["QuantizedHuggingFaceStorageReader"]

globals()["__getattr__"] = names_of("quantized_hf_storage")


class QuantizedHuggingFaceStorageReader(TorchQuantizedReader):
    """Read block-quantized Hugging Face weights as ``target_dtype``, by torch's reader.

    torch's metadata describes the quantized bytes. This class describes the dequantized tensors, so the
    metadata fits a state dict of ``target_dtype``.
    """

    def read_metadata(self) -> Metadata:
        """Return torch's metadata, with dtype and chunks of the dequantized weights."""
        metadata: Metadata = super().read_metadata()
        for fqn, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata) or not self._is_tensor_quantized(fqn):
                continue
            entry.properties.dtype = self.target_dtype
            stored = entry.chunks[0]
            if len(stored.sizes) != len(entry.size):
                whole = ChunkStorageMetadata(Size([0] * len(entry.size)), entry.size)
                entry.chunks = [whole]
                place = metadata.storage_data.pop(MetadataIndex(fqn, stored.offsets))
                metadata.storage_data[MetadataIndex(fqn, whole.offsets)] = place
        return metadata
