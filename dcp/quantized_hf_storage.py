"""What ``torch.distributed.checkpoint.quantized_hf_storage`` has: torch's own for now."""

from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

__all__ = ["QuantizedHuggingFaceStorageReader"]
