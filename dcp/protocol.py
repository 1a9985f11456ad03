"""Names of ``torch.distributed.checkpoint.protocol``, from torch 2.14 on; here in any version."""

from dcp.planners.layout.local_tensor import CheckpointableTensor

__all__ = ["CheckpointableTensor"]
